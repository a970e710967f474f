"""Hand-overs between two processes on one card, by the planes that reach its memory, beside a copy on the card.

    python -m bench.gpu.gpu_handover [--rounds 5] [--json FILE]

Chunks of scattered pages go from pools of this process to pools of another, each with a notice, and all bytes that
arrived are compared. The base is a copy of as many bytes on the card, in one block. On a CPU (`--rehearse`) a file
without a name stands for CUDA IPC. `nixl` is among them where it can be imported and takes the card's memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

import torch

import bench.gpu
from bench.common.bench_report import flag_parser, write_figures
from bench.serving.handover_speed import Measured, Way
from bench.serving.transfer_ways import DISTINCT, Memory, Shape
from twinpool.cache.device.device_copies import zeroed
from twinpool.contracts.errors import TwinpoolError
from twinpool.transfer.planes.nixl.nixl_agent import load_nixl

NOT_RUN = 77


def add_nixl(planes: Sequence[str]) -> tuple[list[str], str]:
    """The planes with `nixl` where it can be imported; and why it isn't among them, in words."""
    try:
        load_nixl()
    except TwinpoolError as error:
        return list(planes), str(error)
    return [*planes, "nixl"], ""


def plain_copy(shape: Shape, chunks: int, device: torch.device, into: Measured) -> None:
    """One block of a chunk's bytes, copied on the device as often."""
    here, there = (zeroed(shape.chunk_bytes, device) for _ in range(2))
    began = time.perf_counter()
    for _ in range(chunks):
        there.copy_(here)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took = time.perf_counter() - began
    into.gb_per_s.append(chunks * shape.chunk_bytes / 1e9 / took)
    into.chunk_ms.append(1e3 * took / chunks)


def measure(shape: Shape, planes: Sequence[str], device: str, chunks: int, rounds: int) -> dict[str, Measured]:
    """All planes in turns; round 0 warms up and counts for nothing. Raises `RuntimeError` for bytes that differ."""
    where = torch.device(device)
    memory = Memory(shape, seed=1, allocate=lambda name, nbytes: zeroed(nbytes, where), noise=True)
    results = {name: Measured() for name in ("one block", *planes)}
    with ExitStack() as stack:
        ways = []
        for name in planes:
            try:
                ways.append(Way(name, shape, memory, 1, device))
            except Exception as error:
                if name != "nixl":
                    raise
                # Its UCX may know no GPU; what fails after that is ours.
                del results[name]
                print(f"{name}: not run: {type(error).__name__}: {error}"[:300], flush=True)
                continue
            stack.callback(ways[-1].close)
        for number in range(rounds + 1):
            plain_copy(shape, chunks, where, results["one block"] if number else Measured())
            for way in ways:
                way.round(chunks, results[way.name] if number else Measured())
    return results


def main(argv: Sequence[str] | None = None) -> int:
    flags = flag_parser(__doc__)
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--rehearse", action="store_true", help="on the CPU, in small")
    args = flags.parse_args(argv)
    if args.rounds < 1:
        flags.error("--rounds must be 1 or more")
    if bench.gpu.STANDS_IN:
        print("pyzmq isn't installed: two processes can't tell each other of pages")
        return NOT_RUN
    shape, chunks, device = Shape(36, 8, 128, 16, 1024), 16 * DISTINCT, "cuda:0"
    planes = ["staged", "cuda_ipc"]
    if args.rehearse:
        shape, chunks, device = Shape(2, 2, 32, 16, 64), DISTINCT, "cpu"
        planes = ["staged", "cuda_ipc, rehearsed"]
    planes, missing = add_nixl(planes)
    if missing:
        print(f"nixl: not run: {missing}", flush=True)
    results = measure(shape, planes, device, chunks, args.rounds)
    base = results["one block"].rate
    print(f"chunks of {shape.chunk_bytes / 2**20:.1f} MiB in {shape.chunk_pages} pages, on {device}")
    for name, measured in results.items():
        each = statistics.median(measured.chunk_ms)
        print(f"  {name:20} {measured.rate:8.2f} GB/s, {each:8.3f} ms a chunk, {measured.rate / base:.3f} of one block")
    write_figures(args.json, {name: asdict(m) | {"median_gb_per_s": m.rate} for name, m in results.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
