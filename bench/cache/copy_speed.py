"""Measure copies between layouts, saving and restoring, loads layer by layer and digests, beside a plain memcpy.

    python -m bench.cache.copy_speed
    python -m bench.cache.copy_speed --threads 2 --shapes demo latent

Pages are scattered, as in a pool that has been used for a while, or follow each other on both sides. memcpy is
torch's copy of one block of as many bytes, in the same run. All ways go in turns; each way's best round is shown, since
whatever else uses the memory only takes away. What has been copied is compared.

The rows: copies from one order to another; loads into layer-first memory, one layer at a time; pages gathered into
packed ones, as for storage; digests; and state that goes to page-first host memory and comes back, in GB/s of both
ways together, without and with the digests that are taken on either side.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from bench.common.bench_report import figure_table, flag_parser, headline, write_report
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace, LayoutOrder, PoolKind, PoolSetSpec, PoolSpec
from twinpool.cache.memory.page_moves import PageMove, PoolMove, copy_state, gather
from twinpool.cache.pool.pool_set import PageExtent, PoolSet
from twinpool.cache.swap.offload import offload, restore

LAYER, PAGE = LayoutOrder.LAYER_FIRST, LayoutOrder.PAGE_FIRST
PATTERNS = ("scattered", "in runs")
CHUNK_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Shape:
    """What is copied: one pool of a model."""

    title: str
    pool: PoolSpec
    page_tokens: int

    @property
    def spec(self) -> PoolSetSpec:
        if self.pool.kind is PoolKind.FULL:
            return PoolSetSpec(self.page_tokens, (self.pool,))
        full = PoolSpec("full", (BufferSpec("k", 1, (1,), torch.int64),))
        return PoolSetSpec(self.page_tokens, (full, self.pool))


def _kv(layers: int, heads: int, dim: int) -> PoolSpec:
    return PoolSpec("full", tuple(BufferSpec(name, layers, (heads, dim), torch.bfloat16) for name in ("k", "v")))


_LATENT = PoolSpec("full", (BufferSpec("latent", 61, (1, 576), torch.bfloat16),))
_STATE = PoolSpec("state", (BufferSpec("recurrent", 8, (2, 128, 128), torch.float32, IndexSpace.SLOT),), PoolKind.STATE)
SHAPES = {
    "kv16": Shape("24 layers, 8 heads of 128, pages of 16", _kv(24, 8, 128), 16),
    "kv64": Shape("24 layers, 8 heads of 128, pages of 64", _kv(24, 8, 128), 64),
    "demo": Shape("4 layers, 2 heads of 32, pages of 16", _kv(4, 2, 32), 16),
    "latent": Shape("61 layers, latent of 576, pages of 64", _LATENT, 64),
    "state": Shape("state slots, 8 layers", _STATE, 16),
}


class Copying:
    """The pool sets of one shape, `nbytes` in use of half as much again, and every way to copy them."""

    def __init__(self, shape: Shape, nbytes: int, pattern: str) -> None:
        self.pool, spec = shape.pool.name, shape.spec
        self.pages = max(4, nbytes // spec.unit_bytes(self.pool))
        self.nbytes = self.pages * spec.unit_bytes(self.pool)
        counts = spec.even(2) | {self.pool: 2 + self.pages * 3 // 2}
        self.sources = {order: PoolSet(spec, counts, order=order) for order in LayoutOrder}
        self.targets = {order: PoolSet(spec, counts, order=order) for order in LayoutOrder}
        noise = torch.Generator().manual_seed(1)
        for pools in self.sources.values():
            pools.region.random_(0, 256, generator=noise)
        self.ends = [self._pages(pattern, counts[self.pool], seed) for seed in (1, 2)]
        self.move = PageMove((PoolMove(self.pool, *map(tuple, self.ends)),))
        self.plain = [torch.ones(self.nbytes, dtype=torch.uint8) for _ in range(2)]
        self.packed = torch.ones(self.pages, spec.unit_bytes(self.pool), dtype=torch.uint8)
        self.lease = self.sources[LAYER].allocators[self.pool].lease(counts[self.pool] - 1, "bench")

    def _pages(self, pattern: str, count: int, seed: int) -> list[int]:
        if pattern == "scattered":
            return random.Random(seed).sample(range(1, count), self.pages)
        return list(range(seed, seed + self.pages))

    def ways(self) -> dict[str, Callable[[], None]]:
        orders = {f"{a} to {b}": (a, b) for a in LayoutOrder for b in LayoutOrder}
        return {
            "memcpy": lambda: _ignore(self.plain[0].copy_(self.plain[1])),
            **{name: self._copy(*pair) for name, pair in orders.items()},
            "page-first by the layer": self._by_layer(PAGE),
            "layer-first by the layer": self._by_layer(LAYER),
            "layer-first, gathered": self._gather(LAYER),
            "page-first, gathered": self._gather(PAGE),
            "layer-first, digested": self._digest(LAYER),
            "page-first, digested": self._digest(PAGE),
            "offload, restore: copies": self._there_and_back(verify=False),
            "offload, restore: digests too": self._there_and_back(verify=True),
        }

    def bytes_of(self, way: str) -> int:
        """What one call moves: there and back is twice."""
        return self.nbytes * (2 if way.startswith("offload") else 1)

    def compare(self) -> None:
        """Raises `RuntimeError` where a copy isn't what was copied."""
        for a in LayoutOrder:
            for b in LayoutOrder:
                self._copy(a, b)()
                found = [
                    gather(pools.region, pools.layout, self.pool, pages)
                    for pools, pages in zip((self.sources[a], self.targets[b]), self.ends, strict=True)
                ]
                if not torch.equal(*found):
                    raise RuntimeError(f"{a} to {b}: what was copied differs")

    def _copy(self, a: LayoutOrder, b: LayoutOrder, layers: range | None = None) -> Callable[[], None]:
        source, target = self.sources[a], self.targets[b]
        return lambda: copy_state(self.move, source.region, source.layout, target.region, target.layout, layers)

    def _by_layer(self, order: LayoutOrder) -> Callable[[], None]:
        count = self.sources[LAYER].spec.by_name[self.pool].layers
        steps = [self._copy(order, LAYER, range(layer, layer + 1)) for layer in range(count)]

        def run() -> None:
            for step in steps:
                step()

        return run

    def _gather(self, order: LayoutOrder) -> Callable[[], None]:
        pools = self.sources[order]
        return lambda: _ignore(gather(pools.region, pools.layout, self.pool, self.ends[0], self.packed))

    def _digest(self, order: LayoutOrder) -> Callable[[], None]:
        pools = self.sources[order]
        size = pools.spec.page_tokens
        firsts, ends = [i * size for i in range(self.pages)], [(i + 1) * size for i in range(self.pages)]
        return lambda: pools.digester.digest(pools.region, self.pool, self.ends[0], firsts, ends).clear()

    def _there_and_back(self, *, verify: bool) -> Callable[[], None]:
        device, pools, host = CpuDevice(), self.sources[LAYER], self.targets[PAGE]
        pages = tuple(self.ends[0])
        positions = tuple(i * pools.spec.page_tokens for i in range(self.pages))
        ends = tuple(p + pools.spec.page_tokens for p in positions)
        extents = {self.pool: PageExtent(pages, pools.allocators[self.pool].epochs.of(pages), positions, ends)}

        def run() -> None:
            saved = offload(device, pools, host, extents, chunk_bytes=CHUNK_BYTES, owner="bench", verify=verify)
            back = restore(device, saved, pools, extents, chunk_bytes=CHUNK_BYTES)
            if not back.complete:
                raise RuntimeError(f"a restore isn't complete: {back.damage[:1]}")
            saved.release()

        return run


def _ignore(result: torch.Tensor) -> None:
    del result


def measure(shape: Shape, nbytes: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """GB/s of each round by way and pattern; round 0 warms up and counts for nothing."""
    results: dict[str, dict[str, list[float]]] = {}
    for pattern in PATTERNS:
        copying = Copying(shape, nbytes, pattern)
        ways = copying.ways()
        for number in range(rounds + 1):
            for name, run in ways.items():
                start = time.perf_counter()
                run()
                rate = copying.bytes_of(name) / (time.perf_counter() - start) / 1e9
                if number:
                    results.setdefault(name, {}).setdefault(pattern, []).append(rate)
        copying.compare()
    return results


def table(shape: Shape, results: dict[str, dict[str, list[float]]]) -> Table:
    """Each way's best, and that over memcpy's."""
    unit = shape.spec.unit_bytes(shape.pool.name)
    heads = [head for pattern in PATTERNS for head in (f"{pattern}, GB/s", "/ memcpy")]
    out = figure_table(f"{shape.title}: {unit / 1024:.0f} KiB each", ("", *heads))
    for name, by_pattern in results.items():
        cells = []
        for pattern in PATTERNS:
            rate, base = (max(r[pattern]) for r in (by_pattern, results["memcpy"]))
            cells += [f"{rate:.1f}", f"{rate / base:.2f}"]
        out.add_row(name, *cells)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    flags = flag_parser(__doc__)
    flags.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="default: all")
    flags.add_argument("--mib", type=int, default=64, help="copied at a time (default: %(default)s)")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--threads", type=int, default=1, help="torch's threads")
    args = flags.parse_args(argv)
    if min(args.mib, args.rounds, args.threads) < 1:
        flags.error("all numbers must be 1 or more")
    torch.set_num_threads(args.threads)
    console = Console()
    console.print(headline())
    measured = {}
    for name in args.shapes:
        measured[name] = measure(SHAPES[name], args.mib * 2**20, args.rounds)
        console.print(table(SHAPES[name], measured[name]))
    write_report(args, gb_per_s=measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
