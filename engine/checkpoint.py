"""Loads a checkpoint's tensors into the shapes that the decoder computes with."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from contracts.config import EngineConfig
from contracts.errors import CheckpointError
from contracts.model import ModelSpec, expected_tensors
from contracts.tensor_files import read_headers
from engine.numerics import Linear


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Projections that read the same input are stacked by rows into one matrix."""

    input_norm_h: Tensor
    qkv: Linear
    """[(heads + 2 kv_heads) * head_dim, hidden]: queries, keys, values."""
    qk_norm_nd: Tensor | None
    """[heads + kv_heads, head_dim]: the queries' norm repeated for each head, then the keys'."""
    out: Linear
    """[hidden, heads * head_dim]"""
    mlp_norm_h: Tensor
    gate_up: Linear
    """[2 * intermediate, hidden]: gate, up."""
    down: Linear
    """[hidden, intermediate]"""


@dataclass(frozen=True)
class Weights:
    """All of a model. Where the checkpoint ties them, `head` is made of `embed_vh`."""

    embed_vh: Tensor
    layers: tuple[LayerWeights, ...]
    norm_h: Tensor
    head: Linear


def dtype_for(spec: ModelSpec, config: EngineConfig) -> torch.dtype:
    """The dtype to compute in: the configured one, else the checkpoint's own.

    A float16 checkpoint computes in float32 unless told otherwise: float16 overflows where bfloat16 and float32
    don't, and it is slow on CPUs.
    """
    name = spec.dtype if config.dtype == "auto" else config.dtype
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def load_weights(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Weights:
    """Load the tensors that `spec` needs, cast to `dtype`; raises `CheckpointError` if a file can't be read."""
    raw = _read(spec, dtype, device)
    layers = []
    for number in range(spec.layers):
        prefix = f"model.layers.{number}."

        def take(name: str, prefix: str = prefix) -> Tensor:
            return raw.pop(prefix + name)

        def linear(*names: str, prefix: str = prefix) -> Linear:
            """Projections that read the same input, stacked."""
            weight = torch.cat([raw.pop(f"{prefix}{name}.weight") for name in names])
            biases = [raw.pop(f"{prefix}{name}.bias") for name in names if f"{prefix}{name}.bias" in raw]
            return Linear(weight, torch.cat(biases) if biases else None)

        qk_norm = None
        if spec.qk_norm:
            q_norm, k_norm = take("self_attn.q_norm.weight"), take("self_attn.k_norm.weight")
            qk_norm = torch.cat((q_norm.expand(spec.heads, -1), k_norm.expand(spec.kv_heads, -1)))
        layers.append(
            LayerWeights(
                input_norm_h=take("input_layernorm.weight"),
                qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                qk_norm_nd=qk_norm,
                out=linear("self_attn.o_proj"),
                mlp_norm_h=take("post_attention_layernorm.weight"),
                gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
                down=linear("mlp.down_proj"),
            )
        )
    embed = raw["model.embed_tokens.weight"]
    head = Linear(embed if spec.tied else raw["lm_head.weight"])
    return Weights(embed, tuple(layers), raw["model.norm.weight"], head)


def _read(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    headers = read_headers(spec.folder)
    by_file = defaultdict(list)
    for name in expected_tensors(spec):
        by_file[headers[name].file].append(name)
    tensors: dict[str, Tensor] = {}
    for path, names in by_file.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    # A copy, also where dtype and device agree: the mapped file may change or vanish below us.
                    tensors[name] = file.get_tensor(name).to(device, dtype, copy=True)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    return tensors
