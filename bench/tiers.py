"""The ways between the tiers, through a seat: claims are saved to the host and loaded, written to storage and read.

Every figure is bytes of state over wall time of the step named, for one claim that fills the device; beside a plain
copy of as many bytes and plain files of a page each, in turns in the same run. Files are warm, in the page cache, and
nobody waits for the disk: what is measured is the way, not the medium.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from cache.claim import Claim
from cache.device import CpuDevice
from cache.nodes import Tier
from cache.pools import PoolSet
from cache.prefix import Prefix
from cache.registry import BufferSpec, Order, PoolSetSpec, PoolSpec
from cache.seat import Seat
from cache.storage import Backend, StorageQueue, make_backend
from contracts.config import CacheConfig, PrefetchConfig, StorageConfig

_DEADLINE_S = 120.0
MEMCPY, FILE_WRITE, FILE_READ = "memcpy", "plain files, write", "plain files, read"


@dataclass(frozen=True)
class Shape:
    """The state of a model with grouped-query attention in bf16, and how much of it a claim has."""

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


SHAPES = (Shape("445 M parameters, pages of 64", 28, 8, 128, 64, 32), Shape("demo, pages of 16", 4, 2, 48, 16, 4096))
QUICK = (Shape("small", 4, 2, 32, 16, 64),)


@dataclass
class Rates:
    """GB/s of each round, by the name of the step."""

    pages: int
    page_bytes: int
    rounds: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.rounds.setdefault(name, []).append(self.pages * self.page_bytes / seconds / 1e9)

    def rate(self, name: str) -> float:
        return statistics.median(self.rounds[name])


class Bed:
    """One seat with device, host and storage of one claim's size, and the prefix of that claim."""

    def __init__(self, shape: Shape, storage: StorageConfig | None = None) -> None:
        spec, counts = shape.spec, {"full": shape.pages + 1}
        self.shape = shape
        self.pools = PoolSet(spec, counts)
        self.host = PoolSet(spec, counts, order=Order.PAGE_FIRST, tier="host")
        self.woken = threading.Event()
        backend: Backend | None = make_backend(storage) if storage is not None else None
        self.queue = StorageQueue(backend, wake=self.woken.set) if backend is not None else None
        config = CacheConfig(
            page_tokens=shape.page_tokens, load_back="always", prefetch=PrefetchConfig(policy="wait_complete")
        )
        self.seat = Seat(
            self.pools, CpuDevice(), config, time.monotonic, host=self.host, storage=self.queue, fingerprint="bench"
        )
        self.prefix = Prefix.of(list(range(1, shape.pages * shape.page_tokens + 1)), shape.page_tokens)
        first = self.pools.region.numel() // self.pools.layout.counts["full"]
        self.pools.region[first:].random_()
        self.pools.zero({"full": (0,)})

    def claim(self) -> Claim:
        positions = self.shape.pages * self.shape.page_tokens
        claim = self.seat.claim(self.prefix, positions, "bench", reusable=self.shape.pages)
        assert claim is not None, "a claim fits an empty device"
        return claim

    def settle(self, until: Callable[[], bool]) -> None:
        """Poll until `until`, woken by storage."""
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            self.woken.clear()
            self.seat.poll()
            if until():
                return
            self.woken.wait(0.01)
            if time.monotonic() > deadline:
                raise TimeoutError("the tiers didn't come to rest")

    def computed(self, claim: Claim) -> None:
        """As if all its positions had been computed and committed."""
        self.seat.seal([(claim, self.shape.pages * self.shape.page_tokens)])

    def close(self) -> None:
        if self.queue is not None and not self.queue.close(_DEADLINE_S):
            raise TimeoutError("storage didn't close")
        self.seat.close()
        wrong = self.seat.check()
        assert not wrong, wrong


def measure_host(shape: Shape, rates: Rates) -> None:
    """Device to host as a claim is shared, and back behind the gates when the next one needs it."""
    bed = Bed(shape)
    try:
        claim = bed.claim()
        bed.seat.launch()
        with rates.timing("digest (seal)"):
            bed.computed(claim)
        with rates.timing("device to host (share, write-through)"):
            bed.seat.share(claim, bed.prefix)
            bed.settle(lambda: not bed.seat.busy)
        bed.seat.release(claim)
        bed.seat.evict("full", shape.pages)
        assert bed.seat.tree.sizes[Tier.DEVICE, "full"] == 0
        start = time.perf_counter()
        with rates.timing("host to device (claim, launch)"):
            claim = bed.claim()
            bed.seat.launch()
        bed.settle(lambda: bed.seat.settled(claim))
        seconds = time.perf_counter() - start
        rates.rounds.setdefault("the same, digests verified", []).append(shape.pages * shape.page_bytes / seconds / 1e9)
        assert claim.cached.host == shape.pages * shape.page_tokens
        bed.seat.release(claim)
    finally:
        bed.close()


def measure_storage(shape: Shape, rates: Rates, name: str, config: StorageConfig) -> None:
    """Host to storage, and from storage to the host as a prefetch."""
    bed = Bed(shape, config)
    try:
        claim = bed.claim()
        bed.computed(claim)
        with rates.timing(f"device to host to {name} (share)"):
            bed.seat.share(claim, bed.prefix)
            bed.settle(lambda: not bed.seat.busy)
        bed.seat.release(claim)
        bed.seat.condemn(bed.prefix)
        with rates.timing(f"{name} to host, digests verified (prefetch)"):
            prefetch = bed.seat.prefetch(bed.prefix)
            assert prefetch is not None
            bed.settle(lambda: prefetch.over)
        assert prefetch.gained == shape.pages, f"{name} gave {prefetch.gained} of {shape.pages} pages"
    finally:
        bed.close()


def measure_plain(shape: Shape, rates: Rates, folder: Path) -> None:
    """A copy of as many bytes, and a file a page written and read again into memory that is there."""
    source = torch.randint(256, (shape.pages * shape.page_bytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    with rates.timing(MEMCPY):
        target.copy_(source)
    pages = source.view(shape.pages, -1)
    with rates.timing(FILE_WRITE):
        for number, page in enumerate(pages):
            with (folder / str(number)).open("wb", buffering=0) as file:
                file.write(page.numpy().data)
    with rates.timing(FILE_READ):
        for number, page in enumerate(target.view(shape.pages, -1)):
            file_number = os.open(folder / str(number), os.O_RDONLY)
            try:
                assert os.readv(file_number, [page.numpy().data]) == shape.page_bytes
            finally:
                os.close(file_number)
    assert torch.equal(source, target)


def measure(shape: Shape, repeats: int, folder: Path) -> Rates:
    """All steps in turns, `repeats` times; each round on fresh seats and folders."""
    rates = Rates(shape.pages, shape.page_bytes)
    room = 4 * shape.pages * (shape.page_bytes + 1024)
    for number in range(repeats):
        plain, stored = folder / f"plain-{number}", folder / f"stored-{number}"
        plain.mkdir()
        measure_plain(shape, rates, plain)
        measure_host(shape, rates)
        memory = StorageConfig("memory", path=f"bench {number}", max_bytes=room)
        measure_storage(shape, rates, "memory storage", memory)
        measure_storage(shape, rates, "file storage", StorageConfig("file", path=str(stored), max_bytes=room))
        for root in (plain, stored):
            for path in sorted(root.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    return rates


def table(shape: Shape, rates: Rates) -> Table:
    title = f"tiers: {shape.name}, {shape.pages:,} pages of {shape.page_bytes / 1024:,.0f} KiB, wall time"
    out = Table("", "GB/s", f"/ {MEMCPY}", "/ plain files", pad_edge=False, title=title)
    for name in rates.rounds:
        plain = FILE_WRITE if name.endswith("(share)") else FILE_READ
        files = f"{rates.rate(name) / rates.rate(plain):.2f}" if "file storage" in name else ""
        out.add_row(name, f"{rates.rate(name):.2f}", f"{rates.rate(name) / rates.rate(MEMCPY):.2f}", files)
    return out


def run(console: Console, shapes: tuple[Shape, ...], repeats: int, folder: Path | None) -> dict[str, Any]:
    """Measure and print each shape; returns the figures for JSON."""
    figures: dict[str, Any] = {}
    for shape in shapes:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            rates = measure(shape, repeats, Path(scratch))
        console.print(table(shape, rates))
        figures[shape.name] = {"page_bytes": shape.page_bytes, "pages": shape.pages, "gb_per_s": rates.rounds}
    return figures
