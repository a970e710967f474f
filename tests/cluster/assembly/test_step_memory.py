"""What steps keep and compute in, as planned, beside the bytes that a worker really allocates."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.native import kernels_or_skip
from tests.support.adapters import make_adapter
from tests.support.bare_engine import Twinpool
from tests.support.live_tensor_bytes import LiveBytes
from tests.support.model_families import EVERY, FAMILIES
from tests.support.seeing_models import WRITERS
from tests.support.worker_pair import pair
from tests.support.worker_parts import steps_of
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.memory.kv_cache_spec import PoolKind
from twinpool.cluster.assembly.memory_plan import (
    StepMemory,
    adapter_bytes,
    kept_bytes,
    state_options,
    step_memory,
    step_rows,
    step_tokens,
    widest_product,
)
from twinpool.contracts.checkpoint.model_spec import ModelSpec, read_model_spec
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import Role
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.layers.moe.expert_group import SpreadStep
from twinpool.engine.layers.moe.experts import ExpertRoutes
from twinpool.engine.layers.picture_encoder import KEPT_BYTES
from twinpool.engine.layers.picture_tower import whole
from twinpool.engine.models.registry import read_model, unchecked_model
from twinpool.engine.native.current_kernels import using
from twinpool.engine.runner.batch import TokenDraw
from twinpool.engine.runner.graphs.graph_inputs import GraphInputs, GraphSize
from twinpool.engine.runner.load_model import load_model
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.engine.runner.sampling.sampler import draw_tokens
from twinpool.engine.tensors.row_exact_linear import FAST
from twinpool.engine.tensors.shard import Shard
from twinpool.engine.tensors.weight_loader import Weights

PENALTIES = SamplingParams(max_tokens=40, temperature=1.0, repetition_penalty=1.2, seed=1)
SPARSE = ("deepseek_v32", "glm5")
"""They score all positions for each query; the scratch of a GPU's kernels for that has a bound."""


def of(folder: Path, role: Role, config: Config, on_cards: bool = False) -> tuple[ModelSpec, StepMemory]:
    model = read_model(folder)
    pool_set = model.pool_set(state_options(model.spec, config, role))
    return model.spec, step_memory(model.spec, pool_set, config, role, on_cards)


def kept(engine: ModelRunner) -> tuple[int, int]:
    """Bytes of the block tables and of the token histories that an engine has on its device."""
    tables = sum(t.nbytes for pool in engine._tables.values() for t in pool._rows.tensors)
    return tables, sum(t.nbytes for t in engine._histories._rows.tensors)


@pytest.mark.parametrize("part", [one.name for one in fields(StepMemory)])
def test_all_parts_but_the_number_of_rows_are_bytes_of_the_whole(part: str) -> None:
    nothing = StepMemory(*[0] * len(fields(StepMemory)))
    assert replace(nothing, **{part: 7}).nbytes == (0 if part == "rows" else 7)


@pytest.mark.parametrize("family", WRITERS)
def test_a_tower_is_in_the_plan_of_who_computes_prompts(tmp_path: Path, family: str) -> None:
    folder = WRITERS[family](tmp_path / "seer")
    _, planned = of(folder, Role.PREFILL, Config())
    assert KEPT_BYTES < planned.pictures < KEPT_BYTES + (64 << 20)
    _, decodes = of(folder, Role.DECODE, Config())
    assert decodes.pictures == 0
    _, blind = of(folder, Role.PREFILL, config_from_dict({"engine": {"draft_model": "mtp"}}))
    assert blind.pictures == 0


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("family", WRITERS)
def test_a_tower_computes_the_largest_picture_in_no_more_than_planned(tmp_path: Path, family: str) -> None:
    config = config_from_dict({"engine": {"numerics": "fast"}, "router": {"max_image_pixels": 4096}})
    spec, planned = of(WRITERS[family](tmp_path / "seer"), Role.PREFILL, config)
    weights = Weights(spec, torch.float32, torch.device("cpu"))
    tower = unchecked_model(spec).build(weights).tower
    assert tower is not None
    assert spec.pictures is not None
    height, width = spec.pictures.size(64, 64)
    with torch.inference_mode(), LiveBytes() as live:
        whole(tower(torch.zeros(height, width, 3, dtype=torch.uint8), FAST))
    assert 0 < live.peak <= planned.pictures - KEPT_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_rows_of_a_full_batch_beside_a_whole_context_are_those_of_the_plan(tmp_path: Path, family: str) -> None:
    folder = FAMILIES[family](tmp_path, max_position_embeddings=512)
    sections: dict[str, Any] = {"cache": {"page_tokens": 4}, "decode": {"max_batch_tokens": 20}}
    with pair(folder, tokens=4096, **sections) as both:
        longest = both.submit([n % 200 + 5 for n in range(460)], PENALTIES)
        others = [both.submit([n + 5] * 9, PENALTIES) for n in range(19)]
        both.run(longest, *others)
        engine = steps_of(both.decode)._engine
        assert isinstance(engine, ModelRunner)
        tables, histories = kept(engine)
    spec, planned = of(folder, Role.DECODE, config_from_dict(sections))
    paged = sum(pool.kind is not PoolKind.STATE for pool in engine.spec.pools)
    assert tables == paged * kept_bytes(20, 512 // 4, 2) <= planned.block_tables
    assert histories == kept_bytes(20, 512, 1) <= planned.histories
    assert spec.context == 512


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "logprobs": 20},
        {"top_p": 0.999999, "top_k": 500, "min_p": 1e-9, "logprobs": 20},
        {"top_p": 0.999999, "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    ],
)
def test_drawing_for_a_full_batch_takes_no_more_than_planned(tmp_path: Path, params: dict[str, float]) -> None:
    folder = FAMILIES["qwen2"](tmp_path, vocab_size=8192, max_position_embeddings=4096)
    spec, planned = of(folder, Role.DECODE, config_from_dict({}))
    rows = step_rows(config_from_dict({}), Role.DECODE)
    sampling = SamplingParams(**{"max_tokens": 4, "temperature": 1.0, **params})  # type: ignore[arg-type]
    tokens = [n % spec.vocab_size for n in range(spec.context)]
    draws = [TokenDraw(sampling, tokens, 10, len(tokens))] * rows
    with torch.inference_mode(), LiveBytes() as live:
        # Flat: as many candidates as there can be.
        draw_tokens(torch.randn(rows, spec.vocab_size, dtype=torch.float32) / 100, draws)
    assert live.peak <= planned.logits + planned.histories
    if not sampling.temperature:  # As on a GPU: a kernel draws there, and log-probabilities take the most.
        assert live.peak <= of(folder, Role.DECODE, config_from_dict({}), on_cards=True)[1].logits


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SPARSE])
def test_activations_of_a_chunk_are_no_more_than_planned_and_not_much_less(tmp_path: Path, family: str) -> None:
    kernels_or_skip()
    folder = FAMILIES[family](tmp_path)
    tokens = 256
    config = config_from_dict({"prefill": {"chunk_tokens": tokens}, "engine": {"numerics": "fast"}})
    side = Twinpool(folder, config.engine, 4 * tokens, 1, device=CpuDevice())
    prompts = [[5] * tokens]
    side.run(prompts, 1)
    with LiveBytes() as live:
        side.run(prompts, 1)
    spec, planned = of(folder, Role.PREFILL, config)
    assert planned.activations / 8 < live.peak <= planned.activations + planned.logits
    assert widest_product(spec) >= spec.config.size("intermediate_size", 1) or "moe" in family


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v32"])
def test_rows_of_all_that_share_their_experts_are_in_the_plan(tmp_path: Path, family: str) -> None:
    """The mixture of one of four, to whose experts all rows of all go."""
    tokens, dp = 256, 4
    folder = EVERY[family](tmp_path)
    prefill = {"chunk_tokens": tokens, "dp": dp}
    config = config_from_dict({"prefill": prefill, "engine": {"numerics": "fast", "threads": 1}})
    _, planned = of(folder, Role.PREFILL, config)
    model = read_model(folder, config=config.engine)
    loaded = load_model(model, config.engine, torch.device("cpu"), shard=Shard(dp=dp))
    mixture: Any = loaded.decoder.mixtures[0]
    ranks: Any = SimpleNamespace(size=dp, exchange=lambda x, sent, received: x[: sum(received)].clone())
    top_k, here = 2, len(mixture.held.numbers)
    routes = ExpertRoutes(torch.arange(top_k).repeat(tokens, 1) % here, torch.ones(tokens, top_k))
    own = torch.randn(tokens, model.spec.config.size("hidden_size"), dtype=loaded.decoder.dtype)
    with torch.inference_mode(), using(loaded.decoder.kernels), LiveBytes() as live:
        SpreadStep(ranks, (tokens,) * dp).sum(own, routes, mixture.held, loaded.numerics)
    assert planned.activations / 8 < live.peak <= planned.activations
    assert live.peak > planned.activations / dp, "more than own rows take"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_graphs_are_counted_where_steps_are_captured(tmp_path: Path, family: str) -> None:
    """Their inputs, and as much as steps of so many rows compute in."""
    folder = FAMILIES[family](tmp_path)
    settings = {"decode": {"max_batch_tokens": 40}, "engine": {"graphs": "auto"}}
    spec, planned = of(folder, Role.DECODE, config_from_dict(settings), on_cards=True)
    pool_set = read_model(folder).pool_set(state_options(spec, config_from_dict(settings), Role.DECODE))
    size = GraphSize(40, -(-spec.context // pool_set.page_tokens))
    with LiveBytes() as live:
        inputs = GraphInputs(pool_set, FAST, [size], torch.device("cpu"))
        assert 0 < live.now <= planned.graphs - planned.activations - planned.scratch
    assert inputs.width(pool_set.full, size) == size.pages
    others = ((Role.PREFILL, True, "auto"), (Role.DECODE, False, "auto"), (Role.DECODE, True, "off"))
    for role, on_cards, graphs in others:
        other = config_from_dict(settings | {"engine": {"graphs": graphs}})
        assert of(folder, role, other, on_cards=on_cards)[1].graphs == 0


@pytest.mark.parametrize("draft", ["", "mtp"])
def test_adapters_are_counted_as_large_as_there_may_be_on_all_layers_but_what_drafts(
    tmp_path: Path, draft: str
) -> None:
    """As many bytes as the factors of an adapter have that names every layer, with the zeros behind them: columns come
    in 32s, outputs in 64s."""
    folder, rank, count = FAMILIES["glm4_moe"](tmp_path / "model", published=True), 8, 3
    adapter = make_adapter(tmp_path / "adapter", folder, rank, without="mlp.experts")
    factors = [f for name, f in load_file(adapter / "adapter_model.safetensors").items() if ".layers.3." not in name]
    adapters = {"roots": "/a", "max_rank": rank, "max_loaded": count}
    config = config_from_dict({"adapters": adapters, "engine": {"draft_model": draft, "dtype": "bfloat16"}})
    sides = [(factor.shape[1], 32) if len(factor) == rank else (len(factor), 64) for factor in factors]
    numbers = rank * sum(-(-side // of) * of for side, of in sides)
    assert adapter_bytes(read_model_spec(folder, 0, draft), config) == numbers * (2 * count + 2 * 4)
    assert adapter_bytes(read_model_spec(folder, 0, draft), config_from_dict({})) == 0


def test_a_colocated_step_has_rows_and_tokens_of_both_roles() -> None:
    config = config_from_dict({"prefill": {"chunk_tokens": 300, "max_running": 7}, "decode": {"max_batch_tokens": 50}})
    assert [step_rows(config, role) for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED)] == [7, 50, 57]
    assert [step_tokens(config, role) for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED)] == [300, 50, 350]
