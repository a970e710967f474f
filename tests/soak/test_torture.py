"""Rounds of load in which workers are killed, stopped and drained and clients leave: every answer that ends is the
oracle's, and after every round everything is accounted for.

``make soak ARGS="tests/soak/test_torture.py"`` runs `ROUNDS` rounds on each plane; the seed is the round's number.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import Oracle, compare, compare_sampled, make_checkpoint
from tests.support.cluster_answers import make_prompts
from tests.support.served_cluster import Answer, Serving, complete, serving, until
from twinpool.contracts.sampling_params import SamplingParams

ROUNDS = 40
REQUESTS, AT_ONCE, TOKENS = 120, 24, 40
TROUBLES = ("kill a prefill", "kill a decode", "kill both of a role", "stop one", "drain one", "nothing")


@dataclass
class Ask:
    prompt: list[int]
    seed: int | None
    stream: bool
    leaves_after: float | None

    @property
    def body(self) -> dict[str, Any]:
        drawn = {} if self.seed is None else {"temperature": 0.8, "top_k": 40, "seed": self.seed}
        return {"max_tokens": TOKENS, "stream": self.stream, **drawn}


def asks(rng: random.Random) -> list[Ask]:
    return [
        Ask(
            prompt,
            rng.randrange(1 << 40) if rng.random() < 0.5 else None,
            rng.random() < 0.5,
            rng.random() * 0.5 if rng.random() < 0.2 else None,
        )
        for prompt in make_prompts(rng.randrange(1 << 30), REQUESTS, 600)
    ]


async def trouble(cluster: Serving, kind: str, rng: random.Random) -> None:
    """Strike at a random moment of the load, by process id."""
    await asyncio.sleep(rng.random())
    workers = [w for w in (await asyncio.to_thread(cluster.status)).values() if w["state"] == "ready"]
    role = "prefill" if kind == "kill a prefill" or rng.random() < 0.5 else "decode"
    role = "decode" if kind == "kill a decode" else role
    able = [w for w in workers if w["role"] == role]
    if not able or kind == "nothing":
        return
    one = rng.choice(able)
    if kind.startswith("kill"):
        for worker in able if "both" in kind else [one]:
            os.kill(worker["pid"], signal.SIGKILL)
    elif kind == "stop one":
        os.kill(one["pid"], signal.SIGSTOP)
        await asyncio.sleep(rng.random() * 5)
        with contextlib.suppress(ProcessLookupError):
            os.kill(one["pid"], signal.SIGCONT)
    elif len(able) > 1:
        # It may have left before it is wanted back; then the rounds go on without it.
        async with httpx.AsyncClient(base_url=cluster.url) as client:
            await client.post(f"/cluster/drain/{one['name']}")
            await asyncio.sleep(rng.random() * 0.2)
            await client.post(f"/cluster/undrain/{one['name']}")


async def load(cluster: Serving, all_asks: list[Ask], kind: str, rng: random.Random) -> list[Answer | None]:
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=180) as client:

        async def one(ask: Ask) -> Answer | None:
            async with gate:
                work = complete(client, cluster.body(ask.prompt, **ask.body))
                try:
                    return await asyncio.wait_for(work, ask.leaves_after)
                except TimeoutError:
                    return None

        answers, _ = await asyncio.gather(asyncio.gather(*[one(a) for a in all_asks]), trouble(cluster, kind, rng))
    return list(answers)


def judge(oracle: Oracle, ask: Ask, answer: Answer) -> bool:
    """Whether the answer is the oracle's to the last token, without need of the rule's margin."""
    assert len(answer.tokens) == TOKENS
    if ask.seed is None:
        verdict = compare(oracle, ask.prompt, answer.tokens)
    else:
        params = SamplingParams(max_tokens=TOKENS, temperature=0.8, top_k=40, seed=ask.seed)
        verdict = compare_sampled(oracle, ask.prompt, answer.tokens, params)
    assert verdict.equal, (len(ask.prompt), ask.seed, verdict)
    return verdict.exact


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("plane", ["shm", "zmq"])
def test_every_answer_survives_what_life_does_to_workers(plane: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=8)
    oracle, counts = Oracle(folder), Counter[str]()
    sections = {
        "engine": {"copy_threads": "on" if plane == "zmq" else "off"},
        "transfer": {"plane": plane},
        "cache": {"device_tokens": 6000},
        "cluster": {"lease_s": 3, "restart_limit": 1000},
    }
    flags = ("--prefill", "2", "--decode", "2")
    with serving(folder, tmp_path / "run", *flags, sections=sections) as cluster:
        for number in range(ROUNDS):
            rng = random.Random(number)
            kind = TROUBLES[number % len(TROUBLES)]
            all_asks = asks(rng)
            for ask, answer in zip(all_asks, asyncio.run(load(cluster, all_asks, kind, rng)), strict=True):
                if answer is None:
                    counts["left"] += 1
                    continue
                counts["answered"] += 1
                counts["replayed"] += answer.twinpool["attempts"] > 1
                counts["exact"] += judge(oracle, ask, answer)
            whole = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
            bring_back(cluster, whole)
            cluster.settle()
            print(f"{plane} round {number}, {kind}: {dict(counts)}", flush=True)
    assert counts["answered"] > ROUNDS * REQUESTS / 2


def bring_back(cluster: Serving, names: set[str]) -> None:
    """Wait until all workers that have not left by a drain serve again."""

    def all_ready() -> bool:
        return all(w["state"] in ("ready", "left") for n, w in cluster.status().items() if n in names)

    until(all_ready, "all workers to be back", 90)
