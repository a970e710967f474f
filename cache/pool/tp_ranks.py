"""The state of several tensor-parallel ranks: the leader owns the indices, and each rank has its bytes under them.

Each rank holds its heads' share of every page under the same index. The followers repeat on their bytes what the leader
does to its own, in the same order: an operation sends them its order as it runs, not when it is submitted, so the order
on the leader's device is that of all ranks (and a legal one, as the device keeps to the declared order). The leader
doesn't wait for followers to zero or copy: later uses come later in the followers' line, too. A digest needs their
answers: the leader asks before it does its own part, so that all ranks work on it at once.

A page's digest is the sum of its ranks' digests, as every term of it stands alone (`cache.memory.page_digest`). Buffers
that aren't sliced by heads, and heads that several ranks hold, are counted once, from the first rank that holds them;
for each further copy its difference to the first is added, times an odd number. So a digest doesn't depend on the
number of ranks, and a page that is damaged on one rank only still changes it.

A mark of the leader's step says nothing of the followers' steps. So the leader's device (`TPDevice`) tells them, right
before a step with marks, to make marks of the same groups for theirs (`FollowerSteps`); what a follower writes of a
layer comes after its own. A follower does to its bytes what its leader orders, one thing after the other: all of it on
the stream that computes. Its step is through with a layer of a pool when it takes the buffers of that pool's next layer
from the gate, and with all layers at its end.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch

from twinpool.cache.device.device_port import (
    DONE,
    NO_GATES,
    Completion,
    Device,
    DeviceOp,
    DeviceStream,
    GatedLoads,
    LayerCounts,
    LayerMarks,
    PageSpanUse,
    RemoteWrite,
)
from twinpool.cache.memory.kv_cache_spec import PoolSetLayout, PoolSpec, copies, groups
from twinpool.cache.memory.page_digest import PageDigester
from twinpool.cache.memory.page_moves import PageMove, PoolIndices
from twinpool.cache.pool.pool_set import LoadGate, PoolSet
from twinpool.contracts.messages.rank_order_codec import OrderChannel
from twinpool.contracts.messages.rank_orders import (
    CheckPages,
    CopyPages,
    DigestPages,
    LayerCount,
    MarkStep,
    PageSpan,
    ZeroPages,
)

_ODD = 0xD6E8FEB86659FD93
_ALL_BITS = 0xFFFFFFFFFFFFFFFF


class TPDigester:
    """Digests the shares of pages of one rank of `size`, with a digest for each group of buffers (`groups`)."""

    def __init__(self, layout: PoolSetLayout, device: torch.device, size: int) -> None:
        self._layout, self._device, self._size = layout, device, size // layout.spec.stages
        self._digesters: dict[int, PageDigester] = {}

    def digest(
        self, region: torch.Tensor, pool: str, indices: Sequence[int], firsts: Sequence[int], ends: Sequence[int]
    ) -> list[list[int]]:
        """Digest as `PageDigester.digest` does; returns digests [groups][pages]."""
        return self.begin(region, pool, indices, firsts, ends)()

    def begin(
        self, region: torch.Tensor, pool: str, indices: Sequence[int], firsts: Sequence[int], ends: Sequence[int]
    ) -> Callable[[], list[list[int]]]:
        """Begin `digest`, without waiting; returns a function that waits for the digests."""
        readers = [
            self._of(count).begin(region, pool, indices, firsts, ends)
            for count in groups(self._layout.spec.by_name[pool], self._size)
        ]
        return lambda: [read() for read in readers]

    def _of(self, count: int) -> PageDigester:
        if count not in self._digesters:
            self._digesters[count] = PageDigester(
                self._layout, self._device, counts=lambda buffer: copies(buffer, self._size) == count
            )
        return self._digesters[count]


def merged(pool: PoolSpec, by_rank: Sequence[Sequence[Sequence[int]]], stages: int = 1) -> list[int]:
    """Merge digests of ranks' shares, [ranks][groups][pages], into digests of whole pages; see the module. Layers of
    different stages are different terms."""
    out = [0] * len(by_rank[0][0])
    width = len(by_rank) // stages
    for group, count in enumerate(groups(pool, width)):
        for rank, digests in enumerate(by_rank):
            first = by_rank[rank - rank % width % count][group]
            for page, digest in enumerate(digests[group]):
                out[page] += digest if rank % width % count == 0 else _ODD * (digest - first[page])
    return [digest & _ALL_BITS for digest in out]


class TPPoolSet(PoolSet):
    """The leader's pool set in `place` (`DEVICE` or `HOST`); operations on its bytes are sent to the followers."""

    def __init__(
        self, layout: PoolSetLayout, region: torch.Tensor, followers: OrderChannel, place: str, tier: str = ""
    ) -> None:
        super().__init__(layout.spec, layout.counts, region, layout.order, tier)
        self.place = place
        self._followers = followers
        self.on_copy: Callable[[], None] = lambda: None
        """Called before the followers are told of a copy into these pools."""

    @cached_property
    def _groups(self) -> TPDigester:
        return TPDigester(self.layout, self.region.device, self._followers.size)

    def zero(self, indices: PoolIndices) -> None:
        self._followers.send(ZeroPages(self.place, tuple((pool, tuple(chosen)) for pool, chosen in indices.items())))
        super().zero(indices)

    def copy(self, move: PageMove, target: PoolSet, layers: range | None = None) -> None:
        assert isinstance(target, TPPoolSet), "all pools of a worker of several ranks are of several ranks"
        pieces = tuple(PageSpan(part.pool, part.sources, part.targets) for part in move.parts)
        span = None if layers is None else (layers.start, layers.stop)
        target.on_copy()
        self._followers.send(CopyPages(self.place, target.place, pieces, span))
        super().copy(move, target, layers)

    def digest(self, pool: str, indices: Sequence[int], firsts: Sequence[int], ends: Sequence[int]) -> list[int]:
        return self.digesting(pool, indices, firsts, ends)()

    def digesting(
        self, pool: str, indices: Sequence[int], firsts: Sequence[int], ends: Sequence[int]
    ) -> Callable[[], list[int]]:
        if not len(indices):
            return list
        answers = self._followers.ask(DigestPages(self.place, pool, tuple(indices), tuple(firsts), tuple(ends)))
        mine = self._groups.begin(self.region, pool, indices, firsts, ends)
        return lambda: merged(self.spec.by_name[pool], [mine(), *answers.wait()], self.spec.stages)

    def check(self) -> list[str]:
        answers = self._followers.ask(CheckPages(self.place))
        found = super().check()
        return found + [f"rank {rank}: {line}" for rank, lines in enumerate(answers.wait(), 1) for line in lines]


class FollowerPools:
    """A follower's pool sets by place; carries out the leader's orders on their bytes."""

    def __init__(
        self,
        pools: Mapping[str, PoolSet],
        size: int,
        copied: Callable[[str], None] = lambda place: None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """`copied` is called after each copy, with the place of its target. `settle` waits until copies are over on the
        device, too: host memory is read and given away as soon as the leader's own copy is over."""
        self._pools, self._copied, self._settle = dict(pools), copied, settle
        self._digesters = {
            place: TPDigester(pool_set.layout, pool_set.region.device, size) for place, pool_set in pools.items()
        }

    def carry_out(self, order: ZeroPages | CopyPages | DigestPages | CheckPages) -> list[list[int]] | list[str] | None:
        """Carry out an order; returns its answer, or None for an order without one."""
        match order:
            case ZeroPages():
                self._pools[order.place].zero(dict(order.chosen))
            case CopyPages():
                move = PageMove.of(
                    {piece.pool: piece.sources for piece in order.pieces},
                    {piece.pool: piece.targets for piece in order.pieces},
                )
                layers = None if order.layers is None else range(*order.layers)
                self._pools[order.source].copy(move, self._pools[order.target], layers)
                if order.source != order.target:
                    self._settle()
                self._copied(order.target)
            case DigestPages():
                region = self._pools[order.place].region
                return self._digesters[order.place].digest(region, order.pool, order.indices, order.firsts, order.ends)
            case CheckPages():
                return self._pools[order.place].check()
        return None


class TPDevice:
    """Implements `cache.device.device_port.Device`: the leader's own `device`, and the marks of its `followers`."""

    def __init__(self, device: Device, followers: OrderChannel) -> None:
        self._device, self._followers = device, followers
        self._steps = itertools.count(1)

    @property
    def torch_device(self) -> torch.device:
        return self._device.torch_device

    @property
    def checks(self) -> bool:
        return self._device.checks

    def marks(self, groups: Sequence[LayerCounts]) -> LayerMarks | None:
        marks = self._device.marks(groups)
        if marks is not None:
            marks.step = next(self._steps)
        return marks

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
        if marks is None:
            return self._device.submit(op, run, after, gates=gates, keep=keep)
        groups = tuple(tuple(LayerCount(*count) for count in group.items()) for group in marks.groups)
        order = MarkStep(marks.step, groups)

        def marked() -> object:
            self._followers.send(order)
            return run()

        return self._device.submit(op, marked, after, gates=gates, keep=keep, marks=marks)

    def touch(self, name: str, *, reads: Sequence[PageSpanUse] = (), writes: Sequence[PageSpanUse] = ()) -> None:
        self._device.touch(name, reads=reads, writes=writes)

    def remote_write(self, name: str, writes: Sequence[PageSpanUse]) -> RemoteWrite:
        return self._device.remote_write(name, writes)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return self._device.allocate_host(nbytes)

    def register_host(self, memory: torch.Tensor) -> None:
        self._device.register_host(memory)

    def end_lane(self, lane: str) -> None:
        self._device.end_lane(lane)

    def close(self) -> None:
        self._device.close()


T = TypeVar("T")
_KEPT = 64
"""Steps whose marks are kept. What comes after an older one's comes after all steps."""


class FollowerSteps:
    """The operations of one follower; used from the thread that carries out its orders."""

    def __init__(self, device: Device, gates: Mapping[str, LoadGate]) -> None:
        """`gates`: of the follower's pools on the device, by pool."""
        self.device = device
        self._gates = gates
        self._asked: MarkStep | None = None
        self._marks: OrderedDict[int, LayerMarks] = OrderedDict()
        self._latest = 0
        self.last: Completion = DONE
        """Of the last operation."""
        self.beside = False
        """Whether sends go on beside steps: the device waits for marks on other threads than this one."""

    def expect(self, order: MarkStep) -> None:
        """Make the marks that the next step is to reach."""
        groups = [{layers.pool: layers.layers for layers in group} for group in order.groups]
        self._asked, self._latest = order, order.step
        made = self.device.marks(groups)
        self.beside = made is not None
        self._marks[order.step] = LayerMarks(groups) if made is None else made
        while len(self._marks) > _KEPT:
            self._marks.popitem(last=False)

    def run(self, step: Callable[[], object]) -> None:
        """Submit a step; without marks it is complete on a CPU when this returns. Raises what it raises."""
        self.look()
        asked, self._asked = self._asked, None
        if asked is None:
            self.last = self.device.submit(_FORWARD, step)
            return
        marks = self._marks[asked.step]

        def marked() -> None:
            written = dict.fromkeys(marks.groups[-1], 0)

            def opened(pool: str, layer: int) -> None:
                if layer > written[pool]:
                    written[pool] = layer
                    marks.passed(written)

            for gate in self._gates.values():
                gate.opened = opened
            try:
                step()
                marks.passed(marks.groups[-1])
            except Exception as error:
                marks.end(error)
                raise
            finally:
                for gate in self._gates.values():
                    gate.opened = None

        self.last = self.device.submit(_FORWARD, marked, marks=marks)

    def apply(self, operation: Callable[[], T]) -> T:
        """Carry out another operation on the pools, after the steps before it; returns its result."""
        self.look()
        results: list[T] = []
        self.last = self.device.submit(_STATE, lambda: results.append(operation()))
        return results[0]

    def look(self) -> None:
        """Let the device go on with what it runs on this thread. Raises what a step has raised."""
        if self.last.done:
            self.last.wait()
            self.last = DONE

    def close(self) -> None:
        """Fail the marks that no step will reach, so that nothing waits for them, and end the device."""
        for marks in self._marks.values():
            marks.end(RuntimeError("the worker has ended"))
        self.device.close()

    def written(self, step: int, group: int) -> Completion | None:
        """The completion that what is written after mark `group` of step `step` comes after; None while the step is
        unknown: it was not ordered yet. Step 0: all that was ordered so far."""
        if step > self._latest:
            return None
        marks = self._marks.get(step)
        return self.last if marks is None else marks[group]


_FORWARD = DeviceOp("forward", DeviceStream.COMPUTE)
_STATE = DeviceOp("state", DeviceStream.COMPUTE)
