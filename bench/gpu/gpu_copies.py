"""Copies between device memory and pinned host memory, beside one plain copy of as many bytes in the same run.

    python -m bench.gpu.gpu_copies [--mib 512] [--rounds 5] [--json FILE]

Swap-out and swap-in of scattered pages in pieces, without and with digests on the device, and load back layer by layer,
through the copier that workers use (`cache.tiers.tier_copy`), on its own streams. Baselines, which no copy passes: one
asynchronous copy of a contiguous pinned block each way. Then the same beside products on the compute stream: what
copies and products lose by each other. What comes back is compared byte for byte. A round is timed until the device has
ended it.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from bench.common.bench_report import flag_parser, write_figures
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.cuda_device import CudaDevice
from twinpool.cache.device.device_port import Completion, Device, DeviceOp, DeviceStream
from twinpool.cache.memory.kv_cache_spec import BufferSpec, LayoutOrder, PoolSetLayout, PoolSetSpec, PoolSpec
from twinpool.cache.memory.page_moves import PageMove
from twinpool.cache.pool.pool_set import PageExtent, PoolSet
from twinpool.cache.tiers.tier_copy import TierCopy

POOL = "full"
CHUNK_BYTES = 16 * 2**20


def kv_spec(layers: int, heads: int, dim: int, page_tokens: int) -> PoolSetSpec:
    """Keys and values in bfloat16, one full pool."""
    buffers = tuple(BufferSpec(name, layers, (heads, dim), torch.bfloat16) for name in ("k", "v"))
    return PoolSetSpec(page_tokens, (PoolSpec(POOL, buffers),))


class TierPair:
    """Pools on the device and on the host, and scattered pages of both that belong together."""

    def __init__(self, device: Device, spec: PoolSetSpec, nbytes: int) -> None:
        self.device = device
        self.pages = max(4, nbytes // spec.unit_bytes(POOL))
        self.nbytes = self.pages * spec.unit_bytes(POOL)
        counts = {POOL: 2 + self.pages * 3 // 2}
        on_device = PoolSetLayout(spec, counts, LayoutOrder.LAYER_FIRST).nbytes
        on_host = PoolSetLayout(spec, counts, LayoutOrder.PAGE_FIRST).nbytes
        region = torch.zeros(on_device, dtype=torch.uint8, device=device.torch_device)
        region.random_(0, 256)
        self.pools = PoolSet(spec, counts, region)
        self.host = PoolSet(spec, counts, device.allocate_host(on_host), LayoutOrder.PAGE_FIRST, "host")
        chosen = random.Random(1)
        self.here, self.there, self.back = (tuple(chosen.sample(range(1, counts[POOL]), self.pages)) for _ in range(3))
        self.down = TierCopy(device, self.pools, self.host, DeviceStream.SAVE)
        self.up = TierCopy(device, self.host, self.pools, DeviceStream.LOAD)

    def save(self, digested: bool) -> list[int]:
        """Down in pieces; returns the digests that were taken on the device, if any."""
        move = PageMove.of({POOL: self.here}, {POOL: self.there})
        extents = {POOL: self._extent(self.here)} if digested else None
        copy = self.down.by_pieces("save", move, CHUNK_BYTES, digested=extents)
        copy.wait()
        return (copy.digests() or {POOL: []})[POOL]

    def load(self, digested: bool) -> list[int]:
        """Up in pieces, into other pages than they came from."""
        move = PageMove.of({POOL: self.there}, {POOL: self.back})
        extents = {POOL: self._extent(self.back)} if digested else None
        copy = self.up.by_pieces("load", move, CHUNK_BYTES, digested=extents)
        copy.wait()
        return (copy.digests() or {POOL: []})[POOL]

    def load_by_layers(self) -> None:
        self.up.by_layers("load", PageMove.of({POOL: self.there}, {POOL: self.back})).wait()

    def content(self, pages: Sequence[int]) -> torch.Tensor:
        """Bytes of pages on the device: uint8 [pages, layers x buffers x bytes], on the CPU."""
        layers = [
            view[list(pages)].reshape(len(pages), -1).view(torch.uint8).cpu()
            for buffer in self.pools.layout.buffers[POOL]
            for layer in range(buffer.spec.layers)
            for view in [self.pools.layout.view(self.pools.region, POOL, buffer, layer)]
        ]
        return torch.cat(layers, dim=1)

    def _extent(self, pages: Sequence[int]) -> PageExtent:
        size = self.pools.spec.page_tokens
        firsts = tuple(i * size for i in range(len(pages)))
        epochs = self.pools.allocators[POOL].epochs.of(pages)
        return PageExtent(tuple(pages), tuple(epochs), firsts, tuple(first + size for first in firsts))


def plain(device: Device, nbytes: int) -> dict[str, Callable[[], None]]:
    """One copy of a contiguous block each way."""
    there = device.allocate_host(nbytes)
    here = torch.ones(nbytes, dtype=torch.uint8, device=device.torch_device)

    def run(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if here.is_cuda:
            torch.cuda.synchronize(here.device)

    return {"one block down": lambda: run(there, here), "one block up": lambda: run(here, there)}


def _ignore(result: object) -> None:
    del result


def check(pair: TierPair) -> list[str]:
    """What is wrong with what came back; empty: nothing."""
    found = []
    want = pair.content(pair.here)
    saved = pair.save(digested=True)
    loaded = pair.load(digested=True)
    if saved != loaded:
        found.append("the digests of what was saved and of what was loaded differ")
    if not torch.equal(pair.content(pair.back), want):
        found.append("what came back in pieces differs")
    torch.manual_seed(2)
    pair.pools.region.random_(0, 256)
    pair.load_by_layers()
    if not torch.equal(pair.content(pair.back), want):
        found.append("what came back layer by layer differs")
    return found


def measure(pair: TierPair, rounds: int) -> dict[str, list[float]]:
    """GB/s of each round by way, in turns; round 0 warms up and counts for nothing."""
    ways: dict[str, Callable[[], None]] = {
        **plain(pair.device, pair.nbytes),
        "pieces down": lambda: _ignore(pair.save(digested=False)),
        "pieces down, digested": lambda: _ignore(pair.save(digested=True)),
        "pieces up": lambda: _ignore(pair.load(digested=False)),
        "pieces up, digested": lambda: _ignore(pair.load(digested=True)),
        "layers up": pair.load_by_layers,
    }
    results: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            if number:
                results[name].append(pair.nbytes / (time.perf_counter() - began) / 1e9)
    return results


class Products:
    """Products of squares on the device's compute stream."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._a = torch.randn(size, size, device=device.torch_device).to(torch.bfloat16)

    def submit(self, count: int) -> Completion:
        def run() -> None:
            for _ in range(count):
                torch.mm(self._a, self._a)

        return self._device.submit(DeviceOp("products", DeviceStream.COMPUTE), run)

    def alone_s(self, count: int) -> float:
        began = time.perf_counter()
        self.submit(count).wait()
        return time.perf_counter() - began


def beside_products(pair: TierPair, size: int, rounds: int) -> dict[str, dict[str, float]]:
    """For each way: what part of its rate a copy keeps beside products that last longer than it, and what part of
    theirs these keep; medians."""
    products = Products(pair.device, size)
    each_s = max(1e-9, min(products.alone_s(4) for _ in range(3)) / 4)
    ways: dict[str, Callable[[], None]] = {
        "pieces down": lambda: _ignore(pair.save(digested=False)),
        "pieces up": lambda: _ignore(pair.load(digested=False)),
        "layers up": pair.load_by_layers,
    }
    found: dict[str, dict[str, float]] = {}
    for name, run in ways.items():
        kept: list[tuple[float, float]] = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            run()
            copy_s = time.perf_counter() - began
            count = 1 + int(1.5 * copy_s / each_s)
            alone_s = products.alone_s(count)
            began = time.perf_counter()
            computing = products.submit(count)
            run()
            copied_s = time.perf_counter() - began
            computing.wait()
            kept.append((copy_s / copied_s, alone_s / (time.perf_counter() - began)))
        copies, computed = zip(*kept[1:], strict=True)
        found[name] = {"copy": statistics.median(copies), "products": statistics.median(computed)}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    flags = flag_parser(__doc__)
    flags.add_argument("--mib", type=int, default=512, help="copied at a time (default: %(default)s)")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--rehearse", action="store_true", help="on the CPU, in small")
    args = flags.parse_args(argv)
    if min(args.mib, args.rounds) < 1:
        flags.error("--mib and --rounds must be 1 or more")
    device: Device = CpuDevice() if args.rehearse else CudaDevice()
    shapes = {"32 layers, 8 heads of 128, pages of 16": kv_spec(32, 8, 128, 16)}
    shapes |= {"32 layers, 1 head of 128, pages of 64": kv_spec(32, 1, 128, 64)}
    nbytes, rounds = (2**20, 1) if args.rehearse else (args.mib * 2**20, args.rounds)
    figures: dict[str, dict[str, list[float]]] = {}
    beside: dict[str, dict[str, dict[str, float]]] = {}
    wrong: list[str] = []
    for title, spec in shapes.items():
        pair = TierPair(device, spec, nbytes)
        wrong += [f"{title}: {one}" for one in check(pair)]
        figures[title] = measure(pair, rounds)
        print(f"{title}: {pair.pages} pages, {pair.nbytes / 2**20:.0f} MiB")
        for name, rates in figures[title].items():
            base = statistics.median(figures[title]["one block up" if "up" in name else "one block down"])
            rate = statistics.median(rates)
            print(f"  {name:24} {rate:7.2f} GB/s, {rate / base:.2f} of one block")
        beside[title] = beside_products(pair, 64 if args.rehearse else 8192, rounds)
        for name, kept in beside[title].items():
            print(f"  {name:24} beside products keeps {kept['copy']:.0%} of its rate, products {kept['products']:.0%}")
        write_figures(args.json, {"gb_per_s": figures, "beside_products": beside, "wrong": wrong})
    for one in wrong:
        print(f"WRONG {one}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
