"""Adapters (LoRA) in a step: what the factors of a row's adapter add to the products that the row goes through.

The model's product is computed as always, for all rows together. Then up·down·x is added to rows that have an adapter,
element by element in one order that no neighbour changes: on a CPU in one call of a C++ kernel for all layers of the
product, grouped by adapter; elsewhere by products that keep rows exact, adapter by adapter. A row without one keeps its
bits.

A worker holds at most `adapters.max_loaded` of them (`AdapterStore`). One that requests need stays whole until the last
of them has ended; a step keeps what it computes with, whatever is dropped meanwhile.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from twinpool.cache.device.device_copies import to_device
from twinpool.contracts.checkpoint.adapter_files import (
    TENSORS,
    AdapterFiles,
    allowed_folder,
    read_adapter_files,
)
from twinpool.contracts.checkpoint.safetensors_headers import canonical_name
from twinpool.contracts.config.worker_config import AdaptersConfig
from twinpool.contracts.errors import CheckpointError
from twinpool.contracts.sampling_params import AdapterRef
from twinpool.engine.native.current_kernels import LayerKernels, native_for
from twinpool.engine.native.native_kernels import (
    LOW_RANK_COLUMNS,
    LOW_RANK_OUTPUTS,
    LOW_RANK_RANKS,
    LowRank,
    NativeKernels,
    huge_pages,
)
from twinpool.engine.tensors.row_exact_linear import TILE_ROWS, AdaptedLayer, Numerics, RowExactLinear

_GROUP_ROWS = 32
"""Rows of one adapter that a thread computes at a time, at most."""


@dataclass(frozen=True, slots=True)
class LayerFactors:
    """One layer's factors, as one rank has them, in the dtype and on the device of the model: down [rank, k] and up
    [rank, n], with the scale; for the C++ kernel both as low_rank.h has them."""

    rank: int
    down: Tensor
    up: Tensor


class AdapterWeights:
    """A loaded adapter."""

    def __init__(self, layers: Mapping[str, LayerFactors]) -> None:
        self.layers = layers
        self.nbytes = sum(one.down.nbytes + one.up.nbytes for one in layers.values())
        self._products: dict[str, tuple[RowExactLinear, RowExactLinear]] = {}

    def products(self, layer: str) -> tuple[RowExactLinear, RowExactLinear]:
        """The layer's two products where no kernel computes both: down, then up."""
        if layer not in self._products:
            factors = self.layers[layer]
            self._products[layer] = RowExactLinear(factors.down), RowExactLinear(factors.up.T.contiguous())
        return self._products[layer]

    def packed(self) -> AdapterWeights:
        """The same as the C++ kernel reads it, in one mapping of huge pages."""
        parts = {name: (_packed_down(one.down), _packed_up(one.up)) for name, one in self.layers.items()}
        mapping, at = huge_pages(sum(part.nbytes for both in parts.values() for part in both))
        layers: dict[str, LayerFactors] = {}
        for name, both in parts.items():
            placed = []
            for part in both:
                placed.append(torch.frombuffer(mapping, dtype=part.dtype, count=part.numel(), offset=at).copy_(part))
                at += part.nbytes
            layers[name] = LayerFactors(self.layers[name].rank, *placed)
        return AdapterWeights(layers)


def padded_numbers(layer: AdaptedLayer, rank: int) -> int:
    """How many numbers a layer's factors of that rank have at most: with the zeros that the C++ kernel pads them by."""
    down, up = layer.columns.whole, layer.rows[0].whole
    ranks = rank + -rank % LOW_RANK_RANKS
    return ranks * (down + -down % LOW_RANK_COLUMNS) + rank * (up + -up % LOW_RANK_OUTPUTS)


def _packed_down(down_rk: Tensor) -> Tensor:
    """[rank, k] as low_rank.h reads it, flat."""
    rank, k = down_rk.shape
    padded = F.pad(down_rk, (0, -k % LOW_RANK_COLUMNS, 0, -rank % LOW_RANK_RANKS))
    parts = padded.view(-1, LOW_RANK_RANKS, padded.shape[1] // LOW_RANK_COLUMNS, LOW_RANK_COLUMNS)
    return _in_words(parts.transpose(1, 2).flatten())


def _packed_up(up_rn: Tensor) -> Tensor:
    """[rank, n] as low_rank.h reads it, flat."""
    padded = F.pad(up_rn, (0, -up_rn.shape[1] % LOW_RANK_OUTPUTS))
    return _in_words(padded.view(len(up_rn), -1, LOW_RANK_OUTPUTS).transpose(0, 1).flatten())


def _in_words(packed: Tensor) -> Tensor:
    """Of values of two bytes each sixteen and the sixteen behind them in turns."""
    if packed.dtype.itemsize != 2:
        return packed
    return packed.view(-1, 2, LOW_RANK_COLUMNS // 2).transpose(1, 2).flatten()


def load_adapter(
    files: AdapterFiles, adapted: Mapping[str, AdaptedLayer], dtype: torch.dtype, device: torch.device
) -> AdapterWeights:
    """Load an adapter for a model whose layers are `adapted`. Raises `CheckpointError` naming the tensor that doesn't
    fit, and for files that have changed since they were checked."""
    found: dict[str, tuple[str, AdaptedLayer]] = {}
    for name, factors in files.factors.items():
        layer = adapted.get(canonical_name(name))
        if layer is None:
            raise CheckpointError(f"{files.path}: {name} is no layer of this model that an adapter may add to")
        if layer.name in found:
            raise CheckpointError(f"{files.path}: {name} is there twice, as {found[layer.name][0]} as well")
        # Runs of rows are ranges of one weight that is as high as each says.
        wanted = layer.rows[0].whole, layer.columns.whole
        if (made := (factors.up.shape[0], factors.down.shape[1])) != wanted:
            raise CheckpointError(
                f"{files.path}: the factors of {name} make a weight {[*made]}; the model's is {[*wanted]}"
            )
        found[layer.name] = name, layer
    try:
        raw = (files.path / TENSORS).read_bytes()
        if hashlib.sha256(raw).digest() != files.tensors_digest:
            raise CheckpointError(f"{files.path / TENSORS} has changed while it was read")
        tensors = load(raw)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {files.path / TENSORS}: {' '.join(str(error).split())}") from None
    layers: dict[str, LayerFactors] = {}
    for name, layer in found.values():
        factors = files.factors[name]
        down, up = (tensors.get(f"base_model.model.{name}.lora_{kind}.weight") for kind in "AB")
        shapes = (factors.down.shape, factors.up.shape)
        if down is None or up is None or (tuple(down.shape), tuple(up.shape)) != shapes:
            raise CheckpointError(f"{files.path / TENSORS} has changed while it was read")
        part = layers[layer.name] = _part(layer, factors.scale, down, up, dtype, device)
        if not all(one.isfinite().all() for one in (down, up, part.down, part.up)):
            raise CheckpointError(
                f"{files.path}: the factors of {name} aren't all finite numbers in {dtype}, times {factors.scale:g}"
            )
    return AdapterWeights(layers)


def _part(
    layer: AdaptedLayer, scale: float, down: Tensor, up: Tensor, dtype: torch.dtype, device: torch.device
) -> LayerFactors:
    """What one rank has of a layer's factors."""
    runs = []
    for axis, order in zip(layer.rows, layer.orders, strict=True):
        run = up[axis.here].float()
        runs.append(run if order is None else run[order.to(run.device)])
    up_rn = (torch.cat(runs) * scale).to(dtype).T.contiguous()
    down_rk = down[:, layer.columns.here].to(dtype).contiguous()
    return LayerFactors(len(down_rk), down_rk.to(device), up_rn.to(device))


@dataclass(frozen=True, slots=True)
class _Table:
    """The factors of all adapters of a set for one product, as the kernel takes them."""

    entries: ctypes.Array[LowRank]
    layers: int
    panels: int
    """Of all layers' outputs."""
    width: int
    """Of all layers' down products; 0: no adapter of the set has any of the layers."""


class AdapterSet:
    """Some loaded adapters, by number. It keeps them in memory for as long as a step has it."""

    def __init__(self, adapters: Sequence[AdapterWeights] = ()) -> None:
        self.adapters = tuple(adapters)
        self._numbers = {id(one): number for number, one in enumerate(self.adapters)}
        self._tables: dict[int, _Table] = {}
        """By the id of the product, which lives as long as the model."""

    def number(self, adapter: AdapterWeights | None) -> int:
        return -1 if adapter is None else self._numbers[id(adapter)]

    def holding(self, wanted: Sequence[AdapterWeights]) -> AdapterSet:
        """This set, or a larger one that has all of `wanted` as well."""
        lacking = [one for one in dict.fromkeys(wanted) if id(one) not in self._numbers]
        return AdapterSet((*self.adapters, *lacking)) if lacking else self

    def table(self, linear: RowExactLinear) -> _Table:
        if (found := self._tables.get(id(linear))) is not None:
            return found
        layers, width = linear.layers, 0
        entries = (LowRank * (len(self.adapters) * len(layers)))()
        for number, adapter in enumerate(self.adapters):
            at = 0
            for place, layer in enumerate(layers):
                factors, column = adapter.layers.get(layer.name), layer.column
                down, up, rank = (
                    (None, None, 0)
                    if factors is None
                    else (factors.down.data_ptr(), factors.up.data_ptr(), factors.rank)
                )
                entries[number * len(layers) + place] = LowRank(down, up, rank, layer.outputs, column, at)
                at += -(-rank // LOW_RANK_RANKS) * LOW_RANK_RANKS
            width = max(width, at)
        panels = sum(-(-layer.outputs // LOW_RANK_OUTPUTS) for layer in layers)
        made = self._tables[id(linear)] = _Table(entries, len(layers), panels, width)
        return made


class AdapterReader(Protocol):
    """Reads adapters, apart from the worker that asks for them."""

    def read(self, ref: AdapterRef) -> Future[AdapterWeights]:
        """Begin to read an adapter; the worker is woken when it is there. The future raises `CheckpointError` where its
        folder isn't allowed, can't be read, isn't of this model, or has another digest than the one that is wanted."""

    def close(self) -> None:
        """Wait for what is being read."""


class AdapterFolders:
    """Implements `AdapterReader` by folders as PEFT writes them, on a thread of its own."""

    def __init__(
        self,
        config: AdaptersConfig,
        adapted: Mapping[str, AdaptedLayer],
        dtype: torch.dtype,
        device: torch.device,
        kernels: LayerKernels | None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`kernels`: what the model is computed with; None: torch's operations."""
        self._config, self._adapted, self._dtype, self._device, self._wake = config, adapted, dtype, device, wake
        self._packs = isinstance(kernels, NativeKernels) and dtype in kernels.dtypes
        self._thread: ThreadPoolExecutor | None = None

    def read(self, ref: AdapterRef) -> Future[AdapterWeights]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        load = self._thread.submit(self._load, ref)
        load.add_done_callback(lambda _: self._wake())
        return load

    def _load(self, ref: AdapterRef) -> AdapterWeights:
        folder = allowed_folder(ref.path, self._config.allowed)
        files = read_adapter_files(folder, self._config.max_rank)
        if files.digest != ref.digest:
            raise CheckpointError(f"the files in {ref.path} are others than when it was loaded: load it again")
        try:
            loaded = load_adapter(files, self._adapted, self._dtype, self._device)
            return loaded.packed() if self._packs else loaded
        except (RuntimeError, MemoryError, OSError) as error:  # No memory: that request's end, not the worker's.
            raise CheckpointError(f"cannot load {ref.path}: {' '.join(str(error).split())}") from error

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


class AdapterStore:
    """The adapters that one worker has in memory. Single-threaded."""

    def __init__(self, max_loaded: int, reader: AdapterReader) -> None:
        """`max_loaded`: those in memory and those that are being read, together."""
        self._max_loaded, self._reader = max_loaded, reader
        self.loaded: dict[str, AdapterWeights] = {}
        """By digest; the one that was wanted least recently comes first."""
        self.needed: Callable[[], Collection[str]] = lambda: ()
        """Returns the digests of those that mustn't be dropped."""
        self._loads: dict[str, Future[AdapterWeights]] = {}
        self._set = AdapterSet()
        self._counts = dict.fromkeys(("adapter_loads", "adapter_evictions"), 0.0)

    @property
    def counters(self) -> dict[str, float]:
        nbytes = sum(one.nbytes for one in self.loaded.values())
        return {**self._counts, "adapters_loaded": len(self.loaded), "adapter_bytes": nbytes}

    def wants(self, ref: AdapterRef) -> bool:
        """Whether an adapter is in memory; else it comes, or waits for room. It may be dropped again unless it is among
        `needed` before the next call. Raises what reading it did."""
        if ref.digest in self.loaded:
            self.loaded[ref.digest] = self.loaded.pop(ref.digest)
            return True
        load = self._loads.get(ref.digest)
        if load is None:
            if self._make_room():
                self._loads[ref.digest] = self._reader.read(ref)
            return False
        if not load.done():
            return False
        del self._loads[ref.digest]
        self._take_in(ref.digest, load.result())
        return True

    def _make_room(self) -> bool:
        """Have room for one more, dropping the least recently wanted one that nobody needs."""
        if self._has_room:
            return True
        for digest in [digest for digest, read in self._loads.items() if read.done()]:
            read = self._loads.pop(digest)  # Whoever wanted it may have gone.
            if read.exception() is None:
                self._take_in(digest, read.result())
        if self._has_room:
            return True
        needed = self.needed()
        idle = next((digest for digest in self.loaded if digest not in needed), None)
        if idle is None:
            return False
        del self.loaded[idle]
        self._set = AdapterSet()  # It keeps those in memory that are in it.
        self._counts["adapter_evictions"] += 1
        return True

    @property
    def _has_room(self) -> bool:
        return len(self.loaded) + len(self._loads) < self._max_loaded

    def _take_in(self, digest: str, adapter: AdapterWeights) -> None:
        self.loaded[digest] = adapter
        self._counts["adapter_loads"] += 1

    def held(self, wanted: Sequence[AdapterWeights]) -> AdapterSet:
        """A set that has all of `wanted`; the same one as long as it has them, as its tables take time to make."""
        self._set = self._set.holding(wanted)
        return self._set

    def close(self) -> None:
        """Wait for a load that is under way."""
        self._reader.close()


class StepAdapters:
    """The adapters of one step's rows."""

    def __init__(self, adapters: AdapterSet, numbers: Sequence[int], counts: np.ndarray, padded: int) -> None:
        """`numbers`: for each sequence, which adapter of the set its rows have, -1 for none; `counts`: its rows;
        `padded`: rows of the step with padding."""
        self.adapters = adapters
        numbers_t = np.repeat(np.array(numbers, dtype=np.int32), counts)
        self._numbers = np.concatenate((numbers_t, np.full(padded - len(numbers_t), -1, dtype=np.int32)))
        self._rows: dict[int, Tensor] = {}
        order = np.argsort(self._numbers, kind="stable").astype(np.int32)
        self._order = order[np.count_nonzero(self._numbers < 0) :]
        """The rows with an adapter, those of one behind each other."""
        groups: list[tuple[int, int, int]] = []
        for number, rows in zip(*np.unique(self._numbers[self._order], return_counts=True), strict=True):
            begin = sum(group[2] for group in groups)
            groups += [(number, begin + at, min(_GROUP_ROWS, rows - at)) for at in range(0, rows, _GROUP_ROWS)]
        self._groups = np.array(groups, dtype=np.int32)
        """[groups, 3]: an adapter, the first of its rows in the order, and how many."""
        self._scratch = torch.empty(0)

    def add(self, out_mn: Tensor, x_mk: Tensor, linear: RowExactLinear, numerics: Numerics) -> None:
        """Add to `out_mn`, a product of `x_mk` with `linear`, what each row's adapter makes of the row."""
        native = native_for(out_mn)
        if native is not None:
            table = self.adapters.table(linear)
            if table.width:
                self._add_all(native, table, out_mn, x_mk)
            return
        for number in np.unique(self._numbers).tolist():
            if number >= 0:
                self._add_one(
                    self.adapters.adapters[number], self._rows_of(number, out_mn.device), out_mn, x_mk, linear, numerics
                )

    def _add_all(self, native: NativeKernels, table: _Table, out_mn: Tensor, x_mk: Tensor) -> None:
        """Both products of all rows, in one call."""
        x_mk = x_mk if x_mk.stride(1) == 1 else x_mk.contiguous()
        if self._scratch.numel() < (needed := len(self._order) * table.width):
            self._scratch = torch.empty(needed)
        native.functions["add_low_rank", out_mn.dtype](
            table.entries, table.layers, table.panels, self._order.ctypes.data, self._groups.ctypes.data,
            len(self._groups), x_mk.data_ptr(), x_mk.stride(0), x_mk.shape[1], out_mn.data_ptr(), out_mn.stride(0),
            self._scratch.data_ptr(), table.width,
        )  # fmt: skip

    def _rows_of(self, number: int, device: torch.device) -> Tensor:
        """The rows with this adapter, [g] int64; made once a step."""
        if number not in self._rows:
            self._rows[number] = to_device(np.flatnonzero(self._numbers == number).tolist(), device)
        return self._rows[number]

    @staticmethod
    def _add_one(
        adapter: AdapterWeights,
        rows_g: Tensor,
        out_mn: Tensor,
        x_mk: Tensor,
        linear: RowExactLinear,
        numerics: Numerics,
    ) -> None:
        for layer in linear.layers:
            if layer.name not in adapter.layers:
                continue
            x_gk = x_mk.index_select(0, rows_g)
            for product in adapter.products(layer.name):
                x_gk = _row_exact(product, x_gk, numerics)
            out_mn.narrow(1, layer.column, layer.outputs).index_add_(0, rows_g, x_gk)


def _row_exact(product: RowExactLinear, x_gk: Tensor, numerics: Numerics) -> Tensor:
    """The product of rows whose bits don't depend on how many there are."""
    if product.row_exact or not numerics.invariant:
        return product(x_gk)
    # No probe has tried these shapes: tiles of one size are computed alike, however many there are.
    rows = len(x_gk)
    x_gk = torch.cat((x_gk, x_gk.new_zeros(-rows % TILE_ROWS, x_gk.shape[1])))
    return torch.cat([product(tile) for tile in torch.split(x_gk, TILE_ROWS)])[:rows]
