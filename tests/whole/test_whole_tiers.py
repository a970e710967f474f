"""Whole clusters on all tiers: conversations that no device pool holds, storage damaged between two runs, restarts.

The full number of conversations is in the soak.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.conversations import make_talks
from tests.tier_clusters import Trace, undisturbed
from tests.tier_scenes import expect_damage_is_counted, expect_first_run, expect_restart

TALKS = make_talks(31, 48, turns=(3, 4))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiers") / "model", "qwen3", seed=3)


@pytest.fixture(scope="module")
def trace(model: Path) -> Trace:
    return undisturbed(model, TALKS, at_once=8)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_in_one_process_tiers_change_no_token_and_damage_is_counted(model: Path, trace: Trace, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    expect_first_run(model, trace, tmp_path / "first", storage, "local", decode_tiers=False)
    expect_damage_is_counted(model, trace, tmp_path / "second", storage, "local", seed=1)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_under_ray_tiers_change_no_token_and_a_restart_keeps_what_storage_has(
    model: Path, trace: Trace, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    expect_first_run(model, trace, tmp_path / "first", storage, "shm", decode_tiers=True)
    expect_restart(model, trace, tmp_path / "second", storage, "shm")
