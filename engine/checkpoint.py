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


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Projections that read the same input are stacked by rows into one matrix."""

    input_norm_h: Tensor
    qkv_oh: Tensor
    """[(heads + 2 kv_heads) * head_dim, hidden]: queries, keys, values."""
    qkv_bias_o: Tensor | None
    qk_norm_nd: Tensor | None
    """[heads + kv_heads, head_dim]: the queries' norm repeated for each head, then the keys'."""
    out_ho: Tensor
    out_bias_h: Tensor | None
    mlp_norm_h: Tensor
    gate_up_ih: Tensor
    """[2 * intermediate, hidden]: gate, up."""
    gate_up_bias_i: Tensor | None
    down_hi: Tensor
    down_bias_h: Tensor | None


@dataclass(frozen=True)
class Weights:
    """All of a model. `head_vh` is `embed_vh` itself where the checkpoint ties them."""

    embed_vh: Tensor
    layers: tuple[LayerWeights, ...]
    norm_h: Tensor
    head_vh: Tensor


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

        def bias(*names: str, prefix: str = prefix) -> Tensor | None:
            parts = [raw.pop(f"{prefix}{name}.bias") for name in names if f"{prefix}{name}.bias" in raw]
            return torch.cat(parts) if parts else None

        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        gate_up = ("mlp.gate_proj", "mlp.up_proj")
        qk_norm = None
        if spec.qk_norm:
            q_norm, k_norm = take("self_attn.q_norm.weight"), take("self_attn.k_norm.weight")
            qk_norm = torch.cat((q_norm.expand(spec.heads, -1), k_norm.expand(spec.kv_heads, -1)))
        layers.append(
            LayerWeights(
                input_norm_h=take("input_layernorm.weight"),
                qkv_oh=torch.cat([take(f"{name}.weight") for name in qkv]),
                qkv_bias_o=bias(*qkv),
                qk_norm_nd=qk_norm,
                out_ho=take("self_attn.o_proj.weight"),
                out_bias_h=bias("self_attn.o_proj"),
                mlp_norm_h=take("post_attention_layernorm.weight"),
                gate_up_ih=torch.cat([take(f"{name}.weight") for name in gate_up]),
                gate_up_bias_i=bias(*gate_up),
                down_hi=take("mlp.down_proj.weight"),
                down_bias_h=bias("mlp.down_proj"),
            )
        )
    embed = raw["model.embed_tokens.weight"]
    return Weights(embed, tuple(layers), raw["model.norm.weight"], embed if spec.tied else raw["lm_head.weight"])


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
