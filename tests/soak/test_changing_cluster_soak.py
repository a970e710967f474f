"""Twenty rounds of every change and kill of a cluster under load, on two planes: every answer exact, none lost."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import changing_cluster
from tests.support.changing_cluster import Load, detached, ready, some_prompts
from tests.support.checkpoints import Oracle, make_checkpoint

ROUNDS = int(os.environ.get("TWINPOOL_ROUNDS", "20"))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("plane", ["zmq", "shm"])
def test_twenty_rounds_of_every_change_lose_no_answer(tmp_path: Path, plane: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=35)
    sections: dict[str, dict[str, Any]] = {
        "cache": {"device_tokens": 8192},
        "prefill": {"chunk_tokens": 128},
        "transfer": {"plane": plane},
        "cluster": {"lease_s": 8, "restart_limit": 200},
        "faults": {"step_delay_s": 0.004},
    }
    flags = ("--prefill", "2", "--decode", "2", "--routers", "2")
    oracle, answers = Oracle(folder), 0
    with detached(folder, tmp_path / "run", *flags, sections=sections) as cluster:
        for number in range(ROUNDS):
            load, took = Load(cluster.url, cluster.model, some_prompts(number)), []
            with load.running():
                for change in (*changing_cluster.CHANGES, *changing_cluster.DETACHED):
                    load.more()
                    began = time.monotonic()
                    change(cluster)
                    ready(cluster, prefill=2, decode=2)
                    took.append(f"{change.__name__} {time.monotonic() - began:.0f} s")
                load.more()
            load.verify(oracle)
            cluster.settle()
            answers += len(load.answers)
            told = f"{len(load.answers)} answers, {load.resumed} resumed, all exact"
            print(f"round {number + 1}: {told}; {', '.join(took)}", flush=True)
    print(f"{answers} answers in {ROUNDS} rounds on {plane}")
