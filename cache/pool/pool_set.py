"""The pool set of one worker: one region of memory, and for each pool an allocator and the gate to its buffers; and
page extents, its pages with the positions that they hold and with epochs that tell whether they were freed since.

The *load gate* is the only access to a pool's buffers, and puts readers of a layer behind pending loads into it. A step
enters it when it is launched and gets a `GatePass`, with the loads that are pending at that moment, by layer. The step
takes a layer's buffers from the pass and nowhere else, so no reader can forget to wait: what the step does with
`layer(i)`'s result comes after every load into that layer. The device waits, layer by layer, so that the loads of later
layers go on beside the computation of earlier ones; decode admits a request to a batch only once all loads of its pages
are complete (per request, before the batch). The step doesn't wait for loads that begin after its launch: they may well
wait for the step. Addresses are bound once, so captured graphs and registered memory stay valid for the life of the
pool set.

A load stays pending until the host knows that it is complete, not until its first reader has come: a second reader,
on another stream, has its own wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Protocol

import torch

from twinpool.cache.device.device_port import Completion, GatedLoads
from twinpool.cache.memory.kv_cache_spec import LayoutOrder, PoolSetLayout, PoolSetSpec
from twinpool.cache.memory.page_digest import PageDigester
from twinpool.cache.memory.page_moves import PageMove, PoolIndices, copy_state
from twinpool.cache.pool.page_allocator import Lease, PageAllocator
from twinpool.contracts.errors import ConfigError, StaleLease
from twinpool.contracts.ids import Epoch

# ------------------------------------------------------------ the gate to one pool's buffers


LayerBuffers = Mapping[str, torch.Tensor]
"""Buffers of one layer by name, each [pages, page_tokens, *shape] (by token) or [pages or slots, *shape]."""


class GateDoor(Protocol):
    """Access to buffers by layer: a step's `GatePass`, or the `LoadGate` for the host's own use."""

    def layer(self, layer: int) -> LayerBuffers: ...


class GatePass:
    """One step's access to a pool's buffers, with the loads that the step has to wait for."""

    def __init__(
        self,
        gates: GatedLoads,
        layers: Sequence[LayerBuffers],
        waits: Mapping[int, Sequence[Completion]],
        opens: Callable[[int], None] | None = None,
    ) -> None:
        """`opens` is called with each layer before the step is given its buffers."""
        self.gates = gates
        """The loads that the step promises to wait for: the `gates` of `Device.submit`."""
        self.opened = 0
        """How many layers were touched so far, from the first on."""
        self._layers = layers
        self._waits = waits
        self._opens = opens

    def layer(self, layer: int) -> LayerBuffers:
        """The buffers of `layer`; what the running operation does from here on comes after the loads into that layer.

        To be called from within the step's operation.
        """
        if self._opens is not None:
            self._opens(layer)
        self.opened = max(self.opened, layer + 1)
        for load in self._waits.get(layer, ()):
            # Requests that rely on a failed load are told before they commit (`LoadBack.poll`); the others go on.
            with suppress(RuntimeError):
                load.order()
        return self._layers[layer]


class LoadGate:
    """Hands out one pool's buffers, layer by layer, after that layer's pending loads."""

    def __init__(self, layers: list[dict[str, torch.Tensor]]) -> None:
        self._layers: list[LayerBuffers] = [MappingProxyType(names) for names in layers]
        self._pending: list[list[Completion]] = [[] for _ in layers]
        self.opened: Callable[[str, int], None] | None = None
        """Called with pool and layer whenever a step that enters from now on takes a layer's buffers; None: nobody
        is."""

    def __len__(self) -> int:
        return len(self._layers)

    def expect(self, layer: int, load: Completion) -> None:
        """Make steps that enter from now on wait for `load` before they read `layer`."""
        self._pending[layer].append(load)

    def pending(self, layer: int) -> tuple[Completion, ...]:
        """The loads into `layer` that aren't known to be complete; complete ones are forgotten."""
        self._pending[layer] = [load for load in self._pending[layer] if not load.done]
        return tuple(self._pending[layer])

    def enter(self, pool: str) -> GatePass:
        """Return the pass of a step that is being launched; `pool` is the name of this gate's pool."""
        waits = {layer: rest for layer, loads in enumerate(self._pending) if loads and (rest := self.pending(layer))}
        opens = None if self.opened is None else partial(self.opened, pool)
        return GatePass({(pool, layer): loads for layer, loads in waits.items()}, self._layers, waits, opens)

    def layer(self, layer: int) -> LayerBuffers:
        """The buffers of `layer` for the host's own use: the host waits for the loads, and gets their errors."""
        for load in self._pending[layer]:
            load.wait()
        return self._layers[layer]


# ------------------------------------------------------------ the pools


@dataclass(frozen=True, slots=True)
class PageExtent:
    """Pages (or slots) of one pool, with their epochs and the positions that they hold.

    Page `i` holds positions `firsts[i] .. ends[i]-1`. A slot holds the state after `firsts[i]` positions; its digest
    doesn't depend on `ends[i]`.
    """

    indices: tuple[int, ...]
    epochs: tuple[Epoch, ...]
    firsts: tuple[int, ...]
    ends: tuple[int, ...]
    keys: tuple[bytes, ...] = ()
    """Block hashes of the pages; empty: not known."""

    def __post_init__(self) -> None:
        if len({len(self.indices), len(self.epochs), len(self.firsts), len(self.ends)}) != 1:
            raise ValueError("an extent needs an epoch, a first position and an end for each index")
        if self.keys and len(self.keys) != len(self.indices):
            raise ValueError(f"{len(self.keys)} block hashes for {len(self.indices)} pages")

    def __len__(self) -> int:
        return len(self.indices)

    @classmethod
    def of(cls, lease: Lease, first: int, end: int, page_tokens: int, keys: Sequence[bytes] = ()) -> PageExtent:
        """The pages of `lease`, of which the first begins at position `first`, filled up to position `end`."""
        firsts = tuple(first + page_tokens * i for i in range(len(lease)))
        ends = tuple(max(f, min(f + page_tokens, end)) for f in firsts)
        return cls(lease.indices, lease.epochs, firsts, ends, tuple(keys))

    @classmethod
    def slot(cls, lease: Lease, position: int, key: bytes = b"") -> PageExtent:
        """The one slot of `lease`, holding the state after `position` tokens."""
        (index,), (epoch,) = lease.indices, lease.epochs
        return cls((index,), (epoch,), (position,), (position,), (key,) if key else ())


PageExtents = Mapping[str, PageExtent]
"""By pool name; pools with nothing to do may be left out."""


def require_current(pools: PoolSet, extents: PageExtents) -> None:
    """Raises `StaleLease` where a page of `extents` has been freed since the extent was made."""
    for pool, extent in extents.items():
        now = pools.allocators[pool].epochs.of(extent.indices)
        stale = [i for i, was, current in zip(extent.indices, extent.epochs, now, strict=True) if was != current]
        if stale:
            raise StaleLease(f"{pool} page {stale[0]} belongs to somebody else by now")


class PoolSet:
    """All pools of a worker in one tier.

    `counts`: how many pages or slots each pool has, with index 0, the null page. `region` is uint8 [layout.nbytes]; it
    must be zero at index 0 of every pool, and stays so. Host tiers are page-first; only layer-first pool sets have
    gates.
    """

    def __init__(
        self,
        spec: PoolSetSpec,
        counts: Mapping[str, int],
        region: torch.Tensor | None = None,
        order: LayoutOrder = LayoutOrder.LAYER_FIRST,
        tier: str = "",
    ) -> None:
        short = [name for name, count in counts.items() if count < 2]
        if short:
            raise ValueError(f"pool {short[0]} needs the null page and at least one more")
        self.layout = PoolSetLayout(spec, dict(counts), order)
        if region is None:
            region = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        if region.dtype != torch.uint8 or region.numel() != self.layout.nbytes:
            raise ValueError(f"region must be uint8 [{self.layout.nbytes}], got {region.dtype} {list(region.shape)}")
        self.region = region
        prefix = f"{tier} " if tier else ""
        self.allocators = {
            pool.name: PageAllocator(f"{prefix}{pool.name} pages", counts[pool.name], first=1) for pool in spec.pools
        }
        self.gates = {
            pool.name: LoadGate(self._layers(pool.name)) for pool in spec.pools if order is LayoutOrder.LAYER_FIRST
        }

    @property
    def spec(self) -> PoolSetSpec:
        return self.layout.spec

    @cached_property
    def digester(self) -> PageDigester:
        """The digester of this region's pages and slots."""
        return PageDigester(self.layout, self.region.device)

    def _layers(self, pool: str) -> list[dict[str, torch.Tensor]]:
        layers: list[dict[str, torch.Tensor]] = [{} for _ in range(self.spec.by_name[pool].layers)]
        for buffer in self.layout.buffers[pool]:
            for at, layer in enumerate(buffer.spec.here):
                layers[layer][buffer.spec.name] = self.layout.view(self.region, pool, buffer, at)
        return layers

    def pages_for(self, positions: int) -> int:
        """Pages that hold `positions` token positions."""
        return -(-positions // self.spec.page_tokens)

    @property
    def max_positions(self) -> int:
        """Positions that one request can hold when the full pool is empty."""
        return self.allocators[self.spec.full.name].total * self.spec.page_tokens

    def zero(self, indices: PoolIndices) -> None:
        """Zero these pages and slots in all buffers; state slots start so."""
        for pool, chosen in indices.items():
            for buffer in self.layout.buffers[pool]:
                buffer.stack(self.region, self.layout.counts[pool])[:, list(chosen)] = 0

    def copy(self, move: PageMove, target: PoolSet, layers: range | None = None) -> None:
        """Copy the pages and slots of `move` to `target`, which may be this pool set; with `layers`, only those."""
        copy_state(move, self.region, self.layout, target.region, target.layout, layers)

    def digest(self, pool: str, indices: Sequence[int], firsts: Sequence[int], ends: Sequence[int]) -> list[int]:
        """Digest these pages or slots, as `PageDigester.digest` does, but over the heads of all ranks."""
        return self.digester.digest(self.region, pool, indices, firsts, ends)

    def digesting(
        self, pool: str, indices: Sequence[int], firsts: Sequence[int], ends: Sequence[int]
    ) -> Callable[[], list[int]]:
        """Begin `digest` on the region's device, without waiting; returns a function that waits for the digests."""
        return self.digester.begin(self.region, pool, indices, firsts, ends)

    def close(self) -> None:
        """Drop the memory and the gates. Raises `ValueError` while anything is leased."""
        held = [a.name for a in self.allocators.values() if a.leases]
        if held:
            raise ValueError(f"{' and '.join(held)} are still leased")
        self.gates.clear()
        self.__dict__.pop("_nulls", None)
        self.region = torch.empty(0, dtype=torch.uint8)

    def check(self) -> list[str]:
        found = [line for allocator in self.allocators.values() for line in allocator.check()]
        for pool, buffer, null_lw in self._nulls:
            if null_lw.any():
                dirty = [i for i, row in enumerate(null_lw) if row.any()]
                found.append(f"{pool} pages: the null page of {buffer} isn't zero in layers {dirty}")
        return found

    @cached_property
    def _nulls(self) -> list[tuple[str, str, torch.Tensor]]:
        """The null page or slot of each buffer, by pool and buffer: [layers, words]."""
        counts = self.layout.counts
        return [
            (pool.name, buffer.spec.name, buffer.stack(self.region, counts[pool.name])[:, 0])
            for pool, buffer in self.layout.each()
        ]


def host_counts(spec: PoolSetSpec, nbytes: int, like: Mapping[str, int]) -> dict[str, int]:
    """Return how many pages and slots of each pool, null pages included, `nbytes` of host memory hold.

    Their proportions are those of `like`. Raises `ConfigError` when not even one page of each pool fits beside the null
    pages.
    """
    least = 2 * sum(spec.unit_bytes(pool) for pool in like)
    if nbytes < least:
        raise ConfigError(f"cache.host_bytes={nbytes} holds no page: this model needs {least} or more")
    share = (nbytes - least) / sum(spec.unit_bytes(pool) * count for pool, count in like.items())
    counts = {pool: 2 + int(share * count) for pool, count in like.items()}
    used = sum(spec.unit_bytes(pool) * count for pool, count in counts.items())
    counts[spec.full.name] += (nbytes - used) // spec.page_bytes
    return counts


def host_layout(spec: PoolSetSpec, nbytes: int, like: Mapping[str, int]) -> PoolSetLayout:
    """Return the page-first layout of the host tier of a pool set, in `nbytes` of memory.

    `like` are the device's counts. Raises `ConfigError` when not even one page of each pool fits.
    """
    return PoolSetLayout(spec, host_counts(spec, nbytes, like), LayoutOrder.PAGE_FIRST)
