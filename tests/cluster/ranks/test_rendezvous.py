"""The ranks of one worker come together."""

from __future__ import annotations

import secrets
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.ranks.rendezvous import follow, lead
from contracts.clock import SystemClock
from contracts.config.worker_config import EngineConfig
from contracts.errors import ConfigError


def test_ranks_meet_without_a_file_that_a_killed_leader_would_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    meeting = secrets.token_hex(32)
    with ThreadPoolExecutor(2) as threads:
        leading = threads.submit(lead, meeting, 2, SystemClock(), EngineConfig(), deadline_s=60.0, start_s=60.0)
        following = threads.submit(follow, meeting, 1, 2, EngineConfig(), deadline_s=60.0, start_s=60.0)
        group, follower = leading.result(), following.result()
    group.close()
    follower.close()


def test_a_rank_on_a_gpu_that_is_not_there_says_so() -> None:
    meeting = secrets.token_hex(32)
    with ThreadPoolExecutor(2) as threads:
        gone = EngineConfig(device="cuda:1")
        leading = threads.submit(lead, meeting, 2, SystemClock(), gone, deadline_s=60.0, start_s=60.0)
        following = threads.submit(follow, meeting, 1, 2, gone, deadline_s=60.0, start_s=60.0)
        for rank in (leading, following):
            with pytest.raises(ConfigError, match=r"cuda:1.*sees no GPU"):
                rank.result()
