"""Half a minute in which everything goes wrong at once; `python -m tests.support.chaos` and the soak take longer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.chaos import scene
from tests.support.chaos_books import Tally, report

SECONDS = 30.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_half_a_minute_of_everything_going_wrong_alters_no_answer_and_fails_none(tmp_path: Path) -> None:
    tally = Tally(seed=5, plane="zmq")
    with scene(tmp_path, tally, pause_s=0.8, prompts=12, long=2) as chaos:
        asyncio.run(chaos.run(SECONDS))
        chaos.finish()
        print(report(tally))
    assert tally.failures == []
    assert tally.outcomes["answered"]
    assert sum(tally.faults.values()) >= 3, "even a slow machine has time for some"
