"""Stages: which weights and pages each holds, and which cuts are refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.support.model_families import EVERY
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.memory.head_slices import RankCount, cuts
from twinpool.cache.memory.kv_cache_spec import PoolSetLayout, PoolSetSpec, overlap, stage_layers
from twinpool.cluster.arena.arena_client import ArenaProvider
from twinpool.cluster.assembly.build_parts import host_memory, host_tier
from twinpool.cluster.assembly.memory_plan import largest_stage
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role
from twinpool.engine.models.model_base import StateOptions
from twinpool.engine.models.registry import model_for
from twinpool.engine.tensors.shard import Shard
from twinpool.engine.tensors.weight_loader import Weights

OPTIONS = StateOptions(torch.float32, 16)


@pytest.mark.parametrize(("layers", "stages"), [(5, 2), (61, 8), (4, 4), (7, 3)])
def test_every_layer_is_of_one_stage_and_none_has_two_more_than_another(layers: int, stages: int) -> None:
    cut = [stage_layers(layers, stage, stages) for stage in range(stages)]
    assert [layer for stage in cut for layer in stage] == list(range(layers))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1
    assert len(cut[0]) == min(map(len, cut)), "the first has the embedding and the head too"


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 layers can't be divided into 5 stages"):
        stage_layers(4, 0, 5)


def test_what_drafts_is_not_divided(tmp_path: Path) -> None:
    """Configurations with ranks of decode are refused before; of prefill's nothing else says so."""
    spec = read_model_spec(EVERY["deepseek_v3"](tmp_path / "model", published=True), draft_model="mtp")
    with pytest.raises(ConfigError, match="what drafts can't be divided into stages"):
        model_for(spec).pool_set(replace(OPTIONS, shard=Shard(stage=0, stages=2)))


def every_layer_once(whole: PoolSetSpec, writers: RankCount, readers: RankCount) -> None:
    """Check that each stage of a reader is written each of its layers once, by writers that have some of them."""
    plan = cuts(whole, writers, readers)
    for target, pool in itertools.product(range(readers.size), whole.by_name):
        for theirs in whole.shard(target, *readers).by_name[pool].buffers:
            come = []
            for source in range(writers.size):
                if theirs.name in plan.get((source, target), {}).get(pool, ()):
                    mine = next(b for b in whole.shard(source, *writers).by_name[pool].buffers if b.name == theirs.name)
                    come.append(overlap(mine.here, theirs.here))
            assert all(come), "whoever writes has something to write"
            assert [layer for layers in come for layer in layers] == [*theirs.here]


@pytest.mark.parametrize(
    ("family", "changes", "stages"),
    [
        ("llama", {"layers": 5}, 2),
        ("qwen3_moe", {}, 2),
        ("deepseek_v32", {}, 3),
        ("gpt_oss", {}, 2),
        ("falcon_h1", {}, 3),
    ],
)
def test_stages_hold_the_models_weights_and_pages_between_them_once(
    tmp_path: Path, family: str, changes: dict[str, Any], stages: int
) -> None:
    spec = read_model_spec(EVERY[family](tmp_path / "model", **changes))
    model = model_for(spec)
    whole = Weights.dry(spec)
    model.build(whole)
    held, pools = [], []
    for stage in range(stages):
        shard = Shard(stage=stage, stages=stages)
        weights = Weights.dry(spec, shard=shard)
        assert len(model.build(weights).layers) == len(shard.layers(spec.layers))
        held.append(weights.nbytes)
        pools.append(model.pool_set(replace(OPTIONS, shard=shard)))
    assert sum(held) == whole.nbytes
    one = model.pool_set(OPTIONS)
    for pool in one.by_name:
        assert sum(stage.unit_bytes(pool) for stage in pools) == one.unit_bytes(pool)
    assert {stage.whole for stage in pools} == {one}
    for writers, readers in ((stages, 1), (1, stages), (stages, stages), (stages, 2)):
        every_layer_once(one, RankCount(writers, writers), RankCount(readers, readers))
    largest = largest_stage(spec, one, EngineConfig(), stages)
    assert largest.weights == max(held) / whole.nbytes
    assert 1 / stages <= largest.pools < 1


def test_ranks_of_stages_have_as_many_host_pages_within_their_shares_and_none_takes_anothers(
    tmp_path: Path,
) -> None:
    """Stages of two layers and of three; memory that ranks of heads have left is not theirs."""
    spec = read_model_spec(EVERY["llama"](tmp_path / "model", layers=5))
    whole = model_for(spec).pool_set(OPTIONS)
    config = config_from_dict({"cache": {"host_bytes": 1 << 20}})

    def tier(of: PoolSetSpec) -> PoolSetLayout:
        found = host_tier(PoolSetLayout(of, of.even(4)), config, Role.DECODE, 2)
        assert found is not None
        return found

    stages = [tier(whole.shard(rank, 2, 2)) for rank in range(2)]
    assert stages[0].counts == stages[1].counts
    assert stages[0].nbytes < stages[1].nbytes <= (1 << 20) // 2
    names = list[str]()

    class Arenas:
        def take(self, rank: int, nbytes: int, named: str) -> None:
            names.append(named)

    for one in (*stages, *(tier(whole.shard(rank, 2)) for rank in range(2))):
        rank = len(names) % 2
        memory, arena = host_memory(one, CpuDevice(), cast(ArenaProvider, Arenas()), rank, 2, "fingerprint")
        assert (memory.numel(), arena) == (one.nbytes, None)
    assert len({*names}) == 4
