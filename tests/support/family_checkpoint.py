"""What the makers of small checkpoints of each family share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.support.checkpoints import VOCAB, write_tokenizer

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
WINDOW = 48
SMALL = COMMON | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def write_family(
    folder: Path,
    config: PretrainedConfig,
    *,
    dtype: str,
    seed: int,
    spread: Callable[[nn.Module], None] | None = None,
) -> Path:
    """Write a checkpoint with random weights as transformers saves it, and a tokenizer; returns `folder`.

    Norms are spread around 1, and biases and everything else that is zero at first are spread around 0; `spread` does
    what a family needs besides.
    """
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name:
            tensor.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            tensor.data.normal_(0.0, 0.3)
    if spread is not None:
        spread(model)
    torch.random.set_rng_state(state)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config.eos_token_id}))
    write_tokenizer(folder, VOCAB, chat=True)
    return folder


def published_config(folder: Path, *, rope: bool = True, **changes: object) -> None:
    """Respell `config.json` as published folders have it, `rope` included; a value of None removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters", None) if rope else None
    if parameters is not None:
        config["rope_theta"] = parameters.pop("rope_theta")
        if parameters.get("rope_type", "default") != "default":
            config["rope_scaling"] = parameters
    config["torch_dtype"] = config.pop("dtype")
    config |= changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return tensors


def rewrite_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def add_predicting_layer(folder: Path, layers: int) -> None:
    """Add the layer behind the last of `layers` by which checkpoints predict further tokens, by DeepSeek's names: one
    like the last, with other weights, and copies of the model's embedding and head."""
    tensors, last, below = tensors_of(folder), f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    more = {name.replace(last, below): t.roll(1, -1) for name, t in tensors.items() if name.startswith(last)}
    random, embed = torch.Generator().manual_seed(1), tensors["model.embed_tokens.weight"]
    hidden = embed.shape[1]
    norms = {name: torch.rand(hidden, generator=random) + 0.5 for name in ("enorm", "hnorm", "shared_head.norm")}
    joined = torch.randn(hidden, 2 * hidden, generator=random) * (2 * hidden) ** -0.5
    parts = {**norms, "eh_proj": joined, "embed_tokens": embed, "shared_head.head": tensors["lm_head.weight"]}
    more |= {f"{below}{name}.weight": part.to(embed.dtype).clone() for name, part in parts.items()}
    rewrite_tensors(folder, tensors | more)
