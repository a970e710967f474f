"""Measure hand-overs between workers of unequal numbers of ranks beside those of equal ones, in the same run.

    python -m bench.serving.unequal_ranks
    python -m bench.serving.unequal_ranks --planes shm zmq --page-tokens 64

All ranks of both ends are in this process and take their turns, so a figure is the sum of what they do: ranks on cores
of their own would do it side by side. A figure of 2 to 1 or 1 to 2 is to be read over those of 1 to 1 and 2 to 2, which
move the same bytes. Rounds go over all of them in turns, and the quickest of each is shown: other work on the machine
only makes a round longer. All bytes that arrived are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.common import machine
from bench.serving.transfer_ways import HOST, Shape
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec, PoolSpec
from twinpool.cache.memory.memory_layout import PoolSetLayout
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.cluster_config import FaultsConfig
from twinpool.contracts.ids import RoomId
from twinpool.transfer.planes.data_plane import SLOT_BYTES, PageNumbers, PageWrite, RankDataPlane, RoomTarget
from twinpool.transfer.planes.direct.shm_plane import ShmPlane
from twinpool.transfer.planes.nixl.nixl_plane import NixlPlane
from twinpool.transfer.planes.tcp.zmq_plane import ZmqPlane

RANKS = ((1, 1), (2, 2), (2, 1), (1, 2), (4, 1), (1, 4))
"""Ranks of the writer, and of the reader."""
_FRAME_BYTES = 1 << 30


def make_plane(kind: str, rank: int, size: int) -> RankDataPlane:
    faults = FaultsConfig()
    if kind == "shm":
        return ShmPlane(faults, HOST, None, rank, size)
    if kind == "nixl":
        return NixlPlane(faults, HOST, None, rank, size)
    bounce_bytes = 1 << 20 if kind == "staged" else None
    return ZmqPlane(faults, HOST, None, rank, size, frame_bytes=_FRAME_BYTES, bounce_bytes=bounce_bytes)


def sliced(shape: Shape) -> PoolSetSpec:
    """The pools of a model whose ranks share its heads."""
    (pool,) = shape.spec.pools
    buffers = tuple(replace(buffer, heads=shape.kv_heads) for buffer in pool.buffers)
    return PoolSetSpec(shape.page_tokens, (PoolSpec(pool.name, buffers),))


class Ranks:
    """All ranks of one worker, each with its heads of the same pages."""

    def __init__(self, kind: str, shape: Shape, size: int, pages: int) -> None:
        self.planes = [make_plane(kind, rank, size) for rank in range(size)]
        self.pools: list[PoolSet] = []
        for rank, plane in enumerate(self.planes):
            layout = PoolSetLayout(sliced(shape).shard(rank, size), {"full": pages})
            pools = PoolSet(layout.spec, layout.counts, plane.allocate("pages", layout.nbytes))
            slots = None if rank else plane.allocate("slots", SLOT_BYTES).view(1, SLOT_BYTES)
            plane.register(pools, slots)
            self.pools.append(pools)

    def heads(self) -> torch.Tensor:
        """The state of all ranks: uint8 [buffers, layers, pages, page_tokens, heads, bytes]."""
        buffers = []
        for name in ("k", "v"):
            shares = []
            for pools in self.pools:
                its = next(b for b in pools.layout.buffers["full"] if b.spec.name == name)
                layers = [pools.layout.view(pools.region, "full", its, n) for n in range(its.spec.layers)]
                shares.append(torch.stack(layers).view(torch.uint8))
            buffers.append(torch.cat(shares, dim=3))
        return torch.stack(buffers)

    def describe(self) -> dict[str, object]:
        return {"ranks": [part for plane in self.planes for part in plane.describe()["ranks"]]}

    def close(self) -> None:
        for plane in self.planes:
            plane.close()


class Handover:
    """A writer, a reader, and the write of one chunk between them."""

    def __init__(self, kind: str, shape: Shape, ranks: tuple[int, int]) -> None:
        pages = 1 + 4 * shape.chunk_pages
        self.writer, self.reader = (Ranks(kind, shape, size, pages) for size in ranks)
        for rank, pools in enumerate(self.writer.pools):
            noise = torch.Generator().manual_seed(rank + 1)
            pools.region.copy_(torch.empty_like(pools.region).random_(0, 256, generator=noise))
        ours, theirs = (self._scattered(pages, shape.chunk_pages, seed) for seed in (1, 2))
        target = RoomTarget(RoomId("bench"), {"full": PageNumbers(0, theirs)}, 0)
        for plane in self.reader.planes:
            plane.permit(target)
        self._ours, self._theirs, self._target = ours, theirs, target
        self._links = [plane.connect(dict(self.reader.describe())) for plane in self.writer.planes]
        self._number = 0

    @staticmethod
    def _scattered(pages: int, count: int, seed: int) -> tuple[int, ...]:
        return tuple(random.Random(seed).sample(range(1, pages), count))

    def run(self) -> float:
        """Write the chunk; returns the seconds until all of it was taken in."""
        self._number += 1
        write = PageWrite(self._target, {"full": PageNumbers(0, self._ours)}, self._number)
        start = time.perf_counter()
        for link in self._links:
            link.post(write).wait()
        return time.perf_counter() - start

    def check(self) -> None:
        """Raises `RuntimeError` where what arrived is not what was sent."""
        sent, came = self.writer.heads()[:, :, list(self._ours)], self.reader.heads()[:, :, list(self._theirs)]
        if not torch.equal(sent, came):
            raise RuntimeError("what arrived is not what was sent")

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.writer.close()
        self.reader.close()


def measure(kind: str, shape: Shape, rounds: int) -> dict[tuple[int, int], list[float]]:
    """Seconds of each round, by ranks; rounds go over all of them in turns, and the first counts for nothing."""
    ways = {ranks: Handover(kind, shape, ranks) for ranks in RANKS if max(ranks) <= shape.kv_heads}
    seconds: dict[tuple[int, int], list[float]] = {ranks: [] for ranks in ways}
    try:
        for number in range(rounds + 1):
            for ranks, way in ways.items():
                took = way.run()
                if number:
                    seconds[ranks].append(took)
        for way in ways.values():
            way.check()
    finally:
        for way in ways.values():
            way.close()
    return seconds


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--planes", nargs="+", choices=("shm", "zmq", "staged", "nixl"), default=["shm", "zmq", "nixl"])
    flags.add_argument("--layers", type=int, default=28)
    flags.add_argument("--kv-heads", type=int, default=8)
    flags.add_argument("--head-dim", type=int, default=128)
    flags.add_argument("--page-tokens", type=int, default=16)
    flags.add_argument("--chunk-tokens", type=int, default=128)
    flags.add_argument("--rounds", type=int, default=12)
    flags.add_argument("--json", type=Path, help="write all figures to this file")
    args = flags.parse_args(argv)
    torch.set_num_threads(1)
    shape = Shape(args.layers, args.kv_heads, args.head_dim, args.page_tokens, args.chunk_tokens)
    console = Console()
    console.print(machine.headline())
    found = {kind: measure(kind, shape, args.rounds) for kind in args.planes}
    out = Table(title=f"ms for {shape.chunk_bytes / 2**20:.1f} MiB in {shape.chunk_pages} pages (over 1 to 1)")
    for name in ("", *(f"{a} to {b}" for a, b in RANKS)):
        out.add_column(name, justify="right" if name else "left")
    for kind, seconds in found.items():
        quickest = {ranks: min(each) for ranks, each in seconds.items()}
        cells = [f"{1e3 * m:.1f} ({m / quickest[1, 1]:.2f})" for m in quickest.values()]
        out.add_row(kind, *cells)
    console.print(out)
    if args.json is not None:
        figures = {kind: {f"{a} to {b}": s for (a, b), s in seconds.items()} for kind, seconds in found.items()}
        args.json.write_text(json.dumps({"machine": machine.describe(), "seconds": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
