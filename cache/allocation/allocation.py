"""An allocation: all state that one request has of a KV cache manager, in every pool, until it is released."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cache.allocation.block_table import NO_PAGE, PageRun
from cache.device.device_port import Completion
from cache.pool.page_allocator import Lease, joined
from cache.prefix_cache.token_prefix import TokenPrefix
from cache.prefix_cache.tree_node import NodeLock, NodePart, Tier
from contracts.ids import Epoch

T = TypeVar("T")


NEVER_FREED = Epoch(0)
"""The epoch of the null page."""


def numbers(values: Iterable[int] = ()) -> array[int]:
    """Page numbers or epochs as int32 side by side: what kernels read, so a step's tables are copies and no lists."""
    # struct takes a third of the time that array does to read a list.
    return array("i", struct.pack(f"{len(values)}i", *values) if isinstance(values, list) else values)


def spread(parts: Sequence[NodePart], values: list[T], nothing: T) -> list[T]:
    """The values of `parts`, one a page, at the page numbers of the sequence; `nothing` where no part is."""
    end = parts[-1].node.start + len(parts[-1]) if parts else 0
    if end == len(values):
        return values
    out = [nothing] * end
    at = 0
    for part in parts:
        start, count = part.node.start, len(part)
        out[start : start + count] = values[at : at + count]
        at += count
    assert len(out) == end, "parts come in the order of the sequence"
    return out


@dataclass(eq=False, slots=True)
class StateSnapshot:
    """A copy of the recurrent state after `depth` pages, on its way into a slot or there."""

    depth: int
    lease: Lease
    completion: Completion


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Positions that a request need not compute, by the tier that had them."""

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage


@dataclass(eq=False)
class Allocation:
    """What a request reads and writes. Tables go by page number of the sequence, from 0 on.

    Pages before `depth` were in the tree and are kept by `lock`; from there on they are the request's own `runs`, until
    the tree takes them. A window's table has `NO_PAGE` where the window has moved on, and ends with what
    `KVCacheManager.grow` has given it so far: pages that the window leaves are used again further on. State pools have
    one working slot, which nobody else ever sees.
    """

    owner: str
    prefix: TokenPrefix
    """The whole pages known when it was made; `KVCacheManager.share` may bring a longer one."""
    pages: int
    """Pages of all positions that it was made for."""
    lock: NodeLock
    depth: int
    """Pages whose state was there when it was made: computing starts behind them."""
    cached: CachedTokens
    tables: dict[str, array[int]] = field(default_factory=dict)
    epochs: dict[str, array[int]] = field(default_factory=dict)
    runs: dict[str, list[PageRun]] = field(default_factory=dict)
    spare: dict[str, Lease] = field(default_factory=dict)
    """Pages of window pools that the window has left, for the pages that are still to come."""
    slots: dict[str, Lease] = field(default_factory=dict)
    snapshots: dict[str, list[StateSnapshot]] = field(default_factory=dict)
    digests: dict[str, list[int | None]] = field(default_factory=dict)
    """Of finished pages, by page number; None where nothing is, or nothing finished."""
    lacking: dict[str, range] = field(default_factory=dict)
    """Of a reservation: the numbers that are to be handed over, by pool."""
    started: list[Completion] = field(default_factory=list)
    """Operations that bring its recurrent states into its slots."""
    invalid: bool = False
    """What was loaded for it turned out damaged: nothing computed from it may be used."""
    released: bool = False

    def put(self, pool: str, first: int, indices: Sequence[int], epochs: Sequence[int]) -> None:
        """Enter pages `first ..` into the table of `pool`."""
        table, marks = self.tables[pool], self.epochs[pool]
        lacking = first + len(indices) - len(table)
        if lacking > 0:
            table.extend([NO_PAGE] * lacking)
            marks.extend([NEVER_FREED] * lacking)
        table[first : first + len(indices)] = numbers(indices)
        marks[first : first + len(indices)] = numbers(epochs)

    def enter(self, pool: str, parts: Sequence[NodePart], least: int = 0) -> None:
        """Begin the table of `pool` with what the tree has of it, in order; it has at least `least` pages."""
        table, marks = joined([part.lease for part in parts])
        table, marks = spread(parts, table, NO_PAGE), spread(parts, marks, NEVER_FREED)
        table += [NO_PAGE] * (least - len(table))
        marks += [NEVER_FREED] * (least - len(marks))
        self.tables[pool], self.epochs[pool] = numbers(table), numbers(marks)

    def named(self) -> dict[str, list[int]]:
        """Every page and slot that operations launched for it may name, by pool."""
        named = {pool: [i for i in table if i != NO_PAGE] for pool, table in self.tables.items()}
        for pool, lease in self.slots.items():
            named[pool] = list(lease.indices) + [i for s in self.snapshots.get(pool, ()) for i in s.lease.indices]
            named[pool] += [i for part in self.lock.of(pool) if part.tier is Tier.DEVICE for i in part.lease.indices]
        return named

    def held(self) -> dict[str, set[int]]:
        """Of a reservation: the page and slot numbers that it needn't be sent, by pool."""
        held = {pool: {n for n, i in enumerate(table) if i != NO_PAGE} for pool, table in self.tables.items()}
        return held | {pool: {n.stop - 1} for pool, n in self.lacking.items() if pool not in self.tables and not n}

    def own(self, pool: str) -> int:
        """Pages and slots of `pool` that it leased itself and still holds."""
        held = sum(len(run.lease) for run in self.runs.get(pool, ()))
        held += sum(len(part[pool]) for part in (self.slots, self.spare) if pool in part)
        return held + sum(len(s.lease) for s in self.snapshots.get(pool, ()))
