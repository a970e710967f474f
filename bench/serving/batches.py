"""What live clients see while a batch runs, and whether each of its lines is answered once, whoever is killed.

    python -m bench.serving.batches  # the demo, two routers, 10,000 lines; a quarter of an hour
    python -m bench.serving.batches --lines 300 --rounds 1 --router-kills 1 --worker-kills 1  # a rehearsal

Phases without the batch and with it take turns; then the batch runs to its end beside the same streams while routers
and workers are killed (`kill -9`). Beside the ratio of both kinds of phases stands that of the phases without a batch
to each other, every second one to the rest: what of it is noise. Exit code 1 where a line lacks, comes twice, has
failed, or has other tokens than the engine alone.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from rich.console import Console

from bench.common.bench_report import figure_table, flag_parser, headline, percentile, write_report
from bench.common.child_server import serving
from bench.common.random_model import DEMO
from tests.support.batch_beside_live import BatchBesideLive, BatchLoad

DEFAULTS = BatchLoad(10_000, 12, 4, 1.5, 64, 48, 10, 20.0, 6, 6, 1)


def row(name: str, values: Sequence[Sequence[float]]) -> tuple[str, ...]:
    """`values`: without the batch, with it, and the phases without it in two halves."""
    cells = []
    for share in (0.5, 0.99):
        without, batched, odd, even = (percentile(one, share) for one in values)
        ratios = [a / b if b else float("nan") for a, b in ((batched, without), (odd, even))]
        cells += [f"{without:.2f}", f"{batched:.2f}", *(f"{one:.3f}" for one in ratios)]
    return (name, *cells)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = flag_parser(__doc__, cluster=True)
    for one in fields(BatchLoad):
        default = getattr(DEFAULTS, one.name)
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--decode", type=int, default=1, help="decode workers")
    args = parser.parse_args(arguments)
    load = BatchLoad(**{one.name: getattr(args, one.name) for one in fields(BatchLoad)})
    print(headline(), flush=True)
    flags = ["--routers", str(args.routers), "--decode", str(args.decode)]
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"batch.folder={folder}", "batch.free_bytes=0", "cluster.restart_limit=100000", *args.set]
        with serving(args.model, settings, flags) as url:
            bench = BatchBesideLive(url, load)
            without, batched = asyncio.run(bench.compare())
            figures = {"without": [asdict(one) for one in without], "batched": [asdict(one) for one in batched]}
            write_report(args, **figures)
            kinds = without, batched, without[1::2], without[::2]
            heads = "live", *(f"{head} p{n}" for n in (50, 99) for head in ("ms", "with", "ratio", "noise"))
            rows = [
                row(name, [[ms for one in kind for ms in getattr(one, field)] for kind in kinds])
                for name, field in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"))
            ]
            Console(width=120).print(figure_table(None, heads, rows))
            lines = sum(one.lines for one in batched) / max(1.0, load.rounds * load.phase_s)
            failed = sum(sum(one.failed.values()) for one in (*without, *batched))
            print(f"{lines:.1f} lines a second beside it; {failed} live streams failed", flush=True)
            killed = asyncio.run(bench.kill(DEMO if args.model == "demo" else Path(args.model)))
    faults = ", ".join(f"{count} {kind}" for kind, count in asdict(killed.faults).items())
    print(
        f"{killed.status} after {killed.seconds:.0f} s, {len(killed.killed)} killed ({', '.join(killed.killed)}): "
        f"lines that are {faults}; "
        f"live streams cut: {sum(killed.live.failed.values())}"
    )
    write_report(args, **figures, killed=asdict(killed))
    return 0 if killed.well and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
