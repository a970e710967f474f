"""Measure storage: batches of pages written to and read from each backend, beside plain files in the same run.

    python -m bench.cache.storage_speed  # the file backend in a temporary folder
    python -m bench.cache.storage_speed --folder /mnt/nvme/try --batch 64  # on another disk
    python -m bench.cache.storage_speed --url redis://127.0.0.1:6379/0  # a server too; its database 0 is used

`plain` opens, reads or writes, and closes one file a page with Python's own calls: no name, no check, no order of
use. Each round takes all ways in turns, under new names (ext4 creates files slowly for some seconds after it has
deleted many), with the file cache written out before each but never emptied. The best round counts, since
disturbances only ever slow one down. What was read is compared. `two threads` reads as a worker does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import machine
from twinpool.cache.storage.backends.backend_factory import make_backend
from twinpool.cache.storage.storage_backend import ObjectBuffer, ObjectName, StorageBackend
from twinpool.contracts.config.cache_config import StorageConfig

SIZES = (64 * 1024, 256 * 1024, 1024 * 1024)
_ROUND_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Rate:
    """GB/s of one way at one page size; `exists_us` per name."""

    way: str
    page_bytes: int
    write: float
    read: float
    read_two_threads: float
    exists_us: float


class Pages:
    """Some pages with names, and buffers to read them into."""

    def __init__(self, size: int) -> None:
        self.size, self.count = size, _ROUND_BYTES // size
        rng = np.random.default_rng(size)
        self.content = [rng.bytes(size) for _ in range(self.count)]
        self.into = [np.zeros(size, dtype=np.uint8) for _ in range(self.count)]

    def items(self, salt: int) -> list[ObjectBuffer]:
        """The pages under names that no other salt gives."""
        chains = [hashlib.blake2b(b"%d %d" % (salt, n), digest_size=16).digest() for n in range(self.count)]
        pairs = enumerate(zip(chains, self.content, strict=True))
        return [ObjectBuffer(ObjectName("bench", "full", chain), n, page) for n, (chain, page) in pairs]

    def check(self) -> None:
        """Raises `RuntimeError` when what was read is not what was written."""
        if not all(a == b.tobytes() for a, b in zip(self.content, self.into, strict=True)):
            raise RuntimeError("what was read is not what was written")
        for page in self.into:
            page[:] = 0


class Plain:
    """One file a page, with Python's own open, write and readinto."""

    def __init__(self, folder: Path, pages: Pages) -> None:
        self._pages, self._folder, self._round = pages, folder, 0
        self._paths: list[str] = []

    def begin(self) -> None:
        self._round += 1
        folder = self._folder / f"{self._round}"
        folder.mkdir(parents=True)
        self._paths = [str(folder / f"{n}") for n in range(self._pages.count)]

    def write(self, which: Sequence[int]) -> None:
        for n in which:
            with open(self._paths[n], "wb", buffering=0) as file:
                file.write(self._pages.content[n])

    def read(self, which: Sequence[int]) -> None:
        for n in which:
            with open(self._paths[n], "rb", buffering=0) as file:
                file.readinto(self._pages.into[n].data)

    def exists(self, which: Sequence[int]) -> None:
        for n in which:
            Path(self._paths[n]).exists()

    def close(self) -> None:
        shutil.rmtree(self._folder)


class Stored:
    """A backend; raises `RuntimeError` when it fails a page."""

    def __init__(self, backend: StorageBackend, pages: Pages) -> None:
        self._backend, self._pages = backend, pages
        self._items: list[ObjectBuffer] = []
        self._written: list[ObjectName] = []

    def begin(self) -> None:
        self._items = self._pages.items(len(self._written))
        self._written += [item.name for item in self._items]

    def write(self, which: Sequence[int]) -> None:
        self._require([o.ok for o in self._backend.write([self._items[n] for n in which])])

    def read(self, which: Sequence[int]) -> None:
        names = [self._items[n].name for n in which]
        self._require([o.ok for o in self._backend.read(names, [self._pages.into[n].data for n in which])])

    def exists(self, which: Sequence[int]) -> None:
        self._require(self._backend.exists([self._items[n].name for n in which]))

    def _require(self, good: list[bool]) -> None:
        if not all(good):
            raise RuntimeError(f"{good.count(False)} of {len(good)} pages failed: {self._backend.counts()}")

    def close(self) -> None:
        self._backend.delete(self._written)
        self._backend.close()


Way = Plain | Stored


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(ways: dict[str, Way], pages: Pages, rounds: int, batch: int) -> list[Rate]:
    """All ways in turns; the best of `rounds`."""
    batches = [range(at, min(at + batch, pages.count)) for at in range(0, pages.count, batch)]
    best: dict[tuple[str, str], float] = {}

    def keep(way: str, what: str, seconds: float) -> None:
        best[way, what] = min(seconds, best.get((way, what), seconds))

    with ThreadPoolExecutor(2) as two:
        for _ in range(rounds):
            for name, way in ways.items():
                way.begin()
                os.sync()  # Else one way pays for what another has left to be written out.
                keep(name, "write", timed(lambda way=way: [way.write(b) for b in batches]))  # type: ignore[misc]
                keep(name, "exists", timed(lambda way=way: [way.exists(b) for b in batches]))  # type: ignore[misc]
                keep(name, "read", timed(lambda way=way: [way.read(b) for b in batches]))  # type: ignore[misc]
                pages.check()
                keep(name, "two", timed(lambda way=way: list(two.map(way.read, batches))))  # type: ignore[misc]
                pages.check()
    gigabytes = pages.size * pages.count / 1e9
    return [
        Rate(
            name,
            pages.size,
            write=gigabytes / best[name, "write"],
            read=gigabytes / best[name, "read"],
            read_two_threads=gigabytes / best[name, "two"],
            exists_us=best[name, "exists"] / pages.count * 1e6,
        )
        for name in ways
    ]


def measure_size(size: int, folder: Path, url: str, rounds: int, batch: int) -> list[Rate]:
    pages = Pages(size)
    configs = {
        "file": StorageConfig(backend="file", path=str(folder / "l3"), timeout_s=60.0),
        "memory": StorageConfig(backend="memory", path="bench"),
    }
    if url:
        configs["redis"] = StorageConfig(backend="redis", url=url, timeout_s=60.0)
    with ExitStack() as stack:
        ways: dict[str, Way] = {"plain": Plain(folder / f"plain-{size}", pages)}
        stack.callback(ways["plain"].close)
        for name, config in configs.items():
            backend = make_backend(config)
            assert backend is not None
            ways[name] = Stored(backend, pages)
            stack.callback(ways[name].close)
        return measure(ways, pages, rounds, batch)


def show(rates: Sequence[Rate]) -> None:
    table = Table("page", "way", "write GB/s", "read GB/s", "two threads", "exists µs", title=machine.headline())
    plain = {rate.page_bytes: rate for rate in rates if rate.way == "plain"}
    for rate in rates:
        base = plain[rate.page_bytes]
        table.add_row(
            f"{rate.page_bytes // 1024} KiB",
            rate.way,
            f"{rate.write:.2f} ({rate.write / base.write:.0%})",
            f"{rate.read:.2f} ({rate.read / base.read:.0%})",
            f"{rate.read_two_threads:.2f} ({rate.read_two_threads / base.read_two_threads:.0%})",
            f"{rate.exists_us:.1f}",
        )
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--url", default="", help="a Redis or Valkey server to measure as well")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="pages a call")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="twinpool-bench-", dir=args.folder) as folder:
        rates = [rate for size in SIZES for rate in measure_size(size, Path(folder), args.url, args.rounds, args.batch)]
    show(rates)
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine.describe(), "rates": [asdict(r) for r in rates]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
