"""A GGUF file's configuration under the keys of `config.json` and `generation_config.json`.

The metadata has an architecture's numbers below its name (``llama.block_count``). What llama.cpp knows of an
architecture and a file doesn't say is written here as `config.json` has it: Gemma 3's two ropes, Qwen's biases.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from twinpool.contracts.checkpoint.gguf.gguf_header import ROPE_FACTORS, GgufHeader, TensorNames, tensors_of
from twinpool.contracts.checkpoint.safetensors_headers import FLOATS, TensorHeader

_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
"""Control tokens that end an answer wherever a vocabulary has them, as llama.cpp has it too."""
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_CONTROL = 3
_GEMMA3_27B_LAYERS = 62
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0
_LLAMA3_BITS = 24
"""Lengths of training are powers of two below 2 to the power of this."""
_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_YARN = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "attn_factor": "attention_factor",
    "yarn_attn_factor": "attention_factor",
}


@dataclass(frozen=True, slots=True)
class GgufConfig:
    """What a GGUF file says in a checkpoint folder's words."""

    values: dict[str, object]
    """The keys of `config.json`."""
    generation: dict[str, object]
    """The keys of `generation_config.json`."""
    tensors: dict[str, TensorHeader]


def config_of(header: GgufHeader) -> GgufConfig:
    """Translate a header.

    Raises `CheckpointError` for an architecture that isn't supported, for numbers that are missing or bad, and for
    tensors that the architecture doesn't have.
    """
    name = header.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise header.refuse(f"GGUF architecture {name!r} is not supported; supported are {', '.join(_ARCHITECTURES)}")
    return _Translation(header, str(name), _ARCHITECTURES[str(name)]).config()


@dataclass(frozen=True, slots=True)
class _Architecture:
    name: str
    """As `config.json` names it."""
    model_type: str
    """As transformers finds its configuration."""
    tensors: TensorNames
    more: Callable[[_Translation], Mapping[str, object]]
    """The keys that other architectures don't have."""


class _Translation:
    """The metadata of one file of one architecture."""

    def __init__(self, header: GgufHeader, prefix: str, architecture: _Architecture) -> None:
        self.header, self._prefix, self._architecture = header, prefix, architecture

    def config(self) -> GgufConfig:
        header = self.header
        heads, hidden = self.size("attention.head_count"), self.size("embedding_length")
        head_dim = self.size("attention.key_length", self.size("rope.dimension_count", hidden // heads))
        if self.count("attention.value_length", head_dim) != head_dim:
            raise header.refuse("values of another width than keys are not supported")
        if (turned := self.count("rope.dimension_count", head_dim)) != head_dim:
            raise header.refuse(f"rope over {turned} of a head's {head_dim} dimensions is not supported")
        if self.has("expert_count") and self._prefix != "qwen3moe" and self.count("expert_count"):
            raise header.refuse(f"experts are not supported in architecture {self._prefix}")
        values: dict[str, object] = {
            "architectures": [self._architecture.name],
            "model_type": self._architecture.model_type,
            "hidden_size": hidden,
            "num_hidden_layers": self.count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.count("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.count("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self.number("rope.freq_base", 10_000.0),
            "tie_word_embeddings": "output.weight" not in header.tensors,
            "vocab_size": self._vocabulary(),
            "dtype": self._dtype(),
        }
        if self.has("feed_forward_length"):
            values["intermediate_size"] = self.count("feed_forward_length")
        values |= self._rope(head_dim) | dict(self._architecture.more(self))
        names = self._architecture.tensors
        return GgufConfig(values, self._generation(), tensors_of(header, names, head_dim))

    # ------------------------------------------------------------ values of the metadata

    def has(self, key: str) -> bool:
        return f"{self._prefix}.{key}" in self.header.metadata

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more; of a list for all layers its one value."""
        return self._whole(key, default, 1)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of 0 or more; of a list for all layers its one value."""
        return self._whole(key, default, 0)

    def _whole(self, key: str, default: int | None, least: int) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            what = "one whole number for all layers" if isinstance(value, list) else "a whole number"
            what = "a positive whole number" if least and not isinstance(value, list) else what
            raise self.header.refuse(f"{self._prefix}.{key} must be {what}, got {value!r:.60}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.header.refuse(f"{self._prefix}.{key} must be a number, got {value!r:.60}")
        try:
            return _shortest(float(value))
        except OverflowError:
            raise self.header.refuse(f"{self._prefix}.{key} is {value!r}, more than a float32 holds") from None

    def _get(self, key: str, default: object) -> object:
        value = self.header.metadata.get(f"{self._prefix}.{key}", default)
        if value is None:
            raise self.header.refuse(f"it has no {self._prefix}.{key}")
        return value

    # ------------------------------------------------------------ parts

    def _vocabulary(self) -> int:
        place = self.header.tensors.get("token_embd.weight")
        if place is None or len(place.shape) != 2:
            raise self.header.refuse("tensor token_embd.weight is missing or no matrix")
        return place.shape[0]

    def _dtype(self) -> str:
        """The dtype of most weights; bfloat16 where any are quantised, since that is far coarser than its rounding."""
        sizes: Counter[str] = Counter()
        for place in self.header.tensors.values():
            sizes[place.kind] += place.end - place.begin
        return "bfloat16" if sizes.keys() - FLOATS.keys() else FLOATS[sizes.most_common(1)[0][0]]

    def _rope(self, head_dim: int) -> dict[str, object]:
        if ROPE_FACTORS in self.header.tensors:
            factors = self._rope_factors(head_dim // 2)
            llama3 = _llama3_scaling(factors, self.number("rope.freq_base", 10_000.0))
            return {"rope_scaling": llama3 or {"rope_type": "factors", "factors": factors}}
        kind = self.header.metadata.get(f"{self._prefix}.rope.scaling.type", "none")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0))
        if kind == "none" and self.has("rope.scale_linear"):
            kind = "linear"
        if kind == "none" or not factor or (kind == "linear" and factor == 1.0):
            return {}
        scaling: dict[str, object] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            if self.has("rope.scaling.original_context_length"):
                scaling["original_max_position_embeddings"] = self.count("rope.scaling.original_context_length")
            scaling |= {to: self.number(f"rope.scaling.{key}") for key, to in _YARN.items() if self._scales(key)}
        return {"rope_scaling": scaling}

    def _scales(self, key: str) -> bool:
        return self.has(f"rope.scaling.{key}")

    def _rope_factors(self, count: int) -> list[float]:
        place = self.header.tensors[ROPE_FACTORS]
        if place.kind != "F32" or place.shape != (count,):
            raise self.header.refuse(
                f"tensor {ROPE_FACTORS} must be a row of {count} F32, got {list(place.shape)} of {place.kind}"
            )
        with self.header.path.open("rb") as file:
            file.seek(place.begin)
            return list(struct.unpack(f"<{place.shape[0]}f", file.read(place.end - place.begin)))

    def _generation(self) -> dict[str, object]:
        metadata, ends = self.header.metadata, []
        for key in _END_IDS:
            ends.append(metadata.get(f"tokenizer.ggml.{key}"))
        tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
        if isinstance(tokens, list) and isinstance(kinds, list) and len(kinds) == len(tokens):
            ends += [at for at, token in enumerate(tokens) if token in _ENDS and kinds[at] == _CONTROL]
        found: dict[str, object] = {"eos_token_id": list(dict.fromkeys(end for end in ends if isinstance(end, int)))}
        if isinstance(metadata.get("tokenizer.ggml.bos_token_id"), int):
            found["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
        sampling = {to: metadata.get(f"general.sampling.{key}") for key, to in _SAMPLING.items()}
        return found | {to: value for to, value in sampling.items() if value is not None}


def _shortest(value: float) -> float:
    """The shortest decimal with the same float32: 1e-5, where the file says 9.999999747378752e-06."""
    same = struct.pack("<f", value)
    return next(d for digits in range(6, 10) if struct.pack("<f", d := float(f"{value:.{digits}g}")) == same)


def _llama3_scaling(factors: Sequence[float], theta: float) -> dict[str, object] | None:
    """The scaling of Llama 3.1 and later that these divisors of all frequencies of a head were made of; None where they
    are others.

    llama.cpp's converter writes the divisors without the numbers. Of those the largest divisor is one, every published
    model has the same two bounds, and the length of training is tried.
    """
    factor = float(f"{max(factors, default=0.0):.6g}")
    if not 1.0 <= factor < math.inf:
        return None
    waves = [2 * math.pi * theta ** (i / len(factors)) for i in range(len(factors))]
    for length in (1 << bits for bits in range(_LLAMA3_BITS)):
        wanted = (_llama3_divisor(length / wave, factor) for wave in waves)
        if all(math.isclose(one, given, rel_tol=1e-5) for one, given in zip(wanted, factors, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": length,
            }
    return None


def _llama3_divisor(turns: float, factor: float) -> float:
    """What divides a frequency that makes so many turns in the length of training: 1 above the upper bound, `factor`
    below the lower one (transformers, `_compute_llama3_parameters`)."""
    share = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    share = min(max(share, 0.0), 1.0)
    return 1.0 / ((1.0 - share) / factor + share)


def _llama(file: _Translation) -> dict[str, object]:
    biased = any(name.endswith("attn_q.bias") for name in file.header.tensors)
    mlp = any(name.endswith("ffn_gate.bias") for name in file.header.tensors)
    window = {"sliding_window": file.count("attention.sliding_window")} if file.has("attention.sliding_window") else {}
    return {"attention_bias": biased, "mlp_bias": mlp, **window}


def _qwen3moe(file: _Translation) -> dict[str, object]:
    return {
        "num_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma3(file: _Translation) -> dict[str, object]:
    """llama.cpp scales the scores of the model with 62 layers by its width a head, others' by the head's width."""
    hidden, heads = file.size("embedding_length"), file.size("attention.head_count")
    wide = file.count("block_count") == _GEMMA3_27B_LAYERS
    values: dict[str, object] = {
        "sliding_window": file.count("attention.sliding_window"),
        "rope_local_base_freq": file.number("rope.freq_base_swa", 10_000.0),
        "rope_theta": file.number("rope.freq_base", 1_000_000.0),
        "query_pre_attn_scalar": hidden // heads if wide else file.count("attention.key_length"),
        "hidden_activation": "gelu_pytorch_tanh",
    }
    pattern = file.header.metadata.get("gemma3.attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        kinds = {True: "sliding_attention", False: "full_attention"}
        values["layer_types"] = [kinds[bool(one)] for one in pattern]
    else:
        values["sliding_window_pattern"] = file.count("attention.sliding_window_pattern", 6)
    if file.has("final_logit_softcapping"):
        values["final_logit_softcapping"] = file.number("final_logit_softcapping")
    return values


_SANDWICH = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", "llama", TensorNames(interleaved=("attn_q", "attn_k")), _llama),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2", TensorNames(), lambda _: {}),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3", TensorNames(), lambda _: {}),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", "qwen3_moe", TensorNames({"ffn_gate_inp": "mlp.gate"}), _qwen3moe),
    "gemma3": _Architecture("Gemma3ForCausalLM", "gemma3_text", TensorNames(_SANDWICH, norms_added=1.0), _gemma3),
}
