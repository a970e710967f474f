"""Measure the engine alone, beside transformers on the same checkpoint, dtype and threads in the same run.

    python -m bench.engine.engine_speed  # the demo checkpoint
    python -m bench.engine.engine_speed --make qwen3-445m  # a Qwen3-shaped one with random weights
    python -m bench.engine.engine_speed --make qwen3-445m --threads 2 --sides generate openvino vllm  # and rivals
    python -m bench.engine.engine_speed --families  # a miniature of every family, or of those that are named

Prefill: one prompt, tokens a second until its first token. Decode: tokens a second of a batch once all of its
sequences have their first token. Repetitions go round all sides in turns, each with new prompts, so that a noisy
machine treats them alike; medians are shown, with our engine over the others.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from bench.common import random_model
from bench.common.bench_report import figure_table, flag_parser, headline, write_report
from bench.common.engines_compared import ContinuousBatching, Generate, Side
from bench.rivals.rival_engine import PACKAGES, Rival
from tests.support.bare_engine import CLOCKS, Answer, Twinpool
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import CheckpointError, ConfigError

_LOWEST_TOKEN = 300
"""Ids below may be special."""
SIDES = ("invariant", "fast", "torch", "drafted", "adapters", "generate", "continuous", "openvino", "vllm")
"""drafted: 4 drafts a row, all right; adapters: one a row. The last two need `python -m bench.rivals --install`."""


_OWN: dict[str, dict[str, Any]] = {
    "invariant": {},
    "int8": {"activations": "int8"},
    "fast": {"numerics": "fast"},
    "torch": {"attention": "torch"},
    **{name: {} for name in ("drafted", "adapters")},
}


@dataclass(frozen=True)
class SpeedScenario:
    """One thing that is measured."""

    batch: int
    prompt_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        if self.output_tokens == 1:
            return f"prefill of {self.prompt_tokens}"
        return f"decode, batch {self.batch}"

    def rate(self, answer: Answer) -> float:
        """Tokens a second."""
        if self.output_tokens == 1:
            return self.batch * self.prompt_tokens / answer.prefilled_s
        return answer.decode_tokens_per_s


@dataclass
class Measured:
    """One scenario on one side."""

    rates: list[float] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)
    """For each sequence: the same tokens as the first side's."""
    begun_equal: list[bool] = field(default_factory=list)
    """The same first token."""

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """Half of what lies between the least and the most, over the median."""
        return (max(self.rates) - min(self.rates)) / 2 / self.median


Results = dict[str, dict[str, Measured]]
"""By scenario, then by side."""


def measure(
    sides: Sequence[Side],
    scenarios: Sequence[SpeedScenario],
    vocab: int,
    repeats: int,
    left_out: Callable[[str, str, Exception], None] | None = None,
) -> Results:
    """Rounds of all sides in turns; round 0 warms up and counts for nothing.

    `left_out`: told of a scenario, and of a side that has no device memory for it, or that has died, and is left out of
    its figures from then on; without it the error is raised.
    """
    random = np.random.default_rng(1)
    results: Results = {s.name: {side.name: Measured() for side in sides} for s in scenarios}
    for number in range(repeats + 1):
        for scenario in scenarios:
            shape, found = (scenario.batch, scenario.prompt_tokens), results[scenario.name]
            prompts = random.integers(min(_LOWEST_TOKEN, vocab // 2), vocab, shape).tolist()
            turn, answers = number % len(sides), dict[str, Answer]()
            for side in (side for side in (*sides[turn:], *sides[:turn]) if side.name in found):
                try:
                    answers[side.name] = side.run(prompts, scenario.output_tokens)
                except (torch.OutOfMemoryError, ConfigError) as error:
                    if left_out is None:
                        raise
                    del found[side.name]
                    left_out(scenario.name, side.name, error)
            first = answers.get(sides[0].name)
            for name, answer in answers.items() if number else ():
                found[name].rates.append(scenario.rate(answer))
                pairs = list(zip(answer.tokens, first.tokens, strict=True)) if first is not None else []
                found[name].equal += [a == b for a, b in pairs]
                found[name].begun_equal += [a[0] == b[0] for a, b in pairs]
    return results


def table(results: Results, title: str, figure: Callable[[Sequence[float]], float]) -> Table:
    """One figure of all repetitions, and in brackets the first side over the others."""
    names = list(next(iter(results.values())))
    out = figure_table(f"tokens/s, {title} (first column over this one)", ("", *names))
    for scenario, by_side in results.items():
        ours, *others = (figure(by_side[name].rates) for name in names)
        out.add_row(scenario, f"{ours:.1f}", *(f"{other:.1f} ({ours / other:.2f})" for other in others))
    return out


def parser() -> argparse.ArgumentParser:
    out = flag_parser(__doc__)
    which = out.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, default=random_model.DEMO, help="checkpoint folder (default: the demo)")
    which.add_argument("--make", choices=random_model.NAMES, help="make this one with random weights")
    which.add_argument(
        "--families", nargs="*", choices=random_model.FAMILIES, help="make a miniature of each (default: of all)"
    )
    out.add_argument("--threads", type=int, default=0, help="torch's threads (default: all cores)")
    out.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    out.add_argument(
        "--sides",
        nargs="+",
        choices=SIDES,
        help="what to measure (default: invariant, fast, generate, continuous; of families invariant, generate)",
    )
    out.add_argument("--batches", type=int, nargs="+", help="batches of decode (default: 1 8 32; of families 1 8)")
    out.add_argument("--prefill-tokens", type=int, default=512)
    out.add_argument("--context", type=int, help="prompt tokens before decode (default: 128; of families 384)")
    out.add_argument("--output-tokens", type=int, default=33, help="tokens of a decode run, the first uncounted")
    out.add_argument("--repeats", type=int, default=5)
    out.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of the processor, for busy machines")
    return out


def make_side(
    name: str, model: Path, args: argparse.Namespace, scenarios: Sequence[SpeedScenario], **rival: str
) -> Side:
    """One of `SIDES` or another rival, loaded; `rival`: what else a rival is told."""
    # Whole pages for every sequence, at any side's page size.
    tokens = max(s.batch * (s.prompt_tokens + s.output_tokens + 32) for s in scenarios)
    sequences = max(s.batch for s in scenarios)
    config: dict[str, Any] = {"dtype": args.dtype, "threads": args.threads}
    if name in _OWN:
        made, drafts = EngineConfig(**_OWN[name], **config), 4 * (name == "drafted")
        ours = Twinpool(model, made, tokens, sequences, clock=args.clock, drafts=drafts)
        ours.name = f"twinpool, {name}"
        if name == "adapters":
            ours.adapt(model)
        return ours
    if name in PACKAGES:
        return Rival(name, model, args.threads or torch.get_num_threads(), args.clock, **rival)
    if name == "generate":
        return Generate(model, EngineConfig(**config), clock=args.clock)
    return ContinuousBatching(model, EngineConfig(**config), tokens)


Agreement = dict[str, float]
"""By side: the share of sequences that got the first side's tokens."""


def measure_model(args: argparse.Namespace, folder: Path) -> tuple[Results, Agreement]:
    """All of `args.sides` on one checkpoint."""
    spec = read_model_spec(folder)
    scenarios = [SpeedScenario(1, args.prefill_tokens, 1)]
    scenarios += [SpeedScenario(batch, args.context, args.output_tokens) for batch in args.batches]
    longest = max(s.prompt_tokens + s.output_tokens for s in scenarios)
    if longest > spec.context:
        raise ConfigError(f"{longest} tokens don't fit the checkpoint's context of {spec.context}")
    with ExitStack() as close:
        sides = []
        for name in args.sides:
            sides.append(make_side(name, folder, args, scenarios))
            close.callback(sides[-1].close)
        results = measure(sides, scenarios, spec.vocab_size, args.repeats)
        agreement = {
            side.name: statistics.fmean(e for by_side in results.values() for e in by_side[side.name].equal)
            for side in sides[1:]
        }
    return results, agreement


def models(args: argparse.Namespace) -> Iterator[Path]:
    """The checkpoints to measure, one after the other; made ones are gone when the next is asked for."""
    made = [args.make] if args.make else args.families
    if made is None:
        yield args.model
        return
    for name in made:
        with tempfile.TemporaryDirectory(prefix="twinpool-bench-") as folder:
            yield random_model.make(Path(folder) / name, name)


def run(args: argparse.Namespace, console: Console) -> None:
    """Measure, print, write."""
    results: Results = {}
    agreement: Agreement = {}
    console.print(headline())
    for folder in models(args):
        label = f"{folder.name}: " if args.families else ""
        mine, agrees = measure_model(args, folder)
        results |= {label + scenario: by_side for scenario, by_side in mine.items()}
        agreement |= {label + side: share for side, share in agrees.items()}
        if label:
            console.print(
                f"{label}load {os.getloadavg()[0]:.1f}", *(_line(scenario, by) for scenario, by in mine.items())
            )
        gc.collect()
    console.print(table(results, "medians", statistics.median))
    console.print(table(results, "best of each, for busy machines", max))
    for side, share in agreement.items():
        console.print(f"{side}: the tokens of the first column in {share:.0%} of sequences")
    figures = {s: {n: asdict(m) | {"median": m.median} for n, m in by.items()} for s, by in results.items()}
    write_report(args, tokens_per_s=figures, same_tokens=agreement)


def _line(scenario: str, by_side: dict[str, Measured]) -> str:
    """The medians of one scenario, at once: a run of all families is long."""
    return f"; {scenario} " + " / ".join(f"{measured.median:.1f}" for measured in by_side.values())


def _fill(args: argparse.Namespace) -> None:
    """Defaults that hang on what is measured."""
    families = args.families is not None
    if families and not args.families:
        args.families = list(random_model.FAMILIES)
    args.sides = args.sides or (
        ["invariant", "generate"] if families else ["invariant", "fast", "generate", "continuous"]
    )
    args.batches = args.batches or ([1, 8] if families else [1, 8, 32])
    args.context = args.context or (384 if families else 128)


def main(argv: list[str] | None = None) -> int:
    """0: measured; 2: wrong flags or a checkpoint that can't be used."""
    flags = parser()
    args = flags.parse_args(argv)
    _fill(args)
    numbers = [*args.batches, args.prefill_tokens, args.context, args.repeats]
    if min(numbers) < 1 or args.output_tokens < 2 or args.threads < 0:
        flags.error("batches, tokens and repeats must be 1 or more, --output-tokens 2 or more")
    if args.clock == "cpu" and (args.threads != 1 or "continuous" in args.sides):
        flags.error(
            "--clock cpu is fair with --threads 1 only, and not to continuous batching, which has its own clock"
        )
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        run(args, Console(width=max(100, Console().width)))
    except (CheckpointError, ConfigError) as error:
        print(f"bench.engine: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
