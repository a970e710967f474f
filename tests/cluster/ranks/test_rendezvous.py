"""The ranks of one worker come together."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from twinpool.cluster.ranks import FollowerRank, follow, lead
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import ConfigError


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


class LateClock:
    """A clock that is 90 seconds further from the second look on; at the third it calls `then`."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then, self._looks = then, 0

    def now(self) -> float:
        self._looks += 1
        if self._looks == 3:
            self._then()
        return 0.0 if self._looks == 1 else 90.0


def test_followers_have_longer_to_come_than_to_answer_orders() -> None:
    meeting, followers = secrets.token_hex(32), list[Future[FollowerRank]]()
    with ThreadPoolExecutor(1) as threads:

        def start() -> None:
            followers.append(threads.submit(follow, meeting, 1, 2, EngineConfig(), deadline_s=60.0, start_s=60.0))

        group = lead(meeting, 2, LateClock(start), EngineConfig(), deadline_s=60.0, start_s=120.0)
        follower = followers[0].result()
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
