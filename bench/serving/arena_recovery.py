"""How much is computed again after a worker was killed: with host memory that outlives it, and without.

    python -m bench.serving.arena_recovery                      # the demo, both ways
    python -m bench.serving.arena_recovery --model DIR --talks 8 --tokens 800

Conversations are held with a cluster of one prefill and one decode worker. Then one worker is killed (SIGKILL), and
at the same moment each conversation's next turn is asked for. Shares are of the prompt tokens of that turn: those that
prefill computed, and those that decode was sent again. `undisturbed` is such a turn without a death. Times are from the
kill to a turn's first token, the worker's restart included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np

from bench.common.bench_cluster import serving
from bench.common.random_model import DEMO

VICTIMS = ("", "prefill-0", "decode-0")
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Result:
    """One turn of all conversations after the death of one worker."""

    arena: str
    victim: str
    asked: int
    computed: int
    """By prefill, of the tokens asked for."""
    sent: int
    """To decode: what it didn't hold."""
    first_token_s: float
    """Median."""
    first_token_worst_s: float


@dataclass
class Talk:
    prompt: list[int]
    computed: int = 0
    held: int = 0
    first_token_s: float = 0.0


async def _turn(client: httpx.AsyncClient, model: str, talk: Talk, tokens: int, said: Sequence[int]) -> None:
    """One turn; afterwards the prompt is that of the next."""
    body = {
        "model": model, "prompt": talk.prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    began, first, answer = time.perf_counter(), 0.0, list[int]()
    async with client.stream("POST", "/v1/completions", json=body, headers={"X-Twinpool-Timeline": "1"}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event.get("choices", ()):
                answer += choice.get("token_ids") or []
                first = first or (time.perf_counter() if answer else 0.0)
            if told := event.get("twinpool"):
                talk.computed, talk.held = told["computed"]["prefill"], told["held_by_decode"]
    talk.first_token_s = first - began
    talk.prompt = [*talk.prompt, *answer, *said]


async def _turns(client: httpx.AsyncClient, model: str, talks: list[Talk], tokens: int, rng: random.Random) -> None:
    said = [[rng.randrange(1, 250) for _ in range(16)] for _ in talks]
    await asyncio.gather(*[_turn(client, model, talk, tokens, more) for talk, more in zip(talks, said, strict=True)])


async def _pid(client: httpx.AsyncClient, worker: str) -> int:
    workers = (await client.get("/cluster/status")).json()["workers"]
    return next(int(w["pid"]) for w in workers if w["name"] == worker)


async def measure(url: str, arena: str, count: int, length: int, tokens: int) -> list[Result]:
    """A turn undisturbed, then one after the death of each worker."""
    rng = random.Random(1)
    talks = [Talk([rng.randrange(1, 250) for _ in range(length)]) for _ in range(count)]
    out = []
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await _turns(client, model, talks, tokens, rng)
        for victim in VICTIMS:
            await asyncio.sleep(1.0)  # what is copied down the tiers arrives there
            asked = sum(len(talk.prompt) for talk in talks)
            if victim:
                os.kill(await _pid(client, victim), signal.SIGKILL)
            await _turns(client, model, talks, tokens, rng)
            times = [talk.first_token_s for talk in talks]
            computed = sum(talk.computed for talk in talks)
            sent = asked - sum(talk.held for talk in talks)
            out.append(Result(arena, victim or "nobody", asked, computed, sent, float(np.median(times)), max(times)))
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEMO, help="checkpoint folder (default: the demo)")
    parser.add_argument("--talks", type=int, default=6, help="conversations, all at once")
    parser.add_argument("--tokens", type=int, default=700, help="of each first prompt")
    parser.add_argument("--answer", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--host-bytes", type=int, default=256 << 20)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(arguments)
    results = []
    for arena in ("auto", "none"):
        settings = [f"cache.arena={arena}", f"cache.host_bytes={args.host_bytes}", "cache.load_back=always"]
        with serving(str(args.model), settings) as url:
            results += asyncio.run(measure(url, arena, args.talks, args.tokens, args.answer))
    print(f"{'arena':6} {'killed':10} {'asked':>7} {'computed':>9} {'sent':>7} {'first token, s':>20}")
    for r in results:
        shares = f"{r.computed / r.asked:9.1%} {r.sent / r.asked:7.1%}"
        print(
            f"{r.arena:6} {r.victim:10} {r.asked:7} {shares} {r.first_token_s:10.2f}, worst {r.first_token_worst_s:.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
