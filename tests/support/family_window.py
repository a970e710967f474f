"""Gemma 3, Gemma 4, gpt-oss and Mistral, for the tests that go over all families.

Windows are far shorter than the prompts of tests, and layers of both kinds take turns, but in Mistral all have one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Gemma3TextConfig, Gemma4TextConfig, GptOssConfig, MistralConfig

from tests.support.family_checkpoint import COMMON, published_config, rewrite_tensors, tensors_of, write_family

WINDOW = 48
_NUMBERS = COMMON | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
}
_IMAGES = {"image_token_index": 299, "mm_tokens_per_image": 4}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "image_size": 16,
    "patch_size": 8,
}
"""Of the part that nobody asks here; small, since the oracle builds it."""
_TURNS = ["sliding_attention", "full_attention"]


def make_gemma3(
    folder: Path,
    *,
    dtype: str = "float32",
    seed: int = 0,
    published: bool = False,
    alone: bool = False,
    **changes: object,
) -> Path:
    """Four layers that take turns.

    `published`: the text of a model of text and images, in the old spelling, its tensors prefixed; with `alone` one of
    text only.
    """
    numbers = {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 16,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }
    config = Gemma3TextConfig(**(_NUMBERS | numbers | changes))
    write_family(folder, config, dtype=dtype, seed=seed, spread=_spread_gemma3)
    if published:
        full, sliding = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
        old: dict[str, Any] = {key: full[key] for key in full if key != "rope_theta"}
        published_config(
            folder,
            rope=False,
            rope_parameters=None,
            rope_theta=full["rope_theta"],
            rope_local_base_freq=sliding["rope_theta"],
            rope_scaling=old if full["rope_type"] != "default" else None,
            layer_types=None,
            _sliding_window_pattern=None,
            cache_implementation="hybrid",
        )
        if not alone:
            prefix = "language_model.model."
            _wrap(folder, "Gemma3ForConditionalGeneration", "gemma3", "siglip_vision_model", prefix, **_IMAGES)
    return folder


def make_gemma4(
    folder: Path,
    *,
    dtype: str = "float32",
    seed: int = 0,
    published: bool = False,
    **changes: object,
) -> Path:
    """Six layers that take turns, of which the last two share keys; full ones have one wide head whose keys are its
    values. `published`: as the text of a model of text and images; `enable_moe_block` brings experts."""
    numbers = {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": _TURNS * 3,
        "tie_word_embeddings": True,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": COMMON["vocab_size"],
        "final_logit_softcapping": 30.0,
        "num_experts": 8,
        "top_k_experts": 4,
        "moe_intermediate_size": 32,
    }
    chosen = _NUMBERS | numbers | changes
    write_family(folder, Gemma4TextConfig(**chosen), dtype=dtype, seed=seed, spread=_spread_gemma4)
    if published:
        own = {key: chosen[key] for key in ("global_head_dim", "num_global_key_value_heads")}
        published_config(folder, rope=False, per_layer_config=None, **own)
        _wrap(folder, "Gemma4ForConditionalGeneration", "gemma4", "gemma4_vision", "model.language_model.")
    return folder


def make_gpt_oss(
    folder: Path,
    *,
    dtype: str = "float32",
    seed: int = 0,
    published: bool = False,
    packed: bool = False,
    **changes: object,
) -> Path:
    """Four layers that take turns, with sinks that matter; eight experts of which four are chosen.

    `packed`: the experts have weights that four bits can hold, and are stored so if `published`.
    """
    numbers = {
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 256,
            "rope_theta": 150_000.0,
        },
    }
    config = GptOssConfig(**(_NUMBERS | numbers | changes))
    write_family(folder, config, dtype=dtype, seed=seed, spread=_spread_gpt_oss)
    if published:
        published_config(folder, initial_context_length=256, experts_per_token=4, swiglu_alpha=None)
    if packed:
        _pack(folder, store=published)
    return folder


def make_mistral(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: object
) -> Path:
    """Two layers, both with a window; `sliding_window=None` is how most are published."""
    numbers = {
        "num_hidden_layers": 2,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    write_family(folder, MistralConfig(**(_NUMBERS | numbers | changes)), dtype=dtype, seed=seed)
    if published:
        published_config(folder)
    return folder


def _spread_gemma3(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.sub_(1.0)  # Counted from one.


def _spread_gemma4(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "q_norm" in name or "k_norm" in name:
            tensor.data.mul_(0.6)  # Scores aren't scaled by the head's size.
        elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            tensor.data.uniform_(0.6, 1.4)


def _spread_gpt_oss(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.normal_(1.0, 1.0)
        elif name.endswith("_proj_bias"):
            parameter.data.normal_(0.0, 0.3)
        # Else scores are so far apart, and experts so loud, that the last bit of bfloat16 changes every answer.
        if ".experts.down_proj" in name:
            parameter.data.mul_(0.2)
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data.mul_(0.5)


def _pack(folder: Path, store: bool) -> None:
    """Round the experts' weights to four bits; with `store`, keep them so, as gpt-oss is published."""
    tensors = tensors_of(folder)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weight_enk = tensors.pop(name).transpose(1, 2).contiguous()
        groups = weight_enk.float().unflatten(-1, (-1, 32))  # type: ignore[no-untyped-call]
        exponents = groups.abs().amax(-1).log2().floor().int() - 2
        values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, *[-0.0, -0.5, -1, -1.5, -2, -3, -4, -6]])
        nearest = (torch.ldexp(groups, -exponents[..., None])[..., None] - values).abs().argmin(-1)
        if store:
            tensors[f"{name}_blocks"] = (nearest[..., ::2] | nearest[..., 1::2] << 4).to(torch.uint8)
            tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        else:
            rounded = torch.ldexp(values[nearest], exponents[..., None]).flatten(-2).to(weight_enk.dtype)
            tensors[name] = rounded.transpose(1, 2)
    rewrite_tensors(folder, tensors)
    if store:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        (folder / "config.json").write_text(json.dumps(config))


def _wrap(folder: Path, architecture: str, kind: str, vision: str, prefix: str, **outer: object) -> None:
    """Make it the text of a model with more than text: numbers in `text_config`, tensors behind a prefix."""
    path = folder / "config.json"
    text = json.loads(path.read_text())
    outer |= {"architectures": [architecture], "model_type": kind, "torch_dtype": text.pop("torch_dtype")}
    outer |= {"eos_token_id": text.pop("eos_token_id"), "vision_config": _VISION | {"model_type": vision}}
    del text["architectures"]
    path.write_text(json.dumps(outer | {"text_config": text}))
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors_of(folder).items()}
    rewrite_tensors(folder, tensors | {"vision_tower.patch.weight": torch.zeros(3)})
