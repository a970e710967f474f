"""Steps on the kernels don't make the host wait for a device, of any family and kind of draw; see `fake_steps.py`."""

from __future__ import annotations

import pytest

from tests.kernels.forked_scripts import Said
from tests.support.model_families import FAMILIES

SCRIPT = "fake_steps.py"

pytestmark = [pytest.mark.slow, pytest.mark.runs(SCRIPT)]


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_launched_without_waiting_for_the_device(family: str, said: Said) -> None:
    """Decode with every kind of draw, and a chunk of prompts, each after pages were released."""
    verdict = said[f"{family} triton"]
    assert verdict is None, verdict


def test_no_kind_of_draw_waits_for_the_device(said: Said) -> None:
    """Greedy, sampled, with penalties, bias, `min_tokens`, masks; and a known answer drawn again."""
    verdicts = {name: said[name] for name in said if name.split()[0] in ("draw", "audit")}
    assert len(verdicts) == 11
    assert not [verdict for verdict in verdicts.values() if verdict is not None]


def test_a_step_at_positions_that_no_table_has_yet_does_not_wait(said: Said) -> None:
    """Tables of rope and of pages grow."""
    assert said["far"] is None, said["far"]


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "deepseek_v32"])
def test_digests_are_begun_without_waiting_for_the_device(family: str, said: Said) -> None:
    """Keys and values; states and convolutions; latents and index keys."""
    assert said[f"digests {family}"] is None, said[f"digests {family}"]


def test_a_step_that_asks_what_was_routed_where_would_be_caught(said: Said) -> None:
    """The torch path of the experts counts on the host."""
    verdict = said["qwen3_moe torch"]
    assert verdict is not None
    assert "DataDependentOutputException" in verdict


def test_epochs_that_come_up_from_pageable_memory_would_be_caught(said: Said) -> None:
    verdict = said["epochs from pageable memory"]
    assert verdict is not None
    assert "page_allocator.py" in verdict
    assert "a copy between host and device waits" in verdict


def test_whatever_waits_would_be_caught(said: Said) -> None:
    """By these checks or by torch, which has no contents to look at."""
    waits = {name: said[name] for name in said if name.startswith("wait: ")}
    assert len(waits) == 14
    assert not [name for name, verdict in waits.items() if verdict is None]
    told = ("waits", "DataDependentOutputException", "DynamicOutputShapeException")
    assert not [verdict for verdict in waits.values() if not any(word in verdict for word in told)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_brings_its_numbers_to_the_device_in_two_copies(family: str, said: Said) -> None:
    """Those of all rows together, then the tokens; and one a pool for the epochs of what was released. What doesn't
    change is there."""
    decode = said["counts"][family]["decode"]
    assert decode["copies up"] <= 2 + decode["pools"], decode


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chunk_of_prompts_brings_no_more_copies_than_its_block_tables_need(family: str, said: Said) -> None:
    chunk, decode = said["counts"][family]["chunk"], said["counts"][family]["decode"]
    assert chunk["copies up"] <= 2 + 2 * chunk["pools"], chunk
    assert chunk["our kernels"] <= decode["our kernels"], "a chunk takes no more launches than a decode step"


def test_the_kernels_of_a_step_are_as_many_as_its_layers_need_and_no_more(said: Said) -> None:
    """Of a dense model, with the library's products: a store, a split, a merge, two norms (one with the residual's sum)
    and an activation a layer, one comparison of epochs and the last norm. A chunk's queries need no merge."""
    counts = said["counts"]["llama"]
    assert counts["decode"]["our kernels"] == 2 * 6 + 1 + 1
    assert counts["chunk"]["our kernels"] == 2 * 5 + 1 + 1
