"""The data plane: five verbs, one-sided, RDMA in shape.

    register   memory that peers may write into            DataPlane.register
    describe   that memory to a peer, as plain values      DataPlane.describe
    post       writes into a peer's memory                 WriteLink.post
    notify     the peer, ordered after the posted writes   WriteLink.notify
    poll       for notices that arrived                    DataPlane.poll

A plane says whether it is `revocable`: whether `revoke` really ends a writer's access. Where it isn't, pages that
were granted to a writer stay out of use until the writer has said it is done, or is dead.

Below are completions of writes: one that a device posts once what it comes after has happened, over all ranks of the
writer (`LaunchedWrite`), and one that another thread carries out (`PostedWrite`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol, TypeVar

import torch
import zmq

from twinpool.cache.device.device_copies import CPU
from twinpool.cache.device.device_port import DONE, Completion, Device, DeviceOp, DeviceStream, PageSpanUse, attempt
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.memory.page_moves import PageMove
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.plane_choice import DEVICE_PLANES
from twinpool.contracts.errors import ConfigError, LayoutMismatch
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.rank_orders import WriteArrived

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PageNumbers:
    """A run of page numbers of a sequence in one pool, from `first` on, with the page or slot that holds each."""

    first: int
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + len(self.indices))

    def head(self, most: int) -> PageNumbers:
        """Return the first `most` numbers of the run, or all where that is less."""
        return self if len(self) <= most else PageNumbers(self.first, self.indices[:most])

    def at(self, numbers: range) -> tuple[int, ...]:
        """Return the indices of these numbers. Raises `IndexError` where some of them are not in the run."""
        if numbers.start < self.first or numbers.stop > self.first + len(self.indices):
            raise IndexError(f"pages {numbers.start}..{numbers.stop - 1} aren't among {self.numbers}")
        return self.indices[numbers.start - self.first : numbers.stop - self.first]


@dataclass(frozen=True, slots=True)
class RoomTarget:
    """The places that a room's writer may write at the reader: pages and slots by pool, and a metadata slot."""

    room: RoomId
    runs: Mapping[str, PageNumbers]
    slot: int
    ticket: int = 0
    """The grant's ticket; frames that arrive with another one are dropped."""

    def at(self, pool: str, numbers: range) -> tuple[int, ...]:
        """Return the reader's pages for these numbers. Raises `IndexError` for numbers that were not granted."""
        return self.runs.get(pool, _NO_RUN).at(numbers)


_NO_RUN = PageNumbers(0, ())


@dataclass(frozen=True, slots=True)
class PageWrite:
    """A write of pages and slots of this worker, all their buffers, to the target's of the same numbers: one write for
    all pools."""

    target: RoomTarget
    runs: Mapping[str, PageNumbers]
    number: int = 1
    """Number of this write within its room, from 1."""
    layers: Mapping[str, range] | None = None
    """By pool, the layers that are written; None: all. Only for links that are `layered`."""

    @property
    def sources(self) -> dict[str, tuple[int, ...]]:
        return {pool: run.indices for pool, run in self.runs.items()}

    def nbytes(self, spec: PoolSetSpec) -> int:
        """Bytes of these pages and slots, of the layers that are written, in a pool set of this spec."""
        layers = self.layers or {}
        return sum(len(run) * spec.unit_bytes(pool, layers.get(pool)) for pool, run in self.runs.items())

    @property
    def move(self) -> PageMove:
        """The copy from this worker's pages to the reader's. Raises `IndexError` for numbers that were not granted."""
        return PageMove.of(self.sources, {pool: self.target.at(pool, run.numbers) for pool, run in self.runs.items()})


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """A write of `data`, at most `SLOT_BYTES`, to the start of the target's metadata slot."""

    target: RoomTarget
    data: bytes


@dataclass
class SentCounts:
    """What went down the connections of a link so far."""

    writes: int = 0
    """Writes that have landed. A write to several ranks of a reader counts once for each."""
    nbytes: int = 0
    busy_s: float = 0.0
    """Seconds in which some write was under way on a connection, summed over connections."""
    waited_s: float = 0.0
    """Seconds from the post of each write until the reader had it, summed."""
    opened: int = 0
    """Connections opened; those after the first of each are retries."""

    @property
    def bytes_per_s(self) -> float:
        """What one connection carried while it was busy; 0 where nothing was measured."""
        return self.nbytes / self.busy_s if self.busy_s > 0 else 0.0

    @classmethod
    def total(cls, counts: Iterable[SentCounts]) -> SentCounts:
        """The counts of several links together: each field summed."""
        return cls(*map(sum, zip(*map(astuple, counts), strict=True)))


class WriteLink(Protocol):
    """A link from a writer into one reader's memory."""

    frame_bytes: int | None
    """Bytes of each pool that one write may have; None: any number."""
    layered: bool
    """Whether a write may have some layers of its pages only."""
    ranked: bool
    """Whether other ranks of this worker write parts: each write is to be ordered once what it comes after has
    happened, but for marks of steps under way."""

    @property
    def sent(self) -> SentCounts:
        """What it has carried so far, from this rank to all ranks of the reader; what other ranks of this worker write
        is not in it."""

    def admit(self, target: RoomTarget) -> None:
        """Check granted places. Raises `WireError` for places that the memory described by the reader doesn't have."""

    def order_parts(self, write: PageWrite | SlotWrite, after: Sequence[Completion]) -> Completion:
        """Have the other ranks of this worker write their parts of `write`, which `post` leaves out; returns a
        completion of these parts, for the thread that calls this. `after`: what the write comes after, each done or a
        mark of the step under way; the other ranks keep to their own marks."""

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        """Start a write. The pages that it reads must stay unchanged until the completion is done: the write has landed
        then, or it has failed and may have landed in part."""

    def notify(self, room: RoomId, data: bytes, writes: int = 0) -> None:
        """Send the reader `data`, a notice of a room. The reader gets it after everything posted here so far has
        arrived, and the first `writes` writes of the room from all other ranks."""

    def cut(self) -> bool:
        """Return whether the link's connection was cut since the last call: writes and notices may be lost then."""

    @property
    def up(self) -> bool:
        """Whether there is a connection now, as far as `cut` has seen; always true where the link needs none."""

    def sever(self) -> None:
        """End the writes that are under way, as far as they can be: all of them are done or failed soon after."""

    def close(self) -> None: ...


class DataPlane(Protocol):
    """One worker's end of the data plane; every worker has one."""

    kind: str
    """The plane's name in `transfer.plane`; both ends must have the same."""
    revocable: bool
    """Whether `revoke` really ends a writer's access."""
    by_peer: bool
    """Whether each writer has access of its own, which `sever` really ends."""
    dropped: int
    """Writes and notices that were dropped: they came for no room, or could not be used."""

    def allocate(self, name: str, nbytes: int, device: torch.device = CPU) -> torch.Tensor:
        """Return zeroed memory of `device`, uint8 [nbytes], that this plane can register. Raises `ConfigError` for
        memory that it can't write from and into."""

    def register(self, pools: PoolSet, slots: torch.Tensor | None) -> None:
        """Let peers write into the pool set and the metadata slots, uint8 [slots, SLOT_BYTES]. A worker that only
        writes has no slots (None); it writes from its pool set."""

    def describe(self, peer: str = "") -> dict[str, Any]:
        """Return the descriptor for `connect` of the writer `peer`, as plain values: a part for each rank, under
        ``ranks``."""

    def sever(self, peer: str) -> None:
        """End all access that was described to the writer `peer`, which is dead, or whose processes can't write here by
        themselves. When this returns nothing of it arrives any more."""

    def connect(self, descriptor: dict[str, Any]) -> WriteLink:
        """Open a link to the reader with this descriptor. Raises `LayoutMismatch`, with the reason, when its memory
        can't be reached from here, and for anything that is no descriptor: a peer sent it."""

    def permit(self, target: RoomTarget) -> None:
        """Accept writes for this room from now on. To be called before the writer hears of the grant."""

    def revoke(self, room: RoomId) -> None:
        """Refuse writes for this room from now on, where the plane is revocable."""

    def poll_followers(self) -> None:
        """Take in reports of this worker's other ranks. `poll` does so, too; a worker that only writes calls this."""

    def poll(self) -> list[bytes]:
        """Apply the writes that have arrived, and return the notices, in order. Never blocks, and takes in a bounded
        amount, so that a peer that sends without end can't keep the caller."""

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        """Sockets that become readable when `poll` has something to do."""

    def close(self) -> None: ...


class RankDataPlane(DataPlane, Protocol):
    """One rank's end of the data plane of a worker of several ranks."""

    def settled(self, rank: int, settled: WriteArrived) -> None:
        """Record that rank `rank` of this worker has taken in a write. Called at the leader."""

    def take_settled(self) -> list[WriteArrived]:
        """Return the writes that this rank has taken in since the last call, for its leader. Empty at the leader, which
        records its own at once."""


WakeCallback = Callable[[], None]


def refuse_device_memory(kind: str, device: torch.device) -> None:
    """Raises `ConfigError` for a device's memory, on a plane that reaches host memory alone."""
    if device.type != "cpu":
        raise ConfigError(
            f"transfer.plane={kind} reaches host memory alone, and the pools lie on {device}: use transfer.plane=auto, "
            f"{' or '.join(DEVICE_PLANES)}, or engine.device=cpu"
        )


def said(descriptor: object, name: str, kind: type[T]) -> T:
    """Return field `name` of a part of a peer's descriptor. Raises `LayoutMismatch` if it is missing, or no `kind`."""
    value = descriptor.get(name) if isinstance(descriptor, dict) else None
    if type(value) is not kind:
        raise LayoutMismatch(f"the descriptor's {name} must be of type {kind.__name__}, got {value!r:.80}")
    return value


SLOT_BYTES = 32 << 10
"""Bytes of a metadata slot: more than the first token with its log-probabilities takes, and as many as builds before
this one have, which write into the same slots."""


Post = Callable[[PageWrite | SlotWrite], Completion]


class LaunchedWrite:
    """A completion that is done when the launch is, the write that it posted, and the parts of other ranks."""

    def __init__(self, launched: Completion, posted: Sequence[Completion], others: Completion = DONE) -> None:
        """`posted` gets the write's completion when it is posted."""
        self._launched, self._posted, self._others = launched, posted, others

    @property
    def done(self) -> bool:
        others = self._others.done
        try:
            return self._launched.done and others and all(p.done for p in self._posted)
        except RuntimeError:  # Some devices tell of a failure where they are asked how far they are.
            return others

    def wait(self) -> None:
        """Return once no part is under way any more. Raises the first error of any."""
        failed: RuntimeError | None = None
        for completion in (self._launched, self._others):
            try:
                completion.wait()
            except RuntimeError as error:
                failed = failed or error
        for posted in self._posted:
            try:
                posted.wait()
            except RuntimeError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def order(self) -> None:
        self.wait()


def launch_write(
    device: Device,
    post: Post,
    write: PageWrite | SlotWrite,
    after: Sequence[Completion],
    *,
    lane: str,
    reads: tuple[PageSpanUse, ...] = (),
    others: Completion = DONE,
    began: Callable[[], None] = lambda: None,
    ended: Callable[[], None] = lambda: None,
) -> LaunchedWrite:
    """Have `device` post a write after the operations `after`, on the lane of its link. Writes of layers that are still
    to be written have a lane of their own: nothing that is ready waits for them.

    `began` is called just before it is posted, and `ended` where it was over at once.
    """
    posted: list[Completion] = []

    def run() -> None:
        began()
        completion = post(write)
        posted.append(completion)
        if completion is DONE:
            ended()

    ahead = isinstance(write, PageWrite) and write.layers is not None
    op = DeviceOp("send", DeviceStream.SEND, reads=reads, lane=f"{lane} ahead" if ahead else lane)
    return LaunchedWrite(attempt(device, op, run, after), posted, others)


def lanes_of(lane: str) -> tuple[str, str]:
    """The lanes that writes to one reader take."""
    return lane, f"{lane} ahead"


class PostedWrite:
    """Implements `cache.device.device_port.Completion`. Any thread may ask; one of them ends it, once."""

    def __init__(self, ended: Callable[[], None] = lambda: None) -> None:
        """`ended` is called after the end, on the thread that ended it."""
        self._over = threading.Event()
        self._error: RuntimeError | None = None
        self._ended = ended

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._over.is_set()

    def wait(self) -> None:
        """Wait for the end. Raises `RuntimeError` where the write failed."""
        self._over.wait()
        if self._error is not None:
            raise self._error

    def order(self) -> None:
        self.wait()

    def end(self, error: RuntimeError | None = None) -> None:
        """End the write: it has landed or, with an `error`, perhaps not. Later calls change nothing."""
        if not self._over.is_set():
            self._error = error
            self._over.set()
            self._ended()
