"""Rounds of structured output over a cluster that is disturbed: every answer is what it would have been in peace, and
follows what its client asked for."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.support.served_cluster import Answer, Serving, complete, serving, until
from tests.support.structured_cases import StructuredCase

AT_ONCE, TOKENS = 8, 160
_ENDLESS: list[dict[str, Any]] = [
    {"guided_regex": "(?:[A-Z]?[a-z]+[,;.]? )+"},
    {"guided_json": {"type": "array", "minItems": 1000, "items": {"type": "string", "maxLength": 12}}},
    {"guided_grammar": 'start: ("(" WORD ")" | "[" WORD "]")~500..600\nWORD: /[a-z]{1,5}/'},
    {},
]
LONG = [
    {"prompt": f"A long story, part {number}.", "max_tokens": 1500, "stream": True, **what}
    for number, what in enumerate(_ENDLESS)
]
"""Streams beside those of a round that end late, so that there are some when a worker drains, and dies. Their clients
leave when that is done."""


def ask(case: StructuredCase, number: int) -> dict[str, Any]:
    """The body that asks for a case; every second one is sampled, every third one a stream."""
    drawn = {"temperature": 0.9, "seed": number} if number % 2 else {}
    return {"prompt": f"Chapter {number}. He wrote down", "max_tokens": TOKENS, "stream": number % 3 == 0, **drawn,
            **case.body}  # fmt: skip


async def answers(cluster: Serving, asked: Sequence[dict[str, Any]]) -> list[Answer]:
    """The answers to `asked`, of which `AT_ONCE` are under way."""
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=180) as client:

        async def one(body: dict[str, Any]) -> Answer:
            async with gate:
                return await complete(client, cluster.body(**body))

        return list(await asyncio.gather(*[one(body) for body in asked]))


async def beside(cluster: Serving, over: asyncio.Event) -> list[list[int]]:
    """The tokens of `LONG` until it is over, or all of them."""
    found: list[list[int]] = [[] for _ in LONG]
    async with httpx.AsyncClient(base_url=cluster.url, timeout=180) as client:

        async def one(body: dict[str, Any], tokens: list[int]) -> None:
            async with client.stream("POST", "/v1/completions", json=cluster.body(**body)) as response:
                async for line in response.aiter_lines():
                    if over.is_set() or line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        assert "error" not in event, event
                        tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or []]

        await asyncio.gather(*[one(body, tokens) for body, tokens in zip(LONG, found, strict=True)])
    return found


def in_peace(cases: Sequence[StructuredCase], folder: Path) -> list[Answer]:
    """The answers to `LONG`, then one for each case."""
    with serving("demo", folder) as cluster:
        found = asyncio.run(answers(cluster, [*LONG, *(ask(case, number) for number, case in enumerate(cases))]))
        cluster.settle()
    return found


def disturb(cluster: Serving) -> None:
    """Drain a decode worker; once its requests have migrated, kill the one that has them now."""
    before = migrations(cluster)
    until(lambda: all(worker["running"] > 2 for worker in decodes(cluster)), "answers on both decode workers")
    first, second = decodes(cluster)
    assert httpx.post(f"{cluster.url}/cluster/drain/{first['name']}", timeout=60).status_code == 200
    until(lambda: migrations(cluster) > before, "a migration")
    os.kill(second["pid"], signal.SIGKILL)
    assert cluster.twinpool("undrain", first["name"]).returncode == 0


async def one_round(cluster: Serving, bodies: Sequence[dict[str, Any]]) -> tuple[list[Answer], list[list[int]]]:
    """Answers that are asked for while `disturb` is at work, and the tokens of the streams beside."""
    over = asyncio.Event()

    async def trouble() -> None:
        try:
            await asyncio.to_thread(disturb, cluster)
        finally:
            over.set()

    got, streams, _ = await asyncio.gather(answers(cluster, bodies), beside(cluster, over), trouble())
    return got, streams


def decodes(cluster: Serving) -> list[dict[str, Any]]:
    """The status of both decode workers."""
    rows = httpx.get(f"{cluster.url}/cluster/status", timeout=60).json()["workers"]
    return sorted((row for row in rows if row["role"] == "decode"), key=lambda row: str(row["name"]))


def migrations(cluster: Serving) -> int:
    return int(cluster.metric("twinpool_migrations_total", outcome="migrated"))


def disturbed(
    cases: Sequence[StructuredCase], folder: Path, long: Sequence[Answer], a_round: int, retract_every: int
) -> tuple[list[Answer], Counter[str]]:
    """An answer for each case, in rounds of `a_round`, each with a migration and a kill -9 while answers are under way.
    `long`: what the answers to `LONG` are."""
    found: list[Answer] = []
    counts = Counter[str]()
    sections = {
        "cluster": {"lease_s": 3, "restart_limit": 1000},
        "faults": {"retract_every": retract_every, "step_delay_s": 0.04},
    }
    asked = [ask(case, number) for number, case in enumerate(cases)]
    with serving("demo", folder, "--decode", "2", sections=sections) as cluster:
        for start in range(0, len(asked), a_round):
            got, streams = asyncio.run(one_round(cluster, asked[start : start + a_round]))
            assert streams == [answer.tokens[: len(tokens)] for answer, tokens in zip(long, streams, strict=True)]
            found += got
            counts["replayed"] += sum(answer.twinpool["attempts"] > 1 for answer in got)
            counts["migrated"] += sum(answer.twinpool["migrations"] > 0 for answer in got)
            counts["rounds"] += 1
            until(lambda: all(w["state"] == "ready" for w in cluster.status().values()), "all workers to be back")
            cluster.settle()
    return found, counts


def expect(cases: Sequence[StructuredCase], tmp_path: Path, a_round: int, retract_every: int) -> Counter[str]:
    """Ask for every case in peace and disturbed; returns what was counted."""
    peaceful = in_peace(cases, tmp_path / "peace")
    long, peaceful = peaceful[: len(LONG)], peaceful[len(LONG) :]
    found, counts = disturbed(cases, tmp_path / "disturbed", long, a_round, retract_every)
    wrong: dict[str, str] = {}
    for case, calm, answer in zip(cases, peaceful, found, strict=True):
        counts[answer.finish or "none"] += 1
        if answer.tokens != calm.tokens or answer.text != calm.text:
            wrong[case.name] = f"{answer.text!r} and in peace {calm.text!r}"
        elif not (case.valid if answer.finish == "stop" else case.begins)(answer.text):
            wrong[case.name] = f"{answer.finish}: {answer.text!r}"
    assert wrong == {}
    assert all(len(answer.tokens) > 1000 for answer in long), "the streams beside are long"
    assert counts["stop"] + counts["length"] == len(cases)
    assert counts["length"] < len(cases) / 5, counts
    return counts
