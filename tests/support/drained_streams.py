"""Streams of a real cluster of which one decode worker is drained: what it costs them, and how soon it is empty."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

from tests.support.followed_streams import FollowedStream, follow
from twinpool.cli.load.openai_client import EndpointError

DRAIN_TIMEOUT_S = 600.0
LOW, HIGH = 300, 2000
"""Token ids to draw prompts from."""


@dataclass
class Round:
    """All streams of one run, and the drain in it."""

    streams: list[FollowedStream]
    drained_at_s: float = 0.0
    left_s: float = 0.0
    """From the drain until the victim had left."""


async def run(url: str, bodies: Sequence[dict[str, Any]], victim: str, after_tokens: int) -> Round:
    """All streams at once; with a `victim`, it is drained when each has had `after_tokens`."""
    streams = [FollowedStream() for _ in bodies]
    limits = httpx.Limits(max_connections=len(bodies) + 4)
    async with httpx.AsyncClient(base_url=url, timeout=DRAIN_TIMEOUT_S, limits=limits, trust_env=False) as client:
        tasks = [asyncio.create_task(follow(client, b, s)) for b, s in zip(bodies, streams, strict=True)]
        out = Round(streams)
        if victim:
            while any(len(s.tokens) < after_tokens and not t.done() for s, t in zip(streams, tasks, strict=True)):
                await asyncio.sleep(0.005)
            out.drained_at_s = time.monotonic()
            await _drain(client, victim)
            out.left_s = time.monotonic() - out.drained_at_s
        await asyncio.gather(*tasks)
    return out


async def _drain(client: httpx.AsyncClient, victim: str) -> None:
    """Returns when it has left. Raises `EndpointError`."""
    answer = await client.post(f"/cluster/drain/{victim}")
    if answer.status_code != 200:
        raise EndpointError(f"{victim} can't be drained: {answer.text[:200]}")
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while time.monotonic() < deadline:
        rows = (await client.get("/cluster/status")).json()["workers"]
        state = next((row["state"] for row in rows if row["name"] == victim), "left")
        if state == "left":
            return
        if state in ("dead", "starting"):
            raise EndpointError(f"{victim} is {state} in the middle of its drain")
        await asyncio.sleep(0.02)
    raise EndpointError(f"{victim} has not left within {DRAIN_TIMEOUT_S:g} s")


def bodies_of(args: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """The requests: the same for the same arguments."""
    rng = random.Random(args.seed)
    low, _, high = args.input_tokens.partition(":")
    out = []
    for number in range(args.streams):
        prompt = [rng.randrange(LOW, HIGH) for _ in range(rng.randint(int(low), int(high or low)))]
        out.append({
            "model": model, "prompt": prompt, "max_tokens": args.output_tokens, "temperature": 0.8, "seed": number,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        })  # fmt: skip
    return out


def compare(calm: Round, drained: Round) -> dict[str, Any]:
    """The figures; times are in seconds."""
    pairs = list(zip(calm.streams, drained.streams, strict=True))
    at = drained.drained_at_s
    migrated = [s for s in drained.streams if s.migrations]
    # What each of the migrated had still to come, at the pace of the run in which nothing happened.
    waits = [
        quiet.at_s[-1] - quiet.at_s[s.had(at) - 1] for quiet, s in pairs if s.migrations and s.had(at) and quiet.at_s
    ]
    pauses = [s.longest_gap_s(at) for s in migrated]
    others = [s.longest_gap_s(at) for s in drained.streams if not s.migrations]
    return {
        "streams": len(pairs),
        "failed": sum(bool(s.error) for s in drained.streams),
        "altered": sum(quiet.tokens != s.tokens for quiet, s in pairs),
        "started_over": sum(s.attempts > 1 for s in drained.streams),
        "migrated": len(migrated),
        "left_s": drained.left_s,
        "waiting_would_take_s": max(waits, default=0.0),
        "pause_p50_s": _quantile(pauses, 0.5),
        "pause_p99_s": _quantile(pauses, 0.99),
        "longest_gap_of_others_p50_s": _quantile(others, 0.5),
        "longest_gap_of_others_p99_s": _quantile(others, 0.99),
        "gap_p50_s": _quantile([b - a for s in calm.streams for a, b in pairwise(s.at_s) if b > a], 0.5),
    }


def _quantile(values: Sequence[float], share: float) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=1000, method="inclusive")[min(998, round(share * 1000) - 1)]
