"""What planning a decode step costs the host: everything but the model and the draw, by batch and context.

    python -m bench.engine.step_planning
    python -m bench.engine.step_planning --batches 64 256 --contexts 8192 32768 131072 --json FILE

`now` is a step as decode launches it, whose block tables are on the device from the step before. `again` is the same
with tables that the device doesn't know, as if every step brought all of them, and `named` with sets of all pages that
it reads and writes, too, which only a checking device looks at. `freed` is `now` where pages of others are freed
between any two steps, so that every epoch is looked at. All in turns in the same run, in processor time, medians; what
counts is their ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from bench.common.bench_report import flag_parser, headline, write_report
from bench.common.random_model import DEMO
from twinpool.cache.allocation import BlockTable, TableSlice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.pool.page_allocator import EpochTable
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.models.model_base import StateOptions
from twinpool.engine.models.registry import read_model
from twinpool.engine.runner.batch import BatchRow, StepHandle, TokenDraw, TokenFromStep
from twinpool.engine.runner.load_model import load_engine
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.engine.tensors.weight_loader import dtype_for

_PAGE_TOKENS = 16
_SHORT = 512
_GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
SIDES = ("named", "again", "freed", "now")


class Naming(CpuDevice):
    """A CPU for which steps name their pages, as for a device that checks them."""

    checks = True


class Host:
    """An engine whose model answers at once: what is left of a step is the host's part."""

    def __init__(self, device: CpuDevice, max_pages: int) -> None:
        model, config = read_model(DEMO), EngineConfig(attention="torch", numerics="fast", threads=1)
        spec = model.pool_set(StateOptions(dtype_for(model.spec, config), _PAGE_TOKENS))
        pools = PoolSet(spec, spec.even(4))
        self.full = spec.full.name
        self.epochs = EpochTable(max_pages + 2)
        self.engine: ModelRunner = load_engine(model, config, spec, pools.gates, {self.full: self.epochs}, device)
        logits_nv = torch.zeros(512, 8)
        self.engine.decoder.forward = _nothing  # type: ignore[method-assign]
        self.engine.decoder.logits = lambda x_nh, numerics: logits_nv[: len(x_nh)]  # type: ignore[method-assign]

    def step(self, tables: Sequence[BlockTable], contexts: Sequence[int], before: StepHandle | None) -> StepHandle:
        """One step of requests at these positions, that goes on from the step before."""
        rows = []
        for number, (table, context) in enumerate(zip(tables, contexts, strict=True)):
            tokens = TokenFromStep(before, number) if before is not None else (7,)
            draw = TokenDraw(_GREEDY, (), 0, context + 1)
            rows.append(BatchRow(tokens, context, {self.full: TableSlice(table, 0, len(table))}, draw))
        step = self.engine.launch(rows)
        step.outputs()
        return step


def _nothing(tokens_m: Tensor, ctx: Any) -> Tensor:
    return torch.zeros(len(tokens_m), 1)


def measure(contexts: Sequence[int], rounds: int) -> dict[str, float]:
    """Milliseconds of processor time a step of requests at these positions, by side."""
    pages = [-(-(context + 1) // _PAGE_TOKENS) for context in contexts]
    begins = list(accumulate(pages, initial=1))[:-1]
    sides: dict[str, tuple[Host, list[BlockTable], StepHandle]] = {}
    for name in SIDES:
        host = Host(Naming() if name == "named" else CpuDevice(), sum(pages))
        tables = [BlockTable(range(at, at + n), [0] * n) for at, n in zip(begins, pages, strict=True)]
        sides[name] = (host, tables, host.step(tables, contexts, None))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (host, known, before) in sides.items():
            tables = known
            if name == "freed":
                host.epochs.bump([sum(pages) + 1])
            elif name != "now":
                tables = [BlockTable(table.pages, table.epochs) for table in known]
            begin = time.thread_time()
            after = host.step(tables, contexts, before)
            times[name].append(1e3 * (time.thread_time() - begin))
            sides[name] = (host, tables, after)
    return {name: statistics.median(mine) for name, mine in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = flag_parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--beside", type=int, default=131072, help="a long context beside short ones; 0: none")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(headline())
    found = []
    cases = {f"{batch:3d} at {at:6d}": [at] * batch for batch in args.batches for at in args.contexts}
    if (rest := max(args.batches) - 1) and args.beside:
        cases[f"1 at {args.beside} beside {rest} at {_SHORT}"] = [args.beside, *[_SHORT] * rest]
    for name, contexts in cases.items():
        ms = measure(contexts, args.rounds)
        found.append({"case": name, "ms": ms, "times": ms["again"] / ms["now"]})
        print(
            f"host's part of a decode step, {name}: {ms['now']:5.2f} ms; {ms['freed']:5.2f} ms where others' pages "
            f"are freed; {ms['again']:6.2f} ms with all tables brought again, {ms['again'] / ms['now']:.1f} times; "
            f"{ms['named']:7.2f} ms with pages named, too"
        )
    write_report(args, steps=found)
    return 0


if __name__ == "__main__":
    main()
