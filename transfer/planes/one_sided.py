"""One-sided planes: writers store by themselves, and the reader hears of it by notices alone.

A write is made of runs of bytes (`page_runs`): where each lies in the writer's region, and in the reader's.

A notice tells of writes. Writers send it to the reader's inbox, a ZMQ socket, and before the receiver gets it, every
rank of the reader must have taken them in, from every rank of the writer that writes to it. Over TCP each rank has
sockets of its own, and its pages come over several connections, so a notice may overtake writes, and writes each other.
A notice says how many writes of its room went before it, and is held, with all later notices of its room, until each
rank has taken in as many from each of its sources (`OrderedNotices`). A room that has ended holds nothing: its notices
are passed on at once, and the receiver drops them.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from twinpool.cache.memory.head_slices import common
from twinpool.cache.memory.kv_cache_spec import BufferLayout, IndexSpace, PoolSetLayout, PoolSetSpec
from twinpool.contracts.errors import LayoutMismatch
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.rank_orders import WriteArrived
from twinpool.transfer.net.fault_injection import via_proxy
from twinpool.transfer.net.zmq_sockets import CurveKeys, DisconnectWatch, bind, keep_alive
from twinpool.transfer.planes.data_plane import RoomTarget, said

# ------------------------------------------------------------ writes, and the line on which they are told of


MAX_COUNT = 2**40


class OneSidedPlane:
    """The part of `transfer.planes.data_plane.RankDataPlane` with nothing to do: no write passes through the reader's
    hands, so none can be permitted, revoked, or missing when its notice comes."""

    revocable = False

    def permit(self, target: RoomTarget) -> None: ...

    def revoke(self, room: RoomId) -> None: ...

    def poll_followers(self) -> None: ...

    def settled(self, rank: int, settled: WriteArrived) -> None: ...

    def take_settled(self) -> list[WriteArrived]:
        return []


def described_layout(kind: str, descriptor: Mapping[str, Any], spec: PoolSetSpec) -> PoolSetLayout:
    """The layout of a reader's memory, from its descriptor's counts. Raises `LayoutMismatch` for counts that can't
    be."""
    counts = said(descriptor, "counts", dict)
    most = {pool.name: counts.get(pool.name) for pool in spec.pools}
    if most != counts or not all(type(count) is int and 0 < count <= MAX_COUNT for count in most.values()):
        raise LayoutMismatch(f"plane {kind}: the reader's counts must be of {sorted(most)}, got {counts!r:.200}")
    return PoolSetLayout(spec, counts)


def _no_notices(data: bytes) -> None:
    raise AssertionError("only leaders give notice, to leaders")


@dataclass(frozen=True, slots=True)
class NoticeLine:
    """The way that notices of a link take to its reader: from leader to leader, there is none between other ranks."""

    send: Callable[[bytes], object] = _no_notices
    watch: DisconnectWatch | None = None
    """The connection's; None where there is no connection."""
    end: Callable[[], object] = lambda: None
    """Called when the link is closed."""

    def cut(self) -> bool:
        """Whether the connection was lost since the last call."""
        return self.watch is not None and self.watch.cut()

    @property
    def up(self) -> bool:
        """Whether it was up at some time."""
        return self.watch is None or self.watch.was_up

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()
        self.end()


IntArray = npt.NDArray[np.int64]


def page_runs(
    sources: Sequence[BufferLayout],
    source_pages: Sequence[int],
    targets: Sequence[BufferLayout],
    target_pages: Sequence[int],
    page_tokens: int,
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the runs of a copy of the heads that both sides hold: their offsets here, there, and their lengths.

    `sources` and `targets` have the same buffers in the same order. Runs that follow each other on both sides are one.
    """
    here, there, sizes = list[IntArray](), list[IntArray](), list[IntArray]()
    a, b = np.asarray(source_pages, dtype=np.int64), np.asarray(target_pages, dtype=np.int64)
    for mine, its in zip(sources, targets, strict=True):
        heads = common(mine.spec, its.spec)
        head_bytes = mine.spec.shape_bytes // mine.spec.shape[0]
        whole = mine.spec.shape == its.spec.shape and len(heads) == mine.spec.shape[0]
        tokens = page_tokens if mine.spec.index is IndexSpace.TOKEN else 1
        parts = 1 if whole else tokens
        width = mine.entry_bytes if whole else len(heads) * head_bytes
        sides = []
        for buffer, pages in ((mine, a), (its, b)):
            first = 0 if whole else (heads.start - buffer.spec.first_head) * head_bytes
            layers = np.arange(buffer.spec.layers, dtype=np.int64)[:, None, None] * buffer.layer_stride
            steps = np.arange(parts, dtype=np.int64)[None, None, :] * (buffer.entry_bytes // tokens)
            sides.append((buffer.base + first + layers + pages[None, :, None] * buffer.index_stride + steps).ravel())
        here.append(sides[0])
        there.append(sides[1])
        sizes.append(np.full(len(sides[0]), width, dtype=np.int64))
    return _joined(np.concatenate(here), np.concatenate(there), np.concatenate(sizes))


def packs(sources: Sequence[BufferLayout], targets: Sequence[BufferLayout]) -> bool:
    """Whether pages are to be packed before they are written: of some buffer the target holds only some of the source's
    heads, all of which are written, so that its pages are long runs and the source's aren't."""
    pairs = [(mine.spec, its.spec) for mine, its in zip(sources, targets, strict=True)]
    whole = all(len(common(mine, its)) == its.shape[0] for mine, its in pairs)
    return whole and any(mine.shape != its.shape and mine.index is IndexSpace.TOKEN for mine, its in pairs)


def packed_pages(targets: Sequence[BufferLayout], count: int) -> list[BufferLayout]:
    """The buffers of `count` pages of the target, packed: buffer by buffer, layer by layer, page by page."""
    out, base = [], 0
    for its in targets:
        out.append(BufferLayout(its.spec, base, count * its.entry_bytes, its.entry_bytes, its.entry_bytes))
        base += its.spec.layers * count * its.entry_bytes
    return out


def _joined(here: IntArray, there: IntArray, sizes: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    follows = (here[1:] == here[:-1] + sizes[:-1]) & (there[1:] == there[:-1] + sizes[:-1])
    firsts = np.flatnonzero(np.concatenate([np.ones(1, dtype=bool), ~follows]))
    return here[firsts], there[firsts], np.add.reduceat(sizes, firsts)


# ------------------------------------------------------------ the inbox of notices, and their order


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
