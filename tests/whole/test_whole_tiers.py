"""Whole clusters on all tiers: conversations that no device pool holds, storage damaged between two runs, restarts.

The full number of conversations is in the soak.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.conversations import make_talks
from tests.support.served_cluster import ROOT, serving
from tests.support.tier_clusters import Trace, undisturbed
from tests.support.tier_scenes import expect_damage_is_counted, expect_first_run, expect_restart
from twinpool.contracts.config.load_config import load_config

TALKS = make_talks(31, 26, turns=(3, 4))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiers") / "model", "qwen3", seed=3)


@pytest.fixture(scope="module")
def trace(model: Path) -> Trace:
    return undisturbed(model, TALKS, at_once=5)


@pytest.mark.slow
def test_in_one_process_tiers_change_no_token_and_damage_is_counted(model: Path, trace: Trace, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    expect_first_run(model, trace, tmp_path / "first", storage, "local", decode_tiers=False)
    expect_damage_is_counted(model, trace, tmp_path / "second", storage, "local", seed=1)


@pytest.mark.soak
@pytest.mark.slow
def test_under_ray_tiers_change_no_token_and_a_restart_keeps_what_storage_has(
    model: Path, trace: Trace, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    expect_first_run(model, trace, tmp_path / "first", storage, "shm", decode_tiers=True)
    expect_restart(model, trace, tmp_path / "second", storage, "shm")


@pytest.mark.slow
def test_the_example_with_all_tiers_runs_and_finds_its_pages_after_a_restart(model: Path, tmp_path: Path) -> None:
    flags = ("--config", str(ROOT / "configs" / "tiers.yaml"))
    sections = {
        "transfer": {"plane": "local"},
        "cache": {"storage.path": tmp_path / "pages", "load_back": "always", "prefetch.policy": "wait_complete"},
    }
    prompt = list(range(1, 100))
    answers = []
    for run in ("first", "second"):
        with serving(model, tmp_path / run, *flags, sections=sections) as cluster:
            answers.append(cluster.complete(prompt, max_tokens=4))
            cluster.settle()
    assert answers[0].tokens == answers[1].tokens
    assert [a.twinpool["cached_by_tier"] for a in answers] == [
        {"device": 0, "host": 0, "storage": stored} for stored in (0, 96)
    ]


def test_every_example_is_a_good_configuration() -> None:
    examples = sorted((ROOT / "configs").glob("*.yaml"))
    assert len(examples) > 2
    for path in examples:
        load_config(path)
