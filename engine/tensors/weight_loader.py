"""The weight loader: a checkpoint's tensors by name, checked against the model's shapes, each rank's part read.

A model is built once from the headers alone (`dry`: tensors on torch's meta device, nothing read) to check that the
checkpoint is complete, and once from the files. Both are the same code, so there is no second list of tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from twinpool.contracts.checkpoint.gguf.gguf_header import GgufTensor
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.safetensors_headers import FLOATS, ROOTS, TensorHeader, same_bytes, spelled_names
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.engine.tensors.gguf_blocks import read_gguf_tensor, read_gguf_weight
from twinpool.engine.tensors.row_exact_linear import (
    AdaptedLayer,
    HeadLinear,
    RowExactLinear,
    StackedLinear,
    adapted_layers,
)
from twinpool.engine.tensors.shard import WHOLE, Shard, ShardAxis, axes_of, stacked_axes
from twinpool.engine.weight_formats.block_formats import PARTS, StoredWeight, quantised_layers, read_blocks
from twinpool.engine.weight_formats.block_weight import (
    BlockWeight,
    Code,
    Inputs,
    Weight,
    dense,
    like_runs,
    quantise,
    select_rows,
    stack_rows,
    with_inputs,
)
from twinpool.engine.weight_formats.gguf_formats import GGUF_TYPES

_MXFP4_GROUP = 32
"""Elements of MXFP4 that share a scale."""
_QUANTISED_BITS = {"int8": 8, "int4": 4}
_QUANTISED_GROUP = 32
"""Columns that share a scale in weights that are quantised when they are loaded."""
_PROJECTION = r"((?<!weights)_proj(_with_mqa|_qkv|_qkvz|_z)?|(^|\.)(dense|c_fc|fc[12]|w[123]))$"
_QUANTISED_NAMES = re.compile(_PROJECTION)
"""The layers that are quantised when they are loaded: those of `is_product` but an indexer's."""
_PRODUCTS = re.compile(rf"model\.layers\.\d+\..*({_PROJECTION}|\.wq_b$|\.wk$)")
_STORED = {
    **{"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn},
    **{"F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64},
}
"""The dtypes of tensors of quantised weights, by the names of safetensors."""
_META = torch.device("meta")
_AS_STORED: Mapping[str, Tensor] = {}
T = TypeVar("T")


def is_product(layer: str) -> bool:
    """Whether a layer, by its canonical name, is a product that quantised checkpoints store quantised.

    Not so: embeddings and heads, routers and gates of a row, and the weights of an indexer's heads, which are small and
    decide much.
    """
    return _PRODUCTS.match(layer) is not None


@dataclass
class LoadFiles:
    """The state that all scopes of one load share."""

    open: dict[Path, Any] = field(default_factory=dict)
    linears: list[RowExactLinear] = field(default_factory=list)
    products: list[tuple[int, int, int]] = field(default_factory=list)
    adapted: dict[str, AdaptedLayer] = field(default_factory=dict)
    nbytes: int = 0
    mixtures: list[Any] = field(default_factory=list)
    triton: bool = False
    gpu: bool = False
    """Whether weights are for a GPU, though it may be the meta device that they are built on."""
    keep: str = "as_stored"
    inputs: Inputs = "float"
    quantised: Collection[str] = ()
    """The layers of which a weight is stored in blocks, by their full names."""
    roots: dict[str, str] = field(default_factory=dict)
    """How this checkpoint spells the roots of names that it lacks."""
    shared: dict[str, Any] = field(default_factory=dict)
    descriptors: dict[Path, int] = field(default_factory=dict)
    """Of open GGUF files."""

    def descriptor(self, path: Path) -> int:
        if path not in self.descriptors:
            try:
                self.descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
        return self.descriptors[path]

    def close(self) -> None:
        for file in self.open.values():
            file.__exit__(None, None, None)
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.open.clear()
        self.descriptors.clear()


class Weights:
    """The tensors of one checkpoint, as one rank holds them, below a prefix of names (`scope`).

    Methods raise `CheckpointError` for a tensor that is missing, has another shape or dtype, or can't be read.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
        *,
        triton: bool = False,
        keep: str = "as_stored",
        inputs: Inputs = "float",
        prefix: str = "",
        files: LoadFiles | None = None,
    ) -> None:
        """`triton`: layers compute with Triton's kernels where they have any. `keep`: `engine.weights`. `inputs`: how
        rows are multiplied with weights of whole numbers."""
        self.spec, self.dtype, self.device, self.shard = spec, dtype, device, shard
        self._prefix = prefix
        gpu = device.type not in ("cpu", "meta")
        self._files = files or LoadFiles(
            triton=triton, gpu=gpu, keep=keep, inputs=inputs, quantised=quantised_layers(spec.headers)
        )

    @classmethod
    def dry(
        cls,
        spec: ModelSpec,
        dtype: torch.dtype = torch.float32,
        shard: Shard = WHOLE,
        keep: str = "as_stored",
        *,
        inputs: Inputs = "float",
        gpu: bool = False,
    ) -> Weights:
        """Weights on the meta device: shapes are checked, nothing is read. Bytes are counted as a CPU, or a `gpu`,
        would hold them."""
        weights = cls(spec, dtype, _META, shard, keep=keep, inputs=inputs)
        weights._files.gpu = gpu
        return weights

    def scope(self, prefix: str) -> Weights:
        """The tensors whose names begin with `prefix`, e.g. ``model.layers.3.``, below this scope."""
        return Weights(self.spec, self.dtype, self.device, self.shard, prefix=self._prefix + prefix, files=self._files)

    def unshared(self) -> Weights:
        """The same, of a worker that shares no experts with others."""
        shard = replace(self.shard, dp=1, dp_rank=0)
        return Weights(self.spec, self.dtype, self.device, shard, prefix=self._prefix, files=self._files)

    def experts(self, count: int) -> range:
        """The experts of a mixture of `count` that this rank holds (`Shard.experts`)."""
        return self.shard.experts(count)

    @property
    def mixtures(self) -> list[Any]:
        """Every mixture of experts (`engine.layers.mlp`) made so far in this load, in the order of the layers."""
        return self._files.mixtures

    def of(self, spec: ModelSpec) -> Weights:
        """The tensors of another checkpoint, in the same load."""
        return Weights(spec, self.dtype, self.device, self.shard, files=self._files)

    @property
    def triton(self) -> bool:
        """Whether layers are to compute with Triton's kernels where they have any."""
        return self._files.triton

    @property
    def linears(self) -> list[RowExactLinear]:
        """Every product with a weight made so far in this load, for `engine.tensors.row_exact_linear.probe`."""
        return self._files.linears

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """(batch, k, n) of batched float32 products of activations, for `probe` as well; layers append theirs."""
        return self._files.products

    @property
    def adapted(self) -> dict[str, AdaptedLayer]:
        """The layers made so far that adapters may add to, by name."""
        return self._files.adapted

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors taken so far, as they are kept."""
        return self._files.nbytes

    def weight(self, name: str, rows: int | ShardAxis, columns: int | ShardAxis) -> Weight:
        """Read the weight ``name.weight`` of a product, [rows, columns]: dense, or in blocks where it is stored so.

        A rank's columns that `BlockWeight.part` can't give in blocks are expanded to a dense weight.
        """
        return self.ranges(name, [rows], columns)[0]

    def ranges(self, name: str, rows: Sequence[int | ShardAxis], columns: int | ShardAxis) -> list[Weight]:
        """Read several ranges of the rows of a weight, each as `weight` does; the stored weight is read once."""
        axes = [axes_of((each, columns)) for each in rows]
        if self._files.keep != "dense":
            of_gguf = [part for each in axes if (part := self._gguf_blocks(f"{name}.weight", each)) is not None]
            if of_gguf:
                return [self.counted(part) for part in of_gguf]
        found = self._stored_blocks(name, axes[0])
        if found is not None:
            return [self.counted(self._part(found, each)) for each in axes]
        weights = [self.tensor(f"{name}.weight", each, columns) for each in rows]
        return [self.kept(weight, columns) for weight in weights] if _QUANTISED_NAMES.search(name) else [*weights]

    def stacked(self, weights: Sequence[Weight]) -> Weight:
        """One weight of the rows of several that were read before (`stack_rows`)."""
        stacked = stack_rows(weights)
        self._files.nbytes += stacked.nbytes - sum(weight.nbytes for weight in weights)
        return stacked

    def kept(self, weight_nk: Tensor, columns: int | ShardAxis = 0) -> Weight:
        """A dense weight of a product, just read, as `engine.weights` has it kept: quantised for int8 and int4.

        Raises `ConfigError` where a rank's `columns` cut through a group: ranks would have other numbers than one.
        """
        bits = _QUANTISED_BITS.get(self._files.keep)
        if bits is None or weight_nk.shape[1] % 2:
            return weight_nk
        if isinstance(columns, ShardAxis) and columns.divided and columns.count % _QUANTISED_GROUP:
            raise ConfigError(
                f"engine.weights={self._files.keep} gives {_QUANTISED_GROUP} columns a scale, and tp={self.shard.size} "
                f"divides {columns.whole} columns into {columns.count}: set engine.weights=as_stored, fewer ranks, or "
                f"quantise it once (twinpool convert {self.spec.path} TARGET --weights {self._files.keep})"
            )
        quantised = quantise(weight_nk, bits, _QUANTISED_GROUP)
        self._files.nbytes += quantised.nbytes - weight_nk.nbytes
        return quantised

    def counted(self, weight: Weight) -> Weight:
        self._files.nbytes += weight.nbytes
        return weight

    def _part(self, whole: BlockWeight, axes: list[ShardAxis]) -> Weight:
        """A rank's part of a whole weight, with memory of its own on this device."""
        rows, columns = (axis.here for axis in axes)
        part = whole.part(rows, columns) if self._files.keep != "dense" else None
        return part.to(self.device) if part is not None else self._expanded(whole, axes, self.dtype)

    def _expanded(self, whole: BlockWeight, axes: list[ShardAxis], dtype: torch.dtype) -> Tensor:
        return whole.expand(axes[0].here, axes[1].here, dtype).to(self.device)

    def _stored_blocks(self, name: str, axes: list[ShardAxis]) -> BlockWeight | None:
        """The whole weight of a layer in blocks; None where it is dense, or missing."""
        layer = next((full for full in self._spelled(name) if full in self._files.quantised), None)
        if layer is None:
            return None
        names = {part: f"{layer}.{part}" for part in PARTS}
        headers = {part: self.spec.headers[full] for part, full in names.items() if full in self.spec.headers}

        def take(part: str) -> Tensor:
            header = headers.get(part)
            if header is None:
                raise CheckpointError(f"tensor {names[part]} is missing")
            if header.dtype not in _STORED:
                raise CheckpointError(f"tensor {names[part]} has dtype {header.dtype}; known are {', '.join(_STORED)}")
            if self.device == _META:
                return torch.empty(header.shape, dtype=_STORED[header.dtype], device=_META)
            return self._read(header.file, names[part], axes_of(header.shape))

        n, k = (axis.whole for axis in axes)
        dtypes = {part: header.dtype for part, header in headers.items()}
        stored = StoredWeight(layer, (n, k), dtypes, take, self.spec.quantization, self.dtype)
        try:
            return read_blocks(stored)
        except CheckpointError as error:
            raise CheckpointError(f"{self.spec.path}: {error}") from None

    def _gguf_blocks(self, name: str, axes: list[ShardAxis]) -> BlockWeight | None:
        """A rank's part of a GGUF file's tensor in blocks; None where it is dense, missing, or cut within a group."""
        header = self.spec.headers.get(self._found(name))
        if not isinstance(header, GgufTensor) or header.dtype not in GGUF_TYPES:
            return None
        self._check_shape(name, header, axes)
        file = -1 if self.device == _META else self._files.descriptor(header.file)
        try:
            return read_gguf_weight(file, header, axes[0], axes[1], self.dtype, self.device)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {self._found(name)}: {error}") from None

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name, or the weight ``layer.weight`` in blocks."""
        names = [name]
        if name.endswith(".weight"):
            names += [name.removesuffix("weight") + part for part in ("qweight", "weight_packed")]
        return any(self._found(each) in self.spec.headers for each in names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as it is stored; empty where there is none of that name."""
        header = self.spec.headers.get(self._found(name))
        return tuple(header.shape) if header is not None else ()

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors that are stored have the same shape, dtype and bytes: a copy, then."""
        one, two = (self.spec.headers.get(self._found(each)) for each in (name, other))
        if one is None or two is None:
            return False
        return (one.dtype, one.shape) == (two.dtype, two.shape) and same_bytes(one, two)

    def tensor(self, name: str, *shape: int | ShardAxis, dtype: torch.dtype | None = None) -> Tensor:
        """Read the tensor of that name, whose whole shape must be `shape`; of a divided axis, this rank's range.

        It is converted to `dtype`, by default the dtype to compute in. A weight that is stored in blocks is expanded.
        """
        if len(shape) == 2 and name.endswith(".weight"):
            axes = axes_of(shape)
            found = self._stored_blocks(name.removesuffix(".weight"), axes)
            if found is not None:
                return dense(self.counted(self._expanded(found, axes, dtype or self.dtype)))
        taken = self._take(name, axes_of(shape), dtype or self.dtype, ("I64",) if dtype is torch.int64 else FLOATS)
        self._files.nbytes += taken.nbytes
        return taken

    def mxfp4(self, name: str, expert: ShardAxis, rows: int | ShardAxis, columns: int | ShardAxis) -> Weight:
        """`weight` for one of an expert, stored with those of all as ``name_blocks`` [experts, n, groups, 16] and
        ``name_scales`` [experts, n, groups], both uint8.

        MXFP4 is four-bit floats with a scale a group, as gpt-oss is published (Open Compute Project, "Microscaling
        Formats (MX) Specification", version 1.0): 32 elements of one sign, two exponent and one mantissa bit share a
        scale that is a power of two, stored as its exponent plus 127. Two elements lie in a byte, the first in the low
        half.
        """
        row, column = axes_of((rows, columns))
        first, last = column.first // _MXFP4_GROUP, -(-(column.first + column.count) // _MXFP4_GROUP)
        groups = ShardAxis(-(-column.whole // _MXFP4_GROUP), first, last - first)
        blocks = self._take(
            f"{name}_blocks", [expert, row, groups, *axes_of((_MXFP4_GROUP // 2,))], torch.uint8, ("U8",)
        )
        scales = self._take(f"{name}_scales", [expert, row, groups], torch.uint8, ("U8",))
        found = BlockWeight(Code.E2M1, blocks[0].flatten(1), scales[0], _MXFP4_GROUP, self.dtype)
        found.check(f"{self.spec.path}: {self._found(name)}")
        begin = column.first - first * _MXFP4_GROUP
        here = ShardAxis(groups.count * _MXFP4_GROUP, begin, column.count)
        return self.counted(self._part(found, [ShardAxis(row.count, 0, row.count), here]))

    def _take(self, name: str, axes: list[ShardAxis], dtype: torch.dtype, stored: Collection[str]) -> Tensor:
        full = self._found(name)
        header = self.spec.headers.get(full)
        if header is None:
            raise CheckpointError(f"{self.spec.path}: tensor {full} is missing")
        self._check_shape(name, header, axes)
        if header.dtype not in stored and not (stored is FLOATS and isinstance(header, GgufTensor)):
            raise CheckpointError(
                f"{self.spec.path}: tensor {full} has dtype {header.dtype}; supported are {', '.join(stored)}"
            )
        if self.device == _META:
            return torch.empty([axis.count for axis in axes], dtype=dtype, device=_META)
        if isinstance(header, GgufTensor):
            return read_gguf_tensor(self._files.descriptor(header.file), header, axes, dtype).to(self.device)
        return self._read(header.file, full, axes).to(self.device, dtype, copy=True)

    def _check_shape(self, name: str, header: TensorHeader, axes: list[ShardAxis]) -> None:
        wanted = [axis.whole for axis in axes]
        if list(header.shape) != wanted:
            raise CheckpointError(
                f"{self.spec.path}: tensor {self._found(name)} has shape {list(header.shape)}, but "
                f"{self.spec.config.path.name} asks for {wanted}"
            )

    def linear(
        self,
        rows: Mapping[str, int | ShardAxis],
        columns: int | ShardAxis,
        *,
        bias: bool = False,
        suffix: str = ".weight",
        fused: str = "",
        orders: Mapping[str, Tensor] = _AS_STORED,
        adapts: bool = False,
    ) -> RowExactLinear:
        """Make one product of weights [rows, columns] that read the same input, stacked by rows in the order given.

        `rows` are the rows of each weight by name; with `bias`, each weight has one. `fused`: the name of one weight
        that has the rows of all of them, one below the other. `orders`: the order in which to take a rank's rows of
        some of them. `adapts`: it is computed by `ForwardContext.linear`, so that adapters may add to it. Where the
        columns are divided, each rank's product is a part of the sum
        (`RowExactLinear.partial`). Raises `ConfigError` where ranks would share columns, since their parts would be
        added twice.
        """
        weights: Sequence[Weight]
        axes = stacked_axes(tuple(rows.values())) if fused else tuple(rows.values())
        if fused:
            weights = self.ranges(fused, axes, columns)
        elif suffix == ".weight":
            weights = [self.weight(name, axis, columns) for name, axis in rows.items()]
        else:
            weights = [self.tensor(name + suffix, axis, columns) for name, axis in rows.items()]
        names = [fused or name for name in rows]
        biases = [self.tensor(f"{name}.bias", axis) for name, axis in zip(names, axes, strict=True)] if bias else []
        for at, name in enumerate(rows):
            if (order := orders.get(name)) is not None:
                weights = [*weights[:at], select_rows(weights[at], order), *weights[at + 1 :]]
                biases[at : at + 1] = [one[order.to(one.device)] for one in biases[at : at + 1]]
        partial = isinstance(columns, ShardAxis) and columns.divided
        if isinstance(columns, ShardAxis) and partial and columns.count * self.shard.size != columns.whole:
            raise ConfigError(
                f"tp={self.shard.size} is more than {self._prefix}{next(iter(rows))} can be divided into: its parts "
                "would be added more than once"
            )
        if partial and self.shard.rank:
            biases = []  # Added once, by the first rank.
        made = self.made(*weights, bias_n=torch.cat(biases) if biases else None, partial=partial)
        if adapts:
            full, places = [self._prefix + name for name in names], axes_of((*axes, columns))
            made.layers = adapted_layers(full, places, [orders.get(name) for name in rows])
            self._files.adapted |= {layer.name: layer for layer in made.layers}
        return made

    def made(self, *weights: Weight, bias_n: Tensor | None = None, partial: bool = False) -> RowExactLinear:
        """Make a product with the rows of weights that were read before, one below the other; `bias_n` is that of all.

        Where some are dense and some in blocks, each run of like ones is a product of its own (`StackedLinear`).
        """
        parts: list[RowExactLinear] = []
        first = 0
        for weight in (with_inputs(self.stacked(run), self._files.inputs) for run in like_runs(weights)):
            bias = None if bias_n is None else bias_n[first : first + weight.shape[0]]
            parts.append(RowExactLinear(weight, bias, partial=partial))
            first += weight.shape[0]
        self._files.linears += parts
        return parts[0] if len(parts) == 1 else StackedLinear(parts)

    def tied_head(self, table: Weight) -> RowExactLinear:
        """Make the head of a model whose weight is its embedding `table` [vocab, hidden].

        CPUs pack a dense one for products, and look up rows of the plain one: both are in memory, and counted.
        """
        if isinstance(table, Tensor) and not self._files.gpu:
            self._files.nbytes += table.nbytes
        return self.made(table)

    def by_head(self, weight_hkn: Tensor) -> HeadLinear:
        """Make a product with one matrix [k, n] a head, of a weight that was read before."""
        linear = HeadLinear(weight_hkn)
        self._files.linears.append(linear)
        return linear

    def once(self, key: str, make: Callable[[], T]) -> T:
        """Return the object under `key` that all layers of this load share; the first call makes it."""
        if key not in self._files.shared:
            self._files.shared[key] = make()
        found: T = self._files.shared[key]
        return found

    def _spelled(self, name: str) -> list[str]:
        """The full name of a tensor or layer, in each spelling that a checkpoint may have."""
        return spelled_names(self._prefix + name)

    def _found(self, name: str) -> str:
        """The full name of a tensor, as this checkpoint spells it."""
        spelled = self._spelled(name)
        known = next((found for found in spelled if found in self.spec.headers), None)
        return known or self._missing(spelled)

    def _missing(self, spelled: list[str]) -> str:
        """The name of a tensor that isn't there, in the spelling that this checkpoint has for others."""
        full = spelled[-1]
        root = next((root for root in ROOTS if full.startswith(root)), "")
        if root and root not in self._files.roots:
            spellings = ROOTS[root]
            there = (s for s in spellings if any(name.startswith(s) for name in self.spec.headers))
            self._files.roots[root] = next(there, root)
        return self._files.roots[root] + full.removeprefix(root) if root else full

    def _read(self, path: Path, name: str, axes: list[ShardAxis]) -> Tensor:
        try:
            if path not in self._files.open:
                self._files.open[path] = safe_open(path, framework="pt").__enter__()  # type: ignore[no-untyped-call]
            file = self._files.open[path]
            if not any(axis.divided for axis in axes):
                return file.get_tensor(name)  # type: ignore[no-any-return]
            return file.get_slice(name)[tuple(axis.here for axis in axes)]  # type: ignore[no-any-return]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}: {' '.join(str(error).split())}") from None

    def close(self) -> None:
        """Close the files. Tensors read before stay valid."""
        self._files.close()
