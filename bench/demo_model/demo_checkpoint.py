"""The demo checkpoint: its model, which is transformers' own, its byte-level BPE, and its Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.demo_model.made_up_names import THINGS, training_names

VOCABULARY, LAYERS, CONTEXT = 2048, 4, 2048
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8").removesuffix("\n")


def config_of(eos: list[int], pad: int) -> dict[str, Any]:
    """``config.json``."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": eos[0],
        "head_dim": 48,
        "hidden_act": "silu",
        "hidden_size": 192,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "layer_types": ["full_attention"] * LAYERS,
        "max_position_embeddings": CONTEXT,
        "max_window_layers": LAYERS,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 2,
        "pad_token_id": pad,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCABULARY,
    }


def make_model() -> nn.Module:
    """Qwen3 in float32 with first weights; run it under ``torch.autocast("cpu", torch.bfloat16)``."""
    model: nn.Module = Qwen3ForCausalLM(Qwen3Config(**config_of([0], 0) | {"dtype": "float32", "use_cache": False}))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            last = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 if last or "embed" in name else parameter.shape[1] ** -0.5)
    model.train()
    return model


def parameters_of(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What Muon trains, the matrices, and what AdamW trains, the rest."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    return matrices, [p for name, p in named if p.ndim != 2 or "embed" in name]


def train_tokenizer(corpus: Path) -> Tokenizer:
    """Learn merges from the prose and a sprinkle of template words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = corpus.read_text(encoding="utf-8").splitlines()
    lines += [f" The name of the {thing} is" for thing in THINGS for _ in range(20)]
    lines += [f" {name}" for name in training_names(2000, seed=1)]
    lines += ["system\nuser\nassistant\n"] * 50
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer lacks {token!r}")
    return int(found)


def export(model: nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model folder: weights in bf16, configuration, tokenizer, chat template and generation defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in model.named_parameters()}
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    end, pad = token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)
    _write_json(folder / "config.json", config_of([end, pad], pad))
    _write_json(folder / "generation_config.json", {"eos_token_id": [end, pad], "pad_token_id": pad})
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_prefix_space": False,
        "backend": "tokenizers",
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": CONTEXT,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
