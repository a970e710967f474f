"""One cluster of two prefill and two decode workers, and what life does to it: cancels, kills, drains."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.killed_workers import Failover, Load
from tests.support.served_cluster import COMES_BACK_S, Answer, Serving, complete, family, serving, until


@dataclass
class Scene:
    oracle: Oracle
    serving: Serving


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    base = tmp_path_factory.mktemp("life")
    folder = make_checkpoint(base / "model", "qwen3", seed=21)
    # Steps take their time, so that requests are in their middle when something happens.
    sections = {
        "cache": {"device_tokens": 8192},
        "prefill": {"chunk_tokens": 128},
        "cluster": {"lease_s": 8},
        # The first hand-over of each start of a prefill worker arrives damaged.
        "faults": {"step_delay_s": 0.004, "corrupt_page": 1},
    }
    with serving(folder, base / "run", "--prefill", "2", "--decode", "2", sections=sections) as cluster:
        yield Scene(Oracle(folder), cluster)


@pytest.fixture(autouse=True)
def settled(scene: Scene) -> Iterator[None]:
    yield
    scene.serving.settle()


def some_prompts(seed: int, count: int, longest: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.slow
def test_one_grep_for_a_replayed_requests_id_finds_its_lines_in_all_processes(scene: Scene) -> None:
    cluster = scene.serving
    logs = Path(next(line for line in cluster.lines if " logs " in line).split()[-1])
    cluster.complete_all(some_prompts(8, 4, 200), max_tokens=4)

    def struck() -> list[str]:
        lines = [line for file in logs.glob("decode-*.log") for line in file.read_text().splitlines()]
        told = [json.loads(line) for line in lines if '"state damage"' in line]
        return [line["request_id"] for line in told]

    until(lambda: bool(struck()), "the log of a damaged hand-over")
    asked = struck()[0].partition("-")[0]  # As the client has it: the choice's number is ours.
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(logs.glob("*.log")):
        lines = [json.loads(line) for line in file.read_text().splitlines() if asked in line]
        found |= {file.stem.partition("-")[0]: lines} if lines else {}
    print(found)
    assert all(line["request_id"].startswith(asked) for lines in found.values() for line in lines)
    events = {process: {line["event"] for line in lines} for process, lines in found.items()}
    assert events["router"] == {"request replayed", "request ended"}
    assert {"state damage", "attempt failed"} <= events["decode"]
    assert events["prefill"] == {"its state arrived damaged"}
    reasons = [line["reason"] for line in found["router"] if line["event"] == "request replayed"]
    assert all("damaged" in reason for reason in reasons)


@pytest.mark.slow
def test_b2_two_hundred_clients_that_leave_at_random_moments_leave_nothing_behind(scene: Scene) -> None:
    cluster, rng = scene.serving, random.Random(1)
    prompts = some_prompts(2, 200, 400)
    leaves = [rng.random() * 0.4 for _ in prompts]

    async def all_of_them() -> int:
        gate, left = asyncio.Semaphore(16), 0
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:

            async def one(prompt: list[int], after: float, stream: bool) -> None:
                nonlocal left
                async with gate:
                    body = cluster.body(prompt, max_tokens=60, stream=stream)
                    try:
                        await asyncio.wait_for(complete(client, body), after)
                    except TimeoutError:
                        left += 1

            await asyncio.gather(*[one(p, leaves[i], i % 2 == 0) for i, p in enumerate(prompts)])
        return left

    left = asyncio.run(all_of_them())
    assert left > 100, "most of them were to leave early"
    cluster.settle()
    (prompt,) = some_prompts(3, 1, 300)
    assert compare(scene.oracle, prompt, cluster.complete(prompt, max_tokens=20).tokens).equal


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["prefill-1", "decode-1"])
def test_d5_a_worker_killed_under_load_costs_no_answer_and_comes_back(scene: Scene, victim: str) -> None:
    cluster = scene.serving
    prompts = some_prompts(4, 48, 500)
    before = cluster.status()[victim]
    replays = cluster.metric("twinpool_replays_total")

    async def under_load() -> list[Answer]:
        gate, ended = asyncio.Semaphore(16), asyncio.Semaphore(0)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:

            async def one(prompt: list[int], stream: bool) -> Answer:
                async with gate:
                    answer = await complete(client, cluster.body(prompt, max_tokens=40, stream=stream))
                    ended.release()
                    return answer

            def struck() -> bool:
                """Whether it has requests, or had when its lease ended."""
                load = cluster.metric("twinpool_worker_booked_requests", worker=victim)
                return load > 0 or cluster.metric("twinpool_replays_total") > replays

            async def kill() -> None:
                with contextlib.suppress(ProcessLookupError):  # its lease has ended already
                    for _ in range(4):
                        for _ in range(8):
                            await ended.acquire()
                        # Stopped, it keeps what it has and gets of what comes, so that the kill strikes in the middle.
                        os.kill(before["pid"], signal.SIGSTOP)
                        for _ in range(4):
                            await ended.acquire()
                        if await asyncio.to_thread(struck):
                            break
                        os.kill(before["pid"], signal.SIGCONT)  # it was stopped with nothing under way
                    os.kill(before["pid"], signal.SIGKILL)

            answers, _ = await asyncio.gather(
                asyncio.gather(*[one(p, i % 3 > 0) for i, p in enumerate(prompts)]), kill()
            )
        return list(answers)

    answers = asyncio.run(under_load())
    print(Counter(a.twinpool["decode_worker"] for a in answers), Counter(a.twinpool["attempts"] for a in answers))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.tokens) == 40
        assert compare(scene.oracle, prompt, answer.tokens).equal
    assert cluster.metric("twinpool_replays_total") > replays, "the kill was to strike in the middle"
    until(lambda: cluster.status()[victim]["state"] == "ready", f"{victim} to come back", pause_s=COMES_BACK_S)
    after = cluster.status()[victim]
    assert after["incarnation"] > before["incarnation"]
    assert after["pid"] != before["pid"]
    assert any(victim in line and "died" in line for line in cluster.lines)

    def it_serves() -> bool:
        answers = cluster.complete_all(some_prompts(5, 8, 100), max_tokens=4)
        return victim in {w for a in answers for w in (a.twinpool["prefill_worker"], a.twinpool["decode_worker"])}

    until(it_serves, f"{victim} to serve again")


@pytest.mark.slow
def test_d1_a_worker_drains_under_load_without_a_failed_request_and_undrains_before_it_has_left(scene: Scene) -> None:
    cluster = scene.serving
    prompts = some_prompts(6, 32, 400)

    async def under_load() -> list[Answer]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            tasks = [asyncio.create_task(complete(client, cluster.body(p, max_tokens=60))) for p in prompts]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            drained = await asyncio.to_thread(cluster.twinpool, "drain", "decode-1")
            assert drained.returncode == 0, drained.stderr
            return list(await asyncio.gather(*tasks))

    for prompt, answer in zip(prompts, asyncio.run(under_load()), strict=True):
        assert compare(scene.oracle, prompt, answer.tokens).equal
    assert cluster.status().get("decode-1", {"state": "left"})["state"] == "left"
    again = cluster.twinpool("drain", "decode-1")
    assert again.returncode == 1
    assert "decode-1" in again.stderr + again.stdout
    last = cluster.twinpool("drain", "decode-0")
    assert last.returncode == 1
    assert "--force" in last.stderr + last.stdout
    unknown = cluster.twinpool("drain", "decode-7")
    assert unknown.returncode == 1
    assert "prefill-0" in unknown.stderr + unknown.stdout
    back = cluster.twinpool("undrain", "decode-1")
    assert (back.returncode, back.stdout.splitlines()[0]) == (0, "decode-1 starts again"), back.stderr
    assert "decode-1 serves on" in back.stdout
    assert cluster.status()["decode-1"]["state"] == "ready"
    (prompt,) = some_prompts(7, 1, 50)
    assert compare(scene.oracle, prompt, cluster.complete(prompt, max_tokens=10).tokens).equal


@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_d5_seeded_streams_go_on_with_the_very_same_tokens_after_a_kill(scene: Scene, role: str) -> None:
    failover = Failover(scene.serving.url, Load(streams=6, prompt_tokens=300, answer_tokens=400, vocab=300, seed=9))
    result = asyncio.run(failover.measure(role, 1))
    print(result)
    assert result.same_tokens
    assert result.replayed == result.logprobs > 0
    assert result.kills == 1
    assert result.struck, "streams waited for the worker that was killed"


@pytest.mark.slow
def test_b2_a_router_that_is_killed_leaves_nothing_on_the_workers_and_the_next_one_serves(scene: Scene) -> None:
    cluster = scene.serving
    prompts = some_prompts(11, 12, 300)
    (router,) = [p for p in family(cluster.process) if "twinpool.router.main" in " ".join(p.cmdline())]

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> None:
        """A stream; the first of all that hears something kills the router, which has all the others under way."""
        body = cluster.body(prompt, max_tokens=400, stream=True)
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                with contextlib.suppress(psutil.NoSuchProcess):
                    router.kill()

    async def under_load() -> list[BaseException | None]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            return list(await asyncio.gather(*[one(client, p) for p in prompts], return_exceptions=True))

    ended = asyncio.run(under_load())
    assert any(isinstance(e, httpx.HTTPError) for e in ended), "the kill was to strike in the middle"
    before = cluster.process.pid

    def it_serves() -> bool:
        try:
            return httpx.get(f"{cluster.url}/health", timeout=60).status_code == 200
        except httpx.HTTPError:
            return False

    until(it_serves, "the next router")
    assert before == cluster.process.pid
    assert any("router died" in line for line in cluster.lines)
    (prompt,) = some_prompts(12, 1, 200)
    assert compare(scene.oracle, prompt, cluster.complete(prompt, max_tokens=20).tokens).equal


def test_the_commands_answer(scene: Scene) -> None:
    for command in (["status"], ["status", "--json"], ["check"]):
        done = scene.serving.twinpool(*command)
        assert done.returncode == 0, done.stderr


def test_no_cluster_is_exit_code_3_and_a_wrong_flag_is_2(scene: Scene, tmp_path: Path) -> None:
    nobody = Serving.__new__(Serving)
    nobody.runtime = tmp_path
    for command in (["status"], ["check", "--json"], ["drain", "decode-0"]):
        done = nobody.twinpool(*command)
        assert done.returncode == 3
        assert "twinpool serve" in done.stderr
    assert scene.serving.twinpool("status", "--colour").returncode == 2
