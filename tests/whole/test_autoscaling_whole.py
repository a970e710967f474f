"""A cluster whose decode pool is short: it grows under a burst of streams, and shrinks by drain while others run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.changing_cluster import WAIT_S, Load, some_prompts
from tests.support.checkpoints import Oracle, make_checkpoint
from tests.support.served_cluster import Serving, serving, until

SECTIONS: dict[str, dict[str, Any]] = {
    "cache": {"page_tokens": 16},
    "decode": {"cache.device_tokens": 768},
    "prefill": {"cache.device_tokens": 8192, "chunk_tokens": 128},
    "engine": {"threads": 1},
    "faults": {"step_delay_s": 0.01},
    "autoscaling": {
        "enabled": "true", "prefill.max_workers": 1, "decode.max_workers": 2, "ttft_target_s": 100,
        "itl_target_s": 100, "period_s": 1, "window_s": 3, "shrink_window_s": 6, "grow_cooldown_s": 1,
        "shrink_cooldown_s": 2, "role_window_s": 600,
    },
}  # fmt: skip


def sizing(cluster: Serving, role: str) -> dict[str, Any]:
    done = cluster.twinpool("status", "--json")
    assert done.returncode == 0, done.stderr
    (pool,) = [pool for pool in json.loads(done.stdout)["autoscaler"]["pools"] if pool["role"] == role]
    return dict(pool)


@pytest.mark.slow
def test_a_pool_grows_under_a_burst_and_shrinks_by_drain_and_no_stream_is_lost(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=61)
    with serving(folder, tmp_path / "run", sections=SECTIONS) as cluster:
        burst = Load(cluster.url, cluster.model, some_prompts(3))
        with burst.running():
            until(lambda: "decode-1" in cluster.status(), "a worker more", WAIT_S)
            until(lambda: cluster.status()["decode-1"]["state"] == "ready", "it to serve", WAIT_S)
            burst.more()
        few = Load(cluster.url, cluster.model, [prompt[:40] for prompt in burst.prompts], streams=2, seed=1)
        with few.running():
            until(lambda: cluster.status()["decode-1"]["state"] == "left", "it to leave", WAIT_S)
            few.more()
        oracle = Oracle(folder)
        burst.verify(oracle)
        few.verify(oracle)
        assert cluster.status()["decode-1"]["last_end"] == "", "it left, and did not die"
        assert sizing(cluster, "decode") | {"need": 0, "why": ""} == {
            "role": "decode", "ready": 1, "wanted": 1, "least": 1, "most": 2, "need": 0, "why": "",
        }  # fmt: skip
        shown = cluster.twinpool("status").stdout
        assert "decode 1 -> 2 (decode-1 starts)" in shown
        assert "decode 2 -> 1 (decode-1 drains)" in shown
        assert cluster.metric("twinpool_autoscaler_changes_total", kind="grown") == 1
        assert cluster.metric("twinpool_autoscaler_changes_total", kind="shrunk") == 1
        assert cluster.metric("twinpool_first_tokens_judged_total") >= len(burst.answers)
        cluster.settle()
