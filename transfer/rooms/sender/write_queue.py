"""The write queue of one reader: writes that are under way, and the notices that follow them, in order.

Every reader has a queue of its own, so that no hand-over waits for writes to another reader. A write pins its pages
until it is complete; its notice is sent only then, after everything that was posted before it (hazard A7). A write that
failed is never announced, nor is any later write of its room.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cache.device.device_port import DEVICE, DONE, Completion, Device, DeviceOp, DeviceStream, attempt, failure, spans
from cache.pool.page_allocator import Pin
from cache.pool.pool_set import PoolSet
from contracts.ids import RoomId, WorkerName
from transfer.planes.data_plane import PageWrite, SlotWrite, WriteLink
from transfer.rooms import room_messages as m

_QUEUED = 4096
"""Writes to one reader that may be under way at once."""
_NOTICE_PAGES = 8192
"""Pages of one pool that one notice tells of at most."""
_TORN = 4096
"""Rooms of which it is known that a write has failed; longer than last words are said again."""
_UNDER_WAY = RuntimeError("under way")


@dataclass(eq=False)
class PendingWrite:
    """A posted write, and the notice that may follow once it is complete; or a last word that follows what was posted
    before it."""

    completion: Completion
    notice: m.Notice
    pins: tuple[Pin, ...] = ()
    writes: int = 0
    """Number of writes of its room that must arrive before the notice."""
    room: RoomId | None = None
    """The room of the write; None for a last word."""
    withdrawn: bool = False
    """Whether the room is over: the notice is not sent then."""


class WriteQueue:
    """Writes and last words to one reader. Never blocks, but for `settle`."""

    def __init__(self, reader: WorkerName, link: WriteLink, pools: PoolSet, device: Device) -> None:
        """`pools`: the pool set that writes read from."""
        self._reader, self._link, self._pools, self._device = reader, link, pools, device
        self._pending: deque[PendingWrite] = deque()
        self._failed: dict[RoomId, str] = {}
        self._torn: OrderedDict[RoomId, None] = OrderedDict()
        """Rooms of which a write has failed, over or not, the latest last."""

    def __len__(self) -> int:
        """The number of writes that are under way, and of last words that wait for them."""
        return len(self._pending)

    def most_pages(self, pool: str) -> int:
        """Return how many pages of `pool` one write may have: as one frame of the reader holds, and one notice."""
        if self._link.frame_bytes is None:
            return _NOTICE_PAGES
        return max(1, min(_NOTICE_PAGES, self._link.frame_bytes // self._pools.spec.whole.unit_bytes(pool)))

    def failed(self, room: RoomId) -> str:
        """Return why a write of `room` failed; empty where none did."""
        return self._failed.get(room, "")

    def post(self, write: PageWrite | SlotWrite, notice: m.Notice, writes: int, after: Sequence[Completion]) -> None:
        """Pin the pages that `write` reads, and post it after the operations `after`, which made them. When it is
        complete `notice` is sent, behind the first `writes` writes of its room. With too many writes under way nothing
        is posted, and the room has `failed`."""
        room = notice.room
        if len(self._pending) >= _QUEUED:
            self._failed[room] = f"{len(self._pending)} writes to {self._reader} are under way already"
            return
        sources = write.sources if isinstance(write, PageWrite) else {}
        op = DeviceOp("send", DeviceStream.SEND, reads=spans(DEVICE, sources))
        posted: list[Completion] = []
        launched = attempt(self._device, op, lambda: posted.append(self._link.post(write)), after)
        reason = f"send of {room}"
        pins = tuple(self._pools.allocators[pool].pin(indices, reason) for pool, indices in sources.items())
        self._pending.append(PendingWrite(_PostedWrite(launched, posted), notice, pins, writes, room))
        self.flush()

    def say(self, word: m.Notice) -> None:
        """Send a last word, after everything that was posted before it."""
        self._pending.append(PendingWrite(DONE, word))
        self.flush()

    def withdraw(self, room: RoomId) -> None:
        """End a room: its writes that are under way go on, and none of them is announced any more."""
        self._failed.pop(room, None)
        for pending in self._pending:
            pending.withdrawn = pending.withdrawn or pending.room == room

    def flush(self) -> None:
        """Send the notices whose writes are complete, in order."""
        while self._pending:
            error = _ended_with(self._pending[0].completion)
            if error is _UNDER_WAY:
                return
            pending = self._pending.popleft()
            for pin in pending.pins:
                pin.release()
            if pending.room is not None and error is not None:
                self._torn[pending.room] = None
                while len(self._torn) > _TORN:
                    self._torn.popitem(last=False)
            if pending.room is not None and error is not None and not pending.withdrawn:
                self._failed.setdefault(pending.room, m.reason_of(f"a write to {self._reader} failed: {error}"))
            if not pending.withdrawn and pending.room not in self._failed:
                self._link.notify(pending.notice.room, m.encode_notice(self._marked(pending.notice)), pending.writes)

    def _marked(self, notice: m.Notice) -> m.Notice:
        """Return a notice, with the mark that a last word of a torn room has."""
        if notice.room in self._torn and isinstance(notice, m.WriterQuiesced | m.RoomFailed | m.NothingToDecode):
            return replace(notice, torn=True)
        return notice

    def settle(self) -> None:
        """Wait until no write is under way, and send the notices and last words that waited."""
        for pending in self._pending:
            with contextlib.suppress(RuntimeError):
                pending.completion.wait()
        self.flush()


def _ended_with(completion: Completion) -> RuntimeError | None:
    """Return the error that ended an operation; None if it succeeded, `_UNDER_WAY` while it has not ended."""
    try:
        if not completion.done:
            return _UNDER_WAY
    except RuntimeError as error:  # Some devices tell of a failure where they are asked how far they are.
        return error
    return failure(completion)


class _PostedWrite:
    """A completion that is done when the launch is, and the write that it posted."""

    def __init__(self, launched: Completion, posted: list[Completion]) -> None:
        self._launched = launched
        self._posted = posted

    @property
    def done(self) -> bool:
        return self._launched.done and all(p.done for p in self._posted)

    def wait(self) -> None:
        self._launched.wait()
        for posted in self._posted:
            posted.wait()

    def order(self) -> None:
        self.wait()
