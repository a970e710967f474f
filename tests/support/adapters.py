"""Adapters (LoRA) with random factors in PEFT's format, and checkpoints with them merged in, for the oracle."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCALES: dict[str, Any] = {"lora_alpha": 16, "use_rslora": False}


def make_adapter(
    folder: Path,
    checkpoint: Path,
    rank: int,
    *,
    seed: int = 0,
    targets: Sequence[str] = ALL,
    without: str = "no such layer",
    **config: Any,
) -> Path:
    """Write an adapter of a checkpoint that lies in one safetensors file; returns `folder`. `without`: a part of the
    names of layers that it leaves out. `config`: fields of `adapter_config.json`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in sorted(load_file(checkpoint / "model.safetensors").items()):
        layer = name.removesuffix(".weight")
        if weight.dim() != 2 or without in layer or not any(f".{layer}".endswith(f".{target}") for target in targets):
            continue
        n, k = weight.shape
        for kind, shape in (("A", (rank, k)), ("B", (n, rank))):
            factor = torch.randn(shape, generator=generator) * 0.3
            tensors[f"base_model.model.{layer}.lora_{kind}.weight"] = factor
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": rank, "bias": "none", "target_modules": [*targets], **SCALES, **config}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def merged(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """Write the checkpoint with W + s·B·A in place of each W, in float32; returns `folder`."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
    weights, factors = load_file(folder / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, up in factors.items():
        if name.endswith(".lora_B.weight"):
            down = factors[name.replace(".lora_B.", ".lora_A.")]
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            weights[f"{layer}.weight"] += (scale * up.double() @ down.double()).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
