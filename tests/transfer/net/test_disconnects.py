"""Connections between workers that are cut or silent, by a proxy between them: what is said again, what is given up."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import zmq

from tests.support.fault_proxy import Proxy, Relay, proxying
from tests.support.pool_sets import pool_sets
from tests.support.room_ends import Ends, Prompt, ends, image, placed
from tests.support.stand_in_ranks import headed_sets
from tests.support.worker_parts import arrivals_of
from twinpool.cache.device.device_port import DONE
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.messages.rank_orders import LinkLost
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.transfer.net import process_watch
from twinpool.transfer.net import zmq_sockets as cuts
from twinpool.transfer.rooms.room_states import ExpectedPrompt, HandoverFailed, PromptArrived

SPEC = pool_sets()["all"]
PLANES = ["shm", "zmq", "nixl", "staged"]
LINK_S = 0.6
"""What connections may be silent for, in these tests: of the wall's clock, as sockets know no other."""
MAX_PER_BEAT = 32
"""Bytes that a beat brings at most; a notice has more."""


@contextmanager
def proxied(
    plane: str, link_s: float = LINK_S, spec: PoolSetSpec = SPEC, ranks: tuple[int, int] = (1, 1)
) -> Iterator[tuple[Ends, Relay, Proxy]]:
    """Both ends, the way to the writer's control socket, and the proxy; the ways of data are made by `faults.proxy`."""
    with proxying() as proxy:
        faults = {"proxy": proxy.door}
        with ends(spec, plane, faults=faults, transfer={"link_timeout_s": link_s}, ranks=ranks) as both:
            relay = proxy.relay("control", "prefill-0", both.sender.control.removeprefix("tcp://"))
            both.sender.control = f"tcp://{relay.endpoint}"
            yield both, relay, proxy


def data(proxy: Proxy) -> Relay:
    """The way to the reader's socket for pages and notices: the one that something goes over."""
    return max(proxy.find("data"), key=lambda relay: (len(relay.open), relay.passed))


def connected(both: Ends, proxy: Proxy, count: int = 1) -> list[Relay]:
    """The ways for pages and notices that have connections. An open room is no sign of them: a socket connects on a
    thread of its own, and so does the proxy."""

    def now() -> list[Relay]:
        return [way for way in proxy.find("data") if way.open]

    both.until(lambda: len(now()) >= count, f"{count} connections for data")
    return now()


def opened(both: Ends, positions: int = 27) -> Prompt:
    prompt = both.prompt(positions)
    both.open(prompt)
    return prompt


def written_into_the_void(both: Ends, way: Relay, prompt: Prompt) -> None:
    """Write a page over a way that is silent. What still is with its socket when the connection is cut goes over the
    next one: so it is waited for until the proxy has it."""
    before = way.taken
    both.sender.write(prompt.room, {"full": prompt.part("full", range(1, 2))}, (DONE,))
    both.until(lambda: way.taken > before + MAX_PER_BEAT, "a page, or its notice, at the proxy")


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
def test_c5_a_cut_control_connection_costs_nothing(plane: str) -> None:
    """A grant that was lost with it is said again, and the room goes on."""
    with proxied(plane) as (both, relay, proxy):
        first = opened(both)
        proxy.silence(relay)
        lost = both.prompt(27)
        writer = PeerRef(WorkerName("prefill-0"), Incarnation(1), both.sender.control)
        expected = ExpectedPrompt(lost.keys, lost.positions)
        both.receiver.open(lost.room, writer, expected)
        both.sender.open(lost.room, PeerRef(WorkerName("decode-0"), Incarnation(1), ""))
        lacks = both.receiver.missing(expected)
        leases = {p: both.target.allocators[p].lease(len(n), lost.room) for p, n in lacks.items()}
        assert both.receiver.grant(lost.room, leases)
        proxy.cut(relay)
        proxy.mend(relay)
        both.until(lambda: both.sender.granted(lost.room), "the grant, said again")
        for prompt in (first, lost):
            both.sender.write(prompt.room, prompt.all(), (DONE,))
            both.seal(prompt)
            arrived = both.outcome(prompt.room)
            assert isinstance(arrived, PromptArrived)
            if prompt is lost:
                placed(both, prompt, arrived.leases, lacks)
            arrived.release()
            assert both.released(prompt.room).received
        assert both.receiver.damaged == 0
        both.quiet()


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
def test_c5_a_confirmation_that_was_lost_is_said_again(plane: str) -> None:
    with proxied(plane) as (both, relay, proxy):
        prompt = opened(both)
        proxy.silence(relay)
        both.sender.write(prompt.room, prompt.all(), (DONE,))
        both.seal(prompt)
        arrived = both.outcome(prompt.room)
        assert isinstance(arrived, PromptArrived)
        arrived.release()
        assert both.sender.rooms == 1
        proxy.cut(relay)
        proxy.mend(relay)
        assert both.released(prompt.room).received
        both.quiet()


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
def test_b10_a_peer_whom_nobody_reaches_loses_its_rooms_within_a_set_time(plane: str) -> None:
    with proxied(plane) as (both, relay, proxy):
        prompt = opened(both)
        proxy.silence(relay)
        both.until(lambda: not next(iter(both.receiver_peers.values())).channel.up, "the heartbeats to stop")
        both.poll()
        assert both.receiver.rooms == 1
        both.clock.advance(LINK_S)
        broken = both.outcome(prompt.room)
        assert isinstance(broken, HandoverFailed)
        assert (broken.kind, broken.blame) == (ErrorKind.ROOM, "prefill-0")
        assert "cut" in broken.message
        # The writer knows nothing of it yet. Where it could still write, nobody else gets what it was promised.
        assert both.receiver.rooms == (0 if both.receiver_plane.revocable else 1)
        for allocator in both.target.allocators.values():
            assert (allocator.free == allocator.total) is both.receiver_plane.revocable
        proxy.cut(relay)
        proxy.mend(relay)
        both.released(prompt.room)
        both.quiet()


@pytest.mark.slow
def test_a5_over_nixl_a_writer_elsewhere_whom_nobody_reaches_loses_its_access_and_its_rooms_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It can't be watched, and has no other way into this memory: here over UCX's TCP."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    pid, started, _ = process_watch.mine()
    monkeypatch.setattr(process_watch, "mine", lambda: (pid, started, "another boot/pid:[1]"))
    with proxied("nixl") as (both, relay, proxy):
        prompt = opened(both)
        both.sender.write(prompt.room, {"full": prompt.part("full", range(2))}, (DONE,))
        (peer,) = both.sender_peers.values()
        both.until(lambda: not len(peer.writes), "the first write")
        proxy.silence(relay)
        both.until(lambda: not next(iter(both.receiver_peers.values())).channel.up, "the heartbeats to stop")
        both.poll()
        assert both.receiver.rooms == 1
        both.clock.advance(LINK_S)
        assert isinstance(both.outcome(prompt.room), HandoverFailed)
        assert both.receiver.rooms == 0
        assert all(allocator.free == allocator.total for allocator in both.target.allocators.values())
        before = image(both.target)
        both.sender.write(prompt.room, prompt.all(), (DONE,))
        both.until(lambda: peer.writes.failed(prompt.room) or not both.sender.rooms, "the failure of a later write")
        assert image(both.target) == before


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
def test_a5_pages_of_a_room_given_up_while_its_writer_is_out_of_reach_return_on_its_word(plane: str) -> None:
    """The abort is lost with the connection, or the answer is: it is asked again until the writer has answered."""
    with proxied(plane) as (both, _, proxy):
        prompt = opened(both)
        both.sender.write(prompt.room, {"full": prompt.part("full")}, (DONE,))
        connected(both, proxy)
        way = data(proxy)
        proxy.silence(way)
        both.receiver.abort(prompt.room, "cancelled")
        both.released(prompt.room)  # It has answered, into the void.
        revocable = both.receiver_plane.revocable
        both.clock.advance(100_000)
        both.poll()
        assert both.receiver.rooms == (0 if revocable else 1), "no time alone gives promised pages back"
        proxy.cut(way)
        proxy.mend(way)
        both.clock.advance(LINK_S)
        both.quiet()


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
def test_a9_pages_that_were_lost_with_their_connection_are_never_taken_for_arrived(plane: str) -> None:
    with proxied(plane) as (both, _, proxy):
        arrivals_of(both.receiver)._verify = False  # Not even where nobody looks at tags.
        prompt = opened(both)
        both.sender.write(prompt.room, {"full": prompt.part("full", range(1))}, (DONE,))
        both.until(lambda: data(proxy).passed and both.receiver_rooms[prompt.room].digests, "the first page")
        way = data(proxy)
        proxy.silence(way)
        written_into_the_void(both, way, prompt)
        proxy.cut(way)
        proxy.mend(way)
        both.sender.write(prompt.room, {**prompt.all(), "full": prompt.part("full", range(2, 7))}, (DONE,))
        both.seal(prompt)
        broken = both.outcome(prompt.room)
        assert isinstance(broken, HandoverFailed)
        assert broken.kind is ErrorKind.ROOM
        assert both.receiver.damaged == 0, "nothing was damaged: something is missing"
        assert not both.released(prompt.room).received
        both.quiet()


@pytest.mark.slow
@pytest.mark.parametrize("refuse", [False, True])
def test_b10_a_cut_connection_of_a_follower_rank_ends_its_rooms_at_once(refuse: bool) -> None:
    """No clock goes on here: without the follower's word both sides would wait for ever."""
    with proxied("zmq", spec=headed_sets()["all"], ranks=(2, 2)) as (both, _, proxy):
        before, prompt = both.prompt(27), opened(both)
        both.sender.write(prompt.room, {"full": prompt.part("full", range(1))}, (DONE,))
        both.until(lambda: both.receiver_rooms[prompt.room].digests, "the first page")
        way, leaders = connected(both, proxy, 2)  # Followers register first.
        assert leaders.passed > way.passed, "notices go to the leader"
        proxy.silence(way)
        written_into_the_void(both, way, prompt)
        proxy.cut(way, refuse=refuse)
        broken, released = both.outcome(prompt.room), both.released(prompt.room)
        assert isinstance(broken, HandoverFailed)
        assert (broken.kind, broken.blame, both.receiver.damaged) == (ErrorKind.ROOM, "prefill-0", 0)
        assert "cut" in broken.message
        assert "cut" in released.reason
        proxy.mend(way)
        both.open(before)
        both.sender.write(before.room, before.all(), (DONE,))
        both.seal(before)
        arrived = both.outcome(before.room)
        assert isinstance(arrived, PromptArrived), "a room that begins later goes on"
        arrived.release()
        both.quiet()


@pytest.mark.slow
def test_b10_what_a_follower_tells_is_heard_though_the_peer_is_gone_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would lie on the line to the ranks, which wakes whoever sleeps there for as long as it lies there."""
    with proxied("zmq", spec=headed_sets()["all"], ranks=(2, 1)) as (both, _, _):
        prompt, followers = opened(both), both.managers[0].followers
        (peer,) = both.sender_peers.values()
        (link,) = followers.links[0]._links.values()
        monkeypatch.setattr(link, "cut", lambda: True)
        told = followers.heard()
        assert told == [(1, LinkLost(1))]
        both.sender_rooms.lost(both.sender_peers.lose(peer, "it died"))
        monkeypatch.setattr(followers, "heard", lambda: [told.pop()] if told else [])
        both.sender.poll()
        assert not told
        both.receiver.abort(prompt.room, "its writer has forgotten it")
        both.quiet()


@pytest.mark.slow
def test_a_link_over_shared_memory_counts_the_connections_that_its_notices_have_had() -> None:
    with proxied("shm") as (both, _, proxy):
        opened(both)
        (peer,) = both.sender_peers.values()
        both.until(lambda: peer.link.sent.opened == 1, "the connection")
        (way,) = connected(both, proxy)
        proxy.cut(way)
        proxy.mend(way)
        link = peer.link

        def again() -> bool:
            link.cut()  # The peer is lost with the connection, and nobody looks at its link any more.
            return link.sent.opened == 2

        both.until(again, "another one in its place")


@pytest.mark.slow
def test_ranks_that_share_memory_have_no_connection_that_could_be_cut() -> None:
    with proxied("shm", spec=headed_sets()["all"], ranks=(2, 2)) as (both, _, proxy):
        opened_room = opened(both)
        (leaders,) = connected(both, proxy)  # Notices, from leader to leader.
        both.sender.write(opened_room.room, opened_room.all(), (DONE,))
        both.seal(opened_room)
        arrived = both.outcome(opened_room.room)
        assert isinstance(arrived, PromptArrived)
        assert leaders.passed
        assert connected(both, proxy) == [leaders], "all has come, and nothing of it over another one"
        arrived.release()
        both.quiet()


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
def test_a_slow_connection_is_no_cut_one(plane: str) -> None:
    with proxied(plane, 20 * LINK_S) as (both, relay, proxy):
        prompt = opened(both)
        for way in (relay, *connected(both, proxy)):
            proxy.slow(way, delay_s=LINK_S / 4)
        both.sender.write(prompt.room, prompt.all(), (DONE,))
        both.seal(prompt)
        arrived = both.outcome(prompt.room)
        assert isinstance(arrived, PromptArrived)
        arrived.release()
        assert both.released(prompt.room).received
        both.quiet()


def test_the_time_after_which_a_connection_is_cut_is_configured() -> None:
    assert replace(TransferConfig(), link_timeout_s=3.0).link_timeout_s == 3.0
    with ends(SPEC, "zmq", transfer={"link_timeout_s": 3.0}) as both:
        assert both.receiver.end.config.link_timeout_s == 3.0
        assert both.receiver_plane._link_timeout_s == 3.0  # type: ignore[attr-defined]


def test_c5_a_watch_that_nobody_closed_stays_so_that_its_context_never_waits_for_it() -> None:
    """A monitor collected before its socket leaves the context's I/O thread waiting for ever at the next event."""
    with zmq.Context() as context:
        socket = context.socket(zmq.DEALER)
        monitor = weakref.ref(cuts.DisconnectWatch(socket)._monitor)
        gc.collect()
        kept = monitor()
        assert kept is not None
        assert not kept.closed
        (watch,) = [watch for watch in cuts._OPEN if watch._socket is socket]
        watch.close()
        socket.close(linger=0)
        assert kept.closed
        assert watch not in cuts._OPEN
