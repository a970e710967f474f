"""Drive OpenAI endpoints and measure what clients see, by the client and the figures of `twinpool replay`.

    python -m bench.serving.serve_load --url http://HOST:PORT --concurrency 8 --requests 100
    python -m bench.serving.serve_load --url http://HOST:PORT --rate 4 --input-tokens 128:512 --output-tokens 64
    python -m bench.serving.serve_load --url http://HOST:PORT --trace TRACE.jsonl --scale-lengths 0.05
    python -m bench.serving.serve_load --url http://HOST:PORT --baseline-url http://HOST:OTHER --concurrency 8

Closed loop (`--concurrency`): that many requests are always under way. Open loop (`--rate`, `--trace`): requests go
out when they are due, however slow the answers are; the client's own lateness is measured and shown. With a baseline
both endpoints get the same load in turns, each round with new content, and their ratios are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from bench.common.bench_report import figure_table, flag_parser, write_report
from bench.common.load_client import LengthRange, synthetic
from twinpool.cli.load.open_loop import Ask, Content, OpenLoop, asks_of
from twinpool.cli.load.openai_client import Endpoint, EndpointError, Outcome, stream
from twinpool.cli.load.replay_figures import LATE_S, ReplayFigures, figures_of, record_of
from twinpool.sim.scale.cluster_plan import AnswerTarget
from twinpool.sim.scale.traffic import read_trace

_CALIBRATION_WORDS = 256
_UNBOUNDED = 1 << 20
PERCENTILES = ("p50", "p90", "p99")
SPREADS = {"TTFT": "ttft", "ITL": "itl", "TPOT": "tpot", "answer": "answer"}
RATES = {
    "requests/s": "requests_per_s", "input tokens/s": "input_tokens_per_s", "output tokens/s": "output_tokens_per_s",
    "goodput, requests/s": "goodput",
}  # fmt: skip


@dataclass
class Target:
    """One endpoint and how it is asked."""

    name: str
    endpoint: Endpoint
    model: str
    chat: bool
    text: bool
    extra: dict[str, Any]
    words_per_token: float = 1.0
    outcomes: list[Outcome] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        """The JSON of one streamed request for exactly `ask.output_tokens` tokens, greedy unless `extra` says so.

        A null in `extra` leaves a field out, for servers that refuse what they don't know.
        """
        limit = "max_completion_tokens" if self.chat else "max_tokens"
        options = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.model, **self._prompt(ask), limit: ask.output_tokens, **options, **self.extra}
        return {name: value for name, value in body.items() if value is not None}

    def _prompt(self, ask: Ask) -> dict[str, Any]:
        if self.chat:
            return {"messages": [{"role": "user", "content": ask.text()}]}
        return {"prompt": ask.text() if self.text else list(ask.tokens)}

    async def calibrate(self) -> None:
        """Learn how many words make a token, where prompts are text."""
        if not (self.chat or self.text):
            return
        body = {**self.body(Ask(0.0, tuple(range(_CALIBRATION_WORDS)), 1)), "stream": False}
        body.pop("stream_options", None)
        usage = (await self.endpoint.ask("POST", self.path, body)).get("usage") or {}
        if not usage.get("prompt_tokens"):
            raise EndpointError(f"{self.endpoint.url} gives no usage, so text of a known length can't be made")
        self.words_per_token = _CALIBRATION_WORDS / usage["prompt_tokens"]

    async def run(self, asks: list[Ask], concurrency: int | None, timeout_s: float) -> None:
        """Send all `asks`, `concurrency` at a time or, without it, each at its `at_s`."""

        async def send(request: bytes, outcome: Outcome) -> Outcome:
            if concurrency is not None:  # In a closed loop a request is due when there is a place for it.
                outcome.due_s, outcome.held_s = time.perf_counter(), 0.0
            return await stream(self.endpoint, request, outcome, timeout_s)

        def encode(ask: Ask, number: int) -> bytes:
            return self.endpoint.encode(self.path, self.body(ask))

        loop = OpenLoop(send, encode, concurrency or _UNBOUNDED)
        due = [replace(ask, at_s=0.0) for ask in asks] if concurrency is not None else asks
        wall, cpu = time.perf_counter(), time.process_time()
        await loop.run(due, lambda outcome: None)
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu
        self.outcomes += loop.outcomes

    def figures(self, slo: AnswerTarget) -> ReplayFigures:
        return figures_of(self.outcomes, slo, self.wall_s, self.cpu_s, counts_prompts=False, exact=True)


def make_asks(args: argparse.Namespace, target: Target, seed: int) -> list[Ask]:
    """The load of one round: the same for the same seed and arguments."""
    low, high = (int(part) for part in args.token_range.split(":"))
    content = Content(seed, low, high, target.words_per_token)
    if args.trace is None:
        inputs, outputs = LengthRange.parse(args.input_tokens), LengthRange.parse(args.output_tokens)
        return synthetic(content, args.requests or 100, inputs, outputs, args.shared_prefix, args.rate)
    lines = read_trace(args.trace, args.requests)
    return list(asks_of(content, lines, args.scale_lengths, args.speed, args.max_context))


async def measure(args: argparse.Namespace) -> list[Target]:
    """Warm up, then run all rounds on all targets in turns."""
    targets = []
    headers = [tuple(header.split(": ", 1)) for header in args.header]
    for name, url, model, extra, needs_done in (
        ("endpoint", args.url, args.model, args.extra, True),
        ("baseline", args.baseline_url, args.baseline_model, args.baseline_extra, not args.baseline_without_done),
    ):
        if url is not None:
            endpoint = Endpoint.parse(url, headers, needs_done)
            chosen = model or await endpoint.first_model()
            targets.append(Target(name, endpoint, chosen, args.endpoint == "chat", args.text, json.loads(extra)))
            await targets[-1].calibrate()
    for target in targets:
        warm = synthetic(Content(args.seed - 1, 300, 400), args.warmup, LengthRange(32, 32), LengthRange(8, 8))
        await target.run(warm, 1, args.timeout_s)
        for outcome in target.outcomes:
            if not outcome.ok:
                raise EndpointError(f"{target.endpoint.url}: warm-up failed: {outcome.error}: {outcome.note}")
        target.outcomes, target.wall_s, target.cpu_s = [], 0.0, 0.0
    rounds = args.rounds or (3 if len(targets) > 1 else 1)
    for number in range(rounds):
        for target in targets if number % 2 == 0 else targets[::-1]:
            await target.run(make_asks(args, target, args.seed + number), args.concurrency, args.timeout_s)
            errors = sum(not outcome.ok for outcome in target.outcomes)
            print(f"{target.name}: round {number + 1} of {rounds}, {errors} errors so far", file=sys.stderr, flush=True)
    return targets


def ratios(ours: ReplayFigures, baseline: ReplayFigures) -> dict[str, float | None]:
    """`ours` over `baseline`: below 1 is faster for latencies, above 1 for rates."""
    pairs = {
        f"{name}_{q}": (getattr(getattr(ours, name), q), getattr(getattr(baseline, name), q))
        for name in SPREADS.values()
        for q in PERCENTILES
    } | {name: (getattr(ours, name), getattr(baseline, name)) for name in RATES.values()}
    return {name: mine / theirs if mine and theirs else None for name, (mine, theirs) in pairs.items()}


def table(sides: Mapping[str, ReplayFigures]) -> Table:
    """All sides beside each other; with two, also the first over the second."""
    all_sides = list(sides.values())
    quotients = ratios(*all_sides) if len(all_sides) == 2 else None
    out = figure_table(None, ["", *sides, *(["ratio"] if quotients else [])])

    def row(label: str, cells: list[str], key: str = "") -> None:
        quotient = (quotients or {}).get(key)
        out.add_row(label, *cells, *([f"{quotient:.2f}" if quotient is not None else ""] if quotients else []))

    for label, name in (SPREADS | {"client late": "late"}).items():
        for q in PERCENTILES:
            spreads = [getattr(side, name) for side in all_sides]
            row(f"{label} {q}, ms", [f"{1e3 * getattr(s, q):.2f}" if s.count else "-" for s in spreads], f"{name}_{q}")
    for label, name in RATES.items():
        row(label, [f"{getattr(side, name):.2f}" for side in all_sides], name)
    row("within SLO", [f"{side.good / side.sent:.1%}" if side.sent else "-" for side in all_sides])
    row("input from cache", [f"{side.cached_share:.1%}" for side in all_sides])
    row("succeeded", [f"{side.answered} of {side.sent}" for side in all_sides])
    for kind in sorted({kind for side in all_sides for kind in side.errors}):
        row(f"[red]error: {kind}[/red]", [str(side.errors.get(kind, 0)) for side in all_sides])
    if any(side.wrong for side in all_sides):
        row("[yellow]wrong token count[/yellow]", [str(sum(side.wrong.values())) for side in all_sides])
    row("wall, s", [f"{side.wall_s:.1f}" for side in all_sides])
    row("client CPU, cores", [f"{side.client_cores:.2f}" for side in all_sides])
    return out


def parser() -> argparse.ArgumentParser:
    """All flags, checked by `check` as a whole."""
    out = flag_parser(__doc__)
    where = out.add_argument_group("where")
    where.add_argument("--url", required=True, help="an OpenAI endpoint: http://HOST:PORT")
    where.add_argument("--baseline-url", help="another one, under the same load in turns")
    where.add_argument("--model", help="model name to send (default: the first one the server lists)")
    where.add_argument("--baseline-model", help="the same for the baseline")
    where.add_argument("--baseline-without-done", action="store_true", help="the baseline's streams end without [DONE]")
    where.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    where.add_argument("--header", action="append", default=[], metavar="'NAME: VALUE'")
    how = out.add_argument_group("how")
    how.add_argument("--concurrency", type=int, help="closed loop: requests under way")
    how.add_argument("--rate", type=float, help="open loop: requests a second, Poisson")
    how.add_argument("--trace", type=Path, help="open loop: a trace's arrivals and lengths (--concurrency: lengths)")
    how.add_argument("--scale-lengths", type=float, default=1.0, help="multiply a trace's lengths")
    how.add_argument("--speed", type=float, default=1.0, help="play a trace this much faster")
    how.add_argument("--max-context", type=int, help="cut a trace's requests to this many tokens in all")
    how.add_argument("--requests", "--limit", type=int, help="how many (default: 100, or the whole trace)")
    how.add_argument("--rounds", type=int, help="how often, each with new content (default: 1; 3 with a baseline)")
    how.add_argument("--warmup", type=int, default=2, help="requests before the clock starts")
    how.add_argument("--timeout-s", type=float, default=300.0, help="a request's deadline")
    how.add_argument("--seed", type=int, default=1)
    what = out.add_argument_group("what")
    what.add_argument("--input-tokens", default="256", help="N or LOW:HIGH")
    what.add_argument("--output-tokens", default="64", help="N or LOW:HIGH")
    what.add_argument("--shared-prefix", type=int, default=0, help="first tokens that all prompts share")
    what.add_argument("--text", action="store_true", help="send text, not token ids (always so for chat)")
    what.add_argument("--token-range", default="300:2000", help="token ids to draw from, LOW:HIGH")
    what.add_argument("--extra", default="{}", help="JSON to add to each request's body; null leaves a field out")
    what.add_argument("--baseline-extra", help="the same for the baseline (default: as --extra)")
    shown = out.add_argument_group("shown")
    shown.add_argument("--slo-ttft-ms", type=float, default=inf, help="good requests have their first token within it")
    shown.add_argument("--slo-tpot-ms", type=float, default=inf, help="and later tokens at this or less on average")
    shown.add_argument("--records", action="store_true", help="with --json: also each request")
    return out


def check(args: argparse.Namespace) -> str | None:
    """What is wrong with the flags together; None where nothing is."""
    if args.concurrency is None and args.rate is None and args.trace is None:
        return "say how to send: --concurrency N, --rate R or --trace FILE"
    if args.rate is not None and (args.concurrency is not None or args.trace is not None):
        return "--rate goes with neither --concurrency nor --trace"
    positive = ("concurrency", "rate", "scale_lengths", "speed", "max_context", "requests", "rounds", "timeout_s")
    for name in (*positive, "slo_ttft_ms", "slo_tpot_ms"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            return f"--{name.replace('_', '-')} must be above 0"
    if args.warmup < 0 or args.shared_prefix < 0 or args.seed < 1:
        return "--warmup and --shared-prefix must be 0 or more, --seed 1 or more"
    if args.max_context is not None and args.max_context < 2:
        return "--max-context must leave room for a prompt and an answer"
    if any(": " not in header for header in args.header):
        return "--header takes 'NAME: VALUE'"
    try:
        low, high = (int(part) for part in args.token_range.split(":"))
        LengthRange.parse(args.input_tokens)
        LengthRange.parse(args.output_tokens)
        extras = [json.loads(args.extra), json.loads(args.baseline_extra)]
    except ValueError as error:
        return str(error)
    if not 0 <= low < high or not all(isinstance(extra, dict) for extra in extras):
        return "--token-range takes LOW:HIGH and --extra a JSON object"
    return None


def main(argv: list[str] | None = None) -> int:
    """0: measured; 1: measured, with errors; 2: wrong flags or an endpoint that can't be used."""
    flags = parser()
    args = flags.parse_args(argv)
    if args.baseline_extra is None:
        args.baseline_extra = args.extra
    if wrong := check(args):
        flags.error(wrong)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            targets = runner.run(measure(args))
    except (EndpointError, ValueError, OSError) as error:
        print(f"bench.serve: {error}", file=sys.stderr)
        return 2
    slo = AnswerTarget(args.slo_ttft_ms / 1e3, args.slo_tpot_ms / 1e3)
    sides = {target.name: target.figures(slo) for target in targets}
    Console().print(table(sides))
    for name, side in sides.items():
        for kind, note in side.notes.items():
            print(f"{name}: {kind}: {note}")
        if side.late.p99 > LATE_S:
            late = f"this client sent up to {1e3 * side.late.p99:.0f} ms late (p99)"
            print(f"{name}: {late}: it is part of what was measured")
    out: dict[str, Any] = {"sides": {name: side.to_dict() for name, side in sides.items()}}
    if len(sides) == 2:
        out["ratios"] = ratios(*sides.values())
    if args.records:
        out["records"] = {one.name: [record_of(o, one.outcomes[0].due_s) for o in one.outcomes] for one in targets}
    del args.header  # It may hold a key.
    write_report(args, **out)
    return 1 if any(side.errors for side in sides.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
