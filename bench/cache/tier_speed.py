"""The ways between the tiers, through a KV cache manager: saved to the host and loaded, written to storage and read.

Every figure is bytes of state over the time of the step named, for one allocation that fills the device; beside a plain
copy of as many bytes and plain files of a page each, in turns in the same run; the best round counts. Processor time,
of all threads together, is what a busy machine doesn't falsify. Files are warm, in the page cache, and nobody waits for
the disk: what is measured is the way, not the medium.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from twinpool.cache.allocation import Allocation
from twinpool.cache.device.device_backends import CpuDevice
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.memory.kv_cache_spec import BufferSpec, PoolSetSpec, PoolSpec
from twinpool.cache.memory.memory_layout import LayoutOrder
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.nodes.token_prefix import TokenPrefix
from twinpool.cache.prefix_cache.nodes.tree_node import Tier
from twinpool.cache.storage.backends.backend_factory import make_backend
from twinpool.cache.storage.io_queue import ThreadedIoQueue
from twinpool.cache.storage.storage_backend import StorageBackend
from twinpool.contracts.config.cache_config import CacheConfig, PrefetchConfig, StorageConfig

_DEADLINE_S = 120.0
MEMCPY, FILE_WRITE, FILE_READ = "memcpy", "plain files, write", "plain files, read"


@dataclass(frozen=True)
class Shape:
    """The state of a model with grouped-query attention in bf16, and how much of it an allocation has."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    pages: int

    @property
    def spec(self) -> PoolSetSpec:
        buffers = (BufferSpec(b, self.layers, (self.kv_heads, self.head_dim), torch.bfloat16) for b in ("k", "v"))
        return PoolSetSpec(self.page_tokens, (PoolSpec("full", tuple(buffers)),))

    @property
    def page_bytes(self) -> int:
        return self.spec.unit_bytes("full")


SHAPES = (Shape("445 M parameters, pages of 64", 28, 8, 128, 64, 32), Shape("demo, pages of 16", 4, 2, 48, 16, 1024))
QUICK = (Shape("small", 4, 2, 32, 16, 64),)


@dataclass
class Rates:
    """GB/s of each round by the name of the step, in processor time of all threads and in wall time."""

    pages: int
    page_bytes: int
    rounds: dict[str, list[float]] = field(default_factory=dict)
    wall_rounds: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        wall, processor = time.perf_counter(), time.process_time()
        yield
        size = self.pages * self.page_bytes / 1e9
        self.rounds.setdefault(name, []).append(size / (time.process_time() - processor))
        self.wall_rounds.setdefault(name, []).append(size / (time.perf_counter() - wall))

    def rate(self, name: str) -> float:
        """The best round: disturbances only ever slow one down."""
        return max(self.rounds[name])

    def wall_rate(self, name: str) -> float:
        return max(self.wall_rounds[name])


class Bed:
    """One KV cache manager with room for an allocation on device and host, two on storage; each round has a prefix."""

    def __init__(self, shape: Shape, storage: StorageConfig | None = None) -> None:
        spec, counts = shape.spec, {"full": shape.pages + 1}
        self.shape = shape
        self.tokens = shape.pages * shape.page_tokens
        self.pools = PoolSet(spec, counts)
        self.host = PoolSet(spec, counts, order=LayoutOrder.PAGE_FIRST, tier="host")
        self.pools.region.random_()
        self.pools.zero({"full": (0,)})
        # The first touch of a page of memory is the kernel's work, and once for all.
        self.host.region.zero_()
        self.woken = threading.Event()
        backend: StorageBackend | None = make_backend(storage) if storage is not None else None
        self.queue = ThreadedIoQueue(backend, wake=self.woken.set) if backend is not None else None
        config = CacheConfig(
            page_tokens=shape.page_tokens, load_back="always", prefetch=PrefetchConfig(policy="wait_complete")
        )
        self.manager = KVCacheManager(
            self.pools, CpuDevice(), config, time.monotonic, host=self.host, storage=self.queue, fingerprint="bench"
        )

    def prefix(self, number: int) -> TokenPrefix:
        return TokenPrefix.of(range(1000 * number, 1000 * number + self.tokens), self.shape.page_tokens)

    def allocate(self, prefix: TokenPrefix) -> Allocation:
        allocation = self.manager.allocations.allocate(prefix, self.tokens, "bench", reusable=self.shape.pages)
        assert allocation is not None, "an allocation fits an empty device"
        self.manager.launch()
        return allocation

    def settle(self, until: Callable[[], bool]) -> None:
        """Poll until `until`, woken by storage."""
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            self.woken.clear()
            self.manager.poll()
            if until():
                return
            self.woken.wait(0.01)
            if time.monotonic() > deadline:
                raise TimeoutError("the tiers didn't come to rest")

    def seal(self, allocation: Allocation) -> None:
        """As if all its positions had been computed and committed."""
        self.manager.finished.seal([(allocation, self.tokens)])

    def share(self, allocation: Allocation, prefix: TokenPrefix) -> None:
        """Give it to the tree, which copies it down."""
        self.manager.finished.cache_pages(allocation, prefix)
        self.settle(lambda: not self.manager.busy)

    def close(self) -> None:
        if self.queue is not None and not self.queue.close(_DEADLINE_S):
            raise TimeoutError("storage didn't close")
        self.manager.close()
        wrong = self.manager.check()
        assert not wrong, wrong


def measure_host(bed: Bed, rates: Rates, number: int) -> None:
    """Device to host as an allocation is shared, and back behind the gates when the next one needs it."""
    prefix, manager = bed.prefix(number), bed.manager
    allocation = bed.allocate(prefix)
    with rates.timing("digest (seal)"):
        bed.seal(allocation)
    with rates.timing("device to host (share, write-through)"):
        bed.share(allocation, prefix)
    manager.allocations.free(allocation)
    manager.supply.evict("full", bed.shape.pages)
    assert manager.tree.accounts.sizes[Tier.DEVICE, "full"] == 0
    with rates.timing("host to device, digests verified (allocate, launch, poll)"):
        with rates.timing("host to device (allocate, launch)"):
            allocation = bed.allocate(prefix)
        bed.settle(lambda: manager.allocations.ready(allocation))
    assert allocation.cached.host == bed.tokens
    manager.allocations.free(allocation)
    manager.finished.invalidate(prefix)


def measure_storage(bed: Bed, rates: Rates, name: str, number: int) -> None:
    """Device to host to storage, and from storage to the host as a prefetch."""
    prefix, manager = bed.prefix(number), bed.manager
    allocation = bed.allocate(prefix)
    bed.seal(allocation)
    with rates.timing(f"device to host to {name} (share)"):
        bed.share(allocation, prefix)
    manager.allocations.free(allocation)
    manager.finished.invalidate(prefix)
    with rates.timing(f"{name} to host, digests verified (prefetch)"):
        prefetch = manager.tiers.prefetcher.start(bed.prefix(number))
        assert prefetch is not None
        bed.settle(lambda: prefetch.over)
    assert prefetch.gained == bed.shape.pages, f"{name} gave {prefetch.gained} of {bed.shape.pages} pages"
    manager.finished.invalidate(prefix)


def measure_plain(shape: Shape, rates: Rates, source: torch.Tensor, target: torch.Tensor, folder: Path) -> None:
    """A copy of as many bytes, and a file a page written and read again into memory that is there: uint8 tensors."""
    with rates.timing(MEMCPY):
        target.copy_(source)
    folder.mkdir()
    with rates.timing(FILE_WRITE):
        for number, page in enumerate(source.view(shape.pages, -1)):
            with (folder / str(number)).open("wb", buffering=0) as file:
                file.write(page.numpy().data)
    target.zero_()
    with rates.timing(FILE_READ):
        for number, page in enumerate(target.view(shape.pages, -1)):
            with (folder / str(number)).open("rb", buffering=0) as file:
                file.readinto(page.numpy().data)
    assert torch.equal(source, target), "plain files differ"
    shutil.rmtree(folder)


def measure(shape: Shape, repeats: int, folder: Path) -> Rates:
    """All steps in turns, `repeats` times."""
    rates = Rates(shape.pages, shape.page_bytes)
    room = 2 * shape.pages * (shape.page_bytes + 1024)
    source = torch.randint(256, (shape.pages * shape.page_bytes,), dtype=torch.uint8)
    target = source.clone()
    stores = {
        "memory storage": StorageConfig("memory", path=f"bench of {shape.name}", max_bytes=room, timeout_s=_DEADLINE_S),
        "file storage": StorageConfig("file", path=str(folder / "stored"), max_bytes=room, timeout_s=_DEADLINE_S),
    }
    with ExitStack() as stack:
        alone = Bed(shape)
        stack.callback(alone.close)
        beds = {name: Bed(shape, config) for name, config in stores.items()}
        for bed in beds.values():
            stack.callback(bed.close)
        for number in range(repeats):
            os.sync()
            measure_plain(shape, rates, source, target, folder / f"plain-{number}")
            measure_host(alone, rates, number)
            for name, bed in beds.items():
                measure_storage(bed, rates, name, number)
    return rates


def table(shape: Shape, rates: Rates) -> Table:
    title = f"tiers: {shape.name}, {shape.pages:,} pages of {shape.page_bytes / 1024:,.0f} KiB"
    headers = ("", "GB/s of processor time", f"/ {MEMCPY}", "/ plain files", "GB/s of wall time")
    out = Table(*headers, pad_edge=False, title=title)
    for name in rates.rounds:
        plain = FILE_WRITE if name.endswith("(share)") else FILE_READ
        files = f"{rates.rate(name) / rates.rate(plain):.2f}" if "file storage" in name else ""
        cells = f"{rates.rate(name):.2f}", f"{rates.rate(name) / rates.rate(MEMCPY):.2f}", files
        out.add_row(name, *cells, f"{rates.wall_rate(name):.2f}")
    return out


def run(console: Console, shapes: tuple[Shape, ...], repeats: int, folder: Path | None) -> dict[str, Any]:
    """Measure and print each shape; returns the figures for JSON."""
    figures: dict[str, Any] = {}
    for shape in shapes:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            rates = measure(shape, repeats, Path(scratch))
        console.print(table(shape, rates))
        rounds = {"gb_per_s": rates.rounds, "gb_per_s_wall": rates.wall_rounds}
        figures[shape.name] = {"page_bytes": shape.page_bytes, "pages": shape.pages, **rounds}
    return figures
