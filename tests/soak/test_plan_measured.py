"""`twinpool plan` from nothing: a cluster is started, measured, ended, and a trace is planned for by what it took."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.served_cluster import COMMAND, ROOT, environment, processes_of
from twinpool.sim.scale.cluster_plan import read_costs

TRACE = ROOT / "bench/traces/conversation_200.jsonl"


@pytest.mark.soak
def test_a_plan_is_made_by_costs_that_were_measured_here(tmp_path: Path) -> None:
    words = ["plan", "--measure", "--trace", str(TRACE), "--scale-lengths", "0.0625", "--max-context", "2000"]
    words += ["--slo", "ttft=5,itl=0.5", "--costs", "costs.json", "--json", "plan.json"]
    done = subprocess.run(
        [*COMMAND, *words], env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    costs = read_costs(tmp_path / "costs.json")
    assert costs.position_bytes == 1536, "4 layers, 2 heads of 48, keys and values, in bfloat16"
    assert costs.prefill_tokens == costs.decode_tokens == 8 * 2048
    # A token is quicker in a batch than alone, and a longer prompt takes longer.
    assert 1e-5 < costs.costs.decode_s(1, 100) < costs.costs.decode_s(32, 32 * 100)
    prompts = {probe.tokens: probe.ttft_s for probe in costs.prompts if probe.prompts == 1}
    assert prompts[16] < prompts[2040]
    chosen = json.loads((tmp_path / "plan.json").read_text())["chosen"]
    assert chosen["report"]["good"] >= 0.99
    assert f"twinpool serve --prefill {chosen['prefill']} --decode {chosen['decode']}" in done.stdout
    assert processes_of(tmp_path) == [], "the cluster that was measured is gone"
