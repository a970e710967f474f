"""Conversion of a checkpoint's weights: any folder or GGUF file that is served, to a folder of safetensors.

    format         weights of the layers' products                                     layout
    bfloat16       rounded to bfloat16                                                 a dense checkpoint
    float8         e4m3 with a float32 scale for each 128 rows and columns             ``fp8``, as DeepSeek-V3
    int8, int4     whole numbers with a bfloat16 scale for each `group` columns        compressed-tensors
    nvfp4          four-bit floats with an e4m3 scale for each 16 columns              compressed-tensors
    mxfp4, mxfp8   floats with a power of two for each 32 columns                      compressed-tensors
    awq            whole numbers with a zero point for each `group` columns            AWQ, `gemm`
    gptq4, gptq8   whole numbers with a float16 scale for each `group` columns         GPTQ, the first version

A source in blocks is unpacked by its definition (`BlockWeight.unpack`) first. Everything else (embeddings, heads,
routers, gates) is bfloat16; vectors, such as norms, keep their dtype (of a GGUF file: float32).

One tensor is in memory at a time (of gpt-oss one expert's). The target comes into its place whole, by a rename, or not
at all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from twinpool.contracts.checkpoint.gguf.gguf_header import GgufTensor, is_gguf
from twinpool.contracts.checkpoint.model_spec import GENERATION_CONFIG, ModelSpec
from twinpool.contracts.checkpoint.safetensors_headers import (
    FLOATS,
    INDEX,
    SINGLE,
    TensorHeader,
    canonical_name,
    read_json,
    stored_bytes,
)
from twinpool.contracts.checkpoint.tokenizer_files import TOKENIZER, TOKENIZER_CONFIG, read_checkpoint_text
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.engine.tensors.shard import ShardAxis
from twinpool.engine.tensors.weight_loader import Weights, is_product
from twinpool.engine.weight_formats.block_formats import PARTS, quantised_layers
from twinpool.engine.weight_formats.block_weight import dense
from twinpool.engine.weight_formats.block_writers import LAYOUTS

SHARD_BYTES = 5_000_000_000
"""Bytes of a safetensors file, about."""
_WIDTH = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}
"""Bytes of a number of each dtype, by the format's name; of the others one."""
_CPU = torch.device("cpu")
_LEFT_OUT = re.compile(
    r"\.(input_scale|input_zero_point|input_global_scale|input_scale_ub|activation_scale|[kqv]_scale|weight_shape)$"
)
"""Tensors that belong to a source's quantisation alone."""
_NO_COPY = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
_QUANTISATION_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Written:
    """Tensors that are written one behind the other, and made when they are."""

    parts: Mapping[str, tuple[str, tuple[int, ...]]]
    """The dtype, by the format's name, and the shape of each."""
    make: Callable[[], Iterator[Tensor | bytes]]
    """Their content, in order and in pieces of any size."""
    dense_layer: str = ""
    """The layer whose product this leaves dense."""

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(*part) for part in self.parts.values())


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    return _WIDTH.get(dtype, 1) * prod(shape)


class Conversion:
    """The conversion of one checkpoint to one format. `group`: columns that share a scale, where the format leaves it
    open."""

    def __init__(self, spec: ModelSpec, form: str, group: int = 128) -> None:
        """Raises `CheckpointError` for a source whose experts can't be written in that format."""
        self._spec, self._form, self._group = spec, form, group
        self._weights = Weights(spec, torch.float32, _CPU, keep="dense")
        self._layers = quantised_layers(spec.headers)
        self._items = list(self._planned())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that will be written."""
        return sum(item.nbytes for item in self._items)

    def write(self, target: Path, say: Callable[[str], None], shard_bytes: int = SHARD_BYTES) -> None:
        """Write the folder `target`. Raises `ConfigError` as `check_target` does, and where there is too little room
        on its disk."""
        check_target(target)
        free = shutil.disk_usage(target.parent).free
        if free < self.nbytes:
            raise ConfigError(f"{target.parent} has {free:,} bytes free, and the weights take {self.nbytes:,}")
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            self._write_shards(beside, say, shard_bytes)
            self._write_texts(beside)
            mask = os.umask(0)
            os.umask(mask)
            beside.chmod(0o777 & ~mask)
            beside.rename(target)
        except OSError as error:
            raise ConfigError(f"cannot write {target}: {error.strerror or error}") from None
        finally:
            self._weights.close()
            shutil.rmtree(beside, ignore_errors=True)

    # ------------------------------------------------------------ what is written

    def _planned(self) -> Iterator[Written]:
        done: set[str] = set()
        headers = self._spec.headers
        for name in sorted(headers, key=lambda name: (str(headers[name].file), headers[name].begin)):
            layer, _, part = name.rpartition(".")
            fused = name.removesuffix("_blocks").removesuffix("_scales")
            if layer in self._layers and part in PARTS:
                if layer not in done:
                    done.add(layer)
                    yield self._product(layer, self._shape(layer))
            elif fused != name and f"{fused}_blocks" in headers and headers[name].dtype == "U8":
                if fused not in done:
                    done.add(fused)
                    yield self._mxfp4(fused, headers[f"{fused}_blocks"])
            elif not _LEFT_OUT.search(name):
                yield self._tensor(name, headers[name])

    def _tensor(self, name: str, header: TensorHeader) -> Written:
        layer = name.removesuffix(".weight")
        is_float = header.dtype in FLOATS or isinstance(header, GgufTensor)
        if layer != name and len(header.shape) == 2 and is_float:
            return self._product(layer, (header.shape[0], header.shape[1]))
        if self._form != "bfloat16" and len(header.shape) == 3 and ".experts." in name:
            raise self._fused(name)
        if is_float and len(header.shape) > 1 and header.dtype != "BF16":
            return Written({name: ("BF16", header.shape)}, lambda: self._read(name, header.shape, torch.bfloat16))
        if isinstance(header, GgufTensor):
            return Written({name: ("F32", header.shape)}, lambda: self._read(name, header.shape, torch.float32))
        return Written({name: (header.dtype, header.shape)}, lambda: stored_bytes(header))

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
        yield self._weights.tensor(name, *shape, dtype=dtype)

    def _product(self, layer: str, shape: tuple[int, int]) -> Written:
        """The weight of a layer: quantised where it is a product of a layer and the format can hold it."""
        (n, k), form = shape, LAYOUTS.get(self._form)
        if form is None or not is_product(canonical_name(layer)) or not form.fits(n, k, self._group):
            name = f"{layer}.weight"
            header = self._spec.headers.get(name)
            if header is not None and header.dtype == "BF16" and not isinstance(header, GgufTensor):
                return Written({name: ("BF16", shape)}, lambda: stored_bytes(header), layer)
            return Written({name: ("BF16", shape)}, lambda: self._read(name, shape, torch.bfloat16), layer)
        group = form.columns(self._group)
        return Written(
            {f"{layer}.{part}": said for part, said in form.shapes(n, k, group).items()},
            lambda: iter(form.write(self._weights.tensor(f"{layer}.weight", n, k, dtype=torch.float32), group)),
        )

    def _mxfp4(self, name: str, header: TensorHeader) -> Written:
        """Experts of gpt-oss, as transformers has them dense: [experts, columns, rows] in bfloat16."""
        if self._form != "bfloat16":
            raise self._fused(name)
        experts, rows, groups, half = header.shape
        columns = 2 * groups * half

        def make() -> Iterator[Tensor]:
            for number in range(experts):
                weight = self._weights.mxfp4(name, ShardAxis(experts, number, 1), rows, columns)
                yield dense(weight).to(torch.bfloat16).T.contiguous()

        return Written({name: ("BF16", (experts, columns, rows))}, make)

    def _fused(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self._spec.path}: experts that lie in one tensor, as {name}, can be written in bfloat16 alone: give "
            "--weights bfloat16"
        )

    def _shape(self, layer: str) -> tuple[int, int]:
        """[n, k] of a weight in blocks, by the tensors that it is stored as."""
        headers, bits = self._spec.headers, self._spec.quantization.bits
        qweight, packed = headers.get(f"{layer}.qweight"), headers.get(f"{layer}.weight_packed")
        if qweight is not None and self._spec.quantization.method == "awq":
            return qweight.shape[1] * 32 // bits, qweight.shape[0]
        if qweight is not None:
            return qweight.shape[1], qweight.shape[0] * 32 // bits
        if packed is not None and packed.dtype != "U8":
            if f"{layer}.weight_shape" not in headers:
                raise CheckpointError(f"{self._spec.path}: tensor {layer}.weight_shape is missing")
            n, k = struct.unpack("<2q", b"".join(stored_bytes(headers[f"{layer}.weight_shape"])))
            return int(n), int(k)
        header = packed or headers.get(f"{layer}.weight")
        if header is None or len(header.shape) != 2:
            raise CheckpointError(f"{self._spec.path}: tensor {layer}.weight is missing, or no matrix")
        return header.shape[0], header.shape[1] * (2 if header.dtype == "U8" else 1)

    # ------------------------------------------------------------ the folder

    def _write_shards(self, folder: Path, say: Callable[[str], None], shard_bytes: int) -> None:
        shards: list[list[Written]] = [[]]
        for item in self._items:
            if shards[-1] and sum(one.nbytes for one in shards[-1]) + item.nbytes > shard_bytes:
                shards.append([])
            shards[-1].append(item)
        index: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            say(f"writing {name}, {sum(item.nbytes for item in shard) / 1e9:,.1f} GB")
            _write_shard(folder / name, shard)
            index |= {part: name for item in shard for part in item.parts}
        if len(shards) > 1:
            tree = {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(index.items()))}
            (folder / INDEX).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")

    def _write_texts(self, folder: Path) -> None:
        """`config.json`, the tokenizer's files, and whatever else of the source isn't weights."""
        source = self._spec.path
        if is_gguf(source):
            values = dict(self._spec.config.values)
            ends: dict[str, object] = {
                "eos_token_id": list(self._spec.eos_token_ids),
                "bos_token_id": self._spec.bos_token_id,
            }
            _write_json(folder / GENERATION_CONFIG, ends | self._spec.generation_defaults)
            for name in (TOKENIZER, TOKENIZER_CONFIG):
                (folder / name).write_text(read_checkpoint_text(source, name) or "{}", encoding="utf-8")
        else:
            values = read_json(source / "config.json")
            for file in sorted(source.rglob("*")):
                within = file.relative_to(source)
                weights = file.suffix in _NO_COPY or file.name.endswith(".index.json")
                if file.is_file() and not weights and not any(part.startswith(".") for part in within.parts):
                    (folder / within).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, folder / within)
        for tree in (values, *(inner for inner in values.values() if isinstance(inner, dict))):
            for key in _QUANTISATION_KEYS:
                tree.pop(key, None)
            for key in ("dtype", "torch_dtype"):
                if key in tree:
                    tree[key] = "bfloat16"
        values.setdefault("dtype", "bfloat16")
        scheme = self._quantization_config()
        _write_json(folder / "config.json", values | ({"quantization_config": scheme} if scheme else {}))

    def _quantization_config(self) -> dict[str, object]:
        left = sorted(item.dense_layer for item in self._items if item.dense_layer)
        left += ["lm_head"] if "lm_head" not in left else []
        form = LAYOUTS.get(self._form)
        return {} if form is None else form.config(form.columns(self._group), left)


def check_target(target: Path) -> None:
    """Raise `ConfigError` for a folder that is there already, or has no folder to lie in."""
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} is there already: give a folder that isn't")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is no folder: make it first")


def _write_shard(path: Path, shard: Sequence[Written]) -> None:
    """Write one safetensors file: eight bytes with the header's length, the header, the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in (part for item in shard for part in item.parts.items()):
        end = at + _nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for item in shard:
            begin = file.tell()
            for piece in item.make():
                file.write(piece if isinstance(piece, bytes) else piece.contiguous().view(torch.uint8).numpy().data)
            assert file.tell() - begin == item.nbytes, f"{list(item.parts)} are written whole"
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, tree: Mapping[str, object]) -> None:
    path.write_text(json.dumps(tree, indent=2, default=str) + "\n", encoding="utf-8")
