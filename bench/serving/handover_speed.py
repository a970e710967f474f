"""Measure the data planes beside a plain copy, a bare TCP socket and bare NIXL, in the same run.

    python -m bench.serving.handover_speed
    python -m bench.serving.handover_speed --layers 4 --kv-heads 2 --head-dim 48    # the demo's state

`shm`, `zmq`, `staged`, `nixl`, the socket and NIXL go between two processes, `local` stays in one. Throughput is
with some chunks under way at once, the time of a chunk with one: from the post until the reader, having it in its
pages, has answered. Rounds go over all ways in turns; medians are shown. All bytes that arrived are compared.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.common.bench_report import figure_table, flag_parser, headline, write_report
from bench.serving.transfer_ways import (
    BETWEEN_PROCESSES,
    DISTINCT,
    Memory,
    PlaneReader,
    PlaneWriter,
    Shape,
    make_reader,
    make_writer,
)
from bench.serving.transfer_ways import plain as plain_memory
from twinpool.cache.memory.page_digest import PageDigester

WINDOW = 4
BASES = ("memcpy", "tcp socket", "bare nixl")
"""What the others are measured by."""
_DEADLINE_S = 60.0


@dataclass
class Measured:
    """One way."""

    gb_per_s: list[float] = field(default_factory=list)
    chunk_ms: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    """Processor seconds of both processes, all threads, for each GB."""

    @property
    def rate(self) -> float:
        return statistics.median(self.gb_per_s)


def read_chunks(pipe: Connection, way: str, shape: Shape, threads: int, device: str = "cpu") -> None:
    """The reader's process: describes itself, then answers each chunk; a number asks for that many, None ends."""
    torch.set_num_threads(threads)
    reader = make_reader(way, shape, device)
    try:
        pipe.send(reader.describe())
        while (wanted := pipe.recv()) is not None:
            deadline, busy = time.monotonic() + _DEADLINE_S, time.process_time()
            while wanted:
                for _ in range(reader.receive()):
                    pipe.send_bytes(b"stored")
                    wanted -= 1
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{way}: {wanted} chunks didn't arrive")
            pipe.send(time.process_time() - busy)
        pipe.send(reader.sums())
    finally:
        reader.close()


class Way:
    """One way between this process and another."""

    def __init__(self, name: str, shape: Shape, memory: Memory, threads: int, device: str = "cpu") -> None:
        """`device`: where the reader's pages lie."""
        self.name = name
        self._shape = shape
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=read_chunks, args=(theirs, name, shape, threads, device), daemon=True)
        self._process.start()
        theirs.close()
        self._writer = make_writer(name, memory, self._wait(self._pipe.recv))
        self._expected = memory.sums()

    def _wait(self, receive: Any) -> Any:
        if not self._pipe.poll(_DEADLINE_S):
            raise TimeoutError(f"{self.name}: the reader's process does not answer")
        return receive()

    def push(self, chunks: int, window: int) -> tuple[list[float], float]:
        """Send chunks, at most `window` unanswered; returns when each was answered, in seconds from the start, and
        the processor seconds of both processes."""
        self._pipe.send(chunks)
        start, busy = time.perf_counter(), time.process_time()
        sent = 0
        answered: list[float] = []
        while len(answered) < chunks:
            if sent < chunks and sent - len(answered) < window:
                self._writer.send(sent)
                sent += 1
            else:
                self._writer.finish()
                self._wait(self._pipe.recv_bytes)
                answered.append(time.perf_counter() - start)
        return answered, time.process_time() - busy + self._wait(self._pipe.recv)

    def round(self, chunks: int, into: Measured) -> None:
        """Whole rounds of the distinct chunks, so that every way keeps them in the same places."""
        self.push(DISTINCT, 1)
        answered, cpu_s = self.push(chunks, WINDOW)
        gb = chunks * self._shape.chunk_bytes / 1e9
        into.gb_per_s.append(gb / answered[-1])
        into.cpu_s_per_gb.append(cpu_s / gb)
        times, _ = self.push(DISTINCT, 1)
        gaps = [b - a for a, b in pairwise([0.0, *times])]
        into.chunk_ms.append(statistics.median(gaps) * 1e3)

    def close(self) -> None:
        """Ends the reader; raises `RuntimeError` where what arrived is not what was sent."""
        try:
            self._pipe.send(None)
            if self._wait(self._pipe.recv) != self._expected:
                raise RuntimeError(f"{self.name}: what arrived is not what was sent")
        finally:
            self._writer.close()
            self._process.join(10)
            self._process.kill()


class InProcess:
    """What needs no second process: a plain copy, the `local` plane, and the digests of content tags."""

    def __init__(self, shape: Shape, memory: Memory) -> None:
        self._shape = shape
        self._memory = memory
        self._packed = [memory.packed(n) for n in range(DISTINCT)]
        self._copied = [torch.empty_like(packed) for packed in self._packed]
        self._reader = PlaneReader("local", shape)
        self._writer = PlaneWriter("local", memory, self._reader.describe())
        self._digester = PageDigester(memory.pools.layout)
        self.ways = {"memcpy": self._copy, "local": self._local, "tags (digest)": self._digest}

    def _copy(self, number: int) -> None:
        self._copied[number % DISTINCT].copy_(self._packed[number % DISTINCT])

    def _local(self, number: int) -> None:
        self._writer.send(number)
        self._writer.finish()
        assert self._reader.plane.poll() == [b"wrote"]

    def _digest(self, number: int) -> None:
        pages = self._memory.chunks[number % DISTINCT]
        size = self._shape.page_tokens
        self._digester.digest(self._memory.pools.region, "full", pages, [0] * len(pages), [size] * len(pages))

    def round(self, way: str, chunks: int, into: Measured) -> None:
        run = self.ways[way]
        run(0)
        times, busy = [time.perf_counter()], time.process_time()
        for number in range(chunks):
            run(number)
            times.append(time.perf_counter())
        gb = chunks * self._shape.chunk_bytes / 1e9
        into.gb_per_s.append(gb / (times[-1] - times[0]))
        into.cpu_s_per_gb.append((time.process_time() - busy) / gb)
        into.chunk_ms.append(statistics.median(b - a for a, b in pairwise(times)) * 1e3)

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
        if self._reader.sums() != self._memory.sums():
            raise RuntimeError("local: what arrived is not what was sent")


@contextmanager
def opened(names: Sequence[str], shape: Shape, memory: Memory, threads: int) -> Iterator[list[Way]]:
    """Ways between processes, compared and ended at the end of the block."""
    ways: list[Way] = []
    try:
        for name in names:
            ways.append(Way(name, shape, memory, threads))
        yield ways
    finally:
        for way in ways:
            way.close()


def measure(shape: Shape, chunks: int, rounds: int, threads: int) -> dict[str, Measured]:
    """All ways in turns; round 0 warms up and counts for nothing."""
    memory = Memory(shape, seed=1, allocate=plain_memory, noise=True)
    inside = InProcess(shape, memory)
    with opened(BETWEEN_PROCESSES, shape, memory, threads) as between:
        results = {name: Measured() for name in (*inside.ways, *BETWEEN_PROCESSES)}
        for number in range(rounds + 1):
            for name in inside.ways:
                inside.round(name, chunks, results[name] if number else Measured())
            for way in between:
                way.round(chunks, results[way.name] if number else Measured())
    inside.close()
    return results


def table(shape: Shape, results: dict[str, Measured]) -> Table:
    """Medians, and each way over memcpy and over the bare socket."""
    title = f"chunks of {shape.chunk_bytes / 2**20:.1f} MiB in {shape.chunk_pages} pages"
    out = figure_table(title, ("", "GB/s", "chunk, ms", "CPU s/GB", *(f"/ {base}" for base in BASES)))
    for name, measured in results.items():
        ratios = [f"{measured.rate / results[base].rate:.2f}" for base in BASES]
        cpu, each = statistics.median(measured.cpu_s_per_gb), statistics.median(measured.chunk_ms)
        out.add_row(name, f"{measured.rate:.2f}", f"{each:.2f}", f"{cpu:.2f}", *ratios)
    return out


def main(argv: list[str] | None = None) -> int:
    flags = flag_parser(__doc__)
    flags.add_argument("--layers", type=int, default=28)
    flags.add_argument("--kv-heads", type=int, default=8)
    flags.add_argument("--head-dim", type=int, default=128)
    flags.add_argument("--page-tokens", type=int, default=16)
    flags.add_argument("--chunk-tokens", type=int, default=128)
    flags.add_argument(
        "--chunks", type=int, default=16, help=f"chunks of a round, rounded up to a multiple of {DISTINCT}"
    )
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--threads", type=int, default=1, help="torch's threads in either process")
    args = flags.parse_args(argv)
    if min(v for v in vars(args).values() if isinstance(v, int)) < 1:
        flags.error("all numbers must be 1 or more")
    torch.set_num_threads(args.threads)
    shape = Shape(args.layers, args.kv_heads, args.head_dim, args.page_tokens, args.chunk_tokens)
    console = Console()
    console.print(headline())
    results = measure(shape, -(-args.chunks // DISTINCT) * DISTINCT, args.rounds, args.threads)
    console.print(table(shape, results))
    write_report(args, ways={name: asdict(m) | {"median_gb_per_s": m.rate} for name, m in results.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
