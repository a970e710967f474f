"""The header of a GGUF file: its metadata and the places of its tensors, read without loading a tensor.

The format (github.com/ggml-org/ggml, docs/gguf.md): the magic, a version, the numbers of tensors and of metadata pairs;
the pairs, each a name, a type and a value; for each tensor its name, lengths (the fastest first), type and offset;
then, aligned, the tensors' bytes. All numbers are little-endian here.

The tensors have the names here that checkpoint folders give them. What llama.cpp's conversion did to them is undone
where they are read, so each header says what that was: Llama's queries and keys have the two halves of each head's rows
interleaved, and Gemma's norms have one added.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from twinpool.contracts.checkpoint.safetensors_headers import FLOATS, TensorHeader
from twinpool.contracts.errors import CheckpointError

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The format's types of plain numbers, as `struct` names them."""
_MAX = 1 << 24
"""More tensors, metadata pairs or lengths than this is damage."""

BLOCKS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}
"""The tensor types that can be read: name, values a block, bytes a block."""
_OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Names of tensor types that can't be read, for errors."""


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """The place of one tensor; `begin` and `end` are byte offsets from the start of the file."""

    kind: str
    """The type by the format's name: ``F32``, ``Q4_K``, ..."""
    shape: tuple[int, ...]
    """The slowest axis first, as in safetensors files."""
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A file's metadata by key, and its tensors' places by name."""

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufPlace]

    def refuse(self, message: str) -> CheckpointError:
        """Returns, for the caller to raise, the error for a fault of this file."""
        return CheckpointError(f"{self.path}: {message}")


def is_gguf(path: Path) -> bool:
    """Whether a model's path names a GGUF file, by its suffix."""
    return path.suffix.lower() == SUFFIX


def read_gguf(path: Path) -> GgufHeader:
    """Read a file's header.

    Raises `CheckpointError` for a file that is missing, truncated, malformed, one of several parts, or that holds a
    tensor of a type that can't be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4)
            if head != _MAGIC:
                raise CheckpointError(f"{path} is no GGUF file: it begins with {head!r}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _HeaderReader(path, content).header()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (struct.error, IndexError):
        raise CheckpointError(f"{path} is truncated: it ends within its header") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is malformed: a string of its header is not UTF-8") from None


class _HeaderReader:
    """The reading of one header from a file's content."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path, self._content = path, content
        self._at = len(_MAGIC)

    def header(self) -> GgufHeader:
        version: int = self._number("I")
        if version not in _VERSIONS:
            other = "of the other byte order" if version > 0xFFFF else f"of version {version}"
            raise CheckpointError(
                f"{self._path} is a GGUF file {other}; versions 2 and 3 in little-endian order are supported: convert "
                "it again"
            )
        tensors, pairs = self._count("Q"), self._count("Q")
        metadata = dict(self._pair() for _ in range(pairs))
        parts = metadata.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            raise CheckpointError(
                f"{self._path} is one of {parts} parts of a model; join them first (llama-gguf-split --merge) and give "
                "the whole file"
            )
        infos = [self._info() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self._path} is malformed: general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return GgufHeader(self._path, metadata, self._places(infos, start))

    def _places(self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int) -> dict[str, GgufPlace]:
        places: dict[str, GgufPlace] = {}
        for name, shape, kind, offset in infos:
            if kind not in BLOCKS:
                known = ", ".join(block[0] for block in BLOCKS.values())
                raise CheckpointError(
                    f"{self._path}: tensor {name} has type {_OTHERS.get(kind, kind)}, which is not supported; "
                    f"supported are {known}"
                )
            word, values, size = BLOCKS[kind]
            if name in places or not shape or shape[-1] % values:
                raise CheckpointError(f"{self._path} is malformed: tensor {name} is {word} of shape {list(shape)}")
            begin = start + offset
            places[name] = GgufPlace(word, shape, begin, begin + prod(shape) // values * size)
        needed, size = max((place.end for place in places.values()), default=0), len(self._content)
        if needed > size:
            raise CheckpointError(
                f"{self._path} is truncated: it has {size} bytes and its header describes {needed}; fetch it again"
            )
        return places

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, axes = self._string(), self._count("I")
        lengths = [self._number("Q") for _ in range(axes)]
        return name, tuple(reversed(lengths)), self._number("I"), self._number("Q")

    def _pair(self) -> tuple[str, object]:
        return self._string(), self._value(self._number("I"))

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path} is malformed: its header has a value of type {kind}")
        return self._number(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if count > len(self._content):
            raise IndexError
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path} is malformed: its header has an array of type {kind}")
        numbers = struct.Struct(f"<{count}{_SCALARS[kind]}")
        begin = self._at
        self._at += numbers.size
        return list(numbers.unpack_from(self._content, begin))

    def _string(self) -> str:
        begin = self._at + 8
        self._at = begin + struct.unpack_from("<Q", self._content, self._at)[0]
        if self._at > len(self._content):
            raise IndexError
        return self._content[begin : self._at].decode("utf-8")

    def _count(self, form: str) -> int:
        found = self._number(form)
        if found > _MAX:
            raise CheckpointError(f"{self._path} is malformed: its header counts {found} of something")
        return int(found)

    def _number(self, form: str) -> Any:
        number = struct.Struct("<" + form)
        (found,) = number.unpack_from(self._content, self._at)
        self._at += number.size
        return found


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
