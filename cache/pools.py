"""The pool set of one seat: one region of memory, an allocator and a gate for each pool."""

from __future__ import annotations

import torch

from cache.gate import Gate
from cache.leases import Allocator
from cache.registry import PoolSetLayout, PoolSetSpec


class PoolSet:
    """All state of a seat. `region` is uint8 [layout.nbytes]; it must be zero, and stays zero in the null page."""

    def __init__(self, spec: PoolSetSpec, pages: int, region: torch.Tensor | None = None) -> None:
        if pages < 2:
            raise ValueError("a pool needs the null page and at least one more")
        self.layout = PoolSetLayout(spec, pages)
        if region is None:
            region = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        if region.dtype != torch.uint8 or region.numel() != self.layout.nbytes:
            raise ValueError(f"region must be uint8 [{self.layout.nbytes}], got {region.dtype} {list(region.shape)}")
        self.region = region
        self.allocators = {pool.name: Allocator(f"{pool.name} pages", pages, first=1) for pool in spec.pools}
        self.gates = {pool.name: Gate(self._layers(pool.name)) for pool in spec.pools}

    def _layers(self, pool: str) -> list[dict[str, torch.Tensor]]:
        buffers = self.layout.buffers[pool]
        layers: list[dict[str, torch.Tensor]] = [{} for _ in range(max(b.spec.layers for b in buffers))]
        for buffer in buffers:
            for layer in range(buffer.spec.layers):
                layers[layer][buffer.spec.name] = self.layout.view(self.region, buffer, layer)
        return layers

    def pages_for(self, positions: int) -> int:
        """Pages that hold `positions` token positions."""
        return -(-positions // self.layout.spec.page_tokens)

    @property
    def max_positions(self) -> int:
        """Positions that one request can hold when every pool is empty."""
        return min(a.total for a in self.allocators.values()) * self.layout.spec.page_tokens

    def check(self) -> list[str]:
        found = [line for allocator in self.allocators.values() for line in allocator.check()]
        for pool, buffers in self.layout.buffers.items():
            for buffer in buffers:
                dirty = [i for i in range(buffer.spec.layers) if self.layout.view(self.region, buffer, i)[0].any()]
                if dirty:
                    found.append(f"{pool} pages: the null page of {buffer.spec.name} isn't zero in layers {dirty}")
        return found
