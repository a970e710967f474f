"""Peers come, go, come again under other numbers, or die: what each proves, and what it leaves behind."""

from __future__ import annotations

import ast
import fcntl
import os
import resource
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support.pool_sets import entry, pool_sets
from tests.support.room_ends import Ends, ends
from tests.support.worker_parts import inbox_of
from twinpool.cache.device.device_port import DONE
from twinpool.cluster.arena.arena_agent import _ArenaSegment
from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.transfer.net import process_watch as process
from twinpool.transfer.net.process_watch import PidfdGroupWatch, PidfdWatch, namespace, readable, start_ticks
from twinpool.transfer.net.zmq_channel import Waiter, ZmqControlTransport
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.room_states import ExpectedPrompt, HandoverFailed, PromptArrived

SPEC = pool_sets()["all"]
ROOT = Path(__file__).parents[3]
PACKAGES = (
    "contracts",
    "cache",
    "transfer",
    "engine",
    "worker",
    "prefill",
    "decode",
    "colocate",
    "router",
    "cluster",
    "sim",
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing but live."""
    started = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        assert started.stdin is not None
        started.stdin.close()


def mark(one: subprocess.Popen[bytes]) -> tuple[int, int, str]:
    return one.pid, start_ticks(one.pid) or 0, namespace()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# ------------------------------------------------------------ descriptors


@contextmanager
def beyond_select(fd: int) -> Iterator[int]:
    """The same file by a descriptor that `select` can't take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1500)
    try:
        with pytest.raises(ValueError, match="out of range"):
            select.select([high], [], [], 0)
        yield high
    finally:
        with suppress(OSError):
            os.close(high)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_death_is_seen_by_a_descriptor_beyond_1024(child: subprocess.Popen[bytes]) -> None:
    watch = PidfdWatch.open(*mark(child))
    assert watch is not None
    with beyond_select(watch.fd) as high:
        far = PidfdWatch(child.pid, high)
        segment = _ArenaSegment(-1, (1, ""), 1, high)
        assert not far.dead
        assert not segment.free
        child.kill()
        child.wait()
        assert far.dead
        assert segment.free
    watch.close()


@pytest.mark.slow
def test_nothing_waits_by_select_which_fails_from_descriptor_1024_on() -> None:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                    continue
                if ast.unparse(node) in ("select.select", "selectors.SelectSelector"):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_readable_says_what_can_be_read() -> None:
    reading, writing = os.pipe()
    assert not readable(reading)
    os.write(writing, b"x")
    assert readable(reading)
    os.close(reading)
    os.close(writing)


# ------------------------------------------------------------ who a process is


def test_a5_a_reused_pid_is_not_taken_for_the_peer(child: subprocess.Popen[bytes]) -> None:
    """By when it started, of a process that can't change any more: the descriptor is opened first."""
    pid, started, boot = mark(child)
    before = descriptors()
    for other in (started - 1, started + 1, 0):
        with pytest.raises(ProcessLookupError, match="another process by now"):
            PidfdWatch.open(pid, other, boot)
        with pytest.raises(ProcessLookupError):
            PidfdGroupWatch.open([(pid, other, boot)])
    assert PidfdWatch.open(pid, started, "another boot") is None
    assert PidfdGroupWatch.open([(pid, started, boot), (pid, started, "another boot")]) is None
    assert descriptors() <= before, "nothing is left open"
    watch = PidfdWatch.open(pid, started, boot)
    assert watch is not None
    assert not watch.dead
    watch.close()


def test_a5_the_start_time_is_looked_up_behind_the_open_descriptor(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way round, a pid that is reused in between would pass."""
    seen: list[str] = []
    opened, looked = os.pidfd_open, start_ticks

    def open_it(pid: int, flags: int = 0) -> int:
        seen.append("open")
        return opened(pid, flags)

    def look(pid: int) -> int | None:
        seen.append("start time")
        return looked(pid)

    pid, started, boot = mark(child)
    monkeypatch.setattr(os, "pidfd_open", open_it)
    monkeypatch.setattr(process, "start_ticks", look)
    watch = PidfdWatch.open(pid, started, boot)
    assert watch is not None
    watch.close()
    assert seen == ["open", "start time"]


@pytest.mark.parametrize("pid", [-1, 0, -(2**31), 2**22 + 1, 2**63])
def test_what_can_be_no_process_is_no_peer(pid: int) -> None:
    with pytest.raises(WireError, match="no process has the pid"):
        PidfdWatch.open(pid, 1, namespace())
    with pytest.raises(WireError, match="no process has the pid"):
        ZmqControlTransport("127.0.0.1", Waiter(), None).watch(
            [(os.getpid(), start_ticks(os.getpid()) or 0, namespace()), (pid, 1, namespace())]
        )


def test_without_a_descriptor_for_it_a_peer_is_refused_and_nobody_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with ends(SPEC, "shm") as both:
        first, second = both.prompt(11), both.prompt(11)

        def full(pid: int, flags: int = 0) -> int:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pidfd_open", full)
            both.start(first)
            broken = both.outcome(first.room)
            assert isinstance(broken, HandoverFailed)
            assert "Too many open files" in broken.message
        both.open(second)
        both.receiver.abort(second.room, "enough")
        both.until(lambda: not both.receiver.rooms, "the end")


def test_a_closed_watch_of_a_peer_that_lives_wakes_nobody(child: subprocess.Popen[bytes]) -> None:
    """A poller that keeps its closed descriptor is woken again and again, or by what gets the number next."""
    waiter = Waiter()
    watch = ZmqControlTransport("127.0.0.1", waiter, None).watch([mark(child)])
    assert watch is not None
    watch.close()
    assert not waiter._poller.poll(0)
    waiter.close()


# ------------------------------------------------------------ incarnations


@pytest.mark.parametrize("plane", ["local", "shm"])
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "out of sight"])
def test_d3_pages_promised_to_an_older_incarnation_that_still_lives_stay_out_of_use(
    plane: str, watched: bool, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer incarnation is no proof of death: the old one, fenced or stopped, has the memory mapped as before."""
    with ends(SPEC, plane) as both:
        prompt = both.prompt(27)
        with monkeypatch.context() as patch:
            patch.setattr(process, "mine", lambda: mark(child))
            leases = both.open(prompt)
        (old,) = both.receiver_peers.values()
        if not watched:
            old.watch = None
        both.sender.write(prompt.room, {"full": prompt.part("full", range(2))}, (DONE,))
        newer = PeerRef(WorkerName("prefill-0"), Incarnation(2), "tcp://127.0.0.1:1")
        other = both.prompt(4)
        both.receiver.open(other.room, newer, ExpectedPrompt(other.keys, 4))
        both.outcomes += both.receiver.poll()
        assert all(lease.live for lease in leases.values())
        taken = {p: a.lease(a.free, "another request") for p, a in both.target.allocators.items()}
        before = {(p, i): entry(both.target, p, i) for p, lease in taken.items() for i in lease.indices}
        rest = {**prompt.all(), "full": prompt.part("full", range(2, 7))}
        both.sender.write(prompt.room, rest, (DONE,))
        assert {place: entry(both.target, *place) for place in before} == before
        if watched:
            child.kill()
            broken = both.outcome(prompt.room)
            assert isinstance(broken, HandoverFailed)
            assert "died" in broken.message
        else:
            broken = both.outcome(prompt.room)
            assert isinstance(broken, HandoverFailed)
            assert "is now incarnation 2" in broken.message
            both.until(lambda: prompt.room not in both.receiver_rooms, "the old one's own word")
        assert not any(lease.live for lease in leases.values())


@pytest.mark.parametrize("plane", ["local", "shm"])
def test_a5_a_writer_that_nobody_could_watch_is_promised_nothing(plane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the reader can't take its memory back, and no death could ever be proven."""
    with ends(SPEC, plane) as both:
        prompt = both.prompt(11)
        real: Callable[..., object] = both.receiver.end.transport.watch
        calls: list[int] = []

        def watch(processes: object) -> object:
            calls.append(1)
            return real(processes) if len(calls) == 1 else None  # The writer's own look at the reader comes first.

        monkeypatch.setattr(both.receiver.end.transport, "watch", watch)
        leases = both.start(prompt)
        broken = both.outcome(prompt.room)
        assert isinstance(broken, HandoverFailed)
        assert "can't be watched from here" in broken.message
        assert not any(lease.live for lease in leases.values())
        assert not both.sender.granted(prompt.room)


def test_d3_an_older_incarnation_takes_nobodys_place() -> None:
    with ends(SPEC, "local") as both:
        prompt = both.prompt(11)
        both.open(prompt)
        (writer,) = both.receiver_peers.values()
        old = replace(both.receiver_peers.hello(writer.ref), incarnation=0)
        channel = both.receiver.end.transport.connect(both.sender.control, b"decode-0:0")
        channel.send(m.encode(old))
        both.until(lambda: both.sender.refused, "the refusal")
        channel.close()
        assert set(both.sender_peers) == {b"decode-0:1"}
        both.sender.write(prompt.room, prompt.all(), (DONE,))
        both.seal(prompt)
        assert isinstance(both.outcome(prompt.room), PromptArrived), "the newer one's rooms go on"


def test_a_grant_for_a_room_that_has_failed_is_answered_with_the_kind_and_the_reason() -> None:
    with ends(SPEC, "local") as both:
        prompt = both.prompt(11)
        writer = PeerRef(WorkerName("prefill-0"), Incarnation(1), both.sender.control)
        expected = ExpectedPrompt(prompt.keys, prompt.positions)
        both.sender.open(prompt.room, PeerRef(WorkerName("decode-0"), Incarnation(1), ""))
        both.sender.fail(prompt.room, ErrorKind.NONFINITE, "they were no numbers")
        both.receiver.open(prompt.room, writer, expected)
        lacks = both.receiver.missing(expected, {})
        leases = {pool: both.target.allocators[pool].lease(len(n), prompt.room) for pool, n in lacks.items()}
        assert both.receiver.grant(prompt.room, leases, {})
        broken = both.outcome(prompt.room)
        assert isinstance(broken, HandoverFailed)
        assert (broken.kind, "no numbers" in broken.message) == (ErrorKind.NONFINITE, True)


def test_a_room_is_granted_by_the_reader_that_it_is_for_and_by_nobody_else() -> None:
    """The reader hears that its room has failed, and why; the room itself waits for its own reader."""
    with ends(SPEC, "local") as both:
        prompt = both.prompt(12)
        both.start(prompt, wants=PeerRef(WorkerName("decode-9"), Incarnation(4), ""))
        failed = both.outcome(prompt.room)
        assert isinstance(failed, HandoverFailed)
        assert failed.kind is ErrorKind.ROOM
        wanted = "decode-9 incarnation 4"
        assert failed.message == f"room {prompt.room} is for {wanted}, granted by decode-0 incarnation 1"
        assert both.heard == []
        both.sender.fail(prompt.room, ErrorKind.CANCELLED, "over")
        both.quiet()


def test_after_a_cut_rooms_of_which_nothing_was_sent_go_on_and_the_others_fail() -> None:
    with ends(SPEC, "zmq") as both:
        begun, waiting = both.prompt(12), both.prompt(12)
        for prompt in (begun, waiting):
            both.open(prompt)
        both.sender.write(begun.room, {"full": begun.part("full")}, (DONE,))
        room = both.sender_rooms.get(begun.room)
        assert room is not None
        assert room.peer is not None
        both.sender_rooms.disconnected(room.peer)
        assert not both.sender.granted(begun.room)
        assert both.sender.granted(waiting.room)
        assert both.released(begun.room).reason == "the connection to decode-0 was cut"
        both.sender.write(waiting.room, waiting.all(), (DONE,))
        both.seal(waiting)
        arrived = both.outcome(waiting.room)
        assert isinstance(arrived, PromptArrived)
        for lease in arrived.leases.values():
            lease.release()
        both.quiet()


def test_who_gave_a_room_up_says_so_again_after_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    with ends(SPEC, "shm") as both:
        prompt = both.prompt(12)
        both.open(prompt)
        room = both.receiver_rooms.get(prompt.room)
        assert room is not None
        both.receiver.abort(prompt.room, "cancelled")
        said: list[object] = []
        send = both.receiver_peers.send

        def listen(to: Any, word: Any) -> None:
            said.append(word)
            send(to, word)

        monkeypatch.setattr(both.receiver_peers, "send", listen)
        both.receiver_rooms.resend(room.peer)
        assert [type(message).__name__ for message in said] == ["AbortRoom"]
        both.quiet()


@pytest.mark.parametrize("plane", ["local", "shm", "zmq", "staged"])
def test_a5_the_places_of_a_damaged_room_are_free_at_once_only_where_nobody_can_write_to_them_any_more(
    plane: str,
) -> None:
    with ends(SPEC, plane) as both:
        prompt = both.prompt(12)
        leases = both.open(prompt)
        room = both.receiver_rooms.get(prompt.room)
        assert room is not None
        both.receiver_rooms.damaged(room, "it was something else")
        revocable = both.receiver_plane.revocable
        assert {lease.live for lease in leases.values()} == {not revocable}
        damaged = both.outcome(prompt.room)
        assert isinstance(damaged, HandoverFailed)
        assert (damaged.kind, damaged.message) == (ErrorKind.DAMAGED, "it was something else")
        both.quiet()


@pytest.mark.parametrize("again", ["after a cut", "as no answer came"])
def test_that_a_room_was_damaged_is_said_with_its_abort_each_time(again: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first may be lost with a connection: the writer would hand the same pages over to others."""
    with ends(SPEC, "shm", transfer={"link_timeout_s": 5.0}) as both:
        both.open(prompt := both.prompt(12))
        room = both.receiver_rooms[prompt.room]
        with monkeypatch.context() as cut:
            cut.setattr(room.peer.channel, "send", lambda data: None)
            both.receiver_rooms.damaged(room, "it was something else")
        if again == "after a cut":
            both.receiver_rooms.resend(room.peer)
        else:
            both.clock.advance(5.0)
            both.receiver_rooms.expire()
        assert both.released(prompt.room).damaged
        both.quiet()


def test_the_receiver_is_due_when_the_first_granted_room_was_silent_for_too_long() -> None:
    with ends(SPEC, "local", transfer={"room_timeout_s": 40.0}) as both:
        assert both.receiver.next_deadline is None
        first = both.prompt(12)
        both.open(first)
        both.clock.advance(5.0)
        second = both.prompt(12)
        both.open(second)
        assert both.receiver.next_deadline == 40.0
        both.receiver.abort(first.room, "cancelled")
        both.sender.fail(second.room, ErrorKind.CANCELLED, "over")
        both.quiet()


def test_a_notice_with_another_ticket_keeps_no_room_alive() -> None:
    with ends(SPEC, "local", transfer={"room_timeout_s": 40.0}) as both:
        both.open(prompt := both.prompt(24))
        both.clock.advance(39.0)
        with pytest.raises(WireError, match="another ticket"):
            both.receiver_rooms.hear(m.PagesWritten(prompt.room, 1, ()))
        both.clock.advance(1.0)
        both.poll()
        assert isinstance(both.outcome(prompt.room), HandoverFailed)
        both.quiet()


def test_a_room_that_waited_for_its_grant_has_all_of_its_time_from_the_grant_on() -> None:
    """What the writer can't begin before it is granted is no silence of the writer's."""
    with ends(SPEC, "local", transfer={"room_timeout_s": 40.0}) as both:
        known = both.prompt(12)
        both.open(known)
        both.receiver.abort(known.room, "cancelled")
        both.quiet()
        prompt = both.prompt(12)
        both.receiver.open(prompt.room, both.writer, ExpectedPrompt(prompt.keys, 12))
        both.sender.open(prompt.room, PeerRef(WorkerName("decode-0"), Incarnation(1), ""))
        both.clock.advance(50.0)
        both.poll()
        leases = {
            pool: both.target.allocators[pool].lease(len(run.indices), prompt.room) for pool, run in prompt.runs.items()
        }
        assert both.receiver.grant(prompt.room, leases)
        assert both.receiver.next_deadline == 90.0
        both.clock.advance(39.0)
        both.poll()
        assert both.outcomes == []
        both.clock.advance(1.0)
        both.poll()
        (silent,) = both.outcomes
        assert isinstance(silent, HandoverFailed)
        assert (silent.room, silent.message) == (prompt.room, "nothing came for 40 s")
        both.quiet()


def test_a_peer_is_late_from_the_moment_on_by_which_it_should_have_answered() -> None:
    with ends(SPEC, "local", transfer={"connect_timeout_s": 7.0}) as both:
        prompt = both.prompt(12)
        nobody = PeerRef(WorkerName("prefill-5"), Incarnation(1), "tcp://127.0.0.1:9")
        both.receiver.open(prompt.room, nobody, ExpectedPrompt(prompt.keys, 12))
        assert both.receiver.next_deadline == 7.0
        both.clock.advance(6.9)
        assert both.receiver_peers.late() == []
        both.clock.advance(7.0 - both.clock.now())
        (parted,) = both.receiver_peers.late()
        assert "did not answer within 7 s" in parted.reason


# ------------------------------------------------------------ peers that have gone for good


def test_b3_peers_on_other_hosts_that_never_come_back_are_forgotten_with_all_that_was_kept_for_them() -> None:
    """No death can be proven of them; autoscaling brings a new name every time."""
    with ends(SPEC, "zmq", transfer={"link_timeout_s": 5.0}) as both:
        both.open(both.prompt(4))
        (writer,) = both.receiver_peers.values()
        before = descriptors()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        for n in range(5):
            name = f"decode-x{n}"
            inbound = context.socket(zmq.PULL)
            port = inbound.bind_to_random_port("tcp://127.0.0.1")
            endpoint = f"tcp://127.0.0.1:{port}"
            mine = {"endpoint": endpoint, "pages": endpoint, "secret": bytes(32), "frame_bytes": 2**22}
            descriptor = {"ranks": [mine]}
            hello = replace(
                both.receiver_peers.hello(writer.ref), worker=name, boot="another host", descriptor=descriptor
            )
            channel = both.receiver.end.transport.connect(both.sender.control, f"{name}:1".encode())
            channel.send(m.encode(hello))

            def met(identity: bytes = f"{name}:1".encode()) -> bool:
                peer = both.sender_peers.get(identity)
                return peer is not None and peer.watch is None and peer.link.up

            both.until(met, f"{name} to be met")
            channel.close()
            inbound.close(linger=0)
        assert len(both.sender_peers) == 6
        both.until(lambda: sum(peer.link.up for peer in both.sender_peers.values()) == 1, "the others to be gone")
        both.clock.advance(1.5)
        both.poll()
        both.clock.advance(both.sender.end.config.peer_forget_s - 1.0)
        both.poll()
        assert len(both.sender_peers) == 6, "not yet: they may come back"
        both.clock.advance(1.5)
        both.poll()
        assert set(both.sender_peers) == {b"decode-0:1"}
        both.until(lambda: len(descriptors() - before) <= 2, "their descriptors to be closed")
        assert both.sender.check() == []


def test_b3_a_writer_that_nobody_reaches_any_more_is_forgotten_by_its_readers() -> None:
    with ends(SPEC, "zmq", transfer={"link_timeout_s": 5.0}) as both:
        prompt, other = both.prompt(4), both.prompt(4)
        both.open(prompt)
        (writer,) = both.receiver_peers.values()
        elsewhere = PeerRef(WorkerName("prefill-1"), Incarnation(1), "tcp://127.0.0.1:1")
        both.receiver.open(other.room, elsewhere, ExpectedPrompt(other.keys, 4))
        assert writer.watch is not None
        writer.watch.close()
        writer.watch = None  # As of one on another host.
        before = descriptors()
        inbox_of(both.sender).close()
        inbox_of(both.sender).receive = list
        both.until(lambda: writer.down_since is not None, "the connection to be cut")
        both.clock.advance(both.receiver.end.config.link_timeout_s + 1)
        broken = both.outcome(prompt.room)
        assert isinstance(broken, HandoverFailed)
        assert "not back after" in broken.message
        assert not [o for o in both.outcomes if o.room == other.room], "the rooms of others have nothing to do with it"
        both.receiver.abort(other.room, "enough")
        assert writer in both.receiver_peers.values()
        both.clock.advance(both.receiver.end.config.peer_forget_s)
        both.receiver.poll()
        assert writer not in both.receiver_peers.values()
        assert len(descriptors()) < len(before)


def test_a_decode_worker_that_was_out_of_reach_for_long_is_served_again() -> None:
    with ends(SPEC, "zmq") as both:
        first, second = both.prompt(11), both.prompt(11)
        both.open(first)
        peer = both.sender_peers[b"decode-0:1"]
        both.sender_rooms.lost(both.sender_peers.lose(peer, "could not be reached"))
        assert not both.released(first.room).received
        both.receiver.abort(first.room, "its writer is gone")
        both.start(second)
        # It hears that it is not known any more, and the router tries once more.
        broken = both.outcome(second.room)
        assert isinstance(broken, HandoverFailed)
        third = both.prompt(11)
        both.open(third)
        both.sender.write(third.room, third.all(), (DONE,))
        both.seal(third)
        assert isinstance(both.outcome(third.room), PromptArrived)


def polls_of(both: Ends, monkeypatch: pytest.MonkeyPatch, rounds: int) -> int:
    """How often the system is asked about a process in so many rounds."""
    count = 0
    real = process.readable

    def counted(fd: int) -> bool:
        nonlocal count
        count += 1
        return real(fd)

    monkeypatch.setattr(process, "readable", counted)
    for _ in range(rounds):
        both.receiver.poll()
    return count


def test_a_round_asks_once_about_each_process_of_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    with ends(SPEC, "shm") as both:
        both.open(both.prompt(4))
        assert polls_of(both, monkeypatch, 10) == 10


# ------------------------------------------------------------ waking


def test_a_worker_that_is_closed_while_another_thread_wakes_it_has_nothing_written_to_a_closed_descriptor() -> None:
    """Its number may be another file's by then. Threads change places as often as the interpreter lets them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    failed: list[OSError] = []

    def wake(waiter: Waiter) -> None:
        try:
            for _ in range(20):
                waiter.wake()
        except OSError as error:
            failed.append(error)

    try:
        for _ in range(1000):
            waiter = Waiter()
            thread = threading.Thread(target=wake, args=(waiter,))
            thread.start()
            waiter.close()
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed
