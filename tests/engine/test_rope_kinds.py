"""Rope angles are transformers' angles, bit for bit, for every supported kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from twinpool.contracts.checkpoint.rope_spec import RopeSpec
from twinpool.engine.layers.rope import RopeTable, inverse_frequencies, rotate

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
CASES: list[tuple[str, float, int, dict[str, Any]]] = [
    ("default", 10000.0, 16, {}),
    ("default", 1000000.0, 128, {}),
    ("linear", 10000.0, 48, {"factor": 4.0}),
    ("llama3", 500000.0, 128, LLAMA3),
    ("llama3", 10000.0, 16, {**LLAMA3, "original_max_position_embeddings": 128}),
    ("yarn", 10000.0, 64, YARN),
    ("yarn", 1000000.0, 128, {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}),
    ("yarn", 10000.0, 48, {**YARN, "attention_factor": 0.7}),
    ("yarn", 10000.0, 64, {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}),
    ("yarn", 10000.0, 64, {**YARN, "truncate": False}),
    ("yarn", 100.0, 16, YARN),
    ("yarn", 10000.0, 16, {**YARN, "original_max_position_embeddings": 128}),
    ("proportional", 1000000.0, 64, {"partial_rotary_factor": 0.25}),
    ("proportional", 10000.0, 48, {"partial_rotary_factor": 0.5, "factor": 4.0}),
]


def config_of(kind: str, theta: float, head_dim: int, numbers: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **numbers},
    )


def spec_of(kind: str, theta: float, numbers: dict[str, Any]) -> RopeSpec:
    return RopeSpec(kind, theta, numbers, numbers.get("partial_rotary_factor", 1.0))


@pytest.mark.parametrize(("kind", "theta", "head_dim", "numbers"), CASES)
def test_frequencies_and_factor_are_transformers(kind: str, theta: float, head_dim: int, numbers: Any) -> None:
    config = config_of(kind, theta, head_dim, numbers)
    if kind == "default":
        want, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        want, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    got, got_factor = inverse_frequencies(spec_of(kind, theta, numbers), head_dim)
    assert torch.equal(got, want)
    assert got_factor == factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "theta", "head_dim", "numbers"), CASES)
def test_rotations_are_transformers_at_near_and_far_positions(
    kind: str, theta: float, head_dim: int, numbers: Any, dtype: torch.dtype
) -> None:
    positions = torch.tensor([0, 1, 17, 500, 4095, 4096, 5000, 9001])
    x = torch.randn(len(positions), 2, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    embedding = LlamaRotaryEmbedding(config_of(kind, theta, head_dim, numbers))
    cos, sin = embedding(x, positions[None])
    want, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    table = RopeTable(spec_of(kind, theta, numbers), head_dim, dtype, torch.device("cpu"))
    got = rotate(x, *table.at(positions, 9002))
    assert torch.equal(got, want[0].transpose(0, 1))


def test_a_table_that_has_grown_holds_what_it_held() -> None:
    spec = RopeSpec("default", 10000.0, {})
    first, second = (RopeTable(spec, 16, torch.float32, torch.device("cpu")) for _ in range(2))
    positions = torch.arange(5000)
    first.at(positions[:10], 10)
    for a, b in zip(first.at(positions, 5000), second.at(positions, 5000), strict=True):
        assert torch.equal(a, b)
