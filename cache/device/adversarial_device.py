"""The lazy device: CPU torch that behaves like the slowest, most contrary GPU that its rules allow.

`submit` queues an operation; a seeded scheduler runs it at any later moment that the declared order allows: when
the host submits, polls or waits, when `run_some` is called, or in the middle of another stream's operation that
`order`s one of its inputs. An operation may also run at once, as on a fast device. So a reader that forgot to wait
finds the bytes missing under most seeds, and the same seed repeats the fault.

Wrong bytes show a race only where the scheduler happens to run it the wrong way round. Five checks always find it:

    order       two conflicting accesses that nothing orders are refused when the second is submitted
    peers       an access to pages that a peer may write, from their grant until it writes them no more, is refused
    gates       an operation that was to `order` a load before touching its layer, and didn't, fails
    writes      an operation that changes pages which it didn't declare as written fails (for pools given to `watch`)
    marks       an operation that comes after a mark is ordered after the layers of its group alone

Every `wait` for a failed operation raises its error again; `settle` runs all queued operations and raises an error
that hasn't been raised to anybody yet. Single-threaded, like the loops that use it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any
from weakref import WeakSet

import torch

from twinpool.cache.device.access_checkers import PageAccess, RaceChecker, VectorClock, WriteChecker, join
from twinpool.cache.device.cpu_device import CpuMemory
from twinpool.cache.device.device_port import (
    NO_GATES,
    Completion,
    DeviceOp,
    DeviceStream,
    GatedLoads,
    LayerCounts,
    LayerMark,
    LayerMarks,
    PageSpanUse,
    RemoteWrite,
)
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import UnorderedAccess

_HOST = "host"
_STRAY = (0.0, 0.1, 0.4, 0.8)
"""Probabilities of running an operation that nobody waits for: from a device that lags to one that keeps up."""
_POLLED = 0.1
"""The least probability of running an operation when the host polls; above 0, so that polling ends."""
_OP_S = 0.001
"""An operation takes up to so many seconds on the virtual clock."""


class _OpState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    OVER = "over"


class DeferredOp:
    """A queued operation, and its completion."""

    def __init__(
        self,
        device: AdversarialDevice,
        op: DeviceOp,
        run: Callable[[], object],
        access: PageAccess,
        clock: VectorClock,
        gates: GatedLoads,
        marks: LayerMarks | None,
    ) -> None:
        self._device = device
        self.op = op
        self.marks = marks
        self.run = run
        self.access = access
        self.clock = clock
        """The ticks that are certain to be over once it is over, its own and those of its gates included."""
        self.gates = gates
        self.before: list[Completion] = []
        self.state = _OpState.QUEUED
        self.error: BaseException | None = None
        self.heard = False
        """Whether its error has been raised by a `wait` or by an operation that depends on it."""
        self.known = False
        """Whether the host knows that it is over."""

    @property
    def done(self) -> bool:
        return self._device.poll(self)

    def wait(self) -> None:
        self._device.wait(self)

    def order(self) -> None:
        self._device.order(self)

    @property
    def ready(self) -> bool:
        return all(b.state is _OpState.OVER if isinstance(b, DeferredOp) else b.done for b in self.before)


class AdversarialMarks(LayerMarks):
    """Marks in whose middle the device may run what waits for them."""

    def __init__(self, groups: Sequence[LayerCounts], device: AdversarialDevice) -> None:
        super().__init__(groups)
        self._device = device
        self.op: DeferredOp | None = None
        """The operation that reaches them, once it is submitted."""

    def passed(self, written: LayerCounts) -> None:
        before = self._reached
        super().passed(written)
        if self._reached > before:
            self._device.interrupt()

    def wait(self, group: int) -> None:
        if not self.settled(group):
            assert self.op is not None, "a mark is waited for after its operation was submitted"
            self._device.run_through(self.op)
        super().wait(group)


class _PeerWrite:
    """Implements `cache.device.device_port.RemoteWrite`: one access of an actor that no clock knows of."""

    def __init__(self, device: AdversarialDevice, access: PageAccess, writes: Sequence[PageSpanUse]) -> None:
        self.access = access
        self._device = device
        self._left = {(span.place, span.pool, number) for span in writes for number in span.pages}

    def arrived(self, writes: Sequence[PageSpanUse]) -> None:
        self._device.arrived(self.access, writes)
        self._left -= {(span.place, span.pool, number) for span in writes for number in span.pages}

    def close(self) -> None:
        left, self._left = self._left, set()
        if left:
            uses = [PageSpanUse(place, pool, (number,)) for place, pool, number in sorted(left)]
            self._device.arrived(self.access, uses)


class AdversarialDevice(CpuMemory):
    """CPU torch that runs operations late and refuses races; see the module.

    The seed decides everything, `stray` (a probability) included unless it is given. `clock`, if given, advances with
    every operation.
    """

    checks = True

    def __init__(
        self, seed: int, *, clock: ManualClock | None = None, stray: float | None = None, polled: float = _POLLED
    ) -> None:
        self._random = random.Random(seed)
        self._clock = clock
        self._stray = self._random.choice(_STRAY) if stray is None else stray
        self._polled = polled
        self._queues: dict[str, deque[DeferredOp]] = {stream: deque() for stream in DeviceStream}
        """By line (`DeviceOp.line`)."""
        self._stream_clocks: dict[str, VectorClock] = {stream: {} for stream in DeviceStream}
        self._host: VectorClock = {_HOST: 0}
        self._checker = RaceChecker()
        self._peers = 0
        """Number of writes of peers so far."""
        self._running: list[DeferredOp] = []
        self._ordered: dict[str, WeakSet[DeferredOp]] = {stream: WeakSet() for stream in DeviceStream}
        self._failed: list[DeferredOp] = []
        self._write_checker = WriteChecker()
        self.trace: list[str] = []
        """Names of the operations in the order in which they ran."""

    # ------------------------------------------------------------ the device port

    def submit(
        self,
        op: DeviceOp,
        run: Callable[[], object],
        after: Sequence[Completion] = (),
        *,
        gates: GatedLoads = NO_GATES,
        keep: Sequence[Any] = (),
        marks: LayerMarks | None = None,
    ) -> Completion:
        """Queue `op`. Raises `UnorderedAccess`, queueing nothing, if nothing orders it after a conflicting one."""
        assert not self._running, "operations are submitted by the host, not by operations"
        self._host[_HOST] += 1
        line = op.line
        if line not in self._queues:
            self._queues[line], self._stream_clocks[line], self._ordered[line] = deque(), {}, WeakSet()
        clock = _joined(_joined(self._host, [self._stream_clocks[line]]), _clocks(after))
        access = PageAccess(line, clock.get(line, 0) + 1, op.name)
        at_layer: dict[tuple[str, int | None], VectorClock] = {k: _joined(clock, _clocks(v)) for k, v in gates.items()}
        through = dict(at_layer)
        for layer, its in _marked(after):
            through[layer] = _joined(through.get(layer, clock), [its])
        self._checker.enter(access, op.reads, op.writes, lambda pool, layer: through.get((pool, layer), clock))
        # Other layers of an operation that has reached a mark are still being written: its end is no part of this.
        clock = _joined(clock, at_layer.values())
        clock[line] = access.tick
        queued = DeferredOp(self, op, run, access, clock, gates, marks)
        queued.before = list(after)
        if isinstance(marks, AdversarialMarks):
            marks.op = queued
        self._stream_clocks[line] = dict(clock)
        self._queues[line].append(queued)
        self.run_some()
        return queued

    def marks(self, groups: Sequence[LayerCounts]) -> AdversarialMarks:
        return AdversarialMarks(groups, self)

    def touch(self, name: str, *, reads: Sequence[PageSpanUse] = (), writes: Sequence[PageSpanUse] = ()) -> None:
        """Raises `UnorderedAccess` when the host doesn't know that a conflicting operation is over."""
        self._host[_HOST] += 1
        self._checker.enter(PageAccess(_HOST, self._host[_HOST], name), reads, writes, lambda pool, layer: self._host)

    def remote_write(self, name: str, writes: Sequence[PageSpanUse]) -> RemoteWrite:
        """Raises `UnorderedAccess` as `touch` does. Until it is closed, nothing is ordered after the peer's writes."""
        self._host[_HOST] += 1
        self._peers += 1
        opened = _PeerWrite(self, PageAccess(f"peer {self._peers}", 1, name), writes)
        self._checker.enter(opened.access, (), writes, lambda pool, layer: self._host)
        return opened

    def arrived(self, access: PageAccess, writes: Sequence[PageSpanUse]) -> None:
        """Enter pages that a peer has written as written by the host: what comes after the host comes after them."""
        self._host[_HOST] += 1
        clock = _joined(self._host, [{access.actor: access.tick}])
        host = PageAccess(_HOST, self._host[_HOST], f"end of {access.name}")
        self._checker.enter(host, (), writes, lambda pool, layer: clock)

    def close(self) -> None:
        return

    # ------------------------------------------------------------ for tests

    def watch(self, place: str, pool: str, layers: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """From now on operations may change pages of this pool only where they say so.

        `layers` has each layer's buffers, [pages, ...]; they are copied at every operation, so keep the pool small.
        """
        self._write_checker.watch(place, pool, layers)

    def run_some(self) -> int:
        """Run some of the operations that may run now, as the scheduler likes; returns how many."""
        count = 0
        while self._random.random() < self._stray and (ready := self._ready()):
            self._execute(self._random.choice(ready))
            count += 1
        return count

    def settle(self) -> None:
        """Run all operations, and let the host know of their end. Raises the first error not raised before."""
        for queue in self._queues.values():
            while queue:
                self._force(queue[-1])
        for clock in self._stream_clocks.values():
            join(self._host, clock)
        failed, self._failed = [op for op in self._failed if not op.heard], []
        for op in failed:
            assert op.error is not None
            raise op.error

    @property
    def queued(self) -> int:
        """Operations that have not run yet."""
        return sum(len(queue) for queue in self._queues.values())

    # ------------------------------------------------------------ completions

    def poll(self, op: DeferredOp) -> bool:
        """Whether `op` is over; may run one ready operation first, so that polling long enough always ends."""
        ready = self._ready()
        if op.state is not _OpState.OVER and ready and self._random.random() < max(self._stray, self._polled):
            self._execute(self._random.choice(ready))
        if op.state is _OpState.OVER:
            self._learn(op)
        return op.state is _OpState.OVER

    def wait(self, op: DeferredOp) -> None:
        self._force(op)
        self._learn(op)
        if op.error is not None:
            op.heard = True
            raise op.error

    def order(self, op: DeferredOp) -> None:
        if not self._running:
            self.wait(op)
            return
        running = self._running[-1]
        self._write_checker.compare(running.op)
        self._force(op)
        self.run_some()
        self._write_checker.accept_all()
        self._ordered[running.op.line].add(op)
        if op.error is not None:
            op.heard = True
            raise op.error

    def interrupt(self) -> None:
        """Run some operations in the middle of the one that runs, which has reached a mark."""
        self._write_checker.compare(self._running[-1].op)
        self.run_some()
        self._write_checker.accept_all()

    def run_through(self, op: DeferredOp) -> None:
        """Run `op`, of which somebody waits for a mark; the host learns nothing of its end."""
        assert op not in self._running, f"{op.access} waits for its own mark"
        self._force(op)

    def _learn(self, op: DeferredOp) -> None:
        """Note that `op` is known to be over. Where an operation has asked, the host's clock learns nothing of it."""
        op.known = True
        if not self._running:
            join(self._host, op.clock)

    # ------------------------------------------------------------ the scheduler

    def _ready(self) -> list[DeferredOp]:
        heads = [queue[0] for queue in self._queues.values() if queue]
        return [op for op in heads if op.state is _OpState.QUEUED and op.ready]

    def _force(self, target: DeferredOp) -> None:
        """Run `target` after the operations that it needs, and now and then another one in between."""
        while target.state is not _OpState.OVER:
            needed = self._needed(target)
            ready = [op for op in self._ready() if op in needed]
            if not ready:
                self._wait_for_others(needed)
            elif self._random.random() < self._stray:
                self._execute(self._random.choice(self._ready()))
            else:
                self._execute(self._random.choice(ready))

    def _needed(self, target: DeferredOp) -> set[DeferredOp]:
        """`target` and everything unfinished that must come before it."""
        stack, needed = [target], set[DeferredOp]()
        while stack:
            op = stack.pop()
            if op.state is _OpState.OVER or op in needed:
                continue
            needed.add(op)
            queue = list(self._queues[op.op.line])
            stack += queue[: queue.index(op)]
            stack += [b for b in op.before if isinstance(b, DeferredOp)]
            stack += [m.op for m in _adversarial_marks(op.before) if m.op is not None]
        return needed

    def _wait_for_others(self, needed: set[DeferredOp]) -> None:
        """With no needed operation ready: wait for another device's completion, or refuse a cycle of operations."""
        foreign = [b for op in needed for b in op.before if not isinstance(b, DeferredOp) and not b.done]
        if not foreign:
            names = ", ".join(sorted(str(op.access) for op in needed))
            raise UnorderedAccess(f"these wait for each other and would never run: {names}")
        foreign[0].wait()

    def _execute(self, op: DeferredOp) -> None:
        if self._running:
            self._write_checker.compare(self._running[-1].op)
        self._write_checker.accept_all()
        op.state = _OpState.RUNNING
        self._running.append(op)
        self.trace.append(op.op.name)
        try:
            for before in op.before:
                if isinstance(before, DeferredOp) and before.error is not None:
                    before.heard = True
                    raise before.error
                if isinstance(before, LayerMark):
                    before.wait()
            op.run()
            self._write_checker.compare(op.op)
            self._check_gates(op)
        except Exception as error:
            op.error = error
            self._failed.append(op)
        finally:
            if op.marks is not None:
                op.marks.end(op.error)
            self._running.pop()
            self._write_checker.accept_all()
        op.state = _OpState.OVER
        op.run = _nothing
        self._queues[op.op.line].popleft()
        if self._clock is not None:
            self._clock.advance(self._random.random() * _OP_S)

    def _check_gates(self, op: DeferredOp) -> None:
        for (pool, layer), loads in op.gates.items():
            for load in loads:
                if isinstance(load, DeferredOp) and not load.known and load not in self._ordered[op.op.line]:
                    raise UnorderedAccess(
                        f"{op.access} touched layer {layer} of {pool} without waiting for {load.access}"
                    )


def _clocks(completions: Iterable[Completion]) -> list[VectorClock]:
    """The clocks of these completions; those of other devices have none: they don't tell what came before them."""
    return [c.clock for c in completions if isinstance(c, DeferredOp)]


def _adversarial_marks(completions: Iterable[Completion]) -> list[AdversarialMarks]:
    marks = [c.marks for c in completions if isinstance(c, LayerMark)]
    return [m for m in marks if isinstance(m, AdversarialMarks)]


def _marked(completions: Iterable[Completion]) -> Iterator[tuple[tuple[str, int], VectorClock]]:
    """By pool and layer, the clock of an operation that has written that layer, as one of its marks says."""
    for mark in completions:
        if isinstance(mark, LayerMark) and isinstance(mark.marks, AdversarialMarks) and mark.marks.op is not None:
            for pool, count in mark.marks.groups[mark.group].items():
                for layer in range(count):
                    yield (pool, layer), mark.marks.op.clock


def _joined(clock: VectorClock, others: Iterable[VectorClock]) -> VectorClock:
    joined = dict(clock)
    for other in others:
        join(joined, other)
    return joined


def _nothing() -> None:
    return
