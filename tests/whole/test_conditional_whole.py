"""One cluster whose decode worker computes prompts, too: its prefill worker is killed under load, and stays away."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.served_cluster import COMES_BACK_S, complete, serving, until

pytestmark = pytest.mark.slow
COUNT = 40


def test_requests_are_answered_while_prefill_is_dead_by_decode_and_afterwards_by_both(tmp_path: Path) -> None:
    folder, rng = make_checkpoint(tmp_path / "model", "qwen3", seed=21), random.Random(1)
    oracle = Oracle(folder)
    sections = {
        "disaggregation": {"mode": "conditional", "step_tokens": 64},
        "cache": {"device_tokens": 8192, "page_tokens": 16},
        "cluster": {"lease_s": 8},
        "audit": {"fraction": 1.0},
        # Steps take their time, so that requests are in their middle when it happens.
        "faults": {"step_delay_s": 0.01},
    }

    async def under_load() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            asked = [[rng.randrange(300) for _ in range(rng.randint(20, 300))] for _ in range(12)]
            bodies = [cluster.body(p, max_tokens=COUNT, stream=n % 2 == 0) for n, p in enumerate(asked)]
            tasks = [asyncio.create_task(complete(client, body)) for body in bodies]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            os.kill(cluster.status()["prefill-0"]["pid"], signal.SIGKILL)
            more = [[rng.randrange(300) for _ in range(50)] for _ in range(4)]
            tasks += [asyncio.create_task(complete(client, cluster.body(p, max_tokens=COUNT))) for p in more]
            for prompt, answer in zip(asked + more, await asyncio.gather(*tasks), strict=True):
                assert compare(oracle, prompt, answer.tokens).equal

    with serving(folder, tmp_path / "run", sections=sections) as cluster:
        asyncio.run(under_load())
        assert cluster.metric("twinpool_requests_failed_total") == 0
        assert cluster.metric("twinpool_local_prompts_total", reason="no_prefill") > 0
        until(lambda: cluster.status()["prefill-0"]["state"] == "ready", "prefill-0 to come back", pause_s=COMES_BACK_S)
        # The last prefill worker may leave without force, and the cluster is well without it.
        left = cluster.twinpool("drain", "prefill-0")
        assert left.returncode == 0, left.stderr
        health = httpx.get(f"{cluster.url}/health", timeout=60).json()
        assert (health["status"], health["serving"]) == ("ok", {"prefill": 0, "decode": 1})
        # What was answered so far is audited by decode, now that there is nobody else, and so is what follows.
        until(lambda: cluster.metric("twinpool_audits_waiting") == 0, "all audits to be over")
        audited = cluster.metric("twinpool_audit_answers_total", result="exact")
        prompt = [rng.randrange(300) for _ in range(400)]
        (answer,) = cluster.complete_all([prompt], max_tokens=8)
        assert compare(oracle, prompt, answer.tokens).equal
        told = answer.twinpool
        assert (told["prefill_worker"], told["local_prompt"], told["transfer_bytes"]) == ("decode-0", "no_prefill", 0)
        until(
            lambda: cluster.metric("twinpool_audit_answers_total", result="exact") == audited + 1,
            "decode-0 to audit it",
        )
        assert cluster.metric("twinpool_audit_answers_total", result="damaged") == 0
        cluster.settle()
