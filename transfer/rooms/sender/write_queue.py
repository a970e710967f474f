"""The write queue of one reader: writes that are under way, and the notices that follow them, in order.

Every reader has a queue of its own, so that no hand-over waits for writes to another reader. A write pins its pages
until it is complete; its notice is sent only then, after everything that was posted before it (hazard A7). A write that
failed is never announced, nor is any later write of its room. What a step under way is still computing is posted before
it is known to be right, layer by layer, and announced later or never.

So many bytes may be under way to a reader, in all its rooms together; what is posted beyond that waits here for its
turn, in order. Writes to the same places wait here for each other, too.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from twinpool.cache.device.device_port import DEVICE, Completion, Device, LayerMark, PageSpanUse, failure
from twinpool.cache.pool.page_allocator import Pin
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.clock import Clock
from twinpool.contracts.ids import RoomId, WorkerName
from twinpool.transfer.planes.data_plane import LaunchedWrite, PageWrite, SlotWrite, WriteLink, lanes_of, launch_write
from twinpool.transfer.rooms import room_messages as m

_QUEUED = 4096
"""Writes to one reader that may be under way at once."""
_NOTICE_PAGES = 8192
"""Pages of one pool that one notice tells of at most."""
_TORN = 4096
"""Rooms of which it is known that a write has failed; longer than last words are said again."""
_UNDER_WAY = RuntimeError("under way")
_LANES = count(1)


@dataclass(slots=True)
class WriteSpan:
    """When a write began and ended, by the clock; infinite while it hasn't."""

    began_at: float = math.inf
    ended_at: float = math.inf


@dataclass(eq=False)
class QueuedWrite:
    """A write that was posted, and the pins of the pages that it reads."""

    room: RoomId
    write: PageWrite | SlotWrite
    after: Sequence[Completion]
    over: Sequence[QueuedWrite]
    """Earlier writes to the same places."""
    nbytes: int
    pins: tuple[Pin, ...] = ()
    span: WriteSpan = field(default_factory=WriteSpan)
    completion: LaunchedWrite | None = None
    """None while it waits for its turn."""
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

    def __init__(
        self, reader: WorkerName, link: WriteLink, pools: PoolSet, device: Device, clock: Clock, max_bytes: int
    ) -> None:
        """`pools`: the pool set that writes read from. `max_bytes`: how many bytes of pages may be under way; a write
        that is alone may have more."""
        self._reader, self._link, self._pools, self._device, self._clock = reader, link, pools, device, clock
        self._max_bytes = max_bytes
        self._lane = f"{reader} {next(_LANES)}"
        self._writes: deque[QueuedWrite] = deque()
        """Those that haven't ended, in order."""
        self._waiting: deque[QueuedWrite] = deque()
        """Those of them that wait for their turn."""
        self.in_flight_bytes = 0
        """Bytes of pages of the others."""
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
    def waiting(self) -> int:
        """The number of writes that wait for their turn."""
        return len(self._waiting)

    @property
    def layered(self) -> bool:
        """Whether some layers of pages can be written by themselves."""
        return self._link.layered

    def max_pages(self, pool: str, layers: range | None = None) -> int:
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
        nbytes = write.nbytes(self._pools.spec.whole) if isinstance(write, PageWrite) else 0
        reason = f"send of {room}"
        pins = tuple(self._pools.allocators[pool].pin(indices, reason) for pool, indices in sources.items())
        queued = QueuedWrite(room, write, after, over, nbytes, pins)
        self._writes.append(queued)
        self._waiting.append(queued)
        self._launch_due()
        return queued

    def _launch_due(self) -> None:
        """Launch the writes whose turn it is, in order."""
        while self._waiting and self._due(self._waiting[0]):
            queued = self._waiting.popleft()
            self.in_flight_bytes += queued.nbytes
            queued.completion = self._launched(queued)

    def _due(self, queued: QueuedWrite) -> bool:
        """Whether a write may be launched: there is room for it, writes to the same places are over, and other ranks
        can be told what it comes after."""
        if not all(self._over(earlier) for earlier in queued.over):
            return False
        if self.in_flight_bytes + queued.nbytes > self._max_bytes:
            for write in self._writes:
                self._over(write)
        if self.in_flight_bytes and self.in_flight_bytes + queued.nbytes > self._max_bytes:
            return False
        return not self._link.ranked or all(isinstance(made, LayerMark) or _ended(made) for made in queued.after)

    def _launched(self, queued: QueuedWrite) -> LaunchedWrite:
        write, span = queued.write, queued.span
        reads = _reads(write) if isinstance(write, PageWrite) else ()

        def began() -> None:
            span.began_at = self._clock.now()

        def ended() -> None:
            span.ended_at = self._clock.now()

        others = self._link.order_parts(write, queued.after)
        return launch_write(
            self._device, self._post, write, queued.after, lane=self._lane, reads=reads, others=others,
            began=began, ended=ended,
        )  # fmt: skip

    def _post(self, write: PageWrite | SlotWrite) -> Completion:
        if self._ended:
            raise RuntimeError(f"{self._reader} is given up")
        return self._link.post(write)

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
        """End a room: its writes that are under way go on, and none of them is announced any more; those that wait for
        their turn are not posted."""
        self._failed.pop(room, None)
        self._drop([write for write in self._waiting if write.room == room])
        for write in self._writes:
            write.withdrawn = write.withdrawn or write.room == room
        for pending in self._notices:
            pending.withdrawn = pending.withdrawn or (pending.notice.room == room and not pending.last)

    def flush(self) -> None:
        """Launch the writes whose turn has come, and send the notices whose writes are complete, in order."""
        self._launch_due()
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
        """Wait until no write is under way, and send the notices and last words that waited; what waits for its turn is
        not posted any more."""
        for write in self._waiting:
            self._failed.setdefault(write.room, f"the link to {self._reader} has ended")
        self._drop(list(self._waiting))
        for write in self._writes:
            if write.completion is not None:
                with contextlib.suppress(RuntimeError):
                    write.completion.wait()
        self.flush()

    def close(self) -> None:
        """Let go of the device's threads for this reader. Nothing is posted any more."""
        for lane in lanes_of(self._lane):
            self._device.end_lane(lane)

    def _drop(self, writes: Sequence[QueuedWrite]) -> None:
        """End writes that wait for their turn: nothing of them was posted."""
        for write in writes:
            self._waiting.remove(write)
            self._end(write)

    def _over(self, write: QueuedWrite) -> bool:
        """Return whether a write has ended. Its pins go as soon as that is known; if it failed, so has its room."""
        if write.ended:
            return True
        error = _UNDER_WAY if write.completion is None else _ended_with(write.completion)
        if error is _UNDER_WAY:
            return False
        self.in_flight_bytes -= write.nbytes
        self._end(write)
        if error is not None:
            self._torn[write.room] = None
            while len(self._torn) > _TORN:
                self._torn.popitem(last=False)
        if error is not None and not write.withdrawn:
            self._failed.setdefault(write.room, m.reason_of(f"a write to {self._reader} failed: {error}"))
        return True

    def _end(self, write: QueuedWrite) -> None:
        write.ended = True
        write.span.ended_at = min(write.span.ended_at, self._clock.now())
        for pin in write.pins:
            pin.release()


def _reads(write: PageWrite) -> tuple[PageSpanUse, ...]:
    """The use of the pages that a write reads."""
    layers = write.layers or {}
    return tuple(PageSpanUse(DEVICE, pool, run.indices, layers.get(pool)) for pool, run in write.runs.items())


def _ended_with(completion: LaunchedWrite) -> RuntimeError | None:
    """Return the error that ended an operation; None if it succeeded, `_UNDER_WAY` while it has not ended."""
    return failure(completion) if completion.done else _UNDER_WAY


def _ended(completion: Completion) -> bool:
    try:
        return completion.done
    except RuntimeError:  # Some devices tell of a failure where they are asked how far they are.
        return True
