"""What a decode loop loses while state arrives: time between tokens with nothing arriving, and with 1 GB.

    python -m bench.serving.arrival_cost
    python -m bench.serving.arrival_cost --rates 100 400 --planes shm zmq nixl

Decode computes on one core, in this process. The writer's process, the reader's threads of the plane and those that
digest what came share another core, as a worker's do where a host has cores to spare. Chunks come at a capped rate, and
each is digested as decode does before it adopts pages. `copy` is the least that any plane could cost: the other core
copies as many bytes within its own memory. What may be lost is the memory's share, which is the rate over a plain
copy's, and five points.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.common import machine, random_model
from bench.common.engines_compared import Twinpool
from bench.serving.transfer_ways import DISTINCT, Memory, PlaneReader, PlaneWriter, Shape
from bench.serving.transfer_ways import plain as plain_memory
from twinpool.cache.device.async_cpu_device import AsyncCpuDevice
from twinpool.cache.device.device_port import DONE, Completion, DeviceOp, DeviceStream
from twinpool.cache.memory.page_digest import PageDigester
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.worker_config import EngineConfig

PLANES = ("shm", "zmq", "nixl")
COPY = "copy"
SHAPE = Shape(layers=28, kv_heads=8, head_dim=128, page_tokens=16, chunk_tokens=128)
_DEADLINE_S = 300.0


@dataclass(frozen=True)
class ArrivalCost:
    """Decode's times between tokens, quiet and while state came, in milliseconds: medians of the rounds."""

    way: str
    rate: float
    """Bytes a second that came."""
    quiet_p50: float
    quiet_p99: float
    p50: float
    p99: float
    share: float
    """Part of the memory's bandwidth that so many bytes take, as a plain copy of them would."""

    @property
    def lost(self) -> tuple[float, float]:
        """Points that p50 and p99 are longer."""
        return 100 * (self.p50 / self.quiet_p50 - 1), 100 * (self.p99 / self.quiet_p99 - 1)


def send(pipe: Connection, way: str, core: int, description: Any) -> None:
    """The writer's process: for each (bytes a second, seconds), sends chunks at that rate; None ends it."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    memory = Memory(SHAPE, seed=1, allocate=plain_memory, noise=True)
    copied = torch.empty_like(memory.packed(0))
    sources = [memory.packed(n) for n in range(DISTINCT)]
    writer = None if way == COPY else PlaneWriter(way, memory, description)
    pipe.send("ready")
    while (wanted := pipe.recv()) is not None:
        rate, seconds = wanted
        began, sent = time.monotonic(), 0
        while (now := time.monotonic() - began) < seconds:
            if sent * SHAPE.chunk_bytes > rate * now:
                time.sleep(min(0.002, sent * SHAPE.chunk_bytes / rate - now))
                continue
            if writer is None:
                copied.copy_(sources[sent % DISTINCT])
            else:
                writer.send(sent)
                writer.finish()
            sent += 1
        pipe.send(sent * SHAPE.chunk_bytes / (time.monotonic() - began))
    if writer is not None:
        writer.close()


class Arrivals:
    """What comes to this process over one plane, and the digests of it."""

    def __init__(self, way: str) -> None:
        self._reader = PlaneReader(way, SHAPE)
        self._device = AsyncCpuDevice()
        self._digester = PageDigester(self._reader.memory.pools.layout)
        self._came = 0
        self._checked: Completion = DONE
        self.description = self._reader.describe()

    def poll(self) -> None:
        """As a round of decode's loop: hear notices, and have what they tell of digested beside it."""
        for _ in self._reader.plane.poll():
            pages = self._reader.memory.chunks[self._came % DISTINCT]
            self._came += 1
            checked = DeviceOp("check", DeviceStream.LOAD)
            self._checked = self._device.submit(checked, partial(self._digest, pages))

    def _digest(self, pages: Sequence[int]) -> None:
        size = SHAPE.page_tokens
        self._digester.digest(self._reader.memory.pools.region, "full", pages, [0] * len(pages), [size] * len(pages))

    def close(self) -> None:
        self._checked.wait()
        self._device.close()
        self._reader.close()


class Decode:
    """A batch that decodes one token a step, on and on."""

    def __init__(self, folder: Path, batch: int, context: int, steps: int) -> None:
        self._engine = Twinpool(folder, EngineConfig(), batch * (context + steps + 32), batch)
        vocab = read_model_spec(folder).vocab_size
        self._prompts = np.random.default_rng(3).integers(vocab // 2, vocab, (batch, context)).tolist()
        self._steps = steps

    def times_ms(self, arrivals: Arrivals | None) -> list[float]:
        """Times between tokens; the arrivals are polled after each step."""
        answer = self._engine.run(
            self._prompts, self._steps, after_step=arrivals.poll if arrivals is not None else None
        )
        times = answer.times_s[0]
        return [1000 * (b - a) for a, b in pairwise(times)][1:]


def others_to(core: int) -> None:
    """Move all threads of this process but the calling one to another core."""
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != threading.get_native_id():
            os.sched_setaffinity(int(thread), {core})


def measure_way(way: str, rates: Sequence[float], decode: Decode, rounds: int, copy_rate: float) -> list[ArrivalCost]:
    """One way at each of `rates`, in turns with quiet runs."""
    cores = sorted(os.sched_getaffinity(0))
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    with ExitStack() as stack:
        arrivals = None if way == COPY else Arrivals(way)
        if arrivals is not None:
            stack.callback(arrivals.close)
        description = arrivals.description if arrivals is not None else None
        child = spawn.Process(target=send, args=(theirs, way, cores[-1], description), daemon=True)
        child.start()
        stack.callback(child.kill)
        theirs.close()

        def told() -> Any:
            if not pipe.poll(_DEADLINE_S):
                raise TimeoutError(f"{way}: the writer's process does not answer")
            return pipe.recv()

        told()
        os.sched_setaffinity(0, {cores[0]})
        stack.callback(os.sched_setaffinity, 0, set(cores))
        quiet: list[list[float]] = []
        loud: dict[float, list[tuple[float, list[float]]]] = {rate: [] for rate in rates}
        for _ in range(rounds):
            others_to(cores[-1])
            quiet.append(decode.times_ms(arrivals))
            seconds = sum(quiet[-1]) / 1000
            for rate in rates:
                pipe.send((rate, 1.5 * seconds))
                while arrivals is not None and not arrivals._came:  # Its threads begin with what comes first.
                    arrivals.poll()
                others_to(cores[-1])
                times = decode.times_ms(arrivals)
                loud[rate].append((told(), times))
        pipe.send(None)
        child.join(10)
    return [_result(way, quiet, runs, copy_rate) for runs in loud.values()]


def _result(way: str, quiet: list[list[float]], loud: list[tuple[float, list[float]]], copy_rate: float) -> ArrivalCost:
    def middle(runs: list[list[float]], percent: float) -> float:
        return statistics.median(float(np.percentile(run, percent)) for run in runs)

    rate = statistics.median(rate for rate, _ in loud)
    times = [times for _, times in loud]
    return ArrivalCost(
        way, rate, middle(quiet, 50), middle(quiet, 99), middle(times, 50), middle(times, 99), rate / copy_rate
    )


def copy_bytes_per_s() -> float:
    """How fast one core copies memory that no cache holds."""
    source = torch.ones(256 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return len(source) / statistics.median(times)


def table(results: Sequence[ArrivalCost]) -> Table:
    out = Table(title=f"time between tokens while chunks of {SHAPE.chunk_bytes / 2**20:.0f} MiB arrive")
    for name in ("", "MB/s", "p50, ms", "quiet", "lost", "p99, ms", "quiet", "lost", "may be lost"):
        out.add_column(name, justify="left" if not name else "right")
    for r in results:
        lost50, lost99 = r.lost
        out.add_row(
            r.way, f"{r.rate / 1e6:.0f}", f"{r.p50:.2f}", f"{r.quiet_p50:.2f}", f"{lost50:.1f} %", f"{r.p99:.2f}",
            f"{r.quiet_p99:.2f}", f"{lost99:.1f} %", f"{100 * r.share + 5:.1f} %",
        )  # fmt: skip
    return out


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--planes", nargs="+", choices=PLANES, default=list(PLANES))
    flags.add_argument("--rates", type=float, nargs="+", default=[100.0, 400.0], help="MB a second")
    flags.add_argument("--model", choices=random_model.NAMES, default="60m", help="default: %(default)s")
    flags.add_argument("--batch", type=int, default=8)
    flags.add_argument("--context", type=int, default=256)
    flags.add_argument("--steps", type=int, default=200, help="of a run")
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--json", type=Path, help="write all figures to this file")
    args = flags.parse_args(argv)
    if min(args.batch, args.context, args.rounds) < 1 or args.steps < 3 or min(args.rates) <= 0:
        flags.error("numbers must be 1 or more, --steps 3 or more, --rates above 0")
    if len(os.sched_getaffinity(0)) < 2:
        print("bench.serving.arrival_cost: needs two cores, one of them for what arrives", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    console = Console()
    console.print(machine.headline())
    copy_rate = copy_bytes_per_s()
    with tempfile.TemporaryDirectory(prefix="twinpool-bench-") as folder:
        model = random_model.make(Path(folder) / args.model, args.model)
        decode = Decode(model, args.batch, args.context, args.steps)
        decode.times_ms(None)
        results = []
        for way in (COPY, *args.planes):
            results += measure_way(way, [1e6 * rate for rate in args.rates], decode, args.rounds, copy_rate)
    console.print(table(results))
    if args.json is not None:
        out = {"machine": machine.describe(), "copy_bytes_per_s": copy_rate, "results": [asdict(r) for r in results]}
        args.json.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
