"""What planning a decode step costs the host: everything but the model and the draw, by batch and context.

    python -m bench.engine.step_planning
    python -m bench.engine.step_planning --batches 64 --contexts 8192 32768 131072 --json FILE

`now` is a step as decode launches it. `named` is the same with sets of all pages that it reads and writes, which only a
checking device looks at, and with block tables as lists: what every step did before. Both in turns in the same run, in
processor time, medians; what counts is their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import machine
from bench.common.random_model import DEMO
from cache.allocation.allocation import numbers
from cache.allocation.block_table import BlockTable
from cache.device.device_backends import CpuDevice
from cache.pool.epoch_table import EpochTable
from cache.pool.pool_set import PoolSet
from contracts.config.worker_config import EngineConfig
from contracts.sampling_params import SamplingParams
from engine.models.model_base import StateOptions
from engine.models.registry import read_model
from engine.runner.batch import BatchRow, StepHandle, TokenDraw, TokenFromStep
from engine.runner.load_model import load_engine
from engine.runner.model_runner import ModelRunner
from engine.tensors.weight_loader import dtype_for

_PAGE_TOKENS = 16
_GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
Numbers = Sequence[int]


class Naming(CpuDevice):
    """A CPU for which steps name their pages, as for a device that checks them."""

    checks = True


class Host:
    """An engine whose model answers at once: what is left of a step is the host's part."""

    def __init__(self, device: CpuDevice, most_pages: int) -> None:
        model, config = read_model(DEMO), EngineConfig(attention="torch", numerics="fast", threads=1)
        spec = model.pool_set(StateOptions(dtype_for(model.spec, config), _PAGE_TOKENS))
        pools = PoolSet(spec, spec.even(4))
        epochs = {pool: EpochTable(most_pages + 1) for pool in spec.by_name}
        self.engine: ModelRunner = load_engine(model, config, spec, pools.gates, epochs, device)
        logits_nv = torch.zeros(512, model.spec.vocab_size)
        self.engine.decoder.forward = _nothing  # type: ignore[method-assign]
        self.engine.decoder.logits = lambda x_nh, numerics: logits_nv[: len(x_nh)]  # type: ignore[method-assign]

    def step(self, tables: Sequence[tuple[Numbers, Numbers]], context: int, before: StepHandle | None) -> StepHandle:
        """One step of so many requests, each at position `context`, that goes on from the step before."""
        stop = -(-(context + 1) // _PAGE_TOKENS)
        rows = []
        for number, (pages, epochs) in enumerate(tables):
            mine = BlockTable(0, pages[:stop], epochs[:stop])
            tokens = TokenFromStep(before, number) if before is not None else (7,)
            rows.append(
                BatchRow(tokens, context, mine.pages, TokenDraw(_GREEDY, (), 0, context + 1), epochs=mine.epochs)
            )
        step = self.engine.launch(rows)
        step.outputs()
        return step


def _nothing(tokens_m: Tensor, ctx: Any) -> Tensor:
    return torch.zeros(len(tokens_m), 1)


def measure(batch: int, context: int, rounds: int) -> dict[str, float]:
    """Milliseconds of processor time a step, by side."""
    pages = -(-(context + 1) // _PAGE_TOKENS)
    kinds: dict[str, tuple[CpuDevice, Callable[[range], Numbers]]] = {
        "named": (Naming(), list),
        "now": (CpuDevice(), numbers),
    }
    sides = {}
    for name, (device, kind) in kinds.items():
        host = Host(device, batch * pages)
        tables = [(kind(range(1 + row * pages, 1 + (row + 1) * pages)), _zeros(kind, pages)) for row in range(batch)]
        sides[name] = (host, tables, host.step(tables, context, None))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (host, tables, before) in sides.items():
            begin = time.thread_time()
            after = host.step(tables, context, before)
            times[name].append(1e3 * (time.thread_time() - begin))
            sides[name] = (host, tables, after)
    return {name: statistics.median(mine) for name, mine in times.items()}


def _zeros(kind: Callable[[range], Numbers], count: int) -> Numbers:
    return array("i", bytes(4 * count)) if kind is numbers else [0] * count


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(machine.headline())
    found = []
    for batch in args.batches:
        for context in args.contexts:
            ms = measure(batch, context, args.rounds)
            found.append({"batch": batch, "context": context, "ms": ms, "times": ms["named"] / ms["now"]})
            print(
                f"host's part of a decode step, batch {batch:3d} at {context:6d}: "
                f"{ms['named']:7.2f} ms with pages named, {ms['now']:6.2f} ms now: {ms['named'] / ms['now']:.1f} times"
            )
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine.describe(), "steps": found}, indent=1))
    return 0


if __name__ == "__main__":
    main()
