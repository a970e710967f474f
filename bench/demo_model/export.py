"""Write the demo checkpoint as a Hugging Face model folder."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from bench.demo_model.train_tokenizer import END_OF_TEXT, TURN_END, save_tokenizer, token_id, write_json
from bench.demo_model.training_model import DemoModel


def export(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Weights in bf16, configuration, tokenizer and generation defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    end, pad = token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)
    write_json(folder / "config.json", model.shape.as_config([end, pad], pad))
    write_json(folder / "generation_config.json", {"eos_token_id": [end, pad], "pad_token_id": pad})
    save_tokenizer(tokenizer, folder, model.shape.context)
