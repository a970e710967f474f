"""Both pools of real workers follow recorded traffic with a burst, and give every answer, and the right one."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.autoscaling import real_pools
from tests.support.changing_cluster import Load, some_prompts
from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.phased_replay import Lengths, Phase, asks_in_phases, replay_phases, spread
from tests.support.served_cluster import ROOT, serving, until
from twinpool.contracts.ids import PAIR
from twinpool.sim.scale.traffic import read_trace

TRACE = ROOT / "bench" / "traces" / "conversation_200.jsonl"
CALM, BURST = Phase(40.0, 0.05), Phase(50.0, 1.0)
LENGTHS = Lengths(prompts=0.02, answers=0.1, most=512)
SHRINK_WINDOW_S = 20.0
SHRINK_WITHIN_S = 300.0
SECTIONS: dict[str, dict[str, Any]] = {
    "cache": {"page_tokens": 16},
    "prefill": {"chunk_tokens": 32, "cache.device_tokens": 8192},
    "decode": {"cache.device_tokens": 1024, "speculation": "off"},
    "engine": {"threads": 1},
    "faults": {"step_delay_s": 0.1},
    "autoscaling": {
        "enabled": "true", "prefill.max_workers": 3, "decode.max_workers": 3, "ttft_target_s": 8, "itl_target_s": 2,
        "queue_target_s": 4, "period_s": 2, "window_s": 10, "shrink_window_s": SHRINK_WINDOW_S, "grow_cooldown_s": 4,
        "shrink_cooldown_s": 4, "role_window_s": 600,
    },
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_pools_grow_under_a_burst_of_recorded_traffic_and_shrink_by_drain_and_every_answer_is_exact(
    tmp_path: Path,
) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=62, vocab=2000)
    phases = [CALM, BURST, Phase(40.0, CALM.rate)]
    asks = asks_in_phases(spread(read_trace(TRACE)), phases, LENGTHS)
    seconds = sum(phase.seconds for phase in phases)
    with serving(folder, tmp_path / "run", sections=SECTIONS, ready_within=200) as cluster:
        # Three streams never cease, so that on every decode worker that leaves something runs.
        streams = Load(cluster.url, cluster.model, [prompt[:40] for prompt in some_prompts(4)], streams=3)
        with streams.running():
            began = time.monotonic()
            run = asyncio.run(replay_phases(cluster.url, asks, seconds))
            watch = run.watch

            def shrunk() -> bool:
                watch.take(time.monotonic() - began, httpx.get(f"{cluster.url}/cluster/status").json())
                return watch.sizes[-1][1:] == (1, 1)

            # As long as it takes: a worker that is still starting keeps its pool from shrinking.
            until(shrunk, f"both pools to shrink: {watch.decisions}", SHRINK_WITHIN_S, pause_s=1.0)
        assert not watch.ends, "nobody died"
        for which in (0, 1):
            steps = watch.steps(which)
            grown = [at for at, by in steps if by > 0]
            assert any(CALM.seconds <= at <= CALM.seconds + BURST.seconds for at in grown), watch.decisions
            assert any(by < 0 and at > CALM.seconds + BURST.seconds for at, by in steps), watch.decisions
        for role in PAIR:
            mine = sorted((at, text) for at, text in watch.decisions if text.startswith(f"{role} "))
            moves = [(at, "drains" in text) for at, text in mine]
            for (before, shrank), (at, shrinks) in itertools.pairwise(moves):
                assert shrank == shrinks or at - before >= SHRINK_WINDOW_S, watch.decisions
        assert watch.counters["starts_failed"] == watch.counters["holds"] == watch.counters["role_changes"] == 0
        assert cluster.metric("twinpool_migrations_total", outcome="migrated") > 0, "drains migrate what runs"
        cluster.settle()
        print(f"{len(run.outcomes)} answers; {watch.decisions}; drains took {watch.drain_s}")
    assert [outcome.note for outcome in run.outcomes if not outcome.ok] == []
    oracle = Oracle(folder)
    streams.verify(oracle)
    for ask, outcome in zip(asks, run.outcomes, strict=True):
        assert len(outcome.token_ids) == ask.output_tokens
        assert compare(oracle, ask.tokens, outcome.token_ids).equal


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_short_run_of_the_bench_loses_nothing_and_both_clusters_answer_the_same(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert real_pools.main(["--quick", "--part", "burst", "--json", str(file)]) == 0
    follows, fixed = json.loads(file.read_text())["burst"]
    assert (follows["workers"], fixed["workers"]) == ("follow the load", "1 + 1")
    assert follows["asked"] == fixed["asked"] > 20
    assert follows["grown"] > 0 == fixed["grown"]
