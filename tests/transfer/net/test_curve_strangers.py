"""Who doesn't hold the cluster's secret is heard on no ZeroMQ socket between workers or ranks."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator

import pytest
import zmq

from twinpool.cluster.rank_links import JOIN, meeting_point
from twinpool.cluster.ranks import FollowerChannel, LeaderChannel
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.errors import PeerDead
from twinpool.transfer.net.zmq_channel import Waiter, ZmqControlTransport
from twinpool.transfer.net.zmq_sockets import CurveKeys, dial
from twinpool.transfer.planes.one_sided import NoticeInbox

WAIT_S = 60.0
MINE, THEIRS = CurveKeys.from_secret(b"m" * 32), CurveKeys.from_secret(b"t" * 32)
HALF = CurveKeys(MINE.public, THEIRS.secret)
"""The cluster's public key with a secret one that isn't its own."""


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    found: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield found
    found.destroy(linger=0)


def strangers(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, *frames: bytes
) -> list[zmq.Socket[bytes]]:
    """Callers without keys, with those of another cluster, and with half a pair, who all have spoken."""
    found = []
    for keys in (None, THEIRS, HALF):
        socket = context.socket(kind)
        socket.set(zmq.LINGER, 0)
        if keys is not None:
            keys.call(socket)
        socket.connect(endpoint)
        socket.send_multipart(list(frames))
        found.append(socket)
    return found


@pytest.mark.parametrize("way", ["notices", "control messages"])
def test_whoever_sends_to_a_peer_that_reads_nothing_is_never_held_up(way: str) -> None:
    """It is the thread that steps the worker. What waits is bounded by the rooms that there are."""
    waiter = Waiter()
    if way == "notices":
        socket, watch = dial(zmq.Context.instance(), "tcp://127.0.0.1:9", None, WAIT_S)
    else:
        channel = ZmqControlTransport("127.0.0.1", waiter, None).connect("tcp://127.0.0.1:9", b"peer")
        socket, watch = channel._socket, channel._watch
    sent = 0
    try:
        with contextlib.suppress(zmq.Again):
            for _ in range(3000):
                socket.send(b"", zmq.NOBLOCK)
                sent += 1
        assert sent == 3000
    finally:
        watch.close()
        socket.close(linger=0)
        waiter.close()


@pytest.mark.parametrize("endpoint", ["tcp://nobody", "", "ipc://" + 200 * "x"])
def test_what_is_sent_to_an_address_that_is_none_is_lost_and_nobody_waits(endpoint: str) -> None:
    waiter = Waiter()
    channel = ZmqControlTransport("127.0.0.1", waiter, None).connect(endpoint, b"peer")
    channel._socket.set(zmq.SNDTIMEO, 1)  # Whoever waits is told so.
    channel.send(b"hello")
    assert channel.receive() is None
    channel.close()
    waiter.close()


def test_less_than_a_millisecond_is_slept_and_not_asked_away(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    monkeypatch.setattr(zmq.Poller, "poll", lambda _, timeout: asked.append(timeout))
    waiter = Waiter()
    for seconds in (0.0004, 0.0021, 0.0, -1.0):
        waiter.wait(seconds)
    waiter.close()
    assert asked == [1, 3, 0, 0]


def refusals(sockets: list[zmq.Socket[bytes]]) -> int:
    return sum(bool(socket.poll(0, zmq.POLLIN)) for socket in sockets)


def test_a_workers_control_socket_hears_its_cluster_alone(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    waiter = Waiter()
    transport = ZmqControlTransport("127.0.0.1", waiter, MINE)
    inbox = transport.listen()
    others = strangers(context, zmq.DEALER, inbox.endpoint, b"hello")
    peer = transport.connect(inbox.endpoint, b"peer")
    peer.send(b"hello")
    heard: list[tuple[bytes, bytes]] = []
    deadline = time.monotonic() + WAIT_S
    while len(heard) < 3:  # The stranger's words had as long to come as three of the peer's, one after the other.
        assert time.monotonic() < deadline
        waiter.wait(0.05)
        if fresh := inbox.receive():
            heard += fresh
            peer.send(b"hello")
    assert {identity for identity, _ in heard} == {b"peer"}
    assert not refusals(others)
    peer.close()
    inbox.close()
    waiter.close()


def test_a_workers_notices_are_its_clusters_alone(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    inbox = NoticeInbox("127.0.0.1", MINE, WAIT_S, 4096, "")
    strangers(context, zmq.PUSH, inbox.endpoint, b"stranger", b"x", b"y")
    peer, watch = dial(context, inbox.endpoint, MINE, WAIT_S)
    (socket,) = inbox.waitable
    for _ in range(3):
        peer.send_multipart([b"peer", b"x", b"y"])
        assert socket.poll(int(1000 * WAIT_S))
        assert socket.recv_multipart()[0] == b"peer"
    assert not socket.poll(100)
    watch.close()
    peer.close(linger=0)
    inbox.close()


def test_no_stranger_joins_the_ranks_of_a_worker(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    meeting = secrets.token_hex(32)
    line = LeaderChannel(meeting, 2, SystemClock(), WAIT_S)
    endpoint, _ = meeting_point(meeting)
    strangers(context, zmq.DEALER, endpoint, JOIN, b"\x93\x01\x01\xa1x")
    with pytest.raises(PeerDead, match="rank 1 of 2 did not come"):
        line.meet(0.3)
    follower = FollowerChannel(meeting, 1)
    line.meet(WAIT_S)
    follower.close()
    line.close()
