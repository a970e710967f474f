"""DeepSeek-V3, DeepSeek-V3.2 and GLM-5, for the tests that go over all families.

Small, but with all their parts: yarn with its extra scale, a dense layer before expert layers, an indexer of 16 heads
whose top-k is far below the prompts of tests, and in GLM-5 layers that share a selection.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV32Config, GlmMoeDsaConfig

from tests.checkpoints import CONTEXT, EOS, VOCAB, _respell, _write_tokenizer

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
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
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
_INDEX: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 64}
_DERIVED = ("head_dim", "qk_head_dim", "layer_types", "mlp_layer_types")
"""What transformers writes besides, and published folders lack."""


def deepseek_v3(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: Any
) -> Path:
    """The first layer is dense, the others have experts; yarn squeezes the scores."""
    values = _COMMON | {"first_k_dense_replace": 1, "rope_parameters": {"rope_theta": 10000.0, **YARN}} | changes
    return _write(folder, DeepseekV3Config(**values), dtype, seed, published)


def deepseek_v32(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: Any
) -> Path:
    """Each layer reads the 64 positions that its indexer selects."""
    values = _COMMON | _INDEX | {"first_k_dense_replace": 1} | changes
    return _write(folder, DeepseekV32Config(**values), dtype, seed, published)


def glm5(folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: Any) -> Path:
    """Four layers; the second and the fourth share the selection of the one before."""
    shared = {"num_hidden_layers": 4, "indexer_types": ["full", "shared"] * 2, "n_group": 1, "first_k_dense_replace": 1}
    return _write(folder, GlmMoeDsaConfig(**(_COMMON | _INDEX | shared | changes)), dtype, seed, published)


def _write(folder: Path, config: Any, dtype: str, seed: int, published: bool) -> Path:
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name and name.endswith("weight"):
            tensor.data.uniform_(0.5, 1.5)
        elif name.endswith(("k_norm.bias", "e_score_correction_bias")):
            tensor.data.uniform_(-0.2, 0.2)
        elif name.endswith("bias"):
            tensor.data.normal_(0.0, 0.3)
    torch.random.set_rng_state(state)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config.eos_token_id}))
    _write_tokenizer(folder, config.vocab_size, True)
    if published:
        _publish(folder)
    return folder


def _publish(folder: Path) -> None:
    """As published folders are: older keys in `config.json`, a layer for multi-token prediction behind the last."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    layers = config["num_hidden_layers"]
    config = {key: value for key, value in config.items() if key not in _DERIVED}
    config |= {"num_nextn_predict_layers": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    path.write_text(json.dumps(config))
    _respell(path)
    tensors = load_file(folder / "model.safetensors")
    last = f"model.layers.{layers - 1}."
    further = {name.replace(last, f"model.layers.{layers}."): t for name, t in tensors.items() if name.startswith(last)}
    further[f"model.layers.{layers}.eh_proj.weight"] = torch.randn(config["hidden_size"], 2 * config["hidden_size"])
    save_file(tensors | {k: t.clone() for k, t in further.items()}, folder / "model.safetensors", {"format": "pt"})
