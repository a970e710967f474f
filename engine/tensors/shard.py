"""Shards: the part of a model that one rank holds.

Heads and the inner units of feed-forward layers are divided among the ranks; each rank has everything else whole. A
product over a divided axis gives each rank a part of the sum, and the ranks add their parts up (`ForwardContext.sum`).
Of a mixture either each expert's inner units are divided, or the experts are spread: each rank has some of them whole.

Pipeline-parallel ranks are stages: each holds some of the layers, whole, and the first the embedding and the head too.

Data-parallel ranks are workers of their own (`engine.layers.moe.expert_group`): each holds all but the experts whole,
and of these its share; or its tensor-parallel ranks divide both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.cache.memory.kv_cache_spec import stage_layers
from twinpool.contracts.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ShardAxis:
    """One axis of a weight: its whole length, and the range that this rank holds."""

    whole: int
    first: int
    count: int

    @property
    def divided(self) -> bool:
        return self.count < self.whole

    @property
    def here(self) -> slice:
        return slice(self.first, self.first + self.count)


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard of rank `rank` of `size` ranks."""

    rank: int = 0
    size: int = 1
    ep: int = 1
    """Expert-parallel ranks: `size`, or 1 for experts that are divided."""
    stage: int = 0
    stages: int = 1
    """The stage that the rank is of, and of how many; `rank` and `size` count the ranks of a stage."""
    dp_rank: int = 0
    dp: int = 1
    """Which of the workers that spread their experts over themselves this one is, and of how many."""

    @staticmethod
    def of(rank: int, size: int, ep: int = 1, stages: int = 1) -> Shard:
        """The shard of rank `rank` of all `size` ranks of a worker, which are in `stages`."""
        width = size // stages
        return Shard(rank % width, width, ep, rank // width, stages)

    def layers(self, count: int) -> range:
        """The layers of `count` that this rank holds. Raises `ConfigError` where there are fewer than stages."""
        return stage_layers(count, self.stage, self.stages)

    def experts(self, count: int) -> range:
        """The experts of `count` that this rank holds, of those that are spread an equal part. Raises `ConfigError`
        where they can't be spread equally."""
        key, rank, size = ("dp", self.dp_rank, self.dp) if self.dp > 1 else ("ep", self.rank, self.ep)
        if size == 1:
            return range(count)
        if count % size:
            raise ConfigError(f"{key}={size} doesn't divide the {count} experts of this model")
        here = count // size
        return range(rank * here, (rank + 1) * here)

    def heads(self, count: int, what: str = "heads") -> range:
        """The heads of `count` that this rank holds: an equal part, or one head that several ranks share.

        Raises `ConfigError` where neither number divides the other; `what` names the heads in its text.
        """
        if count % self.size == 0:
            here = count // self.size
            return range(self.rank * here, (self.rank + 1) * here)
        if self.size % count == 0:
            head = self.rank * count // self.size
            return range(head, head + 1)
        raise ConfigError(f"tp={self.size} doesn't divide the {count} {what} of this model, nor they it")

    def axis(self, units: int, width: int = 1, what: str = "units") -> ShardAxis:
        """An axis of `units` units of `width` elements each, divided as `heads` divides."""
        here = self.heads(units, what)
        return ShardAxis(units * width, here.start * width, len(here) * width)


def axes_of(shape: Sequence[int | ShardAxis]) -> list[ShardAxis]:
    """The axes of a tensor; a number is one that isn't divided."""
    return [axis if isinstance(axis, ShardAxis) else ShardAxis(axis, 0, axis) for axis in shape]


def stacked_axes(parts: Sequence[int | ShardAxis]) -> list[ShardAxis]:
    """The axes of parts that lie one below the other in one tensor, each as a range of all of its rows."""
    axes = axes_of(parts)
    whole, above = sum(axis.whole for axis in axes), 0
    ranges = []
    for axis in axes:
        ranges.append(ShardAxis(whole, above + axis.first, axis.count))
        above += axis.whole
    return ranges


WHOLE = Shard()
