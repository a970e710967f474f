"""Workers of a real cluster that are killed while its streams run: how long each stream pauses, and what it says.

Streams with seeds of their own are answered once undisturbed. Then they are asked again, a worker is killed while they
run, and each token is timed. A stream was struck if it needed another attempt; its pause ends with the token after the
longest silence since the kill. At last each answer is computed once more as the end of a prompt, its replay, whose
log-probabilities are compared with those that the stream told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from tests.support.followed_streams import FollowedStream, follow

BACK_S = 120.0
LOOK_S = 0.02
TRIES = 40
AHEAD = 8
"""Tokens that a stream has before its decode worker is killed."""


@dataclass(frozen=True)
class Result:
    """What killing workers of one role did. Milliseconds."""

    role: str
    kills: int
    streams: int
    struck: int
    same_tokens: bool
    logprobs: int
    """Log-probabilities that answers told."""
    replayed: int
    """Those of them that are bit for bit their replay's."""
    p50_ms: float | None
    p99_ms: float | None
    worst_ms: float | None

    @classmethod
    def of(
        cls, role: str, kills: int, streams: int, pauses_s: Sequence[float], same: bool, replays: Sequence[bool]
    ) -> Result:
        """`replays`: of each log-probability, whether it is its replay's."""
        figures = [1e3 * float(np.percentile(pauses_s, p)) for p in (50, 99, 100)] if pauses_s else [None] * 3
        return cls(role, kills, streams, len(pauses_s), same, len(replays), sum(replays), *figures)

    def in_words(self) -> str:
        """What a bench prints of it."""
        pauses = "-"
        if self.p50_ms is not None:
            pauses = f"p50 {self.p50_ms:.0f} ms, p99 {self.p99_ms:.0f} ms, worst {self.worst_ms:.0f} ms"
        return (
            f"{self.role}: {self.kills} killed, {self.struck} of {self.streams} streams struck: {pauses}; "
            f"same tokens: {self.same_tokens}; {self.replayed} of {self.logprobs} log-probabilities are their replay's"
        )


@dataclass(frozen=True)
class Load:
    """What is asked at once."""

    streams: int
    prompt_tokens: int
    answer_tokens: int
    vocab: int
    seed: int

    def bodies(self, number: int) -> list[dict[str, Any]]:
        """Of round `number`: no prompt is asked in two rounds, so nobody finds it in a cache."""
        rng = random.Random(f"{self.seed}:{number}")
        return [
            {
                "prompt": [rng.randrange(self.vocab) for _ in range(self.prompt_tokens)],
                "max_tokens": self.answer_tokens, "temperature": 0.8, "top_p": 0.95, "seed": rng.randrange(1 << 40),
                "ignore_eos": True, "return_token_ids": True, "stream": True, "logprobs": 0,
            }
            for _ in range(self.streams)
        ]  # fmt: skip


async def replayed(client: httpx.AsyncClient, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """The log-probabilities of the tokens of an answer, computed as the end of a prompt. Raises `httpx.HTTPError`."""
    sampling = {"max_tokens": 0, "prompt_logprobs": 0}
    body = {"token_ids": [*prompt, *answer], "sampling_params": sampling}
    told = (await client.post("/inference/v1/generate", json=body)).raise_for_status().json()["prompt_logprobs"]
    return [told[at][str(token)]["logprob"] for at, token in enumerate(answer, len(prompt))]


class Failover:
    """Kills workers of one cluster, and watches its streams."""

    def __init__(self, url: str, load: Load) -> None:
        self._url, self._load = url, load

    async def measure(self, role: str, rounds: int) -> Result:
        """Kill as many workers as `rounds`; a round whose work was done before one was caught at it is repeated.

        Raises `RuntimeError` for an answer that ended in an error.
        """
        pauses: list[float] = []
        replays: list[bool] = []
        same, kills, number = True, 0, 0
        async with httpx.AsyncClient(base_url=self._url, timeout=300, trust_env=False) as client:
            while kills < rounds and number < TRIES * rounds:
                number += 1
                bodies = self._load.bodies(number)
                whole = await asyncio.gather(*(follow(client, body, FollowedStream()) for body in bodies))
                # Another salt: the second time nothing of it is found in a cache.
                again = [body | {"cache_salt": f"again-{role}-{number}"} for body in bodies]
                streams = [FollowedStream() for _ in again]
                tasks = [
                    asyncio.create_task(follow(client, body, stream))
                    for body, stream in zip(again, streams, strict=True)
                ]
                killed = await self._kill(client, role, streams)
                await asyncio.gather(*tasks)
                if failed := [s.error for s in (*whole, *streams) if s.error]:
                    raise RuntimeError(f"an answer failed: {failed[0]}")
                kills += killed is not None and any(s.attempts > 1 for s in streams)
                struck = [s for s in streams if s.attempts > 1]
                pauses += [s.pause_s(killed) for s in struck] if killed is not None else []
                same = same and [s.tokens for s in streams] == [s.tokens for s in whole]
                await self._all_back(client)
                for body, stream in zip(bodies, streams, strict=True):
                    anew = await replayed(client, body["prompt"], stream.tokens)
                    replays += [told == found for told, found in zip(stream.logprobs, anew, strict=True)]
        return Result.of(role, kills, kills * self._load.streams, pauses, same, replays)

    async def _kill(self, client: httpx.AsyncClient, role: str, streams: Sequence[FollowedStream]) -> float | None:
        """Kill a worker of `role` that has work, once streams run (decode), or as soon as one has (prefill).

        A prefill worker may have finished before the signal comes. So it is stopped first, and killed when a stream
        waits for it: one without a token while the others have nothing to do.
        """
        deadline = time.monotonic() + BACK_S
        while time.monotonic() < deadline:
            if role == "prefill" or sum(len(s.tokens) >= AHEAD for s in streams) * 2 >= len(streams):
                answer = await client.get("/cluster/status")
                busy = [w for w in answer.json()["workers"] if w["role"] == role and w["running"]]
                if busy:
                    victim = max(busy, key=lambda w: int(w["running"]))
                    if role == "prefill" and not await self._caught(client, victim, streams):
                        continue
                    killed = time.monotonic()
                    os.kill(victim["pid"], signal.SIGKILL)
                    return killed
            if all(len(s.tokens) >= self._load.answer_tokens for s in streams):
                return None
            await asyncio.sleep(LOOK_S if role == "decode" else 0)
        raise RuntimeError(f"no {role} worker was found at work within {BACK_S:g} s")

    async def _caught(
        self, client: httpx.AsyncClient, victim: dict[str, Any], streams: Sequence[FollowedStream]
    ) -> bool:
        """Stop a prefill worker; whether a stream waits for it then. One that nobody waits for goes on."""
        with contextlib.suppress(ProcessLookupError):  # Its lease may end meanwhile, and it with it.
            os.kill(victim["pid"], signal.SIGSTOP)
            deadline = time.monotonic() + BACK_S
            while any(not s.tokens for s in streams) and time.monotonic() < deadline:
                rows = (await client.get("/cluster/status")).json()["workers"]
                others = [w for w in rows if w["role"] == "prefill" and w["name"] != victim["name"]]
                if not any(w["running"] or w["waiting"] for w in others):
                    return True
                await asyncio.sleep(LOOK_S)
            os.kill(victim["pid"], signal.SIGCONT)
        return False

    async def _all_back(self, client: httpx.AsyncClient) -> None:
        deadline = time.monotonic() + BACK_S
        while time.monotonic() < deadline:
            rows = (await client.get("/cluster/status")).json()["workers"]
            if all(w["state"] == "ready" for w in rows if w["state"] != "left"):
                return
            await asyncio.sleep(0.2)
        raise RuntimeError(f"not all workers were back within {BACK_S:g} s")
