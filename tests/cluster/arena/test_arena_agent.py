"""The arena agent and those who borrow from it, as real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.served_cluster import ROOT, until
from twinpool.cluster.arena.arena_agent import ArenaAgent, address
from twinpool.cluster.arena.arena_client import ArenaClient
from twinpool.cluster.arena.local_agent import LocalArenaAgent
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.ids import Incarnation, WorkerName

NBYTES = 3 * 4096
NAME = "prefill-0"


class Borrower:
    """One incarnation of a worker, in a process of its own."""

    def __init__(self, token: str, incarnation: int, nbytes: int = NBYTES) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("borrower.py")), token, NAME, str(incarnation), str(nbytes)],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.said = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def write(self, value: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{value}\n")
        self.process.stdin.flush()

    def wrote(self, value: int) -> None:
        self.write(value)
        assert self._line() == "written"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def borrower(token: str, incarnation: int, nbytes: int = NBYTES) -> Iterator[Borrower]:
    one = Borrower(token, incarnation, nbytes)
    try:
        yield one
    finally:
        one.kill()


@contextmanager
def borrowed(
    token: str,
    incarnation: int,
    *,
    rank: int = 0,
    nbytes: int = NBYTES,
    fingerprint: str = "a model",
    owner_s: float = 5.0,
) -> Iterator[memoryview | None]:
    """A segment in this process."""
    arenas = ArenaClient(token, NAME, incarnation, SystemClock(), time.sleep, owner_s)
    try:
        yield arenas.take(rank, nbytes, fingerprint)
    finally:
        arenas.close()


@pytest.mark.slow
def test_what_a_killed_process_wrote_is_there_for_its_successor(agent: LocalArenaAgent, token: str) -> None:
    with borrower(token, 1) as first:
        assert first.said == "has 0"
        first.wrote(7)
    with borrowed(token, 2) as memory:
        assert memory is not None
        assert memory[0] == 7


@pytest.mark.slow
def test_a5_nobody_gets_memory_that_a_living_process_may_still_write_to(agent: LocalArenaAgent, token: str) -> None:
    with borrower(token, 1) as first:
        first.wrote(7)
        # As an incarnation that lost its lease while it hung: fenced, not dead.
        os.kill(first.process.pid, signal.SIGSTOP)
        with borrowed(token, 2, owner_s=0.1) as memory:
            assert memory is not None
            assert memory[0] == 0, "a new segment, not the one that is still mapped"
            memory[0] = 1
            first.write(9)
            os.kill(first.process.pid, signal.SIGCONT)
            assert first._line() == "written"
            assert memory[0] == 1
    with borrower(token, 3) as third:
        assert third.said == "has 0", "this process has the later segment, and lives"


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"nbytes": 2 * NBYTES}, {"fingerprint": "another model"}])
def test_a_worker_of_another_shape_begins_with_zeros(
    agent: LocalArenaAgent, token: str, other: dict[str, object]
) -> None:
    with borrower(token, 1) as first:
        first.wrote(7)
    with borrowed(token, 2, **other) as memory:  # type: ignore[arg-type]
        assert memory is not None
        assert memory[0] == 0


@pytest.mark.slow
def test_an_agent_that_dies_gets_the_memory_back_from_those_who_live(agent: LocalArenaAgent, token: str) -> None:
    with borrower(token, 1) as first:
        first.wrote(7)
        killed(agent)
        first.wrote(8)
        lines = agent.poll()
        assert len(lines) == 1
        assert "restarted" in lines[0]
        until(lambda: segments_of(agent) == [f"twinpool-arena-{NAME}.0"], "the segment to come back")
    with borrowed(token, 2) as memory:
        assert memory is not None
        assert memory[0] == 8


@pytest.mark.slow
def test_of_two_incarnations_the_later_one_is_right_whichever_reaches_a_new_agent_first(
    agent: LocalArenaAgent, token: str
) -> None:
    with borrower(token, 1) as first:
        first.wrote(7)
        os.kill(first.process.pid, signal.SIGSTOP)
        with borrower(token, 2) as second:
            second.wrote(8)
            killed(agent)
            os.kill(second.process.pid, signal.SIGSTOP)
            os.kill(first.process.pid, signal.SIGCONT)
            agent.poll()
            until(lambda: len(segments_of(agent)) == 1, "the fenced one's segment to come back")
            (before,) = (fd for fd, _ in descriptors_of(agent))
            os.kill(second.process.pid, signal.SIGCONT)
            until(lambda: before not in dict(descriptors_of(agent)), "the later one's to replace it")
        with borrowed(token, 3) as memory:
            assert memory is not None
            assert memory[0] == 8
        with borrowed(token, 2) as late:
            assert late is None, "an earlier incarnation gets nothing any more"


@pytest.mark.slow
def test_a_worker_that_wont_come_back_leaves_nothing(agent: LocalArenaAgent, token: str) -> None:
    with borrower(token, 1) as first:
        first.wrote(7)
        assert segments_of(agent) == [f"twinpool-arena-{NAME}.0"]
        agent.forget(WorkerName(NAME))
        assert segments_of(agent) == []
    with borrowed(token, 2) as memory:
        assert memory is not None
        assert memory[0] == 0


@pytest.mark.slow
def test_what_a_later_incarnation_had_no_use_for_is_forgotten_and_nothing_else(
    agent: LocalArenaAgent, token: str
) -> None:
    """As when a worker has changed its role, its number of ranks or its node."""
    with borrower(token, 1) as first, borrowed(token, 1, rank=1):
        first.wrote(7)
        assert segments_of(agent) == [f"twinpool-arena-{NAME}.0", f"twinpool-arena-{NAME}.1"]
        agent.forget(WorkerName(NAME), Incarnation(1))
        assert len(segments_of(agent)) == 2, "they are its own"
    with borrowed(token, 2) as memory:
        assert memory is not None
        assert memory[0] == 7
        agent.forget(WorkerName(NAME), Incarnation(2))
        assert segments_of(agent) == [f"twinpool-arena-{NAME}.0"]
        assert memory[0] == 7


@pytest.mark.slow
def test_a_stranger_gets_nothing_and_harms_nothing(agent: LocalArenaAgent, token: str, tmp_path: Path) -> None:
    with borrower(token, 1) as first:
        first.wrote(7)
        wrong = b'{"verb": "take", "token": "%s", "name": "x", "rank": 0, "incarnation": 1, "nbytes": 1, ' % (
            b"00" * 32
        )
        for said in (b"", b"nonsense", b"[]", b"{}", b"[" * 8000, wrong + b'"fingerprint": "", "fresh": true}'):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.settimeout(60)
                stranger.connect(address(token))
                stranger.send(said)
                assert stranger.recv(100) == b"", "hung up"
    with borrowed(token, 2) as memory:
        assert memory is not None
        assert memory[0] == 7


def test_what_can_not_be_lent_leaves_nothing_behind(token: str) -> None:
    """A worker that is started again and again on a node without that much memory takes no descriptor each time."""
    agent, stop = ArenaAgent(token), os.eventfd(0)
    serving = threading.Thread(target=agent.serve, args=(stop,))
    serving.start()
    told: dict[str, Any] = {"verb": "take", "token": token, "name": NAME, "rank": 0, "incarnation": 1}
    told |= {"nbytes": -1, "fingerprint": "a model", "fresh": False}  # Which the system refuses.
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(60)
            client.connect(address(token))

            def asked() -> int:
                client.send(json.dumps(told).encode())
                assert "bytes" in json.loads(client.recv(8192))["error"]
                return len(os.listdir("/proc/self/fd"))

            assert len({asked() for _ in range(5)}) == 1
    finally:
        os.eventfd_write(stop, 1)
        serving.join(60)
        agent.close()
        os.close(stop)


@pytest.mark.slow
def test_without_an_agent_a_worker_does_without(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.cluster.arena.arena_client.REACH_S", 0.05)
    with borrowed(token, 1) as memory:
        assert memory is None
    with borrowed("", 1) as memory:
        assert memory is None


@pytest.mark.slow
def test_the_agent_and_its_memory_end_with_its_parent_however_that_ends(token: str, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from twinpool.cluster.arena.local_agent import LocalArenaAgent\n"
        "from twinpool.contracts.clock import SystemClock\n"
        "from twinpool.contracts.config.cluster_config import ClusterConfig\n"
        f"agent = LocalArenaAgent({token!r}, pathlib.Path({str(tmp_path)!r}), ClusterConfig(), SystemClock())\n"
        "print(agent.start()[0], flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdin is not None
    assert parent.stdout is not None
    agent = psutil.Process(int(parent.stdout.readline()))
    with borrower(token, 1) as first:
        first.wrote(7)
        parent.kill()
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()
        until(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE, "the agent to end")


def segments_of(agent: LocalArenaAgent) -> list[str]:
    """The names of the segments that the agent holds."""
    return sorted(name for _, name in descriptors_of(agent))


def killed(agent: LocalArenaAgent) -> None:
    """Kill the agent's process; nobody has been told that it is dead."""
    assert agent.pid is not None
    os.kill(agent.pid, signal.SIGKILL)
    os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)


def descriptors_of(agent: LocalArenaAgent) -> list[tuple[tuple[str, int], str]]:
    """Which file each segment of the agent is, and its name."""
    assert agent.pid is not None
    found = []
    for fd in Path(f"/proc/{agent.pid}/fd").iterdir():
        # It opens and closes others meanwhile.
        with suppress(FileNotFoundError):
            link = os.readlink(fd)
            if link.startswith("/memfd:"):
                found.append(((link, fd.stat().st_ino), link.removeprefix("/memfd:").partition(" ")[0]))
    return found
