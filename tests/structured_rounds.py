"""Rounds of structured output over a cluster that is disturbed: every answer is what it would have been in peace, and
follows what its client asked for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.serving import Answer, Serving, complete, serving, until
from tests.structured_cases import StructuredCase

AT_ONCE, TOKENS = 8, 160
DISTURBED: dict[str, Any] = {
    "cluster": {"lease_s": 3, "restart_limit": 1000},
    "faults": {"retract_every": 5, "step_delay_s": 0.04},
}


def ask(case: StructuredCase, number: int) -> dict[str, Any]:
    """The body that asks for a case; every second one is sampled, every third one a stream."""
    drawn = {"temperature": 0.9, "seed": number} if number % 2 else {}
    return {"prompt": f"Chapter {number}. He wrote down", "max_tokens": TOKENS, "stream": number % 3 == 0, **drawn,
            **case.body}  # fmt: skip


async def answers(cluster: Serving, asked: Sequence[dict[str, Any]]) -> list[Answer]:
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=180) as client:

        async def one(body: dict[str, Any]) -> Answer:
            async with gate:
                return await complete(client, cluster.body(**body))

        return list(await asyncio.gather(*[one(body) for body in asked]))


def in_peace(cases: Sequence[StructuredCase], folder: Path) -> list[Answer]:
    with serving("demo", folder) as cluster:
        found = asyncio.run(answers(cluster, [ask(case, number) for number, case in enumerate(cases)]))
        cluster.settle()
    return found


def disturb(cluster: Serving) -> None:
    """Drain a decode worker; once its requests have migrated, kill the one that has them now."""
    before = migrations(cluster)
    until(lambda: all(worker["running"] for worker in decodes(cluster)), "answers on both decode workers")
    first, second = decodes(cluster)
    assert httpx.post(f"{cluster.url}/cluster/drain/{first['name']}", timeout=60).status_code == 200
    until(lambda: migrations(cluster) > before, "a migration")
    os.kill(second["pid"], signal.SIGKILL)
    assert cluster.twinpool("undrain", first["name"]).returncode == 0


def decodes(cluster: Serving) -> list[dict[str, Any]]:
    """The status of both decode workers."""
    rows = httpx.get(f"{cluster.url}/cluster/status", timeout=30).json()["workers"]
    return sorted((row for row in rows if row["role"] == "decode"), key=lambda row: str(row["name"]))


def migrations(cluster: Serving) -> int:
    return int(cluster.metric("twinpool_migrations_total", outcome="migrated"))


def disturbed(cases: Sequence[StructuredCase], folder: Path, a_round: int) -> tuple[list[Answer], Counter[str]]:
    """The answers in rounds of `a_round`, each with a migration and a kill -9 while answers are under way."""
    found: list[Answer] = []
    counts = Counter[str]()
    asked = [ask(case, number) for number, case in enumerate(cases)]
    with serving("demo", folder, "--decode", "2", sections=DISTURBED) as cluster:
        for start in range(0, len(asked), a_round):

            async def one_round(bodies: Sequence[dict[str, Any]]) -> list[Answer]:
                got, _ = await asyncio.gather(answers(cluster, bodies), asyncio.to_thread(disturb, cluster))
                return got

            migrated = migrations(cluster)
            got = asyncio.run(one_round(asked[start : start + a_round]))
            found += got
            counts["replayed"] += sum(answer.twinpool["attempts"] > 1 for answer in got)
            counts["migrated"] += migrations(cluster) - migrated
            counts["rounds"] += 1
            assert counts["replayed"] >= counts["rounds"], "a kill met no answer"
            assert counts["migrated"] >= counts["rounds"], "a drain met no answer"
            until(lambda: all(w["state"] == "ready" for w in cluster.status().values()), "all workers to be back", 90)
            cluster.settle()
    return found, counts


def expect(cases: Sequence[StructuredCase], tmp_path: Path, a_round: int) -> Counter[str]:
    """Ask for every case in peace and disturbed; returns what was counted."""
    peaceful = in_peace(cases, tmp_path / "peace")
    found, counts = disturbed(cases, tmp_path / "disturbed", a_round)
    wrong: dict[str, str] = {}
    for case, calm, answer in zip(cases, peaceful, found, strict=True):
        counts[answer.finish or "none"] += 1
        if answer.tokens != calm.tokens or answer.text != calm.text:
            wrong[case.name] = f"{answer.text!r} and in peace {calm.text!r}"
        elif not (case.valid if answer.finish == "stop" else case.begins)(answer.text):
            wrong[case.name] = f"{answer.finish}: {answer.text!r}"
    assert wrong == {}
    assert counts["stop"] + counts["length"] == len(cases)
    assert counts["length"] < len(cases) / 5, counts
    return counts
