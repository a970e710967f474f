"""DeepSeek-V2 to V3.2, GLM-4.7-Flash and GLM-5, for the tests that go over all families.

Small, but with all their parts: yarn with its extra scale, a dense layer before expert layers, an indexer of 16 heads
whose top-k is far below the prompts of tests, and in GLM-5 layers that share a selection.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    PretrainedConfig,
)

from tests.support.family_checkpoint import COMMON, add_predicting_layer, published_config, write_family

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_NUMBERS = COMMON | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_INDEX = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 64}
_DERIVED = ("head_dim", "qk_head_dim", "layer_types", "mlp_layer_types")
"""What transformers writes besides, and published folders lack."""


def make_deepseek_v3(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: object
) -> Path:
    """Three layers; yarn squeezes the scores."""
    yarn = {"rope_parameters": {"rope_theta": 10000.0, **YARN}}
    return _write(folder, DeepseekV3Config(**(_NUMBERS | yarn | changes)), dtype, seed, published)


def make_deepseek_v2(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: object
) -> Path:
    """Three layers; weights of experts don't add up to 1."""
    numbers = {
        "rope_parameters": {"rope_theta": 10000.0, **YARN},
        "topk_method": "group_limited_greedy",
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": False,
    }
    config = DeepseekV2Config(**(_NUMBERS | numbers | changes))
    return _write(folder, config, dtype, seed, published, topk_method=config.topk_method, scoring_func="softmax")


def make_glm4_moe_lite(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: object
) -> Path:
    """Three layers, of which the first is dense by default."""
    numbers = {key: value for key, value in _NUMBERS.items() if key != "first_k_dense_replace"}
    factor = {"routed_scaling_factor": 1.8}
    config = Glm4MoeLiteConfig(**(numbers | factor | changes))
    return _write(folder, config, dtype, seed, published, first_k_dense_replace=1, partial_rotary_factor=1.0)


def make_deepseek_v32(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: object
) -> Path:
    """Three layers that each read the 64 positions that their indexer selects."""
    return _write(folder, DeepseekV32Config(**(_NUMBERS | _INDEX | changes)), dtype, seed, published)


def make_glm5(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: object
) -> Path:
    """Four layers, of which the second and the fourth share the selection of the one before."""
    shared = {"num_hidden_layers": 4, "indexer_types": ["full", "shared"] * 2, "n_group": 1}
    return _write(folder, GlmMoeDsaConfig(**(_NUMBERS | _INDEX | shared | changes)), dtype, seed, published)


def _write(folder: Path, config: PretrainedConfig, dtype: str, seed: int, published: bool, **more: object) -> Path:
    write_family(folder, config, dtype=dtype, seed=seed)
    if published:
        changes: dict[str, Any] = dict.fromkeys(_DERIVED)
        changes |= {"num_nextn_predict_layers": 1, "moe_layer_freq": 1}
        changes |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"} | more
        published_config(folder, **changes)
        add_predicting_layer(folder, config.num_hidden_layers)
    return folder
