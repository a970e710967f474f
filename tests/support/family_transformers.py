"""Small checkpoints of architectures that have no model file: `engine.models: transformers` is tested with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from tests.support.family_checkpoint import SMALL, WINDOWS, write_family

_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


def _sinks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "sink" in name:
            parameter.data.normal_(0.0, 2.0)


def _norm_biases(model: nn.Module) -> None:
    """Small ones: a large bias of the last norm makes the same token the best one everywhere."""
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("bias"):
            parameter.data.normal_(0.0, 0.1)


_FAMILIES: dict[str, tuple[str, dict[str, Any], Callable[[nn.Module], None] | None]] = {
    # Layer norms with biases, rope over a quarter of each head.
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}, _norm_biases),
    # Queries, keys and values in one product; attention and feed-forward side by side.
    "gpt_neox": ("GPTNeoXConfig", {}, None),
    # Learned positions, a base within the base, scores that are scaled before attention.
    "opt": ("OPTConfig", {"ffn_dim": 128, "word_embed_proj_dim": 64, "pad_token_id": 1}, _norm_biases),
    # Windows in every other layer, softcaps on scores and logits.
    "vaultgemma": ("VaultGemmaConfig", WINDOWS | {"attn_logit_softcapping": 3.0}, None),
    # A mixture behind a dense layer, with a shared expert; scores by a sigmoid.
    "dots1": (
        "Dots1Config",
        _EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
        None,
    ),
    # A mixture with windows, gates on attention, layers without rope.
    "afmoe": (
        "AfmoeConfig",
        WINDOWS | _EXPERTS | {"num_experts": 8, "num_dense_layers": 1, "num_shared_experts": 1},
        None,
    ),
    # Windows with attention sinks, four factors.
    "granite_swa": ("GraniteSWAConfig", WINDOWS | {"attention_multiplier": 0.25}, _sinks),
    # A feed-forward layer of relu(x)², norms around 1.
    "nemotron": ("NemotronConfig", {}, None),
}


def _make(name: str, folder: Path, *, dtype: str = "float32", seed: int = 0, **changes: Any) -> Path:
    config, numbers, spread = _FAMILIES[name]
    made = getattr(transformers, config)(**(SMALL | numbers | changes))
    return write_family(folder, made, dtype=dtype, seed=seed, spread=spread)


MAKERS: dict[str, Callable[..., Path]] = {name: partial(_make, name) for name in _FAMILIES}
"""By name; each takes a folder, a dtype, a seed, and changes to the configuration."""
