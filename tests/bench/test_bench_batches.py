"""The bench of batches beside live traffic: phases in turns, on a router with stand-ins, and what it makes of lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.serving import batches as bench
from tests.router.batch.test_batches import router
from tests.support.batch_beside_live import BatchBesideLive, LineFaults

SMALL = replace(bench.DEFAULTS, lines=40, rate=6.0, live_tokens=4, rounds=1, phase_s=1.0)
TWO = replace(SMALL, lines=2)


def answered(number: int, *tokens: int) -> dict[str, Any]:
    return {"custom_id": f"line-{number}", "response": {"body": {"choices": [{"token_ids": list(tokens)}]}}}


@pytest.mark.asyncio
async def test_phases_without_a_batch_and_with_it_see_the_same_moments_and_only_one_has_lines(tmp_path: Path) -> None:
    with router(tmp_path) as server:
        ((without,), (batched,)) = await BatchBesideLive(server.url, SMALL).compare()
    assert (without.lines, batched.lines > 0) == (0, True)
    assert len(without.ttft_ms) == len(batched.ttft_ms) > 0
    assert not without.failed + batched.failed


@pytest.mark.parametrize(
    ("output", "errors", "faults"),
    [
        ([answered(0, 5), answered(1, 6)], [], LineFaults(0, 0, 0, 0)),
        ([answered(0, 5)], [], LineFaults(1, 0, 0, 1)),
        ([answered(0, 5), answered(1, 6), answered(0, 5)], [], LineFaults(0, 1, 0, 0)),
        ([answered(0, 5), answered(1, 6)], [answered(1)], LineFaults(0, 1, 1, 0)),
        ([answered(0, 5), answered(1, 7)], [], LineFaults(0, 0, 0, 1)),
    ],
)
def test_a_line_that_lacks_comes_twice_failed_or_is_wrong_is_counted(
    output: list[dict[str, Any]], errors: list[dict[str, Any]], faults: LineFaults
) -> None:
    assert LineFaults.of(TWO, output, errors, {0: [5], 1: [6]}) == faults


@pytest.mark.slow
def test_a_batch_beside_live_traffic_is_whole_and_right_after_kills(tmp_path: Path) -> None:
    flags = ["--lines", "120", "--rounds", "1", "--phase-s", "2", "--router-kills", "1", "--worker-kills", "1"]
    assert bench.main([*flags, "--json", str(tmp_path / "out.json")]) == 0
