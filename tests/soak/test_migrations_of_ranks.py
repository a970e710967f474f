"""Requests move between decode workers of several tensor-parallel ranks: each rank writes its own heads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.rank_followers import rank_processes
from tests.support.stepped_cluster import company, generated
from twinpool.contracts.sampling_params import SamplingParams


@pytest.mark.soak
@pytest.mark.parametrize("plane", ["shm", "zmq"])
def test_requests_migrate_between_workers_of_two_ranks(tmp_path: Path, plane: str) -> None:
    folder = make_checkpoint(tmp_path / "qwen3", "qwen3", seed=3)
    sampling = SamplingParams(40, temperature=0.8, seed=4)
    prompt = list(range(60))
    with (
        rank_processes() as ranks,
        company(
            folder, tokens=2048, ranks=ranks, transfer={"plane": plane}, decode={"tp": 2, "migration_precopy_bytes": 1}
        ) as c,
    ):
        rid = c.submit(prompt, sampling)
        c.until(generated(c, rid, 5), "it to run")
        assert c.core.migrations.begin(c.told[rid].request)
        c.act()
        c.until(lambda: c.core.migrations.counts.migrated == 1, "it to move")
        assert c.worker_of(rid) == "decode-1"
        assert c.run(rid) == c.run(c.submit(prompt, sampling))
        assert c.told[rid].replays == []
