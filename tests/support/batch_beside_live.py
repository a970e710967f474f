"""A batch beside live traffic on a real cluster: what live clients see with and without it, and whether each of its
lines is answered once, and rightly, whoever is killed meanwhile.

Live streams begin at random times (Poisson), as many whatever becomes of them. Phases take turns: without a batch, and
with the whole batch submitted at their beginning and cancelled at their end; both of a round have streams that begin at
the same moments. Then the batch is submitted once more and runs to its end beside the same traffic, while routers and
workers are killed whenever a random number of its lines is answered. At last every line is looked for by its name, and
its greedy tokens are compared with those of the engine alone, without workers.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.bare_engine import Twinpool
from twinpool.cli.load.openai_client import Endpoint, Outcome, stream
from twinpool.contracts.config.worker_config import EngineConfig

URL, ENDED = "/v1/completions", ("completed", "failed", "expired", "cancelled")
LOW, HIGH = 300, 2000
"""Ids of ordinary tokens."""
AWAY_S, STALLED_S, STREAM_S = 60.0, 900.0, 120.0
"""Seconds for which no router may answer, no line of the batch be answered, and a live stream may take."""
LOOK_S = 0.2
TOGETHER, PAGE_TOKENS = 50, 16
"""Lines that the engine alone answers at a time, and its pages."""


@dataclass(frozen=True)
class BatchLoad:
    """What is asked, and what is done to the cluster."""

    lines: int
    prompt_tokens: int
    line_tokens: int
    rate: float
    """Live streams that begin each second."""
    live_prompt_tokens: int
    live_tokens: int
    rounds: int
    phase_s: float
    router_kills: int
    worker_kills: int
    seed: int

    def prompt(self, number: int) -> list[int]:
        """Of a line."""
        rng = random.Random(f"{self.seed}:line:{number}")
        return [rng.randrange(LOW, HIGH) for _ in range(self.prompt_tokens)]

    def line(self, number: int) -> dict[str, Any]:
        sampling = {"max_tokens": self.line_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body = {"prompt": self.prompt(number), **sampling}
        return {"custom_id": f"line-{number}", "method": "POST", "url": URL, "body": body}


def right_tokens(load: BatchLoad, model: Path) -> dict[int, list[int]]:
    """The greedy tokens of every line, by number, of the engine alone in this process."""
    pages = -(-(load.prompt_tokens + load.line_tokens) // PAGE_TOKENS)
    engine = Twinpool(model, EngineConfig(), TOGETHER * pages * PAGE_TOKENS, TOGETHER)
    found: dict[int, list[int]] = {}
    for begin in range(0, load.lines, TOGETHER):
        numbers = range(begin, min(begin + TOGETHER, load.lines))
        tokens = engine.run([load.prompt(number) for number in numbers], load.line_tokens).tokens
        found |= zip(numbers, tokens, strict=True)
    return found


@dataclass
class LiveFigures:
    """What live clients saw of all phases of one kind. Milliseconds."""

    ttft_ms: list[float] = field(default_factory=list, repr=False)
    itl_ms: list[float] = field(default_factory=list, repr=False)
    failed: Counter[str] = field(default_factory=Counter)
    lines: int = 0
    """Lines of the batch that were answered meanwhile."""

    def take(self, outcomes: Sequence[Outcome]) -> None:
        for one in outcomes:
            if one.ok:
                self.ttft_ms.append(1e3 * one.ttft_s)
                self.itl_ms += [1e3 * gap for gap in one.gaps_s]
            else:
                self.failed[str(one.error)] += 1


@dataclass(frozen=True)
class LineFaults:
    """Lines of a batch that aren't as they should be."""

    missing: int
    twice: int
    failed: int
    """Among the errors."""
    wrong: int
    """With other tokens than they should have."""

    @classmethod
    def of(
        cls,
        load: BatchLoad,
        output: Sequence[dict[str, Any]],
        errors: Sequence[dict[str, Any]],
        right: Mapping[int, list[int]],
    ) -> LineFaults:
        """`right`: the tokens of some of the lines, by number."""
        times = Counter(str(one["custom_id"]) for one in (*output, *errors))
        tokens = {one["custom_id"]: one["response"]["body"]["choices"][0]["token_ids"] for one in output}
        return cls(
            sum(not times[f"line-{number}"] for number in range(load.lines)),
            sum(count > 1 for count in times.values()),
            len(errors),
            sum(tokens.get(f"line-{number}") != answer for number, answer in right.items()),
        )


@dataclass(frozen=True)
class KilledBatch:
    """A batch that ran to its end while processes were killed."""

    status: str
    seconds: float
    killed: list[str]
    faults: LineFaults
    live: LiveFigures

    @property
    def well(self) -> bool:
        return self.status == "completed" and self.faults == LineFaults(0, 0, 0, 0)


class BatchBesideLive:
    """One cluster, its clients, and who kills its processes, which are children of this one."""

    def __init__(self, url: str, load: BatchLoad) -> None:
        self._load, self._endpoint = load, Endpoint.parse(url)
        self._asked = 0
        """Live streams so far: each has a prompt of its own."""

    # ------------------------------------------------------------ live traffic

    async def _streams(self, seconds: float, moments: random.Random) -> list[Outcome]:
        """Begin streams for so long, and follow all of them to their ends."""
        began, at, tasks = time.perf_counter(), 0.0, list[asyncio.Task[Outcome]]()
        while (at := at + moments.expovariate(self._load.rate)) < seconds:
            self._asked += 1
            rng = random.Random(f"{self._load.seed}:live:{self._asked}")
            prompt = [rng.randrange(LOW, HIGH) for _ in range(self._load.live_prompt_tokens)]
            sampling = {"max_tokens": self._load.live_tokens, "temperature": 0.8, "seed": self._asked}
            body = {"prompt": prompt, **sampling, "ignore_eos": True, "stream": True}  # Drafts seldom fit such answers.
            request = self._endpoint.encode(URL, body)
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            outcome = Outcome(began + at, 0.0, len(prompt), self._load.live_tokens)
            tasks.append(asyncio.create_task(stream(self._endpoint, request, outcome, STREAM_S)))
        await asyncio.sleep(max(0.0, began + seconds - time.perf_counter()))
        return await asyncio.gather(*tasks)

    # ------------------------------------------------------------ the batch

    async def _call(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Ask a router, again while none answers. Raises `httpx.HTTPError`."""
        deadline = time.monotonic() + AWAY_S
        while True:
            try:
                async with httpx.AsyncClient(base_url=self._endpoint.url, timeout=60, trust_env=False) as client:
                    answer = await client.request(method, path, **more)
                if answer.status_code < 500 or time.monotonic() > deadline:
                    return answer.raise_for_status()
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(LOOK_S)

    async def _upload(self) -> str:
        content = b"".join(json.dumps(self._load.line(number)).encode() + b"\n" for number in range(self._load.lines))
        form = {"files": {"file": ("lines.jsonl", content)}, "data": {"purpose": "batch"}}
        return str((await self._call("POST", "/v1/files", **form)).json()["id"])

    async def _submit(self, file_id: str) -> str:
        body = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
        return str((await self._call("POST", "/v1/batches", json=body)).json()["id"])

    async def _batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self._call("GET", f"/v1/batches/{batch_id}")).json()
        return found

    async def _cancelled(self, batch_id: str) -> int:
        """Cancel a batch, and wait until the cluster is at rest; returns how many of its lines were answered."""
        await self._call("POST", f"/v1/batches/{batch_id}/cancel")
        deadline = time.monotonic() + STALLED_S
        while (found := await self._batch(batch_id))["status"] not in ENDED or await self._busy():
            if time.monotonic() > deadline:
                raise RuntimeError(f"a batch that was cancelled is {found['status']} after {STALLED_S:g} s")
            await asyncio.sleep(LOOK_S)
        return int(found["request_counts"]["completed"])

    async def _workers(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (await self._call("GET", "/cluster/status")).json()["workers"]
        return rows

    async def _busy(self) -> bool:
        return any(row["running"] or row["waiting"] for row in await self._workers())

    # ------------------------------------------------------------ what is measured

    async def compare(self) -> tuple[list[LiveFigures], list[LiveFigures]]:
        """What live clients see of each round without the batch, and with it."""
        file_id, found = await self._upload(), (list[LiveFigures](), list[LiveFigures]())
        for number in range(-1, self._load.rounds):  # The first one fills pools, and isn't counted.
            for batched in (False, True) if number % 2 else (True, False):
                figures = LiveFigures()
                batch_id = await self._submit(file_id) if batched else ""
                seconds = self._load.phase_s if number >= 0 else min(5.0, self._load.phase_s)
                figures.take(await self._streams(seconds, random.Random(f"{self._load.seed}:{number}")))
                if batched:
                    figures.lines = await self._cancelled(batch_id)
                if number >= 0:
                    found[batched].append(figures)
        return found

    async def kill(self, model: Path) -> KilledBatch:
        """Kill routers and workers while the batch runs beside live traffic, and compare its lines with what the bare
        engine makes of them."""
        draw, load, began = random.Random(self._load.seed), self._load, time.monotonic()
        batch_id = await self._submit(await self._upload())
        kinds = ["router"] * load.router_kills + ["worker"] * load.worker_kills
        draw.shuffle(kinds)
        points = sorted(draw.sample(range(int(0.9 * load.lines)), len(kinds)))
        due, killed, live = list(zip(points, kinds, strict=True)), list[str](), LiveFigures()
        over = asyncio.Event()
        traffic = asyncio.create_task(self._until(over, live))
        moved, answered = time.monotonic(), -1
        while (batch := await self._batch(batch_id))["status"] not in ENDED:
            if (now_answered := sum(batch["request_counts"][kind] for kind in ("completed", "failed"))) != answered:
                moved, answered = time.monotonic(), now_answered
            if time.monotonic() - moved > STALLED_S:
                raise RuntimeError(f"{answered} of {load.lines} lines are answered, and no other for {STALLED_S:g} s")
            while due and answered >= due[0][0]:
                killed.append(await self._kill(due.pop(0)[1], draw))
            await asyncio.sleep(LOOK_S)
        seconds = time.monotonic() - began
        over.set()
        await traffic
        output, errors = [await self._lines(batch[f"{kind}_file_id"]) for kind in ("output", "error")]
        live.lines = len(output)
        faults = LineFaults.of(load, output, errors, right_tokens(load, model))
        return KilledBatch(batch["status"], seconds, killed, faults, live)

    async def _until(self, over: asyncio.Event, live: LiveFigures) -> None:
        moments = random.Random(f"{self._load.seed}:killed")
        while not over.is_set():
            live.take(await self._streams(1.0, moments))

    async def _lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        answer = await self._call("GET", f"/v1/files/{file_id}/content")
        return [json.loads(line) for line in answer.content.splitlines()]

    async def _kill(self, kind: str, draw: random.Random) -> str:
        """Kill a router, or a worker that serves; returns its name."""
        if kind == "router":
            routers = [
                one for one in psutil.Process().children(recursive=True) if "twinpool.router.main" in one.cmdline()
            ]
            victim = draw.choice(sorted(routers, key=lambda one: one.pid))
            name, pid = "router", victim.pid
        else:
            rows = [row for row in await self._workers() if row["state"] == "ready"]
            if not rows:
                return "nobody"
            row = draw.choice(sorted(rows, key=lambda one: str(one["name"])))
            name, pid = str(row["name"]), int(row["pid"])
        os.kill(pid, signal.SIGKILL)
        return name
