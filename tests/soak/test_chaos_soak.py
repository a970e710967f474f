"""Everything goes wrong for `MINUTES`, on two data planes; `python -m tests.chaos` takes any time and resumes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.chaos import Tally, flat, report, scene

MINUTES = float(os.environ.get("TWINPOOL_CHAOS_MINUTES", "30"))
ROUND_S = 120.0


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(("plane", "share"), [("zmq", 0.7), ("shm", 0.3)])
def test_no_answer_is_altered_and_none_fails_whatever_goes_wrong(plane: str, share: float, tmp_path: Path) -> None:
    tally = Tally(seed=11)
    with scene(tmp_path, tally, plane, pause_s=3.0) as chaos:
        while tally.seconds < 60 * MINUTES * share and not tally.failures:
            asyncio.run(chaos.run(min(ROUND_S, 60 * MINUTES * share - tally.seconds)))
            chaos.finish()
            print(report(tally), flush=True)
    assert tally.failures == []
    assert [name for name in chaos.faults if not tally.faults[name]] == [], "every fault was to happen"
    assert [name for name, values in tally.memory_mib.items() if not flat(values)] == []
