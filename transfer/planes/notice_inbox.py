"""The inbox of a reader's notices, a ZMQ socket that writers send to; their order after writes that take other ways.

A notice tells of writes. Before the receiver gets it, every rank of the reader must have taken them in, from every rank
of the writer that writes to it. Over TCP each rank has sockets of its own, and its pages come over several connections,
so a notice may overtake writes, and writes each other. A notice says how many writes of its room went before it, and is
held, with all later notices of its room, until each rank has taken in as many from each of its sources
(`OrderedNotices`). A room that has ended holds nothing: its notices are passed on at once, and the receiver drops them.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from twinpool.contracts.ids import RoomId
from twinpool.transfer.net.fault_injection import via_proxy
from twinpool.transfer.net.zmq_sockets import CurveKeys, bind, keep_alive

AT_ONCE = 4096
"""Notices that one poll takes in at most."""
_WAITING = 64
"""Messages of one connection that may wait here; more wait at their sender."""


class NoticeInbox:
    """Takes notices in, of one frame each, and bounded in number and length."""

    def __init__(
        self, host: str, curve: CurveKeys | None, link_timeout_s: float, message_bytes: int, proxy: str
    ) -> None:
        """Binds to a free port of `host`. `message_bytes`: the longest notice that is taken in. `proxy`: as
        `faults.proxy`."""
        self._socket = pull_socket(zmq.Context.instance(), link_timeout_s, message_bytes)
        self.endpoint = via_proxy(bind(self._socket, host, curve), "data", str(os.getpid()), proxy)

    def poll(self) -> list[bytes]:
        """Return the notices that have arrived, `AT_ONCE` at most. Messages of several frames are dropped."""
        out: list[bytes] = []
        for _ in range(AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 1:
                out.append(frames[0])
        return out

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        return (self._socket,)

    def close(self) -> None:
        self._socket.close(linger=0)


def pull_socket(
    context: zmq.Context[zmq.Socket[bytes]], link_timeout_s: float, message_bytes: int
) -> zmq.Socket[bytes]:
    """A socket to receive from many peers, which isn't bound yet: bounded, and with heartbeats."""
    socket = context.socket(zmq.PULL)
    socket.set(zmq.RCVHWM, _WAITING)
    socket.set(zmq.MAXMSGSIZE, message_bytes)
    keep_alive(socket, link_timeout_s)
    return socket


MAX_HELD = 4096
"""Notices of one room that may wait for writes; no writer has more under way."""


@dataclass(frozen=True, slots=True)
class _HeldNotice:
    data: bytes
    writes: int
    """Writes of its room that were posted before the notice."""
    writers: frozenset[tuple[int, int]]
    """By rank here and source rank, whose writes it waits for."""


@dataclass(slots=True)
class _NoticeRoom:
    taken: defaultdict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    """The number of the last write that was taken in with all before it, by rank here and source rank."""
    ahead: defaultdict[tuple[int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    """Numbers of writes that were taken in before an earlier one."""
    notices: deque[_HeldNotice] = field(default_factory=deque)


class OrderedNotices:
    """The held notices of a reader of `size` ranks. `writers(sources, rank)` returns the ranks of a writer with
    `sources` ranks that write to rank `rank` of the reader."""

    def __init__(self, size: int, writers: Callable[[int, int], frozenset[int]]) -> None:
        self._size = size
        self._writers = writers
        self._rooms: dict[RoomId, _NoticeRoom] = {}

    def open(self, room: RoomId) -> None:
        self._rooms.setdefault(room, _NoticeRoom())

    def settled(self, rank: int, room: RoomId, source: int, number: int) -> None:
        """Record that rank `rank` has taken in write `number` of a room from rank `source` of the writer.

        A cut connection may lose some: no notice is passed on that tells of writes behind a gap.
        """
        entry, pair = self._rooms.get(room), (rank, source)
        if entry is None or not 0 < number - entry.taken[pair] <= MAX_HELD:
            return
        entry.ahead[pair].add(number)
        while entry.taken[pair] + 1 in entry.ahead[pair]:
            entry.taken[pair] += 1
            entry.ahead[pair].discard(entry.taken[pair])

    def add(self, room: RoomId, data: bytes, writes: int, sources: int) -> list[bytes]:
        """Take in a notice, and return the notices of its room that needn't wait, in order. Raises `ValueError` where
        too many wait already, and as `writers` does for a writer that can't be."""
        entry = self._rooms.get(room)
        if entry is None or not writes:
            return [data]  # An end of the room waits for nothing.
        if len(entry.notices) >= MAX_HELD:
            raise ValueError(f"room {room} holds {MAX_HELD} notices already")
        pairs = frozenset((rank, source) for rank in range(self._size) for source in self._writers(sources, rank))
        entry.notices.append(_HeldNotice(data, writes, pairs))
        return self._due(entry)

    def due(self) -> list[bytes]:
        """Return the held notices whose writes have all been taken in by now."""
        return [data for entry in self._rooms.values() for data in self._due(entry)]

    def _due(self, entry: _NoticeRoom) -> list[bytes]:
        out = []
        while entry.notices and self._complete(entry, entry.notices[0]):
            out.append(entry.notices.popleft().data)
        return out

    @staticmethod
    def _complete(entry: _NoticeRoom, notice: _HeldNotice) -> bool:
        return all(entry.taken.get(pair, 0) >= notice.writes for pair in notice.writers)

    def close(self, room: RoomId) -> list[bytes]:
        """End the room, and return the notices that it held, to be counted as late."""
        entry = self._rooms.pop(room, None)
        return [notice.data for notice in entry.notices] if entry is not None else []
