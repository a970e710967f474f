"""What a step of requests with penalties costs: the host's part and the draw, without the model.

    python -m bench.engine.penalty_cost [--batches 1 64] [--contexts 512 8192]

Beside it, in the same run and in turns, a step of the same requests without penalties. Processor time, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from msgspec.structs import replace

from bench.common import machine
from bench.engine.step_planning import Host
from twinpool.cache.allocation.block_table import BlockTable, TableSlice
from twinpool.cache.device.device_backends import CpuDevice
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.batch import BatchRow, TokenDraw
from twinpool.engine.runner.sampling.token_history import TokenHistory

_PAGE_TOKENS = 16
_VOCAB = 32_000
_GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
_REPETITION = replace(_GREEDY, repetition_penalty=1.05)
KINDS = {
    "none": _GREEDY,
    "repetition": _REPETITION,
    "all three": replace(_REPETITION, presence_penalty=0.3, frequency_penalty=0.2),
}


class Requests:
    """Requests at one position, half of whose tokens are prompt, on an engine whose model answers at once."""

    def __init__(self, batch: int, context: int) -> None:
        self.context, pages = context, -(-(context + 1) // _PAGE_TOKENS)
        self.host = Host(CpuDevice(), batch * pages)
        logits_nv = torch.randn(512, _VOCAB, generator=torch.Generator().manual_seed(1))
        self.host.engine.decoder.logits = lambda x_nh, numerics: logits_nv[: len(x_nh)]  # type: ignore[method-assign]
        begins = range(1, 1 + batch * pages, pages)
        self.tables = [TableSlice(BlockTable(range(at, at + pages), [0] * pages), 0, pages) for at in begins]
        self.histories = [
            TokenHistory([(7919 * at + row) % _VOCAB for at in range(context + 1)]) for row in range(batch)
        ]

    def step(self, params: SamplingParams) -> float:
        """Milliseconds of processor time of one step."""
        begin = time.thread_time()
        rows = [
            BatchRow(
                (history.tokens[-1],),
                self.context,
                {self.host.full: table},
                TokenDraw(params, history if params is not _GREEDY else (), self.context // 2, self.context + 1),
            )
            for table, history in zip(self.tables, self.histories, strict=True)
        ]
        self.host.engine.launch(rows).outputs()
        return 1e3 * (time.thread_time() - begin)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(machine.headline())
    for batch in args.batches:
        for context in args.contexts:
            requests = Requests(batch, context)
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(args.rounds):
                for kind, params in KINDS.items():
                    times[kind].append(requests.step(params))
            told = ", ".join(f"{kind} {statistics.median(mine):6.2f} ms" for kind, mine in times.items())
            print(f"a step of {batch:3d} at {context:6d}: penalties {told}")


if __name__ == "__main__":
    main()
