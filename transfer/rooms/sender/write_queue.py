"""The write queue of one reader: writes that are under way, and the notices that follow them, in order.

Every reader has a queue of its own, so that no hand-over waits for writes to another reader. A write pins its pages
until it is complete; its notice is sent only then, after everything that was posted before it (hazard A7). A write that
failed is never announced, nor is any later write of its room. What a step under way is still computing is posted before
it is known to be right, layer by layer, and announced later or never.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cache.device.device_port import (
    DEVICE,
    DONE,
    Completion,
    Device,
    DeviceOp,
    DeviceStream,
    PageSpanUse,
    attempt,
    failure,
)
from cache.pool.page_allocator import Pin
from cache.pool.pool_set import PoolSet
from contracts.clock import Clock
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


class LaunchedWrite:
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

    def wait_posted(self) -> None:
        """Return once nothing of the write is on its way, well or not. For a write that is launched after it on the
        same stream."""
        for posted in self._posted:
            with contextlib.suppress(RuntimeError):
                posted.wait()

    def order(self) -> None:
        self.wait()


@dataclass(slots=True)
class WriteSpan:
    """When a write began and ended, by the clock; infinite while it hasn't."""

    began_at: float = math.inf
    ended_at: float = math.inf


@dataclass(eq=False)
class QueuedWrite:
    """A write that was posted, and the pins of the pages that it reads."""

    room: RoomId
    completion: LaunchedWrite
    pins: tuple[Pin, ...] = ()
    span: WriteSpan = field(default_factory=WriteSpan)
    ended: bool = False
    withdrawn: bool = False
    """Whether the room is over: it doesn't matter any more how the write ends."""


@dataclass(eq=False)
class RoomTimes:
    """When the last of a room's pages was computed, by the clock, and all its writes."""

    computed_at: float
    writes: Sequence[QueuedWrite]

    def told(self, notice: m.SlotWritten, now: float) -> m.SlotWritten:
        """Return the notice that everything is written, as of `now`, with what of that was hidden and exposed."""
        spans = [write.span for write in self.writes if write.ended]
        hidden = sum(max(0.0, min(span.ended_at, self.computed_at) - span.began_at) for span in spans)
        exposed = max(0.0, now - self.computed_at)
        return replace(notice, hidden_us=int(1e6 * hidden), exposed_us=int(1e6 * exposed))


@dataclass(eq=False)
class PendingNotice:
    """A notice that follows writes of its room once they are complete; or a last word that follows all of them."""

    notice: m.Notice
    behind: tuple[QueuedWrite, ...]
    writes: int = 0
    """Number of writes of its room that must arrive before the notice."""
    times: RoomTimes | None = None
    """What the notice is to say of its room's times; None: nothing."""
    last: bool = False
    """Whether it is a last word, which is sent also where a write failed."""
    withdrawn: bool = False
    """Whether the room is over: the notice is not sent then."""


class WriteQueue:
    """Writes and last words to one reader. Never blocks, but for `settle`."""

    def __init__(self, reader: WorkerName, link: WriteLink, pools: PoolSet, device: Device, clock: Clock) -> None:
        """`pools`: the pool set that writes read from."""
        self._reader, self._link, self._pools, self._device, self._clock = reader, link, pools, device, clock
        self._writes: deque[QueuedWrite] = deque()
        self._notices: deque[PendingNotice] = deque()
        self._failed: dict[RoomId, str] = {}
        self._ended = False
        """Whether no further write goes to the link."""
        self._torn: OrderedDict[RoomId, None] = OrderedDict()
        """Rooms of which a write has failed, over or not, the latest last."""

    def __len__(self) -> int:
        """The number of writes that are under way, and of last words that wait for them."""
        return len(self._writes) + sum(pending.last for pending in self._notices)

    @property
    def layered(self) -> bool:
        """Whether some layers of pages can be written by themselves."""
        return self._link.layered

    def most_pages(self, pool: str, layers: range | None = None) -> int:
        """Return how many pages of `pool`, or `layers` of them, one write may have: as one frame of the reader holds,
        and one notice."""
        if self._link.frame_bytes is None:
            return _NOTICE_PAGES
        nbytes = self._pools.spec.whole.unit_bytes(pool, layers)
        return max(1, min(_NOTICE_PAGES, self._link.frame_bytes // max(1, nbytes)))

    def failed(self, room: RoomId) -> str:
        """Return why a write of `room` failed; empty where none did."""
        return self._failed.get(room, "")

    def post(
        self, write: PageWrite | SlotWrite, after: Sequence[Completion], over: Sequence[QueuedWrite] = ()
    ) -> QueuedWrite | None:
        """Pin the pages that `write` reads, and post it after the operations `after`, which made them. `announce` tells
        the reader. `over`: earlier writes, to the same places, that must have ended before. With too many writes under
        way nothing is posted, and the room has `failed`: returns None."""
        room = write.target.room
        if len(self._writes) >= _QUEUED:
            self._failed[room] = f"{len(self._writes)} writes to {self._reader} are under way already"
            return None
        sources = write.sources if isinstance(write, PageWrite) else {}
        op = DeviceOp("send", DeviceStream.SEND, reads=_reads(write) if isinstance(write, PageWrite) else ())
        posted: list[Completion] = []
        span = WriteSpan()

        def run() -> None:
            for earlier in over:
                earlier.completion.wait_posted()
            if self._ended:
                raise RuntimeError(f"{self._reader} is given up")
            span.began_at = self._clock.now()
            posted.append(self._link.post(write))
            if all(p is DONE for p in posted):
                span.ended_at = self._clock.now()

        launched = attempt(self._device, op, run, after)
        reason = f"send of {room}"
        pins = tuple(self._pools.allocators[pool].pin(indices, reason) for pool, indices in sources.items())
        self._writes.append(QueuedWrite(room, LaunchedWrite(launched, posted), pins, span))
        return self._writes[-1]

    def announce(
        self, notice: m.Notice, behind: Sequence[QueuedWrite], writes: int, times: RoomTimes | None = None
    ) -> None:
        """Send `notice` once the writes `behind` are complete, and the first `writes` writes of its room have arrived.
        `times`: of the room, for the notice that everything is written."""
        self._notices.append(PendingNotice(notice, tuple(behind), writes, times))
        self.flush()

    def say(self, word: m.Notice) -> None:
        """Send a last word, after everything of its room that was posted before it."""
        behind = tuple(write for write in self._writes if write.room == word.room)
        self._notices.append(PendingNotice(word, behind, last=True))
        self.flush()

    def withdraw(self, room: RoomId) -> None:
        """End a room: its writes that are under way go on, and none of them is announced any more."""
        self._failed.pop(room, None)
        for write in self._writes:
            write.withdrawn = write.withdrawn or write.room == room
        for pending in self._notices:
            pending.withdrawn = pending.withdrawn or (pending.notice.room == room and not pending.last)

    def flush(self) -> None:
        """Send the notices whose writes are complete, in order."""
        while self._writes and self._over(self._writes[0]):
            self._writes.popleft()
        while self._notices and all(self._over(write) for write in self._notices[0].behind):
            pending = self._notices.popleft()
            room = pending.notice.room
            if pending.last or not (pending.withdrawn or room in self._failed):
                notice = pending.notice
                if pending.times is not None and isinstance(notice, m.SlotWritten):
                    notice = pending.times.told(notice, self._clock.now())
                self._link.notify(room, m.encode_notice(self._marked(notice)), pending.writes)

    def _marked(self, notice: m.Notice) -> m.Notice:
        """Return a notice, with the mark that a last word of a torn room has."""
        if notice.room in self._torn and isinstance(notice, m.WriterQuiesced | m.RoomFailed | m.NothingToDecode):
            return replace(notice, torn=True)
        return notice

    def end(self) -> None:
        """Give the reader up: writes that the device hasn't come to yet fail, and nothing new goes to the link. To be
        called before the link is severed, which ends the others."""
        self._ended = True

    def settle(self) -> None:
        """Wait until no write is under way, and send the notices and last words that waited."""
        for write in self._writes:
            with contextlib.suppress(RuntimeError):
                write.completion.wait()
        self.flush()

    def _over(self, write: QueuedWrite) -> bool:
        """Return whether a write has ended. Its pins go as soon as that is known; if it failed, so has its room."""
        if write.ended:
            return True
        error = _ended_with(write.completion)
        if error is _UNDER_WAY:
            return False
        write.ended = True
        write.span.ended_at = min(write.span.ended_at, self._clock.now())
        for pin in write.pins:
            pin.release()
        if error is not None:
            self._torn[write.room] = None
            while len(self._torn) > _TORN:
                self._torn.popitem(last=False)
        if error is not None and not write.withdrawn:
            self._failed.setdefault(write.room, m.reason_of(f"a write to {self._reader} failed: {error}"))
        return True


def _reads(write: PageWrite) -> tuple[PageSpanUse, ...]:
    """The use of the pages that a write reads."""
    layers = write.layers or {}
    return tuple(PageSpanUse(DEVICE, pool, run.indices, layers.get(pool)) for pool, run in write.runs.items())


def _ended_with(completion: Completion) -> RuntimeError | None:
    """Return the error that ended an operation; None if it succeeded, `_UNDER_WAY` while it has not ended."""
    try:
        if not completion.done:
            return _UNDER_WAY
    except RuntimeError as error:  # Some devices tell of a failure where they are asked how far they are.
        return error
    return failure(completion)
