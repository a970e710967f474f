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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_brings_its_numbers_to_the_device_in_two_copies(family: str, said: Said) -> None:
    """Those of all rows together, then the tokens. What doesn't change is there."""
    counts = said["counts"]
    assert isinstance(counts, dict)
    assert counts[family]["copies up"] <= 2, counts[family]


def test_the_kernels_of_a_step_are_as_many_as_its_layers_need_and_no_more(said: Said) -> None:
    """Of a dense model, with the library's products: a store, a split, a merge, two norms (one with the residual's sum)
    and an activation a layer, one comparison of epochs and the last norm."""
    counts = said["counts"]
    assert isinstance(counts, dict)
    assert counts["llama"]["our kernels"] == 2 * 6 + 1 + 1
