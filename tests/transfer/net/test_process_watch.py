"""When a writer of several processes is dead: when none of them can write any more."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from twinpool.contracts.errors import WireError
from twinpool.transfer.net import process_watch as process
from twinpool.transfer.net.process_watch import PidfdGroupWatch

Mark = tuple[int, int, str]


@contextmanager
def sleepers(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that wait for the end of their input."""
    command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    found = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(count)]
    try:
        yield found
    finally:
        for one in found:
            one.kill()
            one.wait()
            assert one.stdin is not None
            one.stdin.close()


def mark(one: subprocess.Popen[bytes]) -> Mark:
    return one.pid, process.start_ticks(one.pid) or 0, process.namespace()


def test_a5_a_writer_lives_as_long_as_one_of_its_ranks_although_its_leader_is_dead() -> None:
    with sleepers(2) as (leader, rank):
        watch = PidfdGroupWatch.open([mark(leader), mark(rank)])
        assert watch is not None
        forgotten: list[int] = []
        fds = watch.fds
        leader.kill()
        leader.wait()
        watch.forget_dead(forgotten.append)
        assert not watch.dead, "its rank may be stopped in mid-write, and wake up"
        assert forgotten == fds[:1]
        assert watch.fds == fds[1:]
        rank.kill()
        rank.wait()
        assert watch.dead
        watch.close()


def test_a_writer_all_of_whose_ranks_are_dead_is_no_writer() -> None:
    with sleepers(2) as both:
        marks = [mark(one) for one in both]
        both[0].kill()
        both[0].wait()
        watch = PidfdGroupWatch.open(marks)
        assert watch is not None
        assert not watch.dead
        watch.close()
        both[1].kill()
        both[1].wait()
        with pytest.raises(ProcessLookupError):
            PidfdGroupWatch.open(marks)


def test_a_writer_with_a_rank_on_another_host_cannot_be_watched() -> None:
    with sleepers(1) as (one,):
        assert PidfdGroupWatch.open([mark(one), (1, 1, "elsewhere")]) is None


@pytest.mark.parametrize("second", [(process.MAX_PID + 1, 1, process.namespace()), (1, 1, "elsewhere")])
def test_nothing_stays_open_of_a_writer_of_which_a_later_process_cannot_be_watched(second: Mark) -> None:
    """A reader that is told of such a writer with each hello would run out of descriptors."""
    with sleepers(1) as (one,):
        before = set(os.listdir("/proc/self/fd"))
        with contextlib.suppress(WireError):  # Of a pid that no process has.
            assert PidfdGroupWatch.open([mark(one), second]) is None
        assert set(os.listdir("/proc/self/fd")) <= before
