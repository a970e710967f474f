"""The tensors of a GGUF file under the names that checkpoint folders give them.

What llama.cpp's conversion did to them is undone where they are read, so each header says what that was: Llama's
queries and keys have the two halves of each head's rows interleaved, and Gemma's norms have one added.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from twinpool.contracts.checkpoint.gguf.gguf_header import GgufHeader, GgufPlace
from twinpool.contracts.checkpoint.safetensors_headers import FLOATS, TensorHeader

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of Llama 3's rope scaling; it is read with the configuration."""


@dataclass(frozen=True, slots=True)
class GgufTensor(TensorHeader):
    """The place of one tensor in a GGUF file, with what its conversion did; `dtype` is the format's name of its type,
    and `shape` as in a checkpoint folder."""

    interleaved: int = 0
    """Rows of a head whose two halves lie interleaved, row by row; 0: rows lie in order."""
    added: float = 0.0
    """What was added to each value."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How one architecture's tensors are named and were converted."""

    layer: Mapping[str, str] = field(default_factory=dict)
    """Names within a layer that differ from Llama's."""
    interleaved: tuple[str, ...] = ()
    """Parts of a layer whose rows are interleaved by head."""
    norms_added: float = 0.0


def gguf_types(headers: Mapping[str, TensorHeader]) -> str:
    """``GGUF`` and the types of a file's quantised tensors, those of the most bytes first; empty where there are none,
    as in folders."""
    nbytes: Counter[str] = Counter()
    for header in headers.values():
        if isinstance(header, GgufTensor) and header.dtype not in FLOATS:
            nbytes[header.dtype] += header.end - header.begin
    return f"GGUF {', '.join(kind for kind, _ in nbytes.most_common())}" if nbytes else ""


def tensors_of(header: GgufHeader, names: TensorNames, head_dim: int) -> dict[str, TensorHeader]:
    """The headers of all tensors by their names in a checkpoint folder.

    Raises `CheckpointError` for a tensor that the architecture doesn't have: answers without it would be wrong.
    """
    known = {**_LAYER, **names.layer}
    found: dict[str, TensorHeader] = {}
    for name, place in header.tensors.items():
        if name == ROPE_FACTORS:
            continue
        match = _NAME.fullmatch(name)
        part, root = (match["part"], f"model.layers.{match['layer']}.") if match else ("", "")
        if match and match["layer"] is None and part in _TOP:
            full = f"{_TOP[part]}.{match['kind']}"
        elif match and match["layer"] is not None and part in known:
            full = f"{root}{known[part]}.{match['kind']}"
        elif match and match["layer"] is not None and part in _EXPERTS and len(place.shape) == 3:
            found |= _experts(header, f"{root}mlp.experts", _EXPERTS[part], place)
            continue
        else:
            raise header.refuse(
                f"tensor {name} is not known for architecture {header.metadata['general.architecture']}"
            )
        interleaved = head_dim if part in names.interleaved else 0
        if interleaved and place.shape[0] % head_dim:
            raise header.refuse(f"tensor {name} has {place.shape[0]} rows, which are no whole heads of {head_dim}")
        added = names.norms_added if part.endswith("norm") else 0.0
        found[full] = _tensor(header, place, place.shape, place.begin, interleaved, added)
    return found


def _experts(header: GgufHeader, root: str, name: str, place: GgufPlace) -> Iterator[tuple[str, TensorHeader]]:
    """The tensors of single experts, which lie one behind the other in a tensor of all."""
    count, *shape = place.shape
    size = (place.end - place.begin) // max(count, 1)
    for expert in range(count):
        yield f"{root}.{expert}.{name}.weight", _tensor(header, place, tuple(shape), place.begin + expert * size)


def _tensor(
    header: GgufHeader,
    place: GgufPlace,
    shape: tuple[int, ...],
    begin: int,
    interleaved: int = 0,
    added: float = 0.0,
) -> GgufTensor:
    size = (place.end - place.begin) * prod(shape) // max(prod(place.shape), 1)
    return GgufTensor(header.path, place.kind, shape, begin, begin + size, interleaved, added)
