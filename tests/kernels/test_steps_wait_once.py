"""A decode step on the kernels doesn't make the host wait: each family's, see `fake_steps.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families import FAMILIES
from tests.kernels.claims import Verdicts, interpret

SCRIPT = Path(__file__).with_name("fake_steps.py")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def verdicts() -> Verdicts:
    return interpret(SCRIPT)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_is_launched_without_waiting_for_the_device(family: str, verdicts: Verdicts) -> None:
    verdict = verdicts[f"{family} triton"]
    assert verdict is None, verdict


def test_a_step_that_asks_what_was_routed_where_would_be_caught(verdicts: Verdicts) -> None:
    """The torch path of the experts counts on the host."""
    verdict = verdicts["qwen3_moe torch"]
    assert verdict is not None
    assert "DataDependentOutputException" in verdict or "copies the host's numbers up" in verdict
