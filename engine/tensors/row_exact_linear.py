"""Row-exact matrix products: a row's bits don't depend on how many rows are computed with it.

A GEMM library chooses kernels by the number of rows: the last one to three rows of a batch, or a batch of one, may
take another path with another order of additions. So batches are padded to a multiple of a *quantum*. Which quantum
makes rows bitwise equal is a property of the library and the processor, so it is found when the model is loaded: the
model's own weights and shapes are multiplied with random rows in many batch sizes, and compared bitwise with
products of one fixed tile. The smallest quantum that passes is used. Where none does, every product is computed in
tiles of `TILE_ROWS` rows: slow, but the same call each time.

Twinpool's own kernels (engine/native on CPUs, engine/gpu on GPUs) need no quantum: there, an element of a product is
added up in one order, however many rows are computed with it. So all this is for what torch multiplies: everything
where it computes alone (`engine.attention=torch`, or no compiler), and batched products of latents.

On CPUs oneDNN packs a weight for the products of one processor (`OneDnnWeight`). torch holds the result as a tensor
without strides, which can't be pickled or sliced. Its bytes and the description of its layout can be had
(`torch.ops.mkldnn`), and the C interface that torch compiles models ahead of time against makes such a tensor over
memory that lies there already. So an image of a model (`engine.runner.model_image`) has these weights as all others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twinpool.contracts.checkpoint.safetensors_headers import canonical_name
from twinpool.engine.native.current_kernels import BlockRows, Product, kernels_for
from twinpool.engine.tensors.shard import ShardAxis
from twinpool.engine.weight_formats.block_weight import BlockProduct, BlockStack, Weight


class LayoutUnavailable(Exception):
    """Raised when a packed weight can't be made over memory here: another build of torch."""


class OneDnnWeight:
    """A weight [n, k] of float32 or bfloat16, packed by oneDNN for this processor.

    It holds the packed tensor, and where that lies in memory of others the tensor (uint8) that keeps the memory mapped.
    """

    def __init__(self, packed: Tensor, memory: Tensor | None = None) -> None:
        self._packed: Tensor | None = packed
        self._memory = memory
        self.shape = (packed.shape[0], packed.shape[1])
        self.dtype = packed.dtype

    @classmethod
    def packed(cls, weight_nk: Tensor) -> OneDnnWeight | None:
        """Pack a weight; None where oneDNN can't pack or multiply it."""
        if weight_nk.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return None
        try:
            packed = cls(torch.ops.mkldnn._reorder_linear_weight(weight_nk))
            packed(weight_nk[:1], None)
        except (AttributeError, NotImplementedError, RuntimeError):  # another build of torch, or another processor
            return None
        return packed

    @classmethod
    def placed(cls, memory: Tensor, shape: tuple[int, int], dtype: torch.dtype, layout: bytes) -> OneDnnWeight:
        """The weight whose packed bytes are `memory` (uint8), which is kept and not copied.

        `layout` is that of the weight that was packed, on this processor by this build of torch. Raises
        `LayoutUnavailable`.
        """
        return cls(_tensor_over(memory, shape, dtype, layout), memory)

    def __call__(self, x_mk: Tensor, bias_n: Tensor | None) -> Tensor:
        """Compute ``x @ weight.T + bias``: [m, k] gives [m, n]."""
        assert self._packed is not None, "released"
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x_mk, self._packed, bias_n, "none", [], "")
        return out

    @property
    def layout(self) -> bytes:
        """oneDNN's description of how the packed bytes lie. Raises `LayoutUnavailable`."""
        try:
            return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(self._packed).numpy())
        except (AttributeError, RuntimeError) as error:
            raise LayoutUnavailable(f"this torch doesn't describe oneDNN's layouts: {error}") from None

    def data_ptr(self) -> int:
        """The address of the packed bytes."""
        return int(torch.ops.mkldnn.data_ptr(self._packed))

    def nbytes(self) -> int:
        """How many packed bytes there are."""
        return int(torch.ops.mkldnn._nbytes(self._packed))

    def release(self) -> None:
        """Give up the packed bytes: the weight can't be multiplied with any more."""
        self._packed = self._memory = None


def _tensor_over(memory: Tensor, shape: tuple[int, int], dtype: torch.dtype, layout: bytes) -> Tensor:
    """A tensor in oneDNN's layout over memory that others own, by torch's C interface for compiled models."""
    try:
        library = _libtorch()
        handle = ctypes.c_void_p()
        dtype_code = getattr(library, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")()
        sizes, strides = (ctypes.c_int64 * 2)(*shape), (ctypes.c_int64 * 2)(shape[1], 1)
        failed = library.aoti_torch_create_tensor_from_blob_v2(
            ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(2), sizes, strides, ctypes.c_int64(0),
            dtype_code, library.aoti_torch_device_type_cpu(), ctypes.c_int32(0), ctypes.byref(handle),
            library.aoti_torch_layout__mkldnn(), ctypes.c_char_p(layout), ctypes.c_int64(len(layout)),
        )  # fmt: skip
        if failed or not handle.value:
            raise LayoutUnavailable("torch refused to make a tensor in oneDNN's layout over mapped memory")
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        # The capsule has no destructor: the handle's tensor is Python's from here on.
        made: Tensor = _aoti().alloc_tensor_by_stealing_from_void_ptr(capsule(handle.value, None, None))
    except (AttributeError, OSError) as error:
        raise LayoutUnavailable(f"this torch makes no tensors in oneDNN's layout: {error}") from None
    return made


def _aoti() -> Any:
    return torch._C._aoti


@cache
def _libtorch() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


TILE_ROWS = 16
"""Rows of the fixed tile that the probe compares with."""
_CPU = torch.device("cpu")
_QUANTA = (4, 8, 16)
_PROBE_ROWS = 528
_PROBE_BATCHES = (4, 8, 12, 16, 20, 24, 28, 32, 36, 44, 48, 52, 60, 64, 80, 96, 128, 132, 200, 256, 260, 272, 400, 512)
_PROBE_BYTES = 1 << 25


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A layer of the checkpoint that an adapter may add to, as a part of a product's outputs."""

    name: str
    """As the model's class names it, such as ``model.layers.0.self_attn.q_proj``."""
    column: int
    """The first output of the product that is the layer's."""
    rows: tuple[ShardAxis, ...]
    """The rows of the layer's weight that this rank has, in runs."""
    columns: ShardAxis
    """The columns of the weight that this rank has."""
    orders: tuple[Tensor | None, ...] = ()
    """The order in which the rows of each run are taken; None: as they are."""

    @property
    def outputs(self) -> int:
        return sum(run.count for run in self.rows)


def adapted_layers(
    names: Sequence[str], axes: Sequence[ShardAxis], orders: Sequence[Tensor | None]
) -> tuple[AdaptedLayer, ...]:
    """The layers of a product of stacked weights, by their names in the checkpoint; neighbours of one name are runs of
    one weight. `axes`: the rows of each, then the columns of all."""
    *rows, columns = axes
    layers: list[AdaptedLayer] = []
    column = 0
    for name, runs in groupby(zip(names, rows, orders, strict=True), key=lambda run: run[0]):
        _, runs_of, order = zip(*runs, strict=True)
        layers.append(AdaptedLayer(canonical_name(name), column, runs_of, columns, order))
        column += layers[-1].outputs
    return tuple(layers)


class RowExactLinear:
    """A weight [n, k] and its bias, in the layout that its products are fastest in.

    On a CPU that is the layout of Twinpool's kernels where they are in use, else oneDNN's packed one: with few rows,
    packed products read the weight up to twice as fast as plain ones (measured; see the benchmarks page). In both cases
    the plain weight isn't kept.
    """

    heads = 1
    """How many matrices the weight is made of, each for its own part of the columns (`HeadLinear`)."""
    layers: tuple[AdaptedLayer, ...] = ()
    """The layers that adapters may add to; empty: none can."""
    heights: tuple[int, ...] = ()
    """The rows of each part of a stack in blocks, each of which is multiplied on its own."""

    def __init__(self, weight_nk: Weight, bias_n: Tensor | None = None, *, partial: bool = False) -> None:
        self.partial = partial
        """Whether the columns are a rank's part, so that the product is a part of a sum over ranks."""
        self.shape = (weight_nk.shape[0], weight_nk.shape[1])
        self.dtype, self.device = weight_nk.dtype, weight_nk.device
        self.blocks = not isinstance(weight_nk, Tensor)
        """Whether the weight is kept in blocks, and unpacked by each product."""
        self.int8 = not isinstance(weight_nk, Tensor) and weight_nk.inputs != "float"
        """Whether rows are quantised before they are multiplied."""
        self.nbytes = weight_nk.nbytes
        self.heights = tuple(part.shape[0] for part in weight_nk.parts) if isinstance(weight_nk, BlockStack) else ()
        native = _native(weight_nk, bias_n)
        self.row_exact = native is not None
        """Whether rows are exact by construction, so that `probe` may leave this product out."""
        self.product = native or _library_product(weight_nk, bias_n)
        """Computes ``x @ weight.T + bias``: [m, k] gives [m, n], in the dtype of the weight."""

    def __call__(self, x_mk: Tensor) -> Tensor:
        return self.product(x_mk)

    def __getitem__(self, rows_m: Tensor) -> Tensor:
        """Rows of a weight that is kept in blocks, [m] int64, unpacked: [m, k], as an embedding is looked up."""
        assert isinstance(self.product, BlockRows), "a weight in blocks of one layout"
        return self.product.rows(rows_m)


def _native(weight_nk: Weight, bias_n: Tensor | None) -> Product | None:
    if not isinstance(weight_nk, Tensor):
        of_blocks = kernels_for(torch.empty(0, dtype=weight_nk.dtype, device=weight_nk.device))
        return None if of_blocks is None else of_blocks.packed_blocks(weight_nk, bias_n)
    kernels = kernels_for(weight_nk)
    if kernels is None or not kernels.multiplies(weight_nk.dtype):
        return None
    return kernels.packed(weight_nk, bias_n)


def _library_product(weight_nk: Weight, bias_n: Tensor | None) -> Product:
    if not isinstance(weight_nk, Tensor):
        return BlockProduct(weight_nk, bias_n)
    packed = OneDnnWeight.packed(weight_nk)
    if packed is not None:
        return partial(packed, bias_n=bias_n)
    return partial(_plain_product, weight_nk=weight_nk, bias_n=bias_n)


def _plain_product(x_mk: Tensor, weight_nk: Tensor, bias_n: Tensor | None) -> Tensor:
    return F.linear(x_mk, weight_nk, bias_n)


class HeadLinear(RowExactLinear):
    """One matrix [k, n] a head, each applied to its own part of a row: [m, heads * k] gives [m, heads * n]."""

    def __init__(self, weight_hkn: Tensor) -> None:
        self.heads, k, n = weight_hkn.shape
        self.partial = False
        self.shape = (self.heads * n, self.heads * k)
        self.dtype, self.device = weight_hkn.dtype, weight_hkn.device
        weight_hkn = weight_hkn.contiguous()
        kernels = kernels_for(weight_hkn)
        multiplies = kernels is not None and kernels.multiplies(self.dtype)
        native = kernels.packed_heads(weight_hkn) if kernels is not None and multiplies else None
        self.row_exact = native is not None
        self.product = native or partial(_product_by_head, weight_hkn=weight_hkn)
        self.blocks, self.int8, self.nbytes = False, False, weight_hkn.nbytes


def _product_by_head(x_mk: Tensor, weight_hkn: Tensor) -> Tensor:
    rows = len(x_mk)
    x_hmk = x_mk.view(rows, len(weight_hkn), -1).transpose(0, 1).contiguous()
    return torch.bmm(x_hmk, weight_hkn).transpose(0, 1).reshape(rows, -1)


class StackedLinear(RowExactLinear):
    """Weights [n, k] that read the same input, some dense and some in blocks, each a product of its own: [m, k] gives
    the columns of all, [m, sum of n]."""

    def __init__(self, parts: Sequence[RowExactLinear]) -> None:
        first = parts[0]
        self.partial, self.dtype, self.device = first.partial, first.dtype, first.device
        self.shape = (sum(part.shape[0] for part in parts), first.shape[1])
        self.row_exact = all(part.row_exact for part in parts)
        self.product = partial(_products, parts=[part.product for part in parts])
        self.blocks, self.int8 = any(part.blocks for part in parts), any(part.int8 for part in parts)
        self.nbytes = sum(part.nbytes for part in parts)


def _products(x_mk: Tensor, parts: Sequence[Product]) -> Tensor:
    return torch.cat([product(x_mk) for product in parts], dim=-1)


@dataclass(frozen=True)
class Numerics:
    """How products are computed: with exact rows (`invariant`), or as fast as possible."""

    quantum: int
    """Batches are padded to a multiple of this many rows; 1: not at all."""
    tiled: bool = False
    """Products are computed in tiles of `TILE_ROWS`; then `quantum` is `TILE_ROWS`."""
    invariant: bool = True
    """Whether rows are exact."""

    def padded(self, rows: int) -> int:
        """`rows`, rounded up to whole quanta."""
        return -(-rows // self.quantum) * self.quantum

    def linear(self, x_mk: Tensor, linear: RowExactLinear) -> Tensor:
        """Compute the product of a batch whose rows are padded to whole quanta."""
        if not self.tiled:
            return linear(x_mk)
        return torch.cat([linear(tile) for tile in torch.split(x_mk, TILE_ROWS)])

    def bmm(self, a_bmk: Tensor, b_bkn: Tensor, out_bmn: Tensor) -> None:
        """Compute batched products, whose m rows are padded to whole quanta, into `out_bmn`."""
        if not self.tiled:
            torch.bmm(a_bmk, b_bkn, out=out_bmn)
            return
        for a, out in zip(torch.split(a_bmk, TILE_ROWS, dim=1), torch.split(out_bmn, TILE_ROWS, dim=1), strict=True):
            out.copy_(torch.bmm(a.contiguous(), b_bkn))


FAST = Numerics(quantum=1, invariant=False)


def probe(
    linears: Iterable[RowExactLinear], products: Iterable[tuple[int, int, int]], device: torch.device = _CPU
) -> Numerics:
    """Find the cheapest way to row-exact products for these weights and batched products.

    `products` are (batch, k, n) of batched products of activations, computed in float32. Takes well under a second for
    small models: since a library chooses its kernel by shape, weights of equal shape are tried once, and large ones
    with fewer rows.
    """
    generator = torch.Generator().manual_seed(0)
    trials: list[tuple[Callable[[Tensor], Tensor], Tensor, int]] = []
    by_shape = {
        (linear.heads, linear.shape, linear.heights, linear.dtype, linear.blocks): linear
        for linear in linears
        if not linear.row_exact
    }
    for linear in by_shape.values():
        x = torch.randn(_PROBE_ROWS, linear.shape[1], generator=generator).to(linear.device, linear.dtype)
        trials.append((linear, x, max(1, _PROBE_BYTES // linear.nbytes)))
    for batch, k, n in products:
        x = torch.randn(_PROBE_ROWS, k, generator=generator).to(device)
        b_bkn = torch.randn(1, k, n, generator=generator).to(device).expand(batch, -1, -1).contiguous()
        trials.append((partial(_batched, b_bkn), x, _PROBE_ROWS))
    if not trials:
        return Numerics(quantum=1)
    for quantum in _QUANTA:
        if all(_rows_exact(function, x, quantum, budget) for function, x, budget in trials):
            return Numerics(quantum)
    return Numerics(TILE_ROWS, tiled=True)


def _batched(b_bkn: Tensor, rows: Tensor) -> Tensor:
    """Multiply the same rows with each matrix of a batch of equal ones; NaN where results differ across the batch."""
    out = torch.bmm(rows.expand(len(b_bkn), -1, -1).contiguous(), b_bkn)
    return torch.where((out == out[:1]).all(), out[0], torch.nan)


def _rows_exact(function: Callable[[Tensor], Tensor], x: Tensor, quantum: int, budget: int) -> bool:
    """Whether `function` gives each row the bits of a fixed tile, for any tried number of rows that is whole quanta."""
    limit = max(4 * TILE_ROWS, min(len(x), budget)) // TILE_ROWS * TILE_ROWS
    x = x[:limit]
    reference = torch.cat([function(tile) for tile in torch.split(x, TILE_ROWS)])
    for threads in sorted({1, torch.get_num_threads()}):
        with _threads(threads):
            for rows in _PROBE_BATCHES:
                if rows % quantum or rows > limit:
                    continue
                start = (limit - rows) // quantum * quantum
                if not torch.equal(function(x[start : start + rows].clone()), reference[start : start + rows]):
                    return False
    return True


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent of float32, to 1e-7: the same bits for an element wherever it lies. Changes `x`."""
    return x.mul_(2.0).exp_().add_(1.0).reciprocal_().mul_(-2.0).add_(1.0)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) in float32, the same bits for an element wherever it lies.

    Not torch's silu or sigmoid: their vector lanes and their scalar tails round differently, and where a tail falls
    depends on the number of rows and threads. exp and a quotient are the same everywhere.
    """
    return x / torch.exp(-x).add_(1.0)
