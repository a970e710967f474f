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

from bench.common import machine
from bench.common.bench_cluster import serving
from bench.common.bench_report import flag_parser, write_report
from bench.common.workload import LengthRange, greedy_completion, synthetic
from twinpool.cli.replay.openai_client import Endpoint, EndpointError, Outcome, stream
from twinpool.cli.replay.trace_prompts import Ask, Content

WAYS = ("all", "bounded", "slo")
TIMEOUT_S = 300.0
SETTLE_S = 0.3
TOKENS = (300, 900)
"""Ids of ordinary tokens, of the demo's vocabulary and of most."""
REFUSED = "http 429"


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


class Client:
    """Asks one router."""

    def __init__(self, url: str, model: str, slo_ms: int) -> None:
        self.url, self.model, self.slo_ms = url, model, slo_ms
        self._plain = Endpoint.parse(url)
        self._hurried = Endpoint.parse(url, [("x-slo-ttft-ms", str(slo_ms))])

    async def one(self, ask: Ask, way: str, start: float) -> Outcome:
        body = greedy_completion(self.model, ask.tokens, ask.output_tokens)
        endpoint = self._hurried if way == "slo" else self._plain
        request = endpoint.encode("/v1/completions", body)
        await asyncio.sleep(max(0.0, start + ask.at_s - time.perf_counter()))
        return await stream(endpoint, request, Outcome(ask.at_s, 0.0, len(ask.tokens), ask.output_tokens), TIMEOUT_S)

    async def round(self, asks: Sequence[Ask], way: str, most: int) -> list[Outcome]:
        """Ask all of them when they are due. `bounded`: refuse here what is beyond `most` at a time."""
        start, open_ = time.perf_counter() + 0.05, 0

        async def bounded(ask: Ask) -> Outcome:
            nonlocal open_
            await asyncio.sleep(max(0.0, start + ask.at_s - time.perf_counter()))
            if open_ >= most:
                return Outcome(ask.at_s, 0.0, len(ask.tokens), ask.output_tokens, error=REFUSED)
            open_ += 1
            try:
                return await self.one(ask, way, start)
            finally:
                open_ -= 1

        run = bounded if way == "bounded" else lambda ask: self.one(ask, way, start)
        outcomes = await asyncio.gather(*(run(ask) for ask in asks))
        await self.settle()
        return list(outcomes)

    async def settle(self) -> None:
        async with httpx.AsyncClient() as client:
            while (await client.get(f"{self.url}/load")).json()["server_load"]:
                await asyncio.sleep(SETTLE_S)

    async def falsely(self) -> int:
        async with httpx.AsyncClient() as client:
            lines = (await client.get(f"{self.url}/metrics")).text.splitlines()
        return int(
            float(next(line.split()[1] for line in lines if line.startswith("twinpool_requests_refused_falsely_total")))
        )


def measured(way: str, load: float, outcomes: Sequence[Outcome], falsely: int, slo_ms: int, seconds: float) -> Goodput:
    refused = sum(one.error == REFUSED for one in outcomes)
    answered = [one.ttft_s * 1000 for one in outcomes if one.ok]
    in_time = sum(ms <= slo_ms for ms in answered)
    p50, p99 = (statistics.quantiles(answered, n=100)[at] for at in (49, 98)) if len(answered) > 1 else (0.0, 0.0)
    failed = len(outcomes) - refused - len(answered)
    late = len(answered) - in_time
    return Goodput(
        way, load, len(outcomes), in_time, late, refused, falsely, failed, in_time / seconds, p50, p99
    )  # fmt: skip


async def measure(client: Client, args: argparse.Namespace) -> tuple[float, list[Goodput]]:
    """Return the capacity in requests a second, and all ways under all loads."""
    inputs, outputs = LengthRange.parse(args.input_tokens), LengthRange.parse(args.output_tokens)
    seeds = iter(range(1, 10_000))

    def draw(count: int, rate: float | None = None) -> list[Ask]:
        return synthetic(Content(next(seeds), *TOKENS), count, inputs, outputs, rate=rate)

    for outcome in await client.round(draw(args.warm_up), "all", 0):
        if not outcome.ok:
            raise EndpointError(f"a request failed: {outcome.error}: {outcome.note}")
    count = args.warm_up * 2
    began = time.perf_counter()
    await client.round(draw(count), "all", 0)
    capacity = count / (time.perf_counter() - began - SETTLE_S / 2)
    most = max(1, int(capacity * args.slo_ms / 1000))
    found: dict[tuple[str, float], list[Outcome]] = {}
    false: dict[tuple[str, float], int] = {}
    for _ in range(args.rounds):
        for load in args.loads:
            asks = draw(int(args.seconds * load * capacity), load * capacity)
            for way in WAYS:
                before = await client.falsely()
                found.setdefault((way, load), []).extend(await client.round(asks, way, most))
                false[way, load] = false.get((way, load), 0) + await client.falsely() - before
                asks = [Ask(ask.at_s, tuple(token + 1 for token in ask.tokens), ask.output_tokens) for ask in asks]
    seconds = args.rounds * args.seconds
    return capacity, [
        measured(way, load, outcomes, false[way, load], args.slo_ms, seconds)
        for (way, load), outcomes in sorted(found.items(), key=lambda one: (one[0][1], WAYS.index(one[0][0])))
    ]


def table(results: Sequence[Goodput]) -> Table:
    shown = Table(
        "load", "way", "sent", "in time", "late", "refused", "of these falsely", "failed", "in time / s", "/ all",
        "p50 ms", "p99 ms",
    )  # fmt: skip
    plain = {one.load: one.goodput for one in results if one.way == "all"}
    for one in results:
        ratio = f"{one.goodput / plain[one.load]:.2f}" if plain[one.load] else ""
        falsely = f"{one.falsely} ({one.falsely / one.refused:.0%})" if one.refused and one.way == "slo" else ""
        shown.add_row(
            f"{one.load:g}", one.way, str(one.sent), str(one.in_time), str(one.late), str(one.refused), falsely,
            str(one.failed), f"{one.goodput:.1f}", ratio, f"{one.p50_ms:.0f}", f"{one.p99_ms:.0f}",
        )  # fmt: skip
    return shown


def main(argv: list[str] | None = None) -> int:
    parser = flag_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 2.0])
    parser.add_argument("--slo-ms", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--input-tokens", default="64:1600", help="of prompts: N or LOW:HIGH")
    parser.add_argument("--output-tokens", default="1:4")
    parser.add_argument("--warm-up", type=int, default=40, help="requests before anything is measured")
    args = parser.parse_args(argv)
    print(machine.headline())
    with serving(args.model) as url:
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        capacity, results = asyncio.run(measure(Client(url, model, args.slo_ms), args))
    print(f"capacity: {capacity:.1f} requests/s; first tokens in time within {args.slo_ms} ms")
    Console(width=140).print(table(results))
    write_report(args, capacity=capacity, ways=[asdict(one) for one in results])
    return 0


if __name__ == "__main__":
    sys.exit(main())
