"""Everything goes wrong for `MINUTES`, on two data planes; `python -m tests.support.chaos` takes any time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.chaos import rounds
from tests.support.chaos_books import Tally

MINUTES = float(os.environ.get("TWINPOOL_CHAOS_MINUTES", "30"))


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(("plane", "share"), [("zmq", 0.7), ("shm", 0.3)])
def test_no_answer_is_altered_and_none_fails_whatever_goes_wrong(plane: str, share: float, tmp_path: Path) -> None:
    tally = Tally(seed=11, plane=plane)
    missing = rounds(tmp_path, tally, 60 * MINUTES * share, pause_s=3.0, after=print, say=print)
    assert tally.failures == []
    assert missing == [], "every fault was to happen"
    assert tally.grown() == []
