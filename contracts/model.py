"""What everyone may know about a checkpoint: its architecture as numbers, and whether its files are whole.

Reads `config.json` in both spellings (`rope_theta`/`rope_scaling`/`torch_dtype` as published, `rope_parameters`/
`dtype` as transformers 5 writes it), `generation_config.json`, and the headers of the safetensors files; it loads no
tensor and needs no torch, so a bad folder is refused in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding as the checkpoint declares it; `kind` is transformers' ``rope_type``."""

    kind: str
    theta: float
    parameters: dict[str, object] = field(default_factory=dict)
    """The scaler's own numbers (``factor``, ``low_freq_factor``, ...), as written."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model as numbers. Lengths are in positions, sizes in elements."""

    folder: Path
    name: str
    """The served name: the folder's last part."""
    architecture: str
    """``LlamaForCausalLM`` or ``Qwen3ForCausalLM``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    dtype: str
    """The checkpoint's dtype: ``float32``, ``bfloat16`` or ``float16``."""
    tied: bool
    rms_eps: float
    rope: RopeSpec
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """From `generation_config.json` where it has them, else from `config.json`."""
    fingerprint: str
    """Digest of architecture, numbers and tensor headers: two workers with different ones refuse each other."""
    generation_defaults: dict[str, float] = field(default_factory=dict)
    """`temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` from `generation_config.json`, where given."""


def read_model_spec(folder: Path) -> ModelSpec:
    """Read and check a checkpoint folder without loading a tensor.

    Raises `CheckpointError` in one line for a missing or truncated file, an unknown architecture, an unknown rope
    scaling, or a tensor that is missing or of the wrong shape (naming it and both shapes).
    """
    raise NotImplementedError
