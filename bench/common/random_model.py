"""Make a checkpoint with random weights, to measure speed at a size or of a family that is not committed.

    python -m bench.common.random_model 445m FOLDER      # Qwen3-shaped
    python -m bench.common.random_model sparse FOLDER    # a miniature of a family

It has the demo's tokenizer, so a cluster can serve it; what it says is noise. Miniatures have some 20 to 60 M
parameters in the proportions of the published models: heads, ranks of latents, experts a token, windows and recurrent
states relate to the hidden size and to each other as they do in what is published; layers are fewer, the vocabulary is
small. Windows and selections are of 128 positions, so that prompts of some hundred tokens put them to work.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.common.bench_report import flag_parser

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


DEMO = Path(__file__).parents[2] / "cluster" / "demo"


SIZES: dict[str, dict[str, int]] = {
    "4m": {"hidden": 192, "layers": 8, "heads": 4, "kv_heads": 2, "head_dim": 48, "inner": 512, "vocab": 2048},
    "60m": {"hidden": 512, "layers": 16, "heads": 8, "kv_heads": 4, "head_dim": 64, "inner": 1792, "vocab": 4096},
    "445m": {"hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128, "inner": 3072, "vocab": 4096},
    "qwen3-445m": {
        "hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 64, "inner": 3072, "vocab": 32768,
    },
    "qwen3-8b-cut": {
        "hidden": 4096, "layers": 12, "heads": 32, "kv_heads": 8, "head_dim": 128, "inner": 12288, "vocab": 151936,
    },
}  # fmt: skip
"""445m is Qwen3-0.6B with a small vocabulary; qwen3-445m has narrower heads, a larger vocabulary and 386 M parameters,
as its embedding is tied. qwen3-8b-cut has a third of Qwen3-8B's layers (2.9 B parameters)."""


NAMES = (*SIZES, *FAMILIES, *LARGE)


def _qwen3(shape: dict[str, int]) -> Any:
    return Qwen3Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        max_position_embeddings=4096,
        initializer_range=0.05,
        tie_word_embeddings=True,
        use_sliding_window=False,
        eos_token_id=None,
    )


def make(folder: Path, name: str, seed: int = 0, device: str = "cpu") -> Path:
    """Write a bf16 checkpoint of one of `NAMES` to `folder`; returns it. `device`: where its weights are drawn."""
    config = _qwen3(SIZES[name]) if name in SIZES else config_of(name)
    torch.manual_seed(seed)
    factory: Any = AutoModelForCausalLM
    with torch.device(device):
        model = factory.from_config(config, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / file, folder / file)
    return folder


def main() -> None:
    parser = flag_parser(__doc__, json_file=False)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(make(args.folder, args.name))


if __name__ == "__main__":
    main()
