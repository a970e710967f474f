"""What one step of decode rows and a chunk of a prompt costs, beside a step of the rows and then one of the chunk.

    python -m bench.engine.mixed_steps [--model DIR] [--batches 1 8 32] [--chunks 32 128 448]

Both compute the same tokens of the same sequences, in turns. Milliseconds of processor time, one thread, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.common import machine
from bench.common.engines_compared import Twinpool
from bench.common.random_model import DEMO
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.batch import BatchRow, TokenDraw

_GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


class Sequences(Twinpool):
    """`batch` sequences at one position, and a prompt of which a chunk is computed."""

    def __init__(self, folder: Path, batch: int, context: int, chunk: int) -> None:
        longest = max(context + 1, chunk)
        super().__init__(folder, EngineConfig(), (batch + 1) * (longest + 16), batch + 1)
        held = [self._held(number, longest) for number in range(batch + 1)]
        draw = TokenDraw(_GREEDY, (), 1, context + 1)
        self.rows = [self._row([7 + n], context, held[n], draw) for n in range(batch)]
        self.chunk = self._row([5 + n % 200 for n in range(chunk)], 0, held[batch], None)

    def took(self, *steps: Sequence[BatchRow]) -> float:
        """Milliseconds of processor time of these steps."""
        begin = time.thread_time()
        for rows in steps:
            self.engine.forward(list(rows))
        return 1e3 * (time.thread_time() - begin)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 128, 448])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(machine.headline())
    for batch in args.batches:
        for chunk in args.chunks:
            some = Sequences(args.model, batch, args.context, chunk)
            mixed, apart = list[float](), list[float]()
            for _ in range(args.rounds + 1):
                mixed.append(some.took([*some.rows, some.chunk]))
                apart.append(some.took(some.rows, [some.chunk]))
            one, two = statistics.median(mixed[1:]), statistics.median(apart[1:])
            print(
                f"{batch:3d} rows, a chunk of {chunk:4d}: {one:7.2f} ms in one step, {two:7.2f} in two: {one / two:.2f}"
            )


if __name__ == "__main__":
    main()
