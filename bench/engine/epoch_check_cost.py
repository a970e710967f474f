"""What it costs a step to compare its block tables with the epoch table, beside the step itself in the same run.

python -m bench.engine.epoch_check_cost [--model DIR] [--batches 1 8 32] [--context 400] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.common import machine
from bench.common.engines_compared import Twinpool
from bench.common.random_model import DEMO
from twinpool.cache.allocation.block_table import TableSlice
from twinpool.cache.pool.epoch_table import EpochTable
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.engine.runner.device_block_tables import DeviceBlockTables

_STEPS = 33
_TRIES = 300


def median_us(*work: Callable[[], object]) -> list[float]:
    """Median time of each, in turns."""
    times: list[list[float]] = [[] for _ in work]
    for _ in range(_TRIES):
        for mine, run in zip(times, work, strict=True):
            begin = time.perf_counter()
            run()
            mine.append(1e6 * (time.perf_counter() - begin))
    return [statistics.median(mine) for mine in times]


@torch.inference_mode()
def measure(side: Twinpool, batch: int, context: int) -> tuple[float, float, float]:
    """Microseconds of a decode step, and of them what the comparison takes: where nothing was freed since the last
    step, and where something was."""
    rate = side.run([[300 + i % 700 for i in range(context)]] * batch, _STEPS).decode_tokens_per_s
    pages = -(-context // side.engine.spec.page_tokens)
    tables = DeviceBlockTables(torch.device("cpu"))
    slices = [TableSlice.of(range(1 + row * pages, 1 + (row + 1) * pages)) for row in range(batch)]
    planned = tables.plan(slices, [pages] * batch)
    tables.update(planned)
    epochs = EpochTable(2 + batch * pages)

    def after_a_release() -> object:
        epochs.bump([1 + batch * pages])
        return tables.stale(planned, epochs)

    quiet, freed = median_us(lambda: tables.stale(planned, epochs), after_a_release)
    return 1e6 * batch / rate, quiet, freed


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEMO, help="checkpoint folder (default: the demo)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    tokens = max(args.batches) * (args.context + _STEPS + 32)
    side = Twinpool(args.model, EngineConfig(threads=args.threads), tokens, max(args.batches))
    print(machine.headline())
    for batch in args.batches:
        step, quiet, freed = measure(side, batch, args.context)
        print(
            f"batch {batch}, context {args.context}: step {step:.0f} us; epochs {quiet:.0f} us, {quiet / step:.2%}, "
            f"and where pages were freed {freed:.0f} us, {freed / step:.2%}"
        )


if __name__ == "__main__":
    main()
