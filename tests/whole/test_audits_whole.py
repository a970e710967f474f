"""A whole cluster that audits all of its answers: every one comes out exact, and nobody waits for an audit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.served_cluster import serving, until

ASKED = 12


@pytest.mark.slow
def test_every_answer_of_an_undisturbed_cluster_is_exact(tmp_path: Path) -> None:
    sections = {
        "transfer": {"plane": "local"},
        "audit": {"fraction": 1.0, "chunk_tokens": 64},
        "watch": {"repetition_tokens": 48, "rare_factor": 4.0},
    }
    samplings: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.2},
    )
    with serving("demo", tmp_path, sections=sections) as cluster:
        prompts = [f"Chapter {n}. It was a fine morning, and" for n in range(ASKED // 3)]
        for options in samplings:
            cluster.complete_all(prompts, max_tokens=24, **options)

        def results(result: str) -> float:
            return cluster.metric("twinpool_audit_answers_total", result=result)

        until(lambda: results("exact") + results("dropped") == ASKED, "all audits to end")
        assert results("exact") > 0
        assert cluster.metric("twinpool_audit_tokens_total") == 24 * results("exact")
        assert cluster.metric("twinpool_state_damage_total") == cluster.metric("twinpool_audit_damage_ratio") == 0
        assert cluster.metric("twinpool_streams_watched_total") == ASKED
        cluster.settle()
