"""A model that others trained, on prose that people wrote: every answer is transformers', whatever happens meanwhile.

Two workers of each role over each data plane. Everything that decodes is retracted again and again, and workers are
killed under their streams. TWINPOOL_PUBLISHED_PROMPTS says how many prompts (24), e.g. 6 for a look:
``TWINPOOL_PUBLISHED_PROMPTS=6 make soak ARGS="tests/soak/test_published_model.py -s"``.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.soak.published import OutOfReach, prose, published_model
from tests.support.checkpoints import Oracle, compare
from tests.support.served_cluster import Answer, Serving, complete, serving

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(3600)]

COUNT = int(os.environ.get("TWINPOOL_PUBLISHED_PROMPTS", "24"))
TOKENS, AT_ONCE, KILLS = 48, 6, 4
SHORTEST, LONGEST = 60, 1000
SHARED = 200
"""Tokens that every third prompt begins with."""


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return published_model()
    except OutOfReach as error:
        pytest.skip(f"SmolLM2-135M-Instruct can't be had here: {error}")


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    """Passages of novels, of lengths spread over an order of magnitude; some begin as others do."""
    ids = list(Tokenizer.from_file(str(model / "tokenizer.json")).encode("\n".join(prose())).ids)
    rng = random.Random(1)
    out = []
    for number in range(COUNT):
        length = int(SHORTEST * (LONGEST / SHORTEST) ** rng.random())
        start = rng.randrange(SHARED, len(ids) - LONGEST)
        out.append((ids[:SHARED] if number % 3 == 2 else []) + ids[start : start + length])
    return out


@pytest.fixture(scope="module")
def wanted(model: Path) -> Oracle:
    return Oracle(model, dtype="float32")


async def strike(cluster: Serving, client: httpx.AsyncClient, ended: asyncio.Semaphore, every: int) -> list[str]:
    """Kills a worker with streams under way after every so many answers, one role after the other."""
    killed: list[str] = []
    while len(killed) < KILLS:
        for _ in range(every):
            await ended.acquire()
        role = ("decode", "prefill")[len(killed) % 2]
        while True:
            workers = (await client.get("/cluster/status")).json()["workers"]
            mine = [w for w in workers if w["role"] == role and w["state"] == "ready"]
            busy = [w for w in mine if w["running"] or role == "prefill"]
            if len(mine) > 1 and busy:
                break
            await asyncio.sleep(0.02)
        os.kill(busy[0]["pid"], signal.SIGKILL)
        killed.append(busy[0]["name"])
    return killed


async def under_fire(cluster: Serving, prompts: list[list[int]]) -> tuple[list[Answer], list[str]]:
    gate, ended = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(0)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=900) as client:

        async def one(prompt: list[int], stream: bool) -> Answer:
            async with gate:
                answer = await complete(client, cluster.body(prompt, max_tokens=TOKENS, stream=stream))
            ended.release()
            return answer

        killer = asyncio.create_task(strike(cluster, client, ended, max(1, len(prompts) // (KILLS + 2))))
        answers = await asyncio.gather(*[one(p, i % 4 > 0) for i, p in enumerate(prompts)])
        killer.cancel()
        killed = (await asyncio.gather(killer, return_exceptions=True))[0]
    return list(answers), killed if isinstance(killed, list) else []


@pytest.mark.parametrize("plane", ["shm", "zmq"])
def test_a_published_model_says_what_transformers_does_on_prose_whatever_happens(
    plane: str, model: Path, prompts: list[list[int]], wanted: Oracle, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "engine": {"dtype": "float32"},
        "transfer": {"plane": plane},
        "cache": {"host_bytes": 256 * 2**20},
        "decode": {"retract": "copy"},
        "faults": {"retract_every": 7},
        "router": {"request_timeout_s": 600},
    }
    flags = ("--prefill", "2", "--decode", "2")
    with serving(model, tmp_path / "run", *flags, sections=sections, ready_within=300, orderly=False) as cluster:
        answers, killed = asyncio.run(under_fire(cluster, prompts))
        cluster.settle()
        retracted = sum(w["counters"].get("retractions", 0) for w in cluster.status().values())
    exact = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        verdict = compare(wanted, prompt, answer.tokens)
        assert len(answer.tokens) == TOKENS
        assert verdict.equal, (verdict, prompt)
        exact += verdict.exact
    attempts = Counter(answer.twinpool["attempts"] for answer in answers)
    print(f"\n{plane}: {exact} of {len(answers)} to the token, killed {killed}, attempts {dict(attempts)}, "
          f"retracted {retracted:g}")  # fmt: skip
    assert killed, "somebody was to be killed"
    assert retracted, "and those who decode to leave and come back"
