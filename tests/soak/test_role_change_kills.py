"""Workers that are killed while they change their role, at any moment of it: they come back in the new role, and no
answer is another one."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.served_cluster import Answer, serving, until

CHANGES = 8
LONGEST_S = 0.4
"""From the order to the kill: a change takes less."""


@pytest.mark.soak
def test_a_worker_that_is_killed_in_the_middle_of_a_change_comes_back_in_the_new_role(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=23)
    oracle, rng = Oracle(folder), random.Random(7)
    sections = {
        "cache": {"device_tokens": 16384},
        "engine": {"threads": 1},
        "cluster": {"start_timeout_s": 300, "restart_limit": 100},
    }
    with serving(
        folder, tmp_path / "run", "--prefill", "1", "--decode", "2", sections=sections, ready_within=300
    ) as cluster:
        for number in range(CHANGES):
            role = ("prefill", "decode")[number % 2]
            before = cluster.status()["decode-1"]
            asked = [[rng.randrange(300) for _ in range(40)] for _ in range(6)]
            answers: list[Answer] = []
            clients = threading.Thread(
                target=lambda asked=asked, answers=answers: answers.extend(cluster.complete_all(asked, max_tokens=40))
            )
            clients.start()
            httpx.post(f"{cluster.url}/cluster/role/decode-1?role={role}").raise_for_status()
            time.sleep(rng.uniform(0.0, LONGEST_S))
            os.kill(before["pid"], signal.SIGKILL)
            clients.join(120)
            for prompt, answer in zip(asked, answers, strict=True):
                assert compare(oracle, prompt, answer.tokens).equal

            def back(role: str = role, pid: int = before["pid"]) -> bool:
                row = cluster.status()["decode-1"]
                return (row["role"], row["state"]) == (role, "ready") and row["pid"] != pid

            until(back, f"decode-1 to come back as a {role} worker", 120)
        cluster.settle()
