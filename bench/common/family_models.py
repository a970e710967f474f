"""Miniatures of each family: some 20 to 60 M parameters, in the proportions of the published models.

Heads, ranks of latents, experts a token, windows and recurrent states relate to the hidden size and to each other as
they do in what is published; layers are fewer, the vocabulary is small. Windows and selections are of 128 positions, so
that prompts of some hundred tokens put them to work.
"""

from __future__ import annotations

from typing import Any

import transformers

# fmt: off
_COMMON: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 4096,
    "initializer_range": 0.05, "eos_token_id": None,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LATENT: dict[str, Any] = {
    "num_hidden_layers": 6, "num_key_value_heads": 8, "intermediate_size": 1536, "first_k_dense_replace": 1,
    "n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 160, "q_lora_rank": 192, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64, "rope_parameters": _ROPE,
}

_SPARSE_CUT: dict[str, Any] = {
    "vocab_size": 16384, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
    "num_hidden_layers": 4, "intermediate_size": 18432, "first_k_dense_replace": 1, "n_routed_experts": 16,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 2048, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
    "rope_parameters": _ROPE,
}
LARGE = {"deepseek-v3.2-cut": ("DeepseekV32Config", _SPARSE_CUT)}
"""For GPUs: layers as published, four of them, with 16 experts each (3.7 B parameters)."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": (
        "Qwen3Config",
        {"num_hidden_layers": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1536},
    ),
    "moe": (
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32,
            "num_experts_per_tok": 4, "moe_intermediate_size": 160, "norm_topk_prob": True,
        },
    ),
    "latent": ("DeepseekV3Config", _LATENT),
    "sparse": ("DeepseekV32Config", _LATENT | {"index_n_heads": 16, "index_head_dim": 64, "index_topk": 128}),
    "window": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128,
            "intermediate_size": 2048, "sliding_window": 128, "query_pre_attn_scalar": 128,
        },
    ),
    "window-sinks": (
        "GptOssConfig",
        {
            "num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
            "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128,
        },
    ),
    "hybrid-delta": (
        "Qwen3_5TextConfig",
        {
            "num_hidden_layers": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1536,
            "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "rope_parameters": _ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [4, 2, 2]},
        },
    ),
    "hybrid-mamba": (
        "FalconH1Config",
        {
            "num_hidden_layers": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1024,
            "mamba_d_ssm": 768, "mamba_n_heads": 12, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
            "mamba_chunk_size": 128, "rope_parameters": _ROPE,
        },
    ),
}
# fmt: on
"""By name: transformers' configuration class and its numbers, besides the common ones."""


def config_of(family: str) -> Any:
    """transformers' configuration of a miniature of `FAMILIES`, or of one of `LARGE`."""
    name, numbers = (FAMILIES | LARGE)[family]
    return getattr(transformers, name)(**(_COMMON | numbers))
