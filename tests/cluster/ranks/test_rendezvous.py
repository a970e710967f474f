"""The ranks of one worker come together."""

from __future__ import annotations

import secrets
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.ranks.rendezvous import follow, lead
from contracts.clock import SystemClock


def test_ranks_meet_without_a_file_that_a_killed_leader_would_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    meeting = secrets.token_hex(32)
    with ThreadPoolExecutor(2) as threads:
        leading = threads.submit(lead, meeting, 2, SystemClock(), deadline_s=60.0, start_s=60.0)
        following = threads.submit(follow, meeting, 1, 2, deadline_s=60.0, start_s=60.0)
        group, follower = leading.result(), following.result()
    group.close()
    follower.close()
