"""Ranks of one worker on several hosts: where they meet, how they sum, and how each learns that another is gone.

Ranks of one host meet at an abstract socket, sum over gloo on loopback and watch each other by pidfds. None of this
reaches another host, and gloo and the stores by which its ranks find each other authenticate nobody and encrypt
nothing. So ranks on several hosts have connections of their own, all of them ZMQ under CURVE, with keys that follow
from the secret of the worker's start:

- the leader listens for its followers (`RankSocket`), at the address of its node; orders and answers go there;
- each rank listens at its node's address for what the others send within a step, and connects to each of
  them: a gather is a message to each and one from each (`NetworkGroup`).

**A lost message.** When a connection is cut, ZMQ makes another one by itself and goes on with what comes after. A part
of a sum that was lost would be replaced by the next one, which has the same shape: a wrong token, without an error. So
messages are numbered on each connection, here and on the line of orders; a number that lacks ends the worker.

**A cut link.** Connections are tried by heartbeats of ZMQ's own threads, also while this process computes. A connection
that was cut, or is silent for longer than its timeout, ends the worker on whichever side sees it (`LinkWatch`). The
timeout is less than a lease, so no rank outlives its worker by more than that.
"""

from __future__ import annotations

import hashlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import zmq
from torch import Tensor

from twinpool.contracts.errors import PeerDead
from twinpool.contracts.messages.rank_orders import LinkLost, StepBegun, WriteArrived
from twinpool.engine.tensors.tensor_parallel import ordered_sum
from twinpool.transfer.net.process_watch import readable
from twinpool.transfer.net.zmq_sockets import CurveKeys, DisconnectWatch, bind, keep_alive

_LOOK_MS = 200
"""Milliseconds between two looks for links that were cut, while waiting for another rank."""


JOIN, ANSWER = b"J", b"A"
JOIN_AGAIN_S = 1.0
"""Seconds after which a follower that hasn't heard of its leader says again that it is there."""
FOLLOWER_NOTICES: dict[bytes, type[WriteArrived] | type[LinkLost] | type[StepBegun]] = {
    b"T": WriteArrived,
    b"S": LinkLost,
    b"B": StepBegun,
}
NOTICE_KINDS = {kind: tag for tag, kind in FOLLOWER_NOTICES.items()}


class NodeOfRank(NamedTuple):
    """The node that a rank is on, and what all ranks of a worker must have in common."""

    host: str
    """The address that its sockets listen at."""
    name: str = ""
    """The node's host name."""
    node_id: str = ""
    """Its Ray node id."""
    computes: str = ""
    """The instruction set that it computes with, in words."""
    sizes: str = ""
    """Pages and slots of its pools, and the size of its host tier, in words."""


def meeting_point(secret: str) -> tuple[str, CurveKeys]:
    """Where the ranks of one host that share `secret` (hex, 16 bytes or more) meet, and the keys of all their sockets.
    The socket is abstract: no file."""
    raw = bytes.fromhex(secret)
    name = hashlib.blake2b(raw, digest_size=12, person=b"twinpool-ranks").hexdigest()
    return f"ipc://@twinpool-{name}", CurveKeys.from_secret(raw)


def store_path() -> str:
    """The path of the file by which the group's ranks meet: a memfd, so that a worker that is killed leaves no file.

    The memfd stays open as long as this process lives: torch opens the path again when the group ends, on every rank,
    and would write into another file that had the descriptor's number by then.
    """
    return f"/proc/{os.getpid()}/fd/{os.memfd_create('twinpool-ranks', os.MFD_CLOEXEC)}"


class RankSocket:
    """A socket at which a rank listens for the others, under the keys of their secret: the leader's for its followers,
    and each one's for what is sent within a step. It may be made on another thread than the one that uses it."""

    def __init__(self, secret: str, host: str = "", link_timeout_s: float = 0.0) -> None:
        """`secret`: of the worker's start, in hex. `host`: the address to listen at, on a free port; empty: at the
        socket by which ranks of one host meet."""
        self.link_timeout_s = link_timeout_s
        self.endpoint, self.curve = meeting_point(secret)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.RCVHWM, 0)
        if host:
            keep_alive(self.socket, link_timeout_s)
            self.endpoint = bind(self.socket, host, self.curve)
        else:
            self.curve.serve(self.socket)
            self.socket.bind(self.endpoint)

    def close(self) -> None:
        self.socket.close(linger=0)


class JoinedRank(NamedTuple):
    """What a follower says of itself when it comes."""

    process: tuple[int, int, str]
    """Its pid, start ticks and namespace."""
    endpoint: str = ""
    """Where it listens for the other ranks; empty where all are on one host."""
    at: NodeOfRank = NodeOfRank("")


class LeaderPlace(NamedTuple):
    """Where a follower finds a leader that may be on another host."""

    endpoint: str
    """Of the leader's `RankSocket`."""
    mine: NodeOfRank
    """The follower's own node."""
    link_timeout_s: float


class RankWatch(Protocol):
    """A watch on another rank: a `PidfdWatch` on its process, or a `LinkWatch` on the connection to it."""

    fd: int
    """Readable once it is dead."""

    @property
    def dead(self) -> bool: ...

    @property
    def death(self) -> str: ...

    def close(self) -> None: ...


class LinkWatch:
    """Whether another rank can be reached: `fd` is readable from the moment on when the connection to it was cut."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.fd = os.eventfd(0, os.EFD_CLOEXEC)

    @property
    def dead(self) -> bool:
        return self.fd < 0 or readable(self.fd)

    @property
    def death(self) -> str:
        """What has happened, in words."""
        return f"can't be reached at {self._endpoint} any more: it died, or the link to its host was cut"

    def cut(self) -> None:
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _Links:
    """A thread that looks after the connections to the other ranks. Their monitors are its own until it has stopped."""

    def __init__(self, watched: Sequence[tuple[DisconnectWatch, LinkWatch]]) -> None:
        self._watched = list(watched)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="rank-links", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stop, zmq.POLLIN)
        for connection, _ in self._watched:
            poller.register(connection.monitor, zmq.POLLIN)
        left = list(self._watched)
        while left:
            if any(ready == self._stop for ready, _ in poller.poll()):
                return
            for connection, link in list(left):
                if connection.cut():
                    link.cut()
                    poller.unregister(connection.monitor)
                    left.remove((connection, link))

    def stop(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join(2.0)
        os.close(self._stop)
        for connection, _ in self._watched:
            connection.close()


class NetworkGroup:
    """The ranks of one worker on several hosts, which compute on CPUs; for one thread. Implements
    `engine.tensors.tensor_parallel.TensorParallelGroup`, with its sums.

    All methods raise `PeerDead` when a rank is gone, or silent for longer than `deadline_s`; while ranks load, for
    longer than `start_s`.
    """

    def __init__(
        self, inbox: RankSocket, rank: int, endpoints: Sequence[str], *, deadline_s: float, start_s: float
    ) -> None:
        """`endpoints`: of the inboxes of all ranks."""
        self.rank, self.size = rank, len(endpoints)
        self._inbox = inbox
        self._deadline = timedelta(seconds=deadline_s)
        self._start = timedelta(seconds=max(deadline_s, start_s))
        self._out: dict[int, zmq.Socket[bytes]] = {}
        self._sent = [0] * self.size
        self._received = [0] * self.size
        self._arrived: list[deque[bytes]] = [deque() for _ in range(self.size)]
        self.links: dict[int, LinkWatch] = {}
        """A watch on each of the other ranks."""
        watched = []
        for other, endpoint in enumerate(endpoints):
            if other != rank:
                self._out[other], connection = self._connect(endpoint)
                self.links[other] = LinkWatch(endpoint)
                watched.append((connection, self.links[other]))
        self._watched: _Links | None = _Links(watched)

    @classmethod
    def met(
        cls, inbox: RankSocket, rank: int, endpoints: Sequence[str], deadline_s: float, start_s: float
    ) -> NetworkGroup:
        """The group once all ranks have been heard. Nothing of it is left where one isn't: `PeerDead`."""
        group = cls(inbox, rank, endpoints, deadline_s=deadline_s, start_s=start_s)
        try:
            group.gather(torch.zeros(1))
        except BaseException:
            group.close()
            raise
        return group

    def _connect(self, endpoint: str) -> tuple[zmq.Socket[bytes], DisconnectWatch]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.ROUTING_ID, b"%d" % self.rank)
        keep_alive(socket, self._inbox.link_timeout_s)
        self._inbox.curve.call(socket)
        connection = DisconnectWatch(socket)
        socket.connect(endpoint)
        return socket, connection

    def sum(self, x: Tensor) -> Tensor:
        return ordered_sum(self.gather(x), x.dtype)

    def gather(self, x: Tensor, *, loading: bool = False) -> list[Tensor]:
        raw = _bytes_of(x)
        for other in self._out:
            self._send(other, raw)
        within = self._start if loading else self._deadline
        return [x if other == self.rank else self._receive(other, x, within) for other in range(self.size)]

    def first(self, x: Tensor) -> Tensor:
        if self.rank:
            return self._receive(0, x, self._deadline)
        raw = _bytes_of(x)
        for other in self._out:
            self._send(other, raw)
        return x.clone()

    def send(self, x: Tensor, to: int) -> None:
        self._send(to, _bytes_of(x))

    def receive(self, like: Tensor, sender: int) -> Tensor:
        return self._receive(sender, like, self._deadline)

    def _send(self, other: int, raw: bytes) -> None:
        if self._watched is None:
            raise PeerDead("this rank has left the group")
        self._sent[other] += 1
        self._out[other].send_multipart([self._sent[other].to_bytes(8, "little"), raw])

    def _receive(self, sender: int, like: Tensor, within: timedelta) -> Tensor:
        """What `sender` has sent next: a tensor of the shape and dtype of `like`."""
        left_ms = within.total_seconds() * 1000
        while not self._arrived[sender]:
            self._require_all()
            if not self._inbox.socket.poll(min(_LOOK_MS, max(1, int(left_ms)))):
                left_ms -= _LOOK_MS
                if left_ms <= 0:
                    raise PeerDead(f"rank {sender} of this worker was silent for {within.total_seconds():g} s")
            self._take()
        raw = bytearray(self._arrived[sender].popleft())
        if len(raw) != like.numel() * like.element_size():
            raise PeerDead(f"rank {sender} of this worker has sent {len(raw)} bytes that are of another step")
        if not raw:
            return like.clone()
        return torch.frombuffer(raw, dtype=torch.uint8).view(like.dtype).view(like.shape)

    def _take(self) -> None:
        """Receive all messages that have come. Never waits."""
        while True:
            try:
                sender, number, raw = self._inbox.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            other = int(sender)
            self._received[other] += 1
            if int.from_bytes(number, "little") != self._received[other]:
                raise PeerDead(f"a message of rank {other} of this worker was lost: the link to it was cut")
            self._arrived[other].append(raw)

    def _require_all(self) -> None:
        if self._watched is None:
            raise PeerDead("this rank has left the group")
        for other, link in self.links.items():
            if link.dead:
                raise PeerDead(f"rank {other} of this worker {link.death}")

    def close(self) -> None:
        """Leave the group; the watches of the others see that. Idempotent."""
        if self._watched is None:
            return
        self._watched.stop()
        self._watched = None
        for socket in self._out.values():
            socket.close(linger=0)
        self._inbox.close()
        for link in self.links.values():
            link.close()


def _bytes_of(x: Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def unlike(mine: NodeOfRank, others: Sequence[tuple[int, NodeOfRank]]) -> str:
    """Why ranks can't be of one worker, in words; empty where they can. `others`: the other ranks, by number."""
    for rank, one in others:
        if one.computes != mine.computes:
            return (
                f"rank {rank} on {one.name} computes with {one.computes}, rank 0 on {mine.name} with {mine.computes}: "
                "set engine.numerics_class to a level that both have"
            )
        if one.sizes != mine.sizes:
            return (
                f"rank {rank} on {one.name} was planned for other pools than rank 0 on {mine.name}, as nodes have "
                f"joined meanwhile: {one.sizes} there, {mine.sizes} here"
            )
    return ""


class DeathWatch:
    """A thread that calls back, once, when the first of several processes has died."""

    def __init__(self, watches: Sequence[tuple[str, RankWatch]], on_death: Callable[[str], None]) -> None:
        """`watches`: for each process its description for the text, and its watch. `on_death` is called on the thread
        with a sentence that names the process."""
        self._watches = {watch.fd: f"{who} {watch.death}" for who, watch in watches}
        self._on_death = on_death
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        poller = select.poll()
        for fd in (self._stop, *self._watches):
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll():
            if fd in self._watches:
                self._on_death(self._watches[fd])
                return

    def stop(self) -> None:
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        stop, self._stop = self._stop, -1
        os.close(stop)
