"""Families whose feed-forward layers are mixtures of experts, for the tests that go over all families.

Small, but with all their parts: a layer without experts before those that have some, corrections that change choices,
factors that aren't 1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    HunYuanMoEV1Config,
    Lfm2Config,
    Lfm2MoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
)

from tests.support.family_checkpoint import (
    COMMON,
    add_predicting_layer,
    published_config,
    rewrite_tensors,
    tensors_of,
    write_family,
)
from tests.support.family_hybrid import respread

_NUMBERS = COMMON | {
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_LEFT_OUT = ("head_dim", "layer_types", "mlp_layer_types")
"""What transformers writes besides, and published folders lack."""


def make_mixtral(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, fused: bool = False, **changes: Any
) -> Path:
    """Two layers of experts."""
    config = MixtralConfig(**(_NUMBERS | {"num_local_experts": 8} | changes))
    return _write(folder, config, dtype, seed, published=published, fused=fused)


def make_qwen2_moe(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, fused: bool = False, **changes: Any
) -> Path:
    """Three layers, of which the first has no experts; a shared expert behind a gate."""
    numbers = {
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "num_experts": 8,
        "mlp_only_layers": [0],
    }
    config = Qwen2MoeConfig(**(_NUMBERS | numbers | changes))
    more = {"sliding_window": 4096} if not config.use_sliding_window else {}
    return _write(folder, config, dtype, seed, published=published, fused=fused, **more)


def make_olmoe(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, fused: bool = False, **changes: Any
) -> Path:
    """Two layers of experts, norms of all queries together."""
    config = OlmoeConfig(**(_NUMBERS | {"num_experts": 8, "num_experts_per_tok": 3} | changes))
    return _write(folder, config, dtype, seed, published=published, fused=fused)


def make_glm4_moe(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, fused: bool = False, **changes: Any
) -> Path:
    """Three layers, of which the first has no experts; two groups of experts, one of them for each token."""
    numbers = {
        "num_hidden_layers": 3,
        "head_dim": 24,
        "intermediate_size": 96,
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }
    config = Glm4MoeConfig(**(_NUMBERS | numbers | changes))
    left_out = {"num_nextn_predict_layers": 1, "head_dim": config.head_dim, "partial_rotary_factor": 0.5}
    _write(folder, config, dtype, seed, published=published, fused=fused, **left_out)
    if published and not fused:
        add_predicting_layer(folder, config.num_hidden_layers)
    return folder


def make_minimax_m2(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, fused: bool = False, **changes: Any
) -> Path:
    """Two layers of experts; rope over half of a head."""
    numbers = {
        "head_dim": 24,
        "num_local_experts": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }
    config = MiniMaxM2Config(**(_NUMBERS | numbers | changes))
    more = {"rotary_dim": 12, "head_dim": config.head_dim, "scoring_func": "sigmoid", "use_mtp": True}
    return _write(folder, config, dtype, seed, published=published, fused=fused, **more)


def make_ernie4_5_moe(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, fused: bool = False, **changes: Any
) -> Path:
    """Three layers, of which the first has no experts."""
    numbers = {
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "moe_intermediate_size": 40,
        "moe_num_experts": 8,
        "moe_k": 2,
    }
    numbers = {key: value for key, value in (_NUMBERS | numbers).items() if key != "num_experts_per_tok"}
    return _write(folder, Ernie4_5_MoeConfig(**(numbers | changes)), dtype, seed, published=published, fused=fused)


def make_hunyuan_moe(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, fused: bool = False, **changes: Any
) -> Path:
    """Two layers of experts beside a shared one."""
    numbers = {"head_dim": 24, "num_experts": 8, "moe_topk": [2, 3], "num_hidden_layers": 2}
    numbers = {key: value for key, value in (_NUMBERS | numbers).items() if key != "num_experts_per_tok"}
    config = HunYuanMoEV1Config(**(numbers | changes))
    return _write(folder, config, dtype, seed, published=published, fused=fused, head_dim=24)


def make_lfm2(folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: Any) -> Path:
    """Three layers, of which the second has attention."""
    numbers = {
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.3,
        "layer_types": ["conv", "full_attention", "conv"],
    }
    numbers = {key: value for key, value in (_NUMBERS | numbers).items() if key != "num_experts_per_tok"}
    config = Lfm2Config(**(numbers | changes))
    more = {"intermediate_size": None, "block_ff_dim": config.intermediate_size, "full_attn_idxs": [1]}
    return _write(folder, config, dtype, seed, published=published, **more)


def make_lfm2_moe(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, fused: bool = False, **changes: Any
) -> Path:
    """Three layers, of which the second has attention and the first no experts."""
    numbers = {
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "moe_intermediate_size": 40,
        "num_experts": 8,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.7,
        "layer_types": ["conv", "full_attention", "conv"],
    }
    config = Lfm2MoeConfig(**(_NUMBERS | numbers | changes))
    return _write(folder, config, dtype, seed, published=published, fused=fused, layer_types=config.layer_types)


def make_granite_moe(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: Any
) -> Path:
    """Two layers of experts, with Granite's factors."""
    return _write(folder, _granite(GraniteMoeConfig, changes), dtype, seed, published=published)


def make_granite_moe_shared(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: Any
) -> Path:
    """The same beside a shared expert."""
    config = _granite(GraniteMoeSharedConfig, {"shared_intermediate_size": 56} | changes)
    return _write(folder, config, dtype, seed, published=published)


def make_granite_hybrid(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: Any
) -> Path:
    """Three layers with experts and a shared one, of which the second has attention, without rope."""
    numbers = {
        "num_hidden_layers": 3,
        "shared_intermediate_size": 56,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 12,
        "mamba_n_groups": 2,
        "embedding_multiplier": 0.6,
        "residual_multiplier": 1.4,
    }
    config = _granite(GraniteMoeHybridConfig, numbers | changes)
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    kinds = [words[kind] for kind in config.layer_types]
    _write(folder, config, dtype, seed, published=published, layer_types=kinds)
    respread(folder, seed)
    return folder


def _granite(kind: Any, changes: dict[str, Any]) -> PretrainedConfig:
    factors = {
        "num_local_experts": 8,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
    }
    config: PretrainedConfig = kind(**(_NUMBERS | factors | changes))
    return config


def _write(
    folder: Path,
    config: PretrainedConfig,
    dtype: str,
    seed: int,
    *,
    published: bool,
    fused: bool = False,
    **changes: Any,
) -> Path:
    """As transformers saves it, which is with the tensors of published folders; `fused` with those of its modules;
    `published` with their `config.json`, of which `changes` are a part."""
    write_family(folder, config, dtype=dtype, seed=seed)
    if published:
        left_out: dict[str, Any] = dict.fromkeys(_LEFT_OUT)
        published_config(folder, **(left_out | changes))
    if fused:
        fuse_experts(folder)
    return folder


def fuse_experts(folder: Path) -> None:
    """Put the experts of a folder into one tensor a product, as transformers' modules have them."""
    tensors = tensors_of(folder)
    parts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name in list(tensors):
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if found:
            prefix, number, kind = found.groups()
            kind = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(kind, kind)
            parts.setdefault(prefix, {}).setdefault(int(number), {})[kind] = tensors.pop(name)
    assert parts, "transformers saves experts one by one"
    for prefix, experts in parts.items():
        mine = [experts[number] for number in range(len(experts))]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat((e["gate_proj"], e["up_proj"])) for e in mine])
        tensors[f"{prefix}.down_proj"] = torch.stack([e["down_proj"] for e in mine])
    rewrite_tensors(folder, {name.replace(".block_sparse_moe.", ".mlp."): t for name, t in tensors.items()})
