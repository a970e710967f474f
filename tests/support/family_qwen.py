"""Qwen2 and Qwen3-MoE, for the tests that go over all families."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen2Config, Qwen3MoeConfig

from tests.support.family_checkpoint import COMMON, published_config, write_family
from tests.support.family_mixture import fuse_experts


def make_qwen2(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: object
) -> Path:
    """Two layers."""
    numbers = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    write_family(folder, Qwen2Config(**(COMMON | numbers | changes)), dtype=dtype, seed=seed)
    if published:
        published_config(folder, layer_types=None, sliding_window=4096, max_window_layers=2)
    return folder


def make_qwen3_moe(
    folder: Path,
    *,
    dtype: str = "float32",
    seed: int = 0,
    published: bool = False,
    fused: bool = False,
    **changes: object,
) -> Path:
    """Three layers, of which the first is dense. Experts are one by one, as published and as transformers saves them,
    or `fused` as its modules hold them.
    """
    numbers = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    write_family(folder, Qwen3MoeConfig(**(COMMON | numbers | changes)), dtype=dtype, seed=seed)
    if published:
        published_config(folder, num_experts=(COMMON | numbers | changes)["num_experts"], num_local_experts=None)
    if fused:
        fuse_experts(folder)
    return folder
