"""A detached cluster of two routers whose controller is killed, whose settings and build change, under load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import changing_cluster
from tests.support.changing_cluster import Load, detached, ready, some_prompts
from tests.support.checkpoints import Oracle, make_checkpoint

SECTIONS: dict[str, dict[str, Any]] = {
    "cache": {"device_tokens": 8192},
    "prefill": {"chunk_tokens": 128},
    "cluster": {"lease_s": 8},
    "faults": {"step_delay_s": 0.02},  # So that the load leaves time to the processes that start.
}


CHANGES = {
    "another build": (changing_cluster.kill_controller, changing_cluster.upgrade),
    "other settings": (changing_cluster.apply_settings,),  # A pool grows by them, and shrinks.
}
STREAMS = 3
"""Of clients: every process starts anew beside them."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_no_answer_is_lost_or_wrong_while_a_cluster_changes(
    tmp_path: Path, changes: tuple[changing_cluster.Change, ...]
) -> None:
    """Changes of roles, cordons, restarts and drains by command are in the soak test, with all of these."""
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=33)
    sections = {**SECTIONS, "pools": {"prefill": 2, "decode": 2}}
    with detached(folder, tmp_path / "run", sections=sections, by_file={"routers": 2}) as cluster:
        load = Load(cluster.url, cluster.model, some_prompts(7), STREAMS)
        with load.running():
            for change in changes:
                load.more()
                change(cluster)
                ready(cluster, prefill=2, decode=2)
            load.more()
        load.verify(Oracle(folder))
        cluster.settle()
