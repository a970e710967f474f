"""One cluster of two colocated workers: its answers, and what life does to it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.served_cluster import COMES_BACK_S, Answer, Serving, complete, serving, until

pytestmark = pytest.mark.slow


@dataclass
class Scene:
    oracle: Oracle
    serving: Serving


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    base = tmp_path_factory.mktemp("colocated")
    folder = make_checkpoint(base / "model", "qwen3", seed=21)
    sections = {
        "cache": {"device_tokens": 8192, "page_tokens": 16},
        "prefill": {"chunk_tokens": 128},
        "cluster": {"lease_s": 8},
        "audit": {"fraction": 0.3},
        # Steps take their time, so that streams are in their middle when something happens.
        "faults": {"step_delay_s": 0.01},
    }
    with serving(folder, base / "run", "--colocate", "2", sections=sections) as cluster:
        yield Scene(Oracle(folder), cluster)


@pytest.fixture(autouse=True)
def settled(scene: Scene) -> Iterator[None]:
    yield
    scene.serving.settle()


def some_prompts(seed: int, count: int, longest: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def length(number: int, count: int) -> int:
    return count * (5 if number % 4 == 1 else 1)


def under_load(scene: Scene, prompts: list[list[int]], count: int, strike: list[str], pid: int = 0) -> list[Answer]:
    """All answers, while a command is given or a process killed as soon as the first has ended. Each fourth has
    five times as many tokens, and so is in its middle by then."""
    cluster = scene.serving

    async def all_of_them() -> list[Answer]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            bodies = [
                cluster.body(p, max_tokens=length(n, count), stream=n // 2 % 2 == 0) for n, p in enumerate(prompts)
            ]
            tasks = [asyncio.create_task(complete(client, body)) for body in bodies]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if pid:
                os.kill(pid, signal.SIGKILL)
            else:
                told = await asyncio.to_thread(cluster.twinpool, *strike)
                assert told.returncode == 0, told.stderr
            return list(await asyncio.gather(*tasks))

    return asyncio.run(all_of_them())


def test_answers_are_the_oracles_and_both_legs_are_of_one_worker(scene: Scene) -> None:
    prompts = some_prompts(1, 24, 600)
    answers = scene.serving.complete_all(prompts, max_tokens=20)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert compare(scene.oracle, prompt, answer.tokens).equal
        told = answer.twinpool
        assert told["prefill_worker"] == told["decode_worker"]
        assert (told["transfer_bytes"], told["timeline"]["transfer"]) == (0, None)
    assert {a.twinpool["decode_worker"] for a in answers} == {"colocated-0", "colocated-1"}


def test_the_answers_are_audited_by_idle_workers(scene: Scene) -> None:
    scene.serving.complete_all(some_prompts(2, 24, 60), max_tokens=10)
    until(lambda: scene.serving.metric("twinpool_audit_answers_total", result="exact") >= 2, "exact audits")
    assert scene.serving.metric("twinpool_audit_answers_total", result="damaged") == 0


def test_d5_a_worker_killed_under_load_costs_no_answer_and_comes_back(scene: Scene) -> None:
    cluster, prompts = scene.serving, some_prompts(4, 24, 300)
    before, replays = cluster.status()["colocated-1"], cluster.metric("twinpool_replays_total")
    answers = under_load(scene, prompts, 90, [], before["pid"])
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert len(answer.tokens) == length(number, 90)
        assert compare(scene.oracle, prompt, answer.tokens).equal
    assert cluster.metric("twinpool_replays_total") > replays, "the kill was to strike in the middle"
    until(lambda: cluster.status()["colocated-1"]["state"] == "ready", "colocated-1 to come back", pause_s=COMES_BACK_S)
    assert cluster.status()["colocated-1"]["incarnation"] > before["incarnation"]


def test_d1_a_worker_drains_under_load_without_a_failed_request(scene: Scene) -> None:
    cluster, prompts = scene.serving, some_prompts(6, 24, 400)
    answers = under_load(scene, prompts, 80, ["drain", "colocated-1"])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert compare(scene.oracle, prompt, answer.tokens).equal
    assert cluster.status()["colocated-1"]["state"] == "left"
    last = cluster.twinpool("drain", "colocated-0")
    assert (last.returncode, "--force" in last.stderr) == (1, True)
    role = cluster.twinpool("role", "colocated-0", "decode")
    assert (role.returncode, "it has both roles" in role.stderr) == (1, True), role.stderr
    back = cluster.twinpool("undrain", "colocated-1")
    assert back.returncode == 0, back.stderr
    until(lambda: cluster.status()["colocated-1"]["state"] == "ready", "colocated-1 to be back", pause_s=COMES_BACK_S)
