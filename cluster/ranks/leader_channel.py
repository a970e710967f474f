"""The channel between the leader and the followers of a worker: orders one way, answers and notices the other.

All ranks of a worker are processes of one host. They meet at a socket whose name and keys follow from a secret, which
the launcher makes for each start and gives to every rank: no other process can join. Leader and followers watch each
other by pidfds. Any failure between ranks (a dead rank, a silent rank, an order that can't be carried out) ends the
whole worker: without the lost heads no state of it can be used.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgpack
import zmq

from twinpool.contracts.clock import Clock
from twinpool.contracts.errors import PeerDead
from twinpool.contracts.messages.rank_order_codec import encode
from twinpool.contracts.messages.rank_orders import FollowerNotice, LinkLost, Order, WriteArrived
from twinpool.transfer.net.curve_keys import CurveKeys
from twinpool.transfer.net.process_watch import PidfdWatch

JOIN, ANSWER = b"J", b"A"
_FOLLOWER_NOTICES: dict[bytes, type[WriteArrived] | type[LinkLost]] = {b"T": WriteArrived, b"S": LinkLost}
NOTICE_KINDS = {kind: tag for tag, kind in _FOLLOWER_NOTICES.items()}
_LOOK_S = 0.2
"""Seconds between two looks for dead followers, while waiting for an answer."""


def meeting_point(secret: str) -> tuple[str, CurveKeys]:
    """Endpoint and keys of the ranks that share `secret` (hex, 16 bytes or more). The socket is abstract: no file."""
    raw = bytes.fromhex(secret)
    name = hashlib.blake2b(raw, digest_size=12, person=b"twinpool-ranks").hexdigest()
    return f"ipc://@twinpool-{name}", CurveKeys.from_secret(raw)


class LeaderChannel:
    """The leader's end of the channel; implements `contracts.messages.rank_order_codec.OrderChannel`. Used from one
    thread.

    `size`: number of ranks, the leader included. `deadline_s`: how long a follower may take to answer an order.
    """

    def __init__(self, secret: str, size: int, clock: Clock, deadline_s: float) -> None:
        endpoint, curve = meeting_point(secret)
        self._size, self._clock, self._deadline_s = size, clock, deadline_s
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        curve.serve(self.socket)
        self.socket.bind(endpoint)
        self.watches: dict[int, PidfdWatch] = {}
        self.processes: list[tuple[int, int, str]] = []
        """Each follower's pid, start ticks and namespace, by rank from 1 on."""
        self._sequence = 0
        self._open: dict[int, _AskedRanks] = {}
        self._follower_notices: list[tuple[int, FollowerNotice]] = []
        self._joined: dict[int, tuple[int, int, str]] = {}

    @property
    def size(self) -> int:
        return self._size

    def meet(self, timeout_s: float) -> None:
        """Wait until all followers have joined, then watch their processes. Raises `PeerDead` when one has not joined
        after `timeout_s`, has died, or is on another host."""
        end = self._clock.now() + timeout_s
        while len(self._joined) < self._size - 1:
            if self._clock.now() >= end:
                missing = sorted(set(range(1, self._size)) - set(self._joined))
                raise PeerDead(f"rank {missing[0]} of {self._size} did not come within {timeout_s:g} s")
            self.socket.poll(int(_LOOK_S * 1000))
            self._take()
        self.processes = [self._joined[rank] for rank in range(1, self._size)]
        for rank, (pid, started, boot) in self._joined.items():
            try:
                watch = PidfdWatch.open(pid, started, boot)
            except ProcessLookupError:
                raise PeerDead(f"rank {rank} (pid {pid}) died") from None
            if watch is None:
                raise PeerDead(f"rank {rank} is on another host: all ranks of a worker must be on one")
            self.watches[rank] = watch

    def send(self, order: Order) -> None:
        self._send(order, 0)

    def ask(self, order: Order, deadline_s: float | None = None) -> _AskedRanks:
        self._sequence += 1
        asked = self._open[self._sequence] = _AskedRanks(self, self._sequence, deadline_s or self._deadline_s)
        self._send(order, self._sequence)
        return asked

    def heard(self) -> list[tuple[int, FollowerNotice]]:
        self._take()
        follower_notices, self._follower_notices = self._follower_notices, []
        return follower_notices

    def _send(self, order: Order, sequence: int) -> None:
        data = encode(order)
        for rank in range(1, self._size):
            try:
                self.socket.send_multipart([b"%d" % rank, sequence.to_bytes(8, "little"), data])
            except zmq.ZMQError as error:
                raise PeerDead(f"rank {rank} of this worker can't be reached: {error}") from None

    def _take(self) -> None:
        """Receive all messages that have come: joins, notices and answers. Never waits."""
        while True:
            try:
                identity, kind, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            rank = int(identity)
            value = msgpack.unpackb(frames[-1], use_list=False)
            if kind == JOIN:
                self._joined[rank] = value
            elif kind in _FOLLOWER_NOTICES:
                self._follower_notices.append((rank, _FOLLOWER_NOTICES[kind](*value)))
            else:
                sequence = int.from_bytes(frames[0], "little")
                asked = self._open.get(sequence)
                if asked is not None and asked.take(rank, value, self._size - 1):
                    del self._open[sequence]

    def wait_for(self, asked: _AskedRanks, deadline_s: float) -> None:
        end = self._clock.now() + deadline_s
        self._take()
        while not asked.complete:
            self.require_all()
            if self._clock.now() >= end:
                raise PeerDead(f"{asked.missing(self._size)} of this worker did not answer within {deadline_s:g} s")
            self.socket.poll(int(_LOOK_S * 1000))
            self._take()

    def poll(self) -> None:
        self._take()

    def require_all(self) -> None:
        """Raise `PeerDead` when a follower's process is dead."""
        for rank, watch in self.watches.items():
            if watch.dead:
                raise PeerDead(f"rank {rank} of this worker (pid {watch.pid}) died")

    def close(self) -> None:
        self.socket.close(linger=0)
        for watch in self.watches.values():
            watch.close()


class _AskedRanks:
    """Implements `contracts.messages.rank_order_codec.OrderAnswers`."""

    def __init__(self, line: LeaderChannel, sequence: int, deadline_s: float) -> None:
        self._line, self.sequence, self._deadline_s = line, sequence, deadline_s
        self._answers: dict[int, Any] = {}
        self.complete = False

    def take(self, rank: int, value: Any, wanted: int) -> bool:
        self._answers[rank] = value
        self.complete = len(self._answers) == wanted
        return self.complete

    def missing(self, size: int) -> str:
        return ", ".join(f"rank {rank}" for rank in range(1, size) if rank not in self._answers)

    @property
    def done(self) -> bool:
        if not self.complete:
            self._line.poll()
        return self.complete

    def wait(self) -> list[Any]:
        if not self.complete:
            self._line.wait_for(self, self._deadline_s)
        return [self._answers[rank] for rank in sorted(self._answers)]
