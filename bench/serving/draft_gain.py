"""What drafts gain, at any number of streams, where what makes them was trained for its model.

    python -m bench drafts  # trains what lacks in build/drafts first: a quarter of an hour or less
    python -m bench drafts -- --models hybrid --streams 1 8 --temperatures 0 --rounds 6

A prefill and a decode worker in this process with drafts, and two without, are asked the same in turns, other prose
each time, so many streams at once. The time is decode's alone, on one thread, by default that of the processor, for
busy machines; decode's policy goes by the same clock. Exit code 1 where a token isn't the one without drafts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path

import torch
from rich.console import Console

from bench.common.bench_report import figure_table, flag_parser, headline, write_report
from tests.support.draft_gain import CLOCKS, DraftGain, DraftLoad, measure
from tests.support.trained_drafts import MODELS, prose, train

HEADS = ("", "streams", "temperature", "without", "with", "ratio", "of best", "tokens a step", "drawn")


def row(name: str, one: DraftGain) -> tuple[str, ...]:
    rates = [f"{max(rates):.0f}" for rates in (one.without, one.drafted)]
    shown = f"{one.median:.2f}", f"{one.best:.2f}", f"{one.tokens_per_step:.2f}", f"{one.accepted:.0%}"
    return (name, str(one.streams), f"{one.temperature:g}", *rates, *shown)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = flag_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/drafts"), help="what is trained is kept here")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--clock", choices=list(CLOCKS), default="cpu")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    train(args.folder, [name for name in args.models if not (args.folder / MODELS[name].trained).exists()])
    print(headline(), flush=True)
    loads = [DraftLoad(streams, heat, args.tokens) for heat in args.temperatures for streams in args.streams]
    found: list[tuple[str, DraftGain]] = []
    for name in args.models:
        folder, draft_model = MODELS[name].below(args.folder)
        asked = cycle(prose()[1].tolist())
        for one in measure(folder, draft_model, loads, lambda n: list(islice(asked, n)), args.rounds, args.clock):  # noqa: B023
            print(*row(name, one), flush=True)
            found.append((name, one))
            write_report(args, gains=[{"model": model, **asdict(gain)} for model, gain in found])
    Console(width=110).print(figure_table("tokens/s of decode", HEADS, [row(*one) for one in found]))
    return 0 if all(one.equal for _, one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
