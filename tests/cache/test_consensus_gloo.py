"""The ranks of a seat as processes, over gloo: one slow, one killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.consensus import Ballot
from cache.gloo_group import GlooGroup
from contracts.clock import ManualClock
from contracts.errors import PeerDead
from tests.rank_lines import Process

SCRIPT = Path(__file__).parents[2] / "tests" / "cache" / "gloo_rank.py"
AHEAD = 3


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.soak)])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Process]]:
    ranks = [Process(SCRIPT, tmp_path / "store", rank, request.param) for rank in range(request.param)]
    try:
        for rank in ranks:
            assert rank.hear()["ready"]
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


@pytest.mark.slow
def test_c3_processes_agree_outrun_a_slow_one_and_outlive_a_dead_one(ranks: list[Process]) -> None:
    *others, last = ranks
    for rank in ranks:
        rank.tell(f"agree first {10 + rank.rank}")
    assert [rank.hear()["decisions"] for rank in ranks] == [[["first", 10, 1]]] * len(ranks)

    # The last rank waits for its line: the others run ahead to their limit, and none of their calls waits for it.
    for rank in others:
        rank.tell("ahead")
    ran = [rank.hear() for rank in others]
    assert [r["posted"] for r in ran] == [AHEAD] * len(others)
    assert max(r["longest_s"] for r in ran) < 30.0
    last.tell("ahead")
    assert last.hear()["posted"] >= AHEAD
    for rank in others:
        rank.tell("settle")
    assert all(rank.hear()["completed"] >= AHEAD + 1 for rank in others)

    for rank in others:
        rank.tell("outlive")
    os.kill(last.process.pid, signal.SIGKILL)
    for rank in others:
        heard = rank.hear()
        assert "gone" in heard["dead"], heard
        assert heard["after_s"] < 30.0, "long before the deadline of 60 s"
    for rank in others:
        assert rank.process.wait(30) == 0


def test_one_process_is_a_group_and_leaving_it_ends_it(tmp_path: Path) -> None:
    import torch.distributed as dist

    group = GlooGroup(dist.FileStore(str(tmp_path / "store"), 1), 0, 1, deadline_s=30.0)
    ballot = Ballot(group, ManualClock(), capacity=2)
    ballot.open("key")
    ballot.propose("key", 4)
    ballot.exchange()
    while (decisions := ballot.take(1)) is None:
        os.sched_yield()
    assert [d.value for d in decisions] == [4]
    ballot.leave()
    with pytest.raises(PeerDead):
        ballot.exchange()
    with pytest.raises(PeerDead):
        group.post([1])


@pytest.mark.slow
def test_ranks_that_do_not_come_are_an_error_by_the_deadline(tmp_path: Path) -> None:
    import torch.distributed as dist

    with pytest.raises(PeerDead, match="rank 0 of 2 did not meet the others"):
        GlooGroup(dist.FileStore(str(tmp_path / "store"), 2), 0, 2, deadline_s=0.5)
