"""Models with recurrent layers, for the tests that go over all families.

Their states are made to last: with the usual initial values a layer has forgotten a token after a few others, and
nothing would hang on what a chunk leaves behind.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import FalconH1Config, NemotronHConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from tests.support.family_checkpoint import COMMON, published_config, rewrite_tensors, tensors_of, write_family

DELTA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}


def make_qwen3_next(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: object
) -> Path:
    """Four layers: one with full attention; the feed-forward part of the first is dense."""
    numbers = DELTA | {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [0],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }
    write_family(folder, Qwen3NextConfig(**(COMMON | numbers | changes)), dtype=dtype, seed=seed)
    respread(folder, seed)
    if published:
        published_config(folder, partial_rotary_factor=0.25, rope_scaling=None)
        with_mtp(folder, seed)
    return folder


def make_qwen3_5(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: object
) -> Path:
    """The same with dense layers, or experts where `num_experts` are given; published as the text of a model that sees,
    too."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    numbers = DELTA | {"rope_parameters": rope}
    config = Qwen3_5MoeTextConfig if "num_experts" in changes else Qwen3_5TextConfig
    write_family(folder, config(**(COMMON | numbers | changes)), dtype=dtype, seed=seed)
    respread(folder, seed)
    if published:
        tensors = tensors_of(with_mtp(folder, seed))
        inner = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
        outer = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "tie_word_embeddings": inner["tie_word_embeddings"],
            "text_config": inner,
            "vision_config": {"hidden_size": 8},
        }
        (folder / "config.json").write_text(json.dumps(outer))
        tensors = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in tensors.items()}
        rewrite_tensors(folder, tensors | {"model.visual.merger.norm.weight": torch.ones(8)})
    return folder


def with_mtp(folder: Path, seed: int = 0) -> Path:
    """Add the layer that predicts further tokens to a checkpoint of `make_qwen3_next` or `make_qwen3_5`, which
    published ones have; returns `folder`. It is a layer with full attention, like the third with other numbers."""
    random, tensors = torch.Generator().manual_seed(seed), tensors_of(folder)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=random) * like.float().std()

    below = "model.layers.2."
    layer = {
        name.replace(below, "mtp.layers.0."): (tensor.float() + noise(tensor)).to(tensor.dtype)
        for name, tensor in tensors.items()
        if name.startswith(below)
    }
    around = {f"mtp.{name}.weight": torch.rand(64, generator=random) - 0.5
              for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}  # fmt: skip
    joined = {"mtp.fc.weight": torch.randn(64, 128, generator=random).mul(128**-0.5)}
    rewrite_tensors(folder, tensors | layer | around | joined)
    return folder


def make_falcon_h1(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: object
) -> Path:
    """Three layers, with a factor on everything."""
    numbers = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 4,
        "mamba_d_head": 24,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "num_logits_to_keep": None,
        "embedding_multiplier": 5.65,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.4,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.5,
        "ssm_multipliers": [0.5, 0.7, 0.8, 0.9, 1.1],
        "mlp_multipliers": [0.9, 0.3],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    write_family(folder, FalconH1Config(**(COMMON | numbers | changes)), dtype=dtype, seed=seed)
    respread(folder, seed)
    if published:
        published_config(folder, time_step_limit=[0.0, float("inf")])
    return folder


def make_nemotron_h(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: object
) -> Path:
    """Five layers, one of each kind and a second recurrent one."""
    numbers = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 48,
        "rescale_prenorm_residual": False,
    }
    config = NemotronHConfig(**(COMMON | numbers | changes))
    write_family(folder, config, dtype=dtype, seed=seed)
    respread(folder, seed)
    if published:
        pattern, layers = config.hybrid_override_pattern, config.num_hidden_layers
        published_config(folder, layers_block_type=None, hybrid_override_pattern=pattern, num_hidden_layers=layers)
    return folder


def respread(folder: Path, seed: int) -> dict[str, Tensor]:
    """Decays from almost none to a half at each position, and inputs that bypass the state by various amounts."""
    generator = torch.Generator().manual_seed(seed)
    tensors = tensors_of(folder)
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor.uniform_(-6.0, 0.0, generator=generator)
        elif name.endswith("mixer.D") or name.endswith("mamba.D"):
            tensor.normal_(0.0, 0.5, generator=generator)
    rewrite_tensors(folder, tensors)
    return tensors
