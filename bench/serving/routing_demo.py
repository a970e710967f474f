"""Every routing policy on a real cluster: the demo with two prefill workers whose caches are too small for all chats.

    python -m bench.serving.routing_demo
    python -m bench.serving.routing_demo --policies cache_aware round_robin --rounds 3 --rate 6

Each policy has a cluster of its own, and all are asked the same: multi-turn chats of made-up tokens at random times
(`bench/serving/routing_model.py`, scaled to the demo's context), with a warm-up in front that isn't counted. Answers
are short, so that prefill is what is short. Clusters take turns, round by round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.common import machine
from bench.common.bench_cluster import serving
from bench.common.random_model import DEMO
from bench.serving.serve_load import Target, run
from twinpool.cli.replay.openai_client import Endpoint, Outcome
from twinpool.cli.replay.trace_prompts import Ask

LOW, HIGH = 300, 900
"""Ids of ordinary tokens of the demo."""
WARM_S = 8.0
TIMEOUT_S = 120.0
WAYS = ("cache_aware", "cache_aware, by what was sent", "least_loaded", "power_of_two", "round_robin", "session")


@dataclass(frozen=True)
class DemoFigures:
    """One policy, all rounds together."""

    policy: str
    requests: int
    failed: int
    hit_rate: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    goodput: float


def chats(seconds: float, rate: float, seed: int) -> list[tuple[Ask, str]]:
    """Prompts of chats and the names of these: one of four system prompts of 256 tokens, two to eight turns of about
    130 tokens some seconds apart. Each turn's prompt is all that was said before, with made-up answers."""
    rng = random.Random(seed)
    systems = [tuple(rng.randrange(LOW, HIGH) for _ in range(256)) for _ in range(4)]
    found: list[tuple[Ask, str]] = []
    at, number = 0.0, 0
    while at < seconds:
        said, moment = list(rng.choice(systems)), at
        for _ in range(rng.randint(2, 8)):
            said += [rng.randrange(LOW, HIGH) for _ in range(rng.randint(60, 200))]
            found.append((Ask(moment, tuple(said), 2), f"chat-{seed}-{number}"))
            said += [rng.randrange(LOW, HIGH) for _ in range(40)]
            moment += 1 + rng.expovariate(1 / 2)
        at += rng.expovariate(rate / 5)
        number += 1
    return sorted((one for one in found if one[0].at_s < seconds), key=lambda one: one[0].at_s)


async def ask_all(url: str, asks: Sequence[tuple[Ask, str]]) -> list[Outcome]:
    """Ask everything when it is due; returns what came of what was due after the warm-up. Chats have the header that
    names a session."""
    outcomes: list[Outcome] = []
    endpoint = Endpoint.parse(url)

    async def one(ask: Ask, session: str) -> None:
        target = Target("endpoint", endpoint, "demo", False, False, {"user": session})
        await asyncio.sleep(ask.at_s)
        (outcome,) = await run(target, [Ask(0.0, ask.tokens, ask.output_tokens)], None, TIMEOUT_S)
        if ask.at_s >= WARM_S:
            outcomes.append(outcome)

    await asyncio.gather(*(one(ask, session) for ask, session in asks))
    return outcomes


def measured(policy: str, outcomes: Sequence[Outcome], seconds: float, slo_ms: int) -> DemoFigures:
    good = [one for one in outcomes if one.ok]
    ttft = [1000 * one.ttft_s for one in good]
    cuts = statistics.quantiles(ttft, n=100)
    tokens = sum(one.prompt_tokens or one.input_tokens for one in good)
    hits = sum(one.cached_tokens for one in good) / tokens
    in_time = sum(ms <= slo_ms for ms in ttft)
    return DemoFigures(policy, len(outcomes), len(outcomes) - len(good), hits, cuts[49], cuts[98], in_time / seconds)


def settings_of(way: str, args: argparse.Namespace) -> list[str]:
    policy, _, rest = way.partition(",")
    settings = [
        f"router.policy={policy}",
        f"cache.device_tokens={args.device_tokens}",
        f"cache.host_bytes={args.host_bytes}",
        "audit.fraction=0",
    ]
    return [*settings, *(["router.kv_index=none"] if rest else [])]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a round, after the warm-up")
    parser.add_argument("--rate", type=float, default=12.0, help="prompts a second, about")
    parser.add_argument("--device-tokens", type=int, default=8192)
    parser.add_argument("--host-bytes", type=int, default=24 * 1024**2)
    parser.add_argument("--slo-ms", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    console = Console(width=110)
    console.print(machine.headline())
    outcomes: dict[str, list[Outcome]] = {way: [] for way in args.policies}
    for number in range(args.rounds):
        asks = chats(args.seconds + WARM_S, args.rate, 1 + number)
        for way in args.policies:
            with serving(str(DEMO), settings_of(way, args), ["--prefill", "2", "--decode", "1"]) as url:
                outcomes[way] += asyncio.run(ask_all(url, asks))
    figures = [measured(way, outcomes[way], args.rounds * args.seconds, args.slo_ms) for way in args.policies]
    table = Table(title=f"{figures[0].requests} prompts, two prefill workers")
    for head in ("policy", "hits", "TTFT p50, ms", "p99, ms", f"in {args.slo_ms} ms, each s", "failed"):
        table.add_column(head, justify="left" if head == "policy" else "right")
    for one in figures:
        table.add_row(
            one.policy,
            f"{one.hit_rate:.1%}",
            f"{one.ttft_p50_ms:.0f}",
            f"{one.ttft_p99_ms:.0f}",
            f"{one.goodput:.2f}",
            str(one.failed),
        )
    console.print(table)
    if args.json is not None:
        found = {"machine": machine.describe(), "policies": [asdict(one) for one in figures]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(one.failed for one in figures))


if __name__ == "__main__":
    sys.exit(main())
