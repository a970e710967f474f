"""Families whose feed-forward layers are mixtures of experts, for the tests that go over all families.

Small, but with all their parts: a layer without experts before those that have some, corrections that change choices,
factors that aren't 1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig, PretrainedConfig, Qwen2MoeConfig

from tests.support.family_checkpoint import COMMON, published_config, rewrite_tensors, tensors_of, write_family

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
