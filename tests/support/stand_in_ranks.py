"""Ranks of workers in this process: followers that obey at once, pool sets with heads, and what lies in all of them.

What a follower is told goes through the wire's encoding, so that what can't travel is found here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.support.pool_sets import pool_sets
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import DEVICE, Device
from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace, LayoutOrder, PoolSetLayout, PoolSetSpec
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.pool.tp_ranks import FollowerPools, FollowerSteps, TPPoolSet
from twinpool.contracts.messages.rank_order_codec import decode, encode
from twinpool.contracts.messages.rank_orders import (
    CheckPages,
    CopyPages,
    DigestPages,
    FollowerNotice,
    MarkStep,
    PostWrite,
    ZeroPages,
)
from twinpool.contracts.messages.rank_orders import Order as Told
from twinpool.transfer.planes.data_plane import RankDataPlane
from twinpool.transfer.planes.tp_plane import FollowerLinks


def headed_sets(page_tokens: int = 4) -> dict[str, PoolSetSpec]:
    """The tests' pool sets as models of several heads have them: sliced finely, coarsely, in sub-blocks, and not at
    all."""
    return {name: _headed(spec) for name, spec in pool_sets(page_tokens).items()}


def _headed(spec: PoolSetSpec) -> PoolSetSpec:
    pools = tuple(replace(p, buffers=tuple(b for old in p.buffers for b in _split(old))) for p in spec.pools)
    return PoolSetSpec(spec.page_tokens, pools)


def _split(buffer: BufferSpec) -> list[BufferSpec]:
    if buffer.name in ("latent", "index_k"):
        return [buffer]
    if buffer.name == "conv":
        # Its sub-blocks, of queries and of values, each by heads of its own, and one that no head has.
        q = replace(buffer, name="conv_q", shape=(4, 3), heads=4)
        v = replace(buffer, name="conv_v", shape=(8, 3), heads=8)
        return [q, v, replace(buffer, name="conv_rest", shape=(2, 3))]
    heads = 4 if buffer.name in ("k", "v", "recurrent") else 2
    return [replace(buffer, shape=(heads, *buffer.shape[1:]), heads=heads)]


@dataclass
class DirectFollowers:
    """Followers that obey as they are told."""

    states: Sequence[FollowerPools]
    links: Sequence[FollowerLinks] = ()
    slow: type[Any] | None = None
    """Orders of this type are carried out by `catch_up`."""
    late: list[tuple[Told, Answered]] = field(default_factory=list)
    steps: Sequence[FollowerSteps] = ()
    _open: dict[int, Answered] = field(default_factory=dict)
    """The answers of writes that are under way."""
    _asked: int = 0

    @property
    def size(self) -> int:
        return len(self.states) + 1

    def send(self, order: Told) -> None:
        self.ask(order)

    def ask(self, order: Told) -> Answered:
        order = decode(encode(order))
        answered = Answered([], False, self._answer)
        if self.slow is not None and isinstance(order, self.slow):
            self.late.append((order, answered))
        else:
            self._obey(order, answered)
        return answered

    def catch_up(self) -> None:
        """Carry out what was slow."""
        late, self.late = self.late, []
        for order, answered in late:
            self._obey(order, answered)

    def _obey(self, order: Told, answered: Answered) -> None:
        if isinstance(order, PostWrite):
            self._asked += 1
            self._open[self._asked] = answered
            for links in self.links:
                links.post(self._asked, order)
            self._answer()
            return
        if isinstance(order, MarkStep):
            for steps in self.steps:
                steps.expect(order)
        elif isinstance(order, ZeroPages | CopyPages | DigestPages | CheckPages):
            answered.answers += [state.carry_out(order) for state in self.states]
        else:
            answered.answers += [links.carry_out(order) for links in self.links]  # type: ignore[arg-type]
        answered.over = True

    def _answer(self, *, settle: bool = False) -> None:
        """Take in the answers of writes that are over; with `settle`, wait for them."""
        for links in self.links:
            for number, done in links.settle() if settle else links.answers():
                self._open[number].answers.append(done)
        for number, answered in list(self._open.items()):
            if len(answered.answers) == len(self.links):
                answered.over = True
                del self._open[number]

    def heard(self) -> list[tuple[int, FollowerNotice]]:
        return [(rank, notice) for rank, links in enumerate(self.links, 1) for notice in links.poll()]


@dataclass
class Answered:
    answers: list[Any]
    over: bool = True
    look: Callable[..., None] = lambda **_: None

    @property
    def done(self) -> bool:
        if not self.over:
            self.look()
        return self.over

    def wait(self) -> list[Any]:
        if not self.over:
            self.look(settle=True)
        assert self.over, "nobody carries it out while this waits"
        return self.answers


@dataclass
class RankedSeat:
    """The pool sets of all ranks of a KV cache manager; the leader's is the first."""

    whole: PoolSetSpec
    pools: list[PoolSet]
    followers: DirectFollowers
    follower_device: Callable[[], Device] = CpuDevice

    @property
    def leader(self) -> PoolSet:
        return self.pools[0]

    def connect(self, planes: Sequence[RankDataPlane]) -> None:
        """The followers' planes; the leader's belongs to an end of its own."""
        for plane, pools in zip(planes[1:], self.pools[1:], strict=True):
            plane.register(pools, None)
        self.followers.steps = [FollowerSteps(self.follower_device(), pools.gates) for pools in self.pools[1:]]
        steps = zip(planes[1:], self.followers.steps, strict=True)
        self.followers.links = [FollowerLinks(plane, its) for plane, its in steps]

    def close(self) -> None:
        for steps, links in zip(self.followers.steps, self.followers.links, strict=True):
            steps.close()
            links.close()


def tp_manager(
    whole: PoolSetSpec,
    size: int,
    count: int,
    place: str = DEVICE,
    regions: Sequence[torch.Tensor] = (),
    order: LayoutOrder = LayoutOrder.LAYER_FIRST,
) -> RankedSeat:
    layouts = [PoolSetLayout(whole.shard(rank, size), whole.even(count), order) for rank in range(size)]
    memory = list(regions) or [torch.zeros(layout.nbytes, dtype=torch.uint8) for layout in layouts]
    others = [
        PoolSet(layout.spec, layout.counts, region, order)
        for layout, region in zip(layouts[1:], memory[1:], strict=True)
    ]
    followers = DirectFollowers([FollowerPools({place: pools}, size) for pools in others])
    leader: PoolSet
    if size > 1:
        leader = TPPoolSet(layouts[0], memory[0], followers, place)
    else:
        leader = PoolSet(whole, layouts[0].counts, memory[0], order)
    return RankedSeat(whole, [leader, *others], followers)


def fill(manager: RankedSeat, seed: int) -> None:
    """Random state, the same for every number of ranks: each rank gets its heads of it."""
    generator = torch.Generator().manual_seed(seed)
    counts = manager.leader.layout.counts
    for pool in manager.whole.pools:
        for at, buffer in enumerate(pool.buffers):
            for layer in range(buffer.layers):
                inner = (manager.whole.page_tokens, *buffer.shape) if buffer.index is IndexSpace.TOKEN else buffer.shape
                shape = (counts[pool.name], *inner, buffer.dtype.itemsize)
                state = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
                state[0] = 0
                for pools in manager.pools:
                    its = pools.layout.buffers[pool.name][at]
                    view = pools.layout.view(pools.region, pool.name, its, layer)
                    axis = 2 if buffer.index is IndexSpace.TOKEN else 1
                    first, n = (its.spec.first_head, its.spec.shape[0]) if buffer.heads else (0, buffer.shape[0])
                    view.copy_(state.narrow(axis, first, n).contiguous().view(buffer.dtype).reshape(view.shape))


def content(manager: RankedSeat, pool: str, index: int) -> list[bytes]:
    """What a page or slot holds, all heads of each buffer and layer; fails where copies on several ranks differ."""
    out = []
    for at, buffer in enumerate(manager.whole.by_name[pool].buffers):
        for layer in range(buffer.layers):
            heads: dict[int, bytes] = {}
            for pools in manager.pools:
                its = pools.layout.buffers[pool][at]
                view = pools.layout.view(pools.region, pool, its, layer)[index]
                axis = 1 if buffer.index is IndexSpace.TOKEN else 0
                for n in range(its.spec.shape[0]):
                    raw = view.select(axis, n).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                    known = heads.setdefault(its.spec.first_head + n, raw)
                    assert known == raw, f"{pool} {index}: copies of head {n} of {buffer.name} differ"
            assert sorted(heads) == list(range(buffer.shape[0]))
            out += [heads[head] for head in sorted(heads)]
    return out
