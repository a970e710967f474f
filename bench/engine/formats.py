"""Measure weights of each format: ours beside OpenVINO, llama.cpp and transformers, the same weights for all, in turns.

    python -m bench.engine.formats           # ours alone, in every numerics
    python -m bench.engine.formats --rivals  # and what `python -m bench.rivals --install openvino llamacpp` made
    python -m bench.engine.formats --rivals --formats bf16 q4_0 --batches 1 --repeats 2    # a part, in some minutes
    python -m bench.engine.formats --sides invariant llamacpp --threads 2

One Qwen3-shaped model with random weights (386 M parameters), made once and kept, is written as a folder in bfloat16
and as a GGUF file of each type; Q4_K's blocks, which nothing here quantises to, are random. `smollm2` is the model of
that name, whose file has Q4_1. Each process is kept to as many cores as `--threads` says, one by default; then the
clock is the processor's, which tells how much work an engine makes of the same task, whoever else is using the machine.
A figure is a median with half of what lies between its least and its most, and in brackets the first column over it.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from bench.common import random_model
from bench.common.bench_report import describe, flag_parser, write_report
from bench.common.engines_compared import Side
from bench.engine.engine_speed import Measured, SpeedScenario, make_side, measure
from bench.rivals.rival_engine import ENVIRONMENTS, Rival
from tests.support.bare_engine import CLOCKS
from tests.support.gguf_files import write_gguf
from twinpool.cluster.models import find_model
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.errors import CheckpointError, ConfigError

OWN, RIVALS = ("invariant", "int8", "fast"), ("openvino", "llamacpp", "generate")
MADE = ENVIRONMENTS / "models"

FORMATS = {
    "bf16": ("BF16", "bf16"),
    "q8_0": ("Q8_0", "int8"),
    "q4_0": ("Q4_0", "int4"),
    "q4_k": ("Q4_K", "int4"),
    "smollm2": ("", ""),
}
"""By name: the type in a GGUF file (none: the file is somebody else's), and what OpenVINO makes of the folder (one of
`WEIGHTS`; none: it reads the file)."""


def _kept(place: Path, make: Callable[[Path], object]) -> Path:
    """What `make` writes to a path that it is given, whole or not at all."""
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as made:
            make(Path(made) / place.name)
            shutil.move(Path(made) / place.name, place)
    return place


def find_files(shape: str, name: str) -> tuple[Path | None, Path]:
    """The folder in bfloat16 and the GGUF file of a format; no folder where the file is somebody else's."""
    kind, _ = FORMATS[name]
    if not kind:
        return None, find_model(name, print).path
    folder = _kept(MADE / shape, lambda to: random_model.make(to, shape))
    return folder, _kept(MADE / f"{shape}-{kind}.gguf", lambda to: write_gguf(folder, to, "qwen3", kind))


def make_sides(
    args: argparse.Namespace, name: str, scenarios: Sequence[SpeedScenario], notes: list[str], close: ExitStack
) -> list[Side]:
    """All of `args.sides` for one format; what can't be had is in `notes`, with the reason."""
    folder, file = find_files(args.make, name)
    compressed, sides = FORMATS[name][1], list[Side]()
    for side in args.sides:
        by_folder = folder if side == "openvino" or (name == "bf16" and side != "llamacpp") else None
        weights = {"weights": compressed} if side == "openvino" and folder else {}
        try:
            made = make_side(side, by_folder or file, args, scenarios, **weights)
        except (ConfigError, OSError, RuntimeError, ValueError) as error:
            notes.append(f"{name}: without {side}: {error}")
            continue
        close.callback(made.close)
        notes.append(f"{name}: {side} is {made.name}{''.join(f', weights as {kind}' for kind in weights.values())}")
        made.name = side
        sides.append(made)
    return sides


def measure_format(
    args: argparse.Namespace, name: str, scenarios: Sequence[SpeedScenario], notes: list[str]
) -> dict[str, dict[str, Measured]]:
    """One format on all sides: by scenario, then by side."""

    def left_out(scenario: str, side: str, error: Exception) -> None:
        notes.append(f"{name}, {scenario}: without {side}: {error}")

    with ExitStack() as close:
        sides = make_sides(args, name, scenarios, notes, close)
        vocab = read_model_spec(find_files(args.make, name)[1]).vocab_size
        found = measure(sides, scenarios, vocab, args.repeats, left_out) if sides else {}
        notes += [f"{name}: {note}" for side in sides if isinstance(side, Rival) for note in side.notes]
    for side in sides[1:]:
        ones = [by_side[side.name] for by_side in found.values() if side.name in by_side]
        begun, whole = ([e for one in ones for e in getattr(one, which)] for which in ("begun_equal", "equal"))
        if begun:
            said = f"first tokens of {sides[0].name} in {statistics.fmean(begun):.0%} of sequences"
            notes.append(f"{name}: {side.name} has the {said}, all of them in {statistics.fmean(whole):.0%}")
    return found


def table(results: dict[str, dict[str, dict[str, Measured]]], sides: Sequence[str]) -> Iterator[str]:
    """Lines of a table in Markdown."""
    yield "| tokens/s | " + " | ".join(sides) + " |"
    yield "|---|" + "---:|" * len(sides)
    for name, by_scenario in results.items():
        for scenario, by_side in by_scenario.items():
            first, cells = by_side.get(sides[0]), []
            for side in sides:
                one = by_side.get(side)
                over = f" ({first.median / one.median:.2f})" if one and first and one is not first else ""
                cells.append(f"{one.median:,.1f} ±{one.spread:.0%}{over}" if one else "–")
            yield f"| {name}, {scenario} | " + " | ".join(cells) + " |"


@contextmanager
def kept_to(cores: int) -> Iterator[None]:
    """This process, and those that it starts, on so many cores."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, sorted(before)[:cores])
    torch.set_num_threads(cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write; figures are written after each format, so that a run that is ended leaves those before."""
    scenarios = [SpeedScenario(1, args.prefill_tokens, 1)]
    scenarios += [SpeedScenario(batch, args.context, args.output_tokens) for batch in args.batches]
    results: dict[str, dict[str, dict[str, Measured]]] = {}
    notes: list[str] = []
    about = ", ".join(f"{key} {value}" for key, value in describe().items())
    print(f"{about}, transformers {transformers.__version__}, {args.clock} clock", flush=True)
    for name in args.formats:
        told = len(notes)
        results[name] = measure_format(args, name, scenarios, notes)
        gc.collect()
        print("\n".join([*notes[told:], f"{name}: load {os.getloadavg()[0]:.1f}"]), flush=True)
        rows = {f"{kind}, {scenario}": by for kind, each in results.items() for scenario, by in each.items()}
        figures = {
            row: {n: asdict(m) | {"median": m.median, "spread": m.spread} for n, m in by.items()}
            for row, by in rows.items()
        }
        write_report(args, tokens_per_s=figures, notes=notes, transformers=transformers.__version__)
    print("\n".join([*table(results, args.sides), "", *notes]))


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured; 2: wrong flags or a model that can't be had."""
    flags = flag_parser(__doc__)
    flags.add_argument("--rivals", action="store_true", help=f"beside {', '.join(RIVALS)}")
    flags.add_argument("--sides", nargs="+", choices=(*OWN, *RIVALS), help="what to measure, the first over the others")
    flags.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="default: all")
    flags.add_argument("--make", choices=random_model.SIZES, default="qwen3-445m", help="default: %(default)s")
    flags.add_argument("--threads", type=int, choices=(1, 2), default=1)
    flags.add_argument("--clock", choices=CLOCKS, help="default: cpu with one thread, else wall")
    flags.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32], help="of decode (default: 1 8 32)")
    flags.add_argument("--prefill-tokens", type=int, default=512)
    flags.add_argument("--context", type=int, default=32, help="prompt tokens before decode")
    flags.add_argument("--output-tokens", type=int, default=9, help="tokens of a decode run, the first uncounted")
    flags.add_argument("--repeats", type=int, default=3, help="rounds behind the one that warms up")
    args = flags.parse_args(argv)
    args.sides = args.sides or [*OWN, *(RIVALS if args.rivals else ())]
    args.clock, args.dtype = args.clock or ("cpu" if args.threads == 1 else "wall"), "auto"
    if min([*args.batches, args.prefill_tokens, args.context, args.repeats]) < 1 or args.output_tokens < 2:
        flags.error("batches, tokens and repeats must be 1 or more, --output-tokens 2 or more")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        with kept_to(args.threads):
            run(args)
    except (CheckpointError, ConfigError) as error:
        print(f"bench.engine.formats: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
