"""What everyone may know about a checkpoint: its architecture as numbers, and whether its files are whole.

Reads `config.json` in both spellings (`rope_theta`/`rope_scaling`/`torch_dtype` as published, `rope_parameters`/
`dtype` as transformers 5 writes it), `generation_config.json`, and the headers of the safetensors files; it loads no
tensor and needs no torch, so a bad folder is refused in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from contracts.errors import CheckpointError
from contracts.tensor_files import FLOATS, TensorHeader, digest_samples, read_headers, read_json

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
_ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The supported kinds of rope scaling, each with the numbers it can't do without."""
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
_DEFAULT_THETA = 10000.0
_DEFAULT_EPS = 1e-6
_QWEN3_HEAD_DIM = 128
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


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

    @property
    def qk_norm(self) -> bool:
        """Queries and keys are normed by head before rope."""
        return self.architecture == "Qwen3ForCausalLM"


def read_model_spec(folder: Path) -> ModelSpec:
    """Read and check a checkpoint folder without loading a tensor.

    Raises `CheckpointError` in one line for a missing or truncated file, an unknown architecture, an unknown rope
    scaling, or a tensor that is missing or of the wrong shape (naming it and both shapes).
    """
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint folder {folder} does not exist")
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} has no config.json; is it a Hugging Face checkpoint folder?")
    config = _Fields(folder / "config.json", read_json(folder / "config.json"))
    architecture = _architecture(config)
    _refuse_unsupported(config, architecture)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    headers = read_headers(folder)
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    fallback_dim = _QWEN3_HEAD_DIM if architecture == "Qwen3ForCausalLM" else hidden // heads
    numbers: dict[str, object] = {
        "architecture": architecture,
        "vocab_size": config.size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": config.size("intermediate_size"),
        "layers": config.size("num_hidden_layers"),
        "heads": heads,
        "kv_heads": config.size("num_key_value_heads", heads),
        "head_dim": config.size("head_dim", fallback_dim),
        "context": config.size("max_position_embeddings"),
        "dtype": _dtype(config, headers),
        "tied": config.flag("tie_word_embeddings"),
        "rms_eps": config.number("rms_norm_eps", _DEFAULT_EPS),
        "attention_bias": config.flag("attention_bias"),
        "mlp_bias": config.flag("mlp_bias") and architecture == "LlamaForCausalLM",
    }
    rope = _rope(config)
    eos = generation.get("eos_token_id")
    bos = generation.get("bos_token_id", config.values.get("bos_token_id"))
    spec = ModelSpec(
        folder=folder,
        name=folder.resolve().name,
        rope=rope,
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=_token_ids(eos if eos is not None else config.values.get("eos_token_id")),
        fingerprint="",
        generation_defaults={
            key: float(value)
            for key in _GENERATION_KEYS
            if isinstance(value := generation.get(key), int | float) and not isinstance(value, bool)
        },
        **numbers,  # type: ignore[arg-type]
    )
    _check_heads(config, spec)
    expected = expected_tensors(spec)
    _check_tensors(folder, expected, headers)
    identity = json.dumps([numbers, rope.kind, rope.theta, rope.parameters], sort_keys=True)
    samples = digest_samples({name: headers[name] for name in expected})
    fingerprint = hashlib.sha256((identity + samples).encode()).hexdigest()[:32]
    return replace(spec, fingerprint=fingerprint)


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the model needs, as checkpoints of both architectures name them."""
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    wide, narrow = spec.heads * dim, spec.kv_heads * dim
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied:
        out["lm_head.weight"] = (spec.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (wide, hidden, spec.attention_bias),
        "self_attn.k_proj": (narrow, hidden, spec.attention_bias),
        "self_attn.v_proj": (narrow, hidden, spec.attention_bias),
        "self_attn.o_proj": (hidden, wide, spec.attention_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        out[prefix + "input_layernorm.weight"] = (hidden,)
        out[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if spec.qk_norm:
            out[prefix + "self_attn.q_norm.weight"] = (dim,)
            out[prefix + "self_attn.k_norm.weight"] = (dim,)
        for name, (rows, columns, bias) in linears.items():
            out[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                out[f"{prefix}{name}.bias"] = (rows,)
    return out


class _Fields:
    """`config.json` with typed access; a bad or missing value is named with its file."""

    def __init__(self, path: Path, values: dict[str, object]) -> None:
        self.path = path
        self.values = values

    def size(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.path} has no {key}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self.path}: {key} must be a positive whole number, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {key} must be a number, got {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {key} must be true or false, got {value!r}")
        return bool(value)


def _architecture(config: _Fields) -> str:
    names = config.values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{config.path}: architecture {name or config.values.get('model_type') or 'not given'} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return str(name)


def _refuse_unsupported(config: _Fields, architecture: str) -> None:
    values = config.values
    if values.get("quantization_config") is not None:
        raise CheckpointError(f"{config.path}: quantised checkpoints are not supported; use the original weights")
    if values.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{config.path}: hidden_act {values['hidden_act']!r} is not supported; only silu is")
    layer_types = values.get("layer_types")
    others = {str(kind) for kind in layer_types if kind != "full_attention"} if isinstance(layer_types, list) else set()
    slides = values.get("use_sliding_window") is True and values.get("sliding_window") is not None
    if others or (slides and architecture == "Qwen3ForCausalLM"):
        kind = ", ".join(sorted(others)) or "sliding_attention"
        raise CheckpointError(f"{config.path}: {kind} layers are not supported; only full attention is")


def _dtype(config: _Fields, headers: Mapping[str, TensorHeader]) -> str:
    declared = config.values.get("dtype") or config.values.get("torch_dtype")
    if declared is None:
        header = headers.get("model.embed_tokens.weight")
        declared = FLOATS.get(header.dtype, header.dtype) if header else "float32"
    name = str(declared).removeprefix("torch.")
    if name not in FLOATS.values():
        raise CheckpointError(
            f"{config.path}: dtype {name} is not supported; supported are {', '.join(FLOATS.values())}"
        )
    return name


def _rope(config: _Fields) -> RopeSpec:
    """Old spelling: `rope_theta` beside `rope_scaling` (with ``type`` or ``rope_type``); new: `rope_parameters`."""
    raw = config.values.get("rope_scaling") or config.values.get("rope_parameters") or {}
    if not isinstance(raw, dict):
        raise CheckpointError(f"{config.path}: the rope scaling must be an object, got {raw!r}")
    scaling = dict(raw)
    old_kind = scaling.pop("type", None)
    kind = str(scaling.pop("rope_type", None) or old_kind or "default")
    theta = scaling.pop("rope_theta", None)
    if theta is None:
        theta = config.number("rope_theta", _DEFAULT_THETA)
    if kind in _LENGTH_DEPENDENT:
        raise CheckpointError(
            f"{config.path}: rope scaling {kind!r} is not supported: its angles depend on the length of the whole "
            "sequence, so keys computed earlier would be wrong later"
        )
    if kind not in _ROPE_NUMBERS:
        raise CheckpointError(f"{config.path}: unknown rope scaling {kind!r}; supported are {', '.join(_ROPE_NUMBERS)}")
    partial = scaling.pop("partial_rotary_factor", config.values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"{config.path}: partial_rotary_factor {partial!r} is not supported; only 1 is")
    if "original_max_position_embeddings" in _ROPE_NUMBERS[kind]:
        given = config.values.get("original_max_position_embeddings")
        if given is not None:
            scaling["original_max_position_embeddings"] = given
        scaling.setdefault("original_max_position_embeddings", config.size("max_position_embeddings"))
    for key in (*_ROPE_NUMBERS[kind], "rope_theta"):
        value = theta if key == "rope_theta" else scaling.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"{config.path}: rope scaling {kind!r} needs a positive {key}, got {value!r}")
    return RopeSpec(kind, float(theta), scaling)


def _token_ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def _check_heads(config: _Fields, spec: ModelSpec) -> None:
    if spec.heads % spec.kv_heads:
        raise CheckpointError(
            f"{config.path}: {spec.heads} attention heads do not divide among {spec.kv_heads} key-value heads"
        )
    if spec.head_dim % 2:
        raise CheckpointError(f"{config.path}: head_dim {spec.head_dim} must be even for rotary embeddings")


def _check_tensors(folder: Path, expected: Mapping[str, tuple[int, ...]], headers: Mapping[str, TensorHeader]) -> None:
    for name, shape in expected.items():
        header = headers.get(name)
        if header is None:
            raise CheckpointError(f"{folder}: tensor {name} is missing")
        if header.shape != shape:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {list(header.shape)}, but config.json asks for {list(shape)}"
            )
        if header.dtype not in FLOATS:
            raise CheckpointError(
                f"{folder}: tensor {name} has dtype {header.dtype}; supported are {', '.join(FLOATS)}"
            )
