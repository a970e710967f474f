"""Drive OpenAI endpoints and measure what clients see.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.common.bench_report import flag_parser
from bench.common.latency_report import Slo, Summary, ratios, summarize, table
from bench.common.workload import LengthRange, synthetic
from twinpool.cli.replay.openai_client import Endpoint, EndpointError, Outcome, stream
from twinpool.cli.replay.trace_prompts import Ask, Content, asks_of
from twinpool.sim.scale.traffic import read_trace

_CALIBRATION_WORDS = 256
_LAG_WARNING_MS = 20.0


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
        ask = Ask(0.0, tuple(range(_CALIBRATION_WORDS)), 1)
        body = {**self.body(ask), "stream": False}
        body.pop("stream_options", None)
        answer = await self.endpoint.ask("POST", self.path, body)
        usage = answer.get("usage") or {}
        if not usage.get("prompt_tokens"):
            raise EndpointError(f"{self.endpoint.url} gives no usage, so text of a known length can't be made")
        self.words_per_token = _CALIBRATION_WORDS / usage["prompt_tokens"]


async def run(
    target: Target,
    asks: list[Ask],
    concurrency: int | None,
    timeout_s: float,
    on_end: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Send all `asks`, `concurrency` at a time or, without it, each at its `at_s`; returns them in order of sending."""
    outcomes: list[Outcome] = []

    async def one(ask: Ask, request: bytes, due_s: float) -> None:
        outcome = Outcome(due_s, due_s, len(ask.tokens), ask.output_tokens)
        outcomes.append(outcome)
        on_end(await stream(target.endpoint, request, outcome, timeout_s))

    async def worker(queue: Iterator[Ask]) -> None:
        for ask in queue:
            request = target.endpoint.encode(target.path, target.body(ask))
            await one(ask, request, time.perf_counter())

    wall, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        if concurrency is not None:
            queue = iter(asks)
            for _ in range(concurrency):
                group.create_task(worker(queue))
        else:
            for ask in asks:
                request = target.endpoint.encode(target.path, target.body(ask))  # before it is due, not after
                await asyncio.sleep(max(0.0, wall + ask.at_s - time.perf_counter()))
                group.create_task(one(ask, request, wall + ask.at_s))
    target.wall_s += time.perf_counter() - wall
    target.cpu_s += time.process_time() - cpu
    return outcomes


def make_asks(args: argparse.Namespace, target: Target, seed: int) -> list[Ask]:
    """The load of one round: the same for the same seed and arguments."""
    low, high = (int(part) for part in args.token_range.split(":"))
    content = Content(seed, low, high, target.words_per_token)
    if args.trace is None:
        inputs, outputs = LengthRange.parse(args.input_tokens), LengthRange.parse(args.output_tokens)
        return synthetic(content, args.requests or 100, inputs, outputs, args.shared_prefix, args.rate)
    lines = read_trace(args.trace, args.requests)
    return list(asks_of(content, lines, args.scale_lengths, args.speed, args.max_context))


async def measure(args: argparse.Namespace, console: Console) -> list[Target]:
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
        for outcome in await run(target, warm, 1, args.timeout_s):
            if not outcome.ok:
                raise EndpointError(f"{target.endpoint.url}: warm-up failed: {outcome.error}: {outcome.note}")
        target.wall_s = target.cpu_s = 0.0
    rounds = args.rounds or (3 if len(targets) > 1 else 1)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tail = TextColumn("{task.fields[tokens]} tokens, {task.fields[errors]} errors")
    # Drawn twice a second: the bar runs on the cores that are measured.
    with Progress(*columns, tail, console=console, refresh_per_second=2, disable=not console.is_terminal) as progress:
        for number in range(rounds):
            for target in targets if number % 2 == 0 else targets[::-1]:
                asks = make_asks(args, target, args.seed + number)
                task = progress.add_task(f"{target.name} {number + 1}/{rounds}", total=len(asks), tokens=0, errors=0)
                counts = {"tokens": 0, "errors": 0}

                def show(outcome: Outcome, task: Any = task, counts: dict[str, int] = counts) -> None:
                    counts["tokens"] += outcome.output_tokens if outcome.ok else 0
                    counts["errors"] += not outcome.ok
                    progress.update(task, advance=1, **counts)  # type: ignore[arg-type]

                target.outcomes += await run(target, asks, args.concurrency, args.timeout_s, show)
    return targets


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
    how.add_argument(
        "--trace", type=Path, help="open loop: arrivals and lengths of a trace (with --concurrency: lengths)"
    )
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
    shown.add_argument("--slo-ttft-ms", type=float, help="good requests have their first token within this")
    shown.add_argument("--slo-tpot-ms", type=float, help="and later tokens at this or less on average")
    shown.add_argument("--records", action="store_true", help="with --json: also each request")
    return out


def check(args: argparse.Namespace) -> str | None:
    """What is wrong with the flags together; None where nothing is."""
    if args.concurrency is None and args.rate is None and args.trace is None:
        return "say how to send: --concurrency N, --rate R or --trace FILE"
    if args.rate is not None and (args.concurrency is not None or args.trace is not None):
        return "--rate goes with neither --concurrency nor --trace"
    positive = ("concurrency", "rate", "scale_lengths", "speed", "max_context", "requests", "rounds", "timeout_s")
    for name in positive:
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


def write_json(path: Path, args: argparse.Namespace, targets: list[Target], sides: dict[str, Summary]) -> None:
    """Settings, figures, ratios and, if wanted, each request."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    settings.pop("header")  # may hold a key
    out: dict[str, Any] = {"settings": settings, "sides": {name: side.to_dict() for name, side in sides.items()}}
    if len(sides) == 2:
        out["ratios"] = ratios(*sides.values())
    if args.records:
        out["records"] = {target.name: [record(outcome) for outcome in target.outcomes] for target in targets}
    path.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


def record(outcome: Outcome) -> dict[str, Any]:
    """One request as JSON; times in milliseconds since it was sent."""
    return {
        "lag_ms": (outcome.sent_s - outcome.due_s) * 1e3,
        "arrivals_ms": [round((at - outcome.sent_s) * 1e3, 3) for at in outcome.arrivals_s],
        "e2e_ms": outcome.e2e_s * 1e3,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "completion_tokens": outcome.completion_tokens,
        "wanted_tokens": outcome.wanted_tokens,
        "error": outcome.error,
        "note": outcome.note,
    }


def main(argv: list[str] | None = None) -> int:
    """0: measured; 1: measured, with errors; 2: wrong flags or an endpoint that can't be used."""
    flags = parser()
    args = flags.parse_args(argv)
    if args.baseline_extra is None:
        args.baseline_extra = args.extra
    if wrong := check(args):
        flags.error(wrong)
    console = Console(stderr=True)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            targets = runner.run(measure(args, console))
    except (EndpointError, ValueError, OSError) as error:
        print(f"bench.serve: {error}", file=sys.stderr)
        return 2
    slo = Slo(args.slo_ttft_ms, args.slo_tpot_ms)
    sides = {t.name: summarize(t.outcomes, slo, t.wall_s, t.cpu_s) for t in targets}
    Console().print(table(sides))
    for name, side in sides.items():
        for kind, note in side.notes.items():
            print(f"{name}: {kind}: {note}")
        if side.lag_ms.p99 is not None and side.lag_ms.p99 > _LAG_WARNING_MS:
            print(
                f"{name}: this client sent up to {side.lag_ms.p99:.0f} ms late (p99): it is part of what was measured"
            )
    if args.json is not None:
        write_json(args.json, args, targets, sides)
    return 1 if any(side.errors for side in sides.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
