"""Two hundred conversations at concurrency 16 on all tiers, with damage and a restart between runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.conversations import make_talks
from tests.support.tier_clusters import Trace, undisturbed
from tests.support.tier_scenes import expect_damage_is_counted, expect_first_run, expect_restart


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiers") / "model", "llama", seed=5)


@pytest.fixture(scope="module")
def trace(model: Path) -> Trace:
    return undisturbed(model, make_talks(77, 200, turns=(3, 6)), at_once=16)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("decode_tiers", [False, True], ids=["prefill-tiers", "all-tiers"])
@pytest.mark.parametrize("plane", ["local", "shm", "zmq"])
def test_two_hundred_conversations_get_undisturbed_tokens_whatever_happens_to_storage(
    model: Path, trace: Trace, tmp_path: Path, plane: str, decode_tiers: bool
) -> None:
    storage = tmp_path / "storage"
    expect_first_run(model, trace, tmp_path / "first", storage, plane, decode_tiers=decode_tiers)
    expect_damage_is_counted(model, trace, tmp_path / "second", storage, plane, seed=2)
    expect_restart(model, trace, tmp_path / "third", storage, plane)
