"""The command `twinpool replay`: what it is asked, and the run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from twinpool.cli.load.open_loop import Ask, Content, OpenLoop, asks_of
from twinpool.cli.load.openai_client import Endpoint, EndpointError, Outcome, stream
from twinpool.cli.load.replay_figures import (
    RecentFigures,
    ReplayFigures,
    check_plots,
    draw_plots,
    figures_of,
    final_lines,
    final_table,
    live_line,
    live_view,
    record_of,
    write_json,
)
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.outside_data import read_json
from twinpool.sim.scale.cluster_plan import AnswerTarget
from twinpool.sim.scale.traffic import TraceLine, read_trace

KEY_VARIABLE = "TWINPOOL_API_KEY"
LOOK_S = 0.5
SAY_S = 5.0
_CALIBRATION_WORDS = 256


class EndpointUnusable(TwinpoolError):
    """Raised when the endpoint can't be asked at all."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What the command line says."""

    trace: Path
    url: str
    target: AnswerTarget
    model: str = ""
    speed: float = 1.0
    limit: int | None = None
    seconds: float | None = None
    concurrency: int = 1024
    scale_lengths: float = 1.0
    max_context: int | None = None
    chat: bool = False
    text: bool = False
    token_range: tuple[int, int] = (300, 2000)
    seed: int = 1
    keys: Path | None = None
    extra: str = "{}"
    timeout: float = 600.0
    json: Path | None = None
    records: bool = False
    plots: Path | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> ReplayOptions:
        """Check the flags. Raises `ConfigError`."""
        for name in ("speed", "limit", "seconds", "concurrency", "scale_lengths", "timeout"):
            value = getattr(args, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
        if args.max_context is not None and args.max_context < 2:
            raise ConfigError("--max-context must leave room for a prompt and an answer")
        if args.seed < 1:
            raise ConfigError(f"--seed must be 1 or more, got {args.seed}")
        low, _, high = args.token_range.partition(":")
        if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
            raise ConfigError(f"--token-range takes LOW:HIGH, got {args.token_range!r}")
        try:
            fields = read_json(args.extra)
        except ValueError as error:
            raise ConfigError(f"--extra takes a JSON object: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"--extra takes a JSON object, got {args.extra!r}")
        if args.records and args.json is None:
            raise ConfigError("--records goes with --json FILE")
        if args.plots is not None:
            check_plots()
        names = set(cls.__dataclass_fields__) - {"target", "token_range"}
        given = {name: getattr(args, name) for name in names}
        return cls(target=AnswerTarget.read(args.slo), token_range=(int(low), int(high)), **given)

    def headers(self) -> list[list[tuple[str, str]]]:
        """The headers of requests, to be taken in turn: a set for each key. Raises `ConfigError`."""
        if self.keys is None:
            key = os.environ.get(KEY_VARIABLE, "")
            return [[("Authorization", f"Bearer {key}")] if key else []]
        try:
            keys = [line.strip() for line in self.keys.read_text(encoding="utf-8").splitlines() if line.strip()]
        except OSError as error:
            raise ConfigError(f"--keys: can't read {self.keys}: {error.strerror}") from None
        if not keys:
            raise ConfigError(f"--keys: {self.keys} has no key")
        return [[("Authorization", f"Bearer {key}")] for key in keys]

    def settings(self) -> dict[str, Any]:
        """For the report: nothing in it is secret."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


class ReplayRun:
    """A run against one endpoint."""

    def __init__(self, options: ReplayOptions, endpoints: list[Endpoint], model: str, per_token: float) -> None:
        """`endpoints`: one for each key. `per_token`: words that make a token, where prompts are text."""
        self.options, self._endpoints, self._model = options, endpoints, model
        self._fields: dict[str, Any] = json.loads(options.extra)
        self.lines = _read(options)
        self._content = Content(options.seed, *options.token_range, per_token)
        self.recent = RecentFigures(options.target)
        self.loop = OpenLoop(self._send, self._encode, options.concurrency)
        self.wall_s = self.cpu_s = 0.0

    @property
    def exact(self) -> bool:
        """Whether answers have to be as long as the trace's."""
        return self._fields.get("ignore_eos", True) is True

    async def run(self) -> None:
        """Send everything; stopped by a Ctrl-C it leaves the figures of what has ended."""
        options, wall, cpu = self.options, time.perf_counter(), time.process_time()
        try:
            asks = asks_of(self._content, self.lines, options.scale_lengths, options.speed, options.max_context)
            await self.loop.run(asks, self.recent.add)
        finally:
            self.wall_s, self.cpu_s = time.perf_counter() - wall, time.process_time() - cpu

    def figures(self) -> ReplayFigures:
        text = self.options.chat or self.options.text
        return figures_of(
            self.loop.outcomes, self.options.target, self.wall_s, self.cpu_s, counts_prompts=not text, exact=self.exact
        )

    async def _send(self, request: bytes, outcome: Outcome) -> Outcome:
        return await stream(self._endpoints[0], request, outcome, self.options.timeout)

    def _encode(self, ask: Ask, number: int) -> bytes:
        endpoint = self._endpoints[number % len(self._endpoints)]
        return endpoint.encode(path_of(self.options), body_of(self.options, self._fields, self._model, ask))


def path_of(options: ReplayOptions) -> str:
    return "/v1/chat/completions" if options.chat else "/v1/completions"


def body_of(options: ReplayOptions, fields: dict[str, Any], model: str, ask: Ask) -> dict[str, Any]:
    """The JSON of a streamed, greedy request for exactly `ask.output_tokens` tokens, with `fields` over it."""
    prompt: dict[str, Any] = {"prompt": ask.text() if options.text else list(ask.tokens)}
    if options.chat:
        prompt = {"messages": [{"role": "user", "content": ask.text()}]}
    limit = "max_completion_tokens" if options.chat else "max_tokens"
    asked = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    body = {"model": model, **prompt, limit: ask.output_tokens, **asked, **fields}
    return {name: value for name, value in body.items() if value is not None}


def _read(options: ReplayOptions) -> list[TraceLine]:
    """The lines that are to be played, one at least. Raises `ConfigError`."""
    try:
        lines = read_trace(options.trace, options.limit)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the trace can't be read: {error}") from None
    most = lines[0].at_s + (float("inf") if options.seconds is None else options.seconds * options.speed)
    return [line for line in lines if line.at_s < most]


async def _prepared(options: ReplayOptions) -> ReplayRun:
    """Find the model, learn how long words are, and make the requests. Raises `EndpointUnusable`."""
    try:
        first = Endpoint.parse(options.url)
        endpoints = [replace(first, headers=tuple(headers)) for headers in options.headers()]
        model = options.model or await endpoints[0].first_model()
        per_token = await _words_per_token(options, endpoints[0], model) if options.chat or options.text else 1.0
    except EndpointError as error:
        raise EndpointUnusable(str(error)) from None
    return ReplayRun(options, endpoints, model, per_token)


async def _words_per_token(options: ReplayOptions, endpoint: Endpoint, model: str) -> float:
    body = body_of(options, json.loads(options.extra), model, Ask(0.0, tuple(range(_CALIBRATION_WORDS)), 1))
    body.pop("stream_options", None)
    answer = await endpoint.ask("POST", path_of(options), {**body, "stream": False})
    tokens = (answer.get("usage") or {}).get("prompt_tokens")
    if not tokens:
        raise EndpointError(f"{endpoint.url} gives no usage, so text of a known length can't be made")
    return _CALIBRATION_WORDS / float(tokens)


def replay(options: ReplayOptions, say: Callable[[str], None], show: Callable[[Any], None]) -> bool:
    """Run the command; returns whether every answer came whole and right. Raises `ConfigError` and
    `EndpointUnusable`."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run = runner.run(_prepared(options))
        seconds = (run.lines[-1].at_s - run.lines[0].at_s) / options.speed
        say(f"{len(run.lines):,} requests over {seconds:,.1f} s to {options.url}")
        with contextlib.suppress(KeyboardInterrupt):
            runner.run(_watched(run, say))
    figures = run.figures()
    show(final_table(figures, options.target))
    for line in final_lines(figures):
        say(line)
    if options.json is not None:
        began = run.loop.began_s
        records = [record_of(one, began) for one in run.loop.outcomes] if options.records else None
        write_json(options.json, options.settings(), figures, records)
    if options.plots is not None:
        for path in draw_plots(options.plots, run.loop.outcomes, run.loop.began_s, options.target):
            say(f"drawn: {path}")
    return figures.clean and not figures.unfinished


async def _watched(run: ReplayRun, say: Callable[[str], None]) -> None:
    """Run, with a view of it on a terminal, or a line now and then."""
    watching = asyncio.create_task(_watch(run, say))
    try:
        await run.run()
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def _watch(run: ReplayRun, say: Callable[[str], None]) -> None:
    total = len(run.lines)
    if not sys.stdout.isatty():
        while True:
            await asyncio.sleep(SAY_S)
            say(live_line(run.loop, run.recent, total, time.perf_counter()))
    from rich.live import Live

    with Live(auto_refresh=False, transient=True) as live:
        while True:
            live.update(live_view(run.loop, run.recent, total, time.perf_counter()), refresh=True)
            await asyncio.sleep(LOOK_S)
