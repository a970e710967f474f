"""A detached cluster of two routers whose controller and supervisor are killed, and whose pools change, under load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import changing
from tests.changing import Detached, Load, detached, ready, some_prompts
from tests.checkpoints import Oracle, make_checkpoint

SECTIONS: dict[str, dict[str, Any]] = {
    "cache": {"device_tokens": 8192},
    "prefill": {"chunk_tokens": 128},
    "cluster": {"lease_s": 8},
    "faults": {"step_delay_s": 0.004},
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Detached, Oracle]]:
    base = tmp_path_factory.mktemp("changing")
    folder = make_checkpoint(base / "model", "qwen3", seed=33)
    flags = ("--prefill", "2", "--decode", "2", "--routers", "2")
    with detached(folder, base / "run", *flags, sections=SECTIONS) as cluster:
        yield cluster, Oracle(folder)


@pytest.mark.slow
@pytest.mark.parametrize("change", [*changing.CHANGES, *changing.DETACHED], ids=lambda change: change.__name__)
def test_no_answer_is_lost_or_wrong_while(scene: tuple[Detached, Oracle], change: changing.Change) -> None:
    cluster, oracle = scene
    load = Load(cluster.url, cluster.model, some_prompts(7))
    with load.running():
        load.more()
        change(cluster)
        load.more()
        ready(cluster, prefill=2, decode=2)
    load.verify(oracle)
    cluster.settle()
