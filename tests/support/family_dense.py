"""Dense models beside Llama and Qwen, for the tests that go over all families: one table of numbers.

Windows are far shorter than the prompts of tests, and what a family has of its own counts: no factor is 1, softcaps
bite, norms are spread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from tests.support.family_checkpoint import SMALL, WINDOW, WINDOWS, published_config, write_family

_NUMBERS = SMALL | {"pad_token_id": 3}
_DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
_LONGROPE = _DEFAULT | {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.05 * i for i in range(6)],
    "long_factor": [1.0 + 0.9 * i for i in range(6)],
}
_YARN = {"rope_type": "yarn", "rope_theta": 500_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_HALF = _DEFAULT | {"partial_rotary_factor": 0.5}


@dataclass(frozen=True)
class _Family:
    config: str
    numbers: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=lambda: dict(_DEFAULT))
    spread: Callable[[nn.Module], None] | None = None


def _from_one(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.sub_(1.0)


def _norm_biases(model: nn.Module) -> None:
    """Small ones: a large bias of the last norm makes the same token the best one everywhere."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.bias"):
            parameter.data.normal_(0.0, 0.2)


def _slopes(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "alpha" in name:
            parameter.data.uniform_(-0.5, 1.0)


_FAMILIES: dict[str, _Family] = {
    "phi3": _Family("Phi3Config", {"sliding_window": WINDOW, "original_max_position_embeddings": 4096}, _LONGROPE),
    "granite": _Family(
        "GraniteConfig",
        {
            "embedding_multiplier": 1.7,
            "logits_scaling": 1.3,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.11,
            "attention_bias": True,
        },
    ),
    "hyperclovax": _Family(
        "HyperCLOVAXConfig",
        {
            "embedding_multiplier": 1.7,
            "logits_scaling": 0.8,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.11,
        },
    ),
    "olmo2": _Family("Olmo2Config"),
    "olmo3": _Family(
        "Olmo3Config",
        WINDOWS,
        {"full_attention": _YARN, "sliding_attention": _DEFAULT | {"rope_theta": 500_000.0}},
    ),
    "exaone4": _Family("Exaone4Config", WINDOWS),
    "smollm3": _Family(
        "SmolLM3Config", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1], "use_sliding_window": False}
    ),
    "cwm": _Family("CwmConfig", WINDOWS | {"bos_token_id": 1}),
    "ministral": _Family("MinistralConfig", WINDOWS),
    "ministral3": _Family(
        "Ministral3Config", rope=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
    ),
    "gemma": _Family("GemmaConfig", spread=_from_one),
    "gemma2": _Family(
        "Gemma2Config",
        WINDOWS | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0},
        spread=_from_one,
    ),
    "glm": _Family("GlmConfig", rope=_HALF),
    "glm4": _Family("Glm4Config", rope=_HALF),
    "seed_oss": _Family("SeedOssConfig", {"head_dim": 32, "attention_bias": True, "attention_out_bias": False}),
    "ernie4_5": _Family("Ernie4_5Config", {"use_bias": True}),
    "hunyuan": _Family(
        "HunYuanDenseV1Config", rope={"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0}
    ),
    "arcee": _Family("ArceeConfig"),
    "apertus": _Family("ApertusConfig", spread=_slopes),
    "phi": _Family("PhiConfig", rope=_HALF, spread=_norm_biases),
    "starcoder2": _Family("Starcoder2Config", {"sliding_window": WINDOW}, spread=_norm_biases),
    "cohere": _Family("CohereConfig", {"logit_scale": 0.3}),
    "cohere2": _Family("Cohere2Config", WINDOWS | {"logit_scale": 0.3}),
}


def _make(
    family: str, folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: Any
) -> Path:
    """Two layers, or four where layers differ. `published`: rope in the old spelling, with its share of a head and the
    positions of its training beside it."""
    known = _FAMILIES[family]
    config = getattr(transformers, known.config)(
        **(_NUMBERS | {"rope_parameters": known.rope} | known.numbers | changes)
    )
    write_family(folder, config, dtype=dtype, seed=seed, spread=known.spread)
    if published:
        rope = dict(known.rope.get("full_attention", known.rope))
        outside = {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        scaling = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
        published_config(
            folder,
            rope=False,
            rope_parameters=None,
            rope_scaling=scaling if scaling["type"] != "default" else None,
            **outside,
        )
    return folder


MAKERS = {name: partial(_make, name) for name in _FAMILIES}
"""The makers of these families, by the names of test ids."""
