"""A cluster whose prefill worker has two ranks, tensor-parallel ones or stages, under Ray, and what becomes of it when
one dies; and one whose decode workers share their experts."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.model_families import FAMILIES
from tests.support.served_cluster import COMES_BACK_S, Serving, family, serving, until


def _ranks(cluster: Serving) -> list[psutil.Process]:
    """The processes of all workers' ranks, leaders included."""
    found = []
    for process in family(cluster.process):
        try:
            if any("WorkerActor" in part for part in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_a_worker_of_two_ranks_answers_as_the_oracle_and_comes_back_whole_when_a_rank_is_killed(
    tmp_path: Path, layout: str
) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", seed=31)
    oracle, rng = Oracle(folder), random.Random(7)
    prompts = [[rng.randrange(300) for _ in range(n)] for n in (1, 40, 150, 333)]
    sections = {"cache": {"device_tokens": 4096}, "prefill": {"chunk_tokens": 128, layout: 2}}
    with serving(folder, tmp_path / "run", sections=sections) as cluster:
        for prompt, answer in zip(prompts, cluster.complete_all(prompts, max_tokens=12), strict=True):
            assert compare(oracle, prompt, answer.tokens).equal
        cluster.settle()
        before = cluster.status()
        leaders = {worker["pid"] for worker in before.values()}
        followers = [process for process in _ranks(cluster) if process.pid not in leaders]
        assert len(followers) == 1
        followers[0].send_signal(signal.SIGKILL)
        until(
            lambda: cluster.status()["prefill-0"]["incarnation"] > before["prefill-0"]["incarnation"], "a new one", 120
        )
        until(
            lambda: cluster.status()["prefill-0"]["state"] == "ready",
            "prefill-0 to come back",
            120,
            pause_s=COMES_BACK_S,
        )
        assert any("prefill-0" in line and "rank 1" in line for line in cluster.lines), cluster.lines
        assert not psutil.pid_exists(before["prefill-0"]["pid"])
        assert len(_ranks(cluster)) == 3
        for prompt, answer in zip(prompts, cluster.complete_all(prompts, max_tokens=12), strict=True):
            assert compare(oracle, prompt, answer.tokens).equal
        cluster.settle()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_decode_workers_that_share_their_experts_come_back_together_when_one_is_killed(
    tmp_path: Path, ranks: int
) -> None:
    folder = FAMILIES["qwen3_moe"](tmp_path / "model")
    oracle, rng = Oracle(folder), random.Random(7)
    prompts = [[rng.randrange(90) for _ in range(n)] for n in (1, 40, 150, 90)]
    sections = {"cache": {"device_tokens": 4096}, "decode": {"dp": 2, "tp": ranks}}
    with serving(folder, tmp_path / "run", "--decode", "2", sections=sections) as cluster:
        for prompt, answer in zip(prompts, cluster.complete_all(prompts, max_tokens=12), strict=True):
            assert compare(oracle, prompt, answer.tokens).equal
        before = cluster.status()
        psutil.Process(before["decode-1"]["pid"]).send_signal(signal.SIGKILL)
        names = ("decode-0", "decode-1")
        until(
            lambda: all(
                cluster.status()[name]["incarnation"] > before[name]["incarnation"]
                and cluster.status()[name]["state"] == "ready"
                for name in names
            ),
            "both to come back",
            240,
            pause_s=COMES_BACK_S,
        )
        assert not any(psutil.pid_exists(before[name]["pid"]) for name in names)
        for prompt, answer in zip(prompts, cluster.complete_all(prompts, max_tokens=12), strict=True):
            assert compare(oracle, prompt, answer.tokens).equal
        cluster.settle()


@pytest.mark.slow
def test_decode_workers_that_share_their_experts_pause_change_their_weights_and_sleep_together(tmp_path: Path) -> None:
    folders = [FAMILIES["qwen3_moe"](tmp_path / name, seed=seed) for seed, name in enumerate(("first", "second"))]
    rng = random.Random(7)
    prompts = [[rng.randrange(90) for _ in range(n)] for n in (1, 40, 150, 90)]
    sections = {
        "cache": {"device_tokens": 4096}, "decode": {"dp": 2}, "cluster": {"heartbeat_s": 0.2},
        "engine": {"weight_roots": str(tmp_path)},
    }  # fmt: skip
    with serving(folders[0], tmp_path / "run", "--decode", "2", sections=sections) as cluster:

        def post(name: str, **body: Any) -> None:
            told = httpx.post(f"{cluster.url}/v1/{name}", json=body, timeout=300)
            assert told.status_code == 200, told.text

        def check(folder: Path) -> None:
            oracle = Oracle(folder)
            for prompt, answer in zip(prompts, cluster.complete_all(prompts, max_tokens=12), strict=True):
                assert compare(oracle, prompt, answer.tokens).equal

        check(folders[0])
        post("pause")
        post("resume")
        check(folders[0])
        before = cluster.status()
        post("weights", path=str(folders[1]), rolling=True)
        check(folders[1])
        assert all(cluster.status()[name]["incarnation"] > before[name]["incarnation"] for name in before)
        post("sleep", level=1)
        post("wake")
        check(folders[1])
        post("weights/revert")
        check(folders[0])
        assert cluster.twinpool("restart", "decode-0").returncode != 0, "nobody else decodes"
        assert cluster.twinpool("restart", "decode-0", "--force").returncode == 0
        check(folders[0])
        cluster.settle()
