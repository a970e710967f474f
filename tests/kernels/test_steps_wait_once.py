"""A decode step on the kernels doesn't make the host wait: each family's, see `fake_steps.py`."""

from __future__ import annotations

import pytest

from tests.families import FAMILIES
from tests.kernels.claims import Said

SCRIPT = "fake_steps.py"

pytestmark = [pytest.mark.slow, pytest.mark.runs(SCRIPT)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_is_launched_without_waiting_for_the_device(family: str, said: Said) -> None:
    verdict = said[f"{family} triton"]
    assert verdict is None, verdict


def test_a_step_that_asks_what_was_routed_where_would_be_caught(said: Said) -> None:
    """The torch path of the experts counts on the host."""
    verdict = said["qwen3_moe torch"]
    assert verdict is not None
    assert "DataDependentOutputException" in verdict or "copies the host's numbers up" in verdict
