"""Goodput under overload: first tokens in time each second, with and without early refusal.

    python -m bench.serving.early_refusal
    python -m bench.serving.early_refusal --loads 0.8 2 4 --slo-ms 500 --seconds 20 --rounds 3

One cluster, asked in turns in three ways: `all` takes whatever comes, `bounded` takes no more answers at a time than
could be in time at the measured capacity (the bound an operator would choose, as `--max-queue`), and `slo` names the
time in the header x-slo-ttft-ms. Arrivals are random (Poisson) and the same for each way. Prompts are of random lengths
and like no other, and answers short, so that prefill is what is short. An answer counts whose first token came in time.
False refusals are counted by the router: those for which the worker would have had the time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import httpx
from rich.console import Console
from rich.table import Table

from bench.common.bench_report import figure_table, flag_parser, headline, write_report
from bench.common.child_server import serving
from bench.common.load_client import SETTLE_S, TOKENS, LengthRange, LoadClient, synthetic
from twinpool.cli.replay.openai_client import EndpointError, Outcome
from twinpool.cli.replay.trace_prompts import Ask, Content

WAYS = ("all", "bounded", "slo")
REFUSED = "http 429"
FALSE = "twinpool_requests_refused_falsely_total"


@dataclass(frozen=True)
class Goodput:
    """One way under one load, all rounds together."""

    way: str
    load: float
    """Requests that came, over the capacity."""
    sent: int
    in_time: int
    late: int
    refused: int
    falsely: int
    """Refused requests whose worker would have had the time."""
    failed: int
    goodput: float
    """First tokens in time, each second."""
    p50_ms: float
    """Time to first token of those that were answered."""
    p99_ms: float


async def run_round(client: LoadClient, asks: Sequence[Ask], max_open: int | None = None) -> list[Outcome]:
    """Ask all of them when they are due; refuse here what is beyond `max_open` at a time."""
    start, open_ = time.perf_counter() + 0.05, 0

    async def one(ask: Ask) -> Outcome:
        nonlocal open_
        await asyncio.sleep(max(0.0, start + ask.at_s - time.perf_counter()))
        if max_open is not None and open_ >= max_open:
            return Outcome(ask.at_s, 0.0, len(ask.tokens), ask.output_tokens, error=REFUSED)
        open_ += 1
        try:
            return await client.ask(ask.tokens, ask.output_tokens, ask.at_s)
        finally:
            open_ -= 1

    outcomes = await asyncio.gather(*(one(ask) for ask in asks))
    await client.settle()
    return list(outcomes)


def measured(way: str, load: float, outcomes: Sequence[Outcome], falsely: int, slo_ms: int, seconds: float) -> Goodput:
    refused = sum(one.error == REFUSED for one in outcomes)
    answered = [one.ttft_s * 1000 for one in outcomes if one.ok]
    in_time = sum(ms <= slo_ms for ms in answered)
    p50, p99 = (statistics.quantiles(answered, n=100)[at] for at in (49, 98)) if len(answered) > 1 else (0.0, 0.0)
    counts = len(outcomes), in_time, len(answered) - in_time, refused, falsely, len(outcomes) - refused - len(answered)
    return Goodput(way, load, *counts, in_time / seconds, p50, p99)


async def measure(url: str, model: str, args: argparse.Namespace) -> tuple[float, list[Goodput]]:
    """Return the capacity in requests a second, and all ways under all loads."""
    inputs, outputs = LengthRange.parse(args.input_tokens), LengthRange.parse(args.output_tokens)
    plain, hurried = LoadClient(url, model), LoadClient(url, model, [("x-slo-ttft-ms", str(args.slo_ms))])
    seeds = iter(range(1, 10_000))

    def draw(count: int, rate: float | None = None) -> list[Ask]:
        return synthetic(Content(next(seeds), *TOKENS), count, inputs, outputs, rate=rate)

    for outcome in await run_round(plain, draw(args.warm_up)):
        if not outcome.ok:
            raise EndpointError(f"a request failed: {outcome.error}: {outcome.note}")
    count = args.warm_up * 2
    began = time.perf_counter()
    await run_round(plain, draw(count))
    capacity = count / (time.perf_counter() - began - SETTLE_S / 2)
    most = max(1, int(capacity * args.slo_ms / 1000))
    found: dict[tuple[float, str], list[Outcome]] = {(load, way): [] for load in sorted(args.loads) for way in WAYS}
    false = dict.fromkeys(found, 0)
    for _ in range(args.rounds):
        for load in args.loads:
            asks = draw(int(args.seconds * load * capacity), load * capacity)
            for way in WAYS:
                before = await plain.counter(FALSE)
                found[load, way] += await run_round(
                    hurried if way == "slo" else plain, asks, most if way == "bounded" else None
                )
                false[load, way] += await plain.counter(FALSE) - before
                asks = [Ask(ask.at_s, tuple(token + 1 for token in ask.tokens), ask.output_tokens) for ask in asks]
    seconds = args.rounds * args.seconds
    return capacity, [
        measured(way, load, outcomes, false[load, way], args.slo_ms, seconds) for (load, way), outcomes in found.items()
    ]


def table(results: Sequence[Goodput]) -> Table:
    heads = (
        "load", "way", "sent", "in time", "late", "refused", "of these falsely", "failed", "in time / s", "/ all",
        "p50 ms", "p99 ms",
    )  # fmt: skip
    plain, rows = {one.load: one.goodput for one in results if one.way == "all"}, []
    for one in results:
        ratio = f"{one.goodput / plain[one.load]:.2f}" if plain[one.load] else ""
        falsely = f"{one.falsely} ({one.falsely / one.refused:.0%})" if one.refused and one.way == "slo" else ""
        counts = map(str, (one.sent, one.in_time, one.late, one.refused))
        ends = str(one.failed), f"{one.goodput:.1f}", ratio, f"{one.p50_ms:.0f}", f"{one.p99_ms:.0f}"
        rows.append((f"{one.load:g}", one.way, *counts, falsely, *ends))
    return figure_table(None, heads, rows)


def main(argv: list[str] | None = None) -> int:
    parser = flag_parser(__doc__, cluster=True)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 2.0])
    parser.add_argument("--slo-ms", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--input-tokens", default="64:1600", help="of prompts: N or LOW:HIGH")
    parser.add_argument("--output-tokens", default="1:4")
    parser.add_argument("--warm-up", type=int, default=40, help="requests before anything is measured")
    args = parser.parse_args(argv)
    print(headline())
    with serving(args.model, args.set) as url:
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        capacity, results = asyncio.run(measure(url, model, args))
    print(f"capacity: {capacity:.1f} requests/s; first tokens in time within {args.slo_ms} ms")
    Console(width=140).print(table(results))
    write_report(args, capacity=capacity, ways=[asdict(one) for one in results])
    return 0


if __name__ == "__main__":
    sys.exit(main())
