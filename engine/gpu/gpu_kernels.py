"""The layers' kernels of an NVIDIA GPU: launches of the Triton kernels of products, norms and activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from twinpool.cache.device.device_choice import device_capability
from twinpool.engine.gpu import block_kernels, product_kernels
from twinpool.engine.gpu.gpu_blocks import GpuBlocks
from twinpool.engine.weight_formats.block_weight import BlockStack, BlockWeight

FEW_ROWS, MANY_ROWS = 64, 128
"""Rows of a tile. With at most `FEW_ROWS` rows, a narrow weight's parts have programs of their own."""
BLOCK_N, BLOCK_K = 128, 64
"""Columns of a tile, and terms of one dot product. Other sizes change last bits."""
UNPACKED_N = 64
"""Columns of a tile whose weight is in blocks: unpacking has no registers for more."""
PART = 1024
"""Terms of a part of the inner axis; parts are added up one after the other. Another size changes last bits."""
_FEW_TILES = 256
"""With fewer tiles than this, parts have programs of their own. Bounds their results: so many tiles of float32 a
part."""
_SHARED_BYTES = {80: 160 * 1024, 90: 224 * 1024, 100: 224 * 1024}
"""Compute capability, times 10 -> shared memory of a block; `_MIN_SHARED_BYTES` for any other."""
_MIN_SHARED_BYTES = 96 * 1024
_GROUP = 8
_SUM_BLOCK, _RANK_BLOCK = 1024, 1024
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class GpuKernels:
    """What layers compute with on a GPU, or in Triton's interpreter. `products`: whether products are row-exact ones of
    Triton; else the vendor's library multiplies (``engine.numerics: fast``). `part`: as `PART`, a multiple of
    `BLOCK_K`."""

    wide_norms, dtypes = True, _DTYPES

    def __init__(self, *, products: bool = True, part: int = PART) -> None:
        self._products, self._part = products, part
        self._interpreted = bool(triton.knobs.runtime.interpret)
        self.devices = ("cuda", "cpu") if self._interpreted else ("cuda",)

    def begin(self) -> None:
        """Nothing: what these kernels launch is the same on every thread."""

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Whether products of this dtype are these kernels'."""
        return self._products and dtype in _DTYPES

    def packed(self, weight_nk: Tensor, bias_n: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return the product with a weight, ``x @ weight.T + bias``: [m, k] gives [m, n]; rows are exact."""
        weight_hnk = weight_nk.unsqueeze(0)
        return lambda x_mk: self.product(x_mk.unsqueeze(0), weight_hnk, bias_n)[0]

    def packed_blocks(self, weight: BlockWeight | BlockStack, bias_n: Tensor | None) -> BlockProducts | None:
        """Return the product with a weight in blocks: its bits are those of the weight expanded. None where rows are to
        be quantised first."""
        parts = weight.parts if isinstance(weight, BlockStack) else (weight,)
        if any(part.inputs != "float" for part in parts):
            return None
        return BlockProducts(self, parts, bias_n)

    def packed_heads(self, weight_hkn: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the product with one matrix [k, n] a head: [m, heads * k] gives [m, heads * n]; rows are exact."""
        heads, _, width = weight_hkn.shape
        weight_hnk = weight_hkn.transpose(1, 2)

        def multiply(x_mk: Tensor) -> Tensor:
            x_hmk = x_mk.view(len(x_mk), heads, -1).transpose(0, 1)
            return self.product(x_hmk, weight_hnk, None).transpose(0, 1).reshape(len(x_mk), heads * width)

        return multiply

    def product(self, x_hmk: Tensor, weight_hnk: Tensor, bias_n: Tensor | None) -> Tensor:
        """Multiply each head's rows with its weight: [heads, m, n], in the dtype of x."""
        if x_hmk.stride(2) != 1:
            x_hmk = x_hmk.contiguous()
        heads, rows, inner = x_hmk.shape
        width = weight_hnk.shape[1]
        out = torch.empty(heads, rows, width, dtype=x_hmk.dtype, device=x_hmk.device)
        if not out.numel():
            return out
        launch = _Launch(self._part, rows, width, inner, x_hmk.dtype, heads)
        into = launch.into(out)
        bias = weight_hnk if bias_n is None else bias_n
        product_kernels.product_kernel[launch.grid](
            x_hmk, weight_hnk, bias, into, rows, width, inner, x_hmk.stride(0), x_hmk.stride(1), *weight_hnk.stride(),
            0 if launch.whole else into.stride(0), into.stride(-3), into.stride(-2),
            GROUP=_GROUP, BIAS=bias_n is not None, UPCAST=self._interpreted and x_hmk.dtype != torch.float32,
            **launch.constants,
        )  # fmt: skip
        self._sum_parts(launch, into, bias_n, out)
        return out

    def block_product(self, x_mk: Tensor, blocks: GpuBlocks, bias_n: Tensor | None) -> Tensor:
        """Multiply rows with a weight in blocks: [m, n], in the dtype of x."""
        if x_mk.stride(1) != 1:
            x_mk = x_mk.contiguous()
        rows, inner = x_mk.shape
        out = torch.empty(rows, blocks.width, dtype=x_mk.dtype, device=x_mk.device)
        if not out.numel():
            return out
        launch = _Launch(self._part, rows, blocks.width, inner, x_mk.dtype, block_n=UNPACKED_N)
        into = launch.into(out)
        block_kernels.block_product_kernel[launch.grid](
            x_mk, out if bias_n is None else bias_n, into, *blocks.tensors, rows, blocks.width, inner,
            *blocks.row_sizes, x_mk.stride(0), 0 if launch.whole else into.stride(0), into.stride(-2),
            GROUP_M=_GROUP, BIAS=bias_n is not None, UPCAST=self._interpreted and x_mk.dtype != torch.float32,
            **blocks.constants, **launch.constants,
        )  # fmt: skip
        self._sum_parts(launch, into, bias_n, out)
        return out

    def _sum_parts(self, launch: _Launch, into: Tensor, bias_n: Tensor | None, out: Tensor) -> None:
        """Add up the parts of the inner axis, where each had a program of its own."""
        if launch.whole:
            return
        product_kernels.sum_parts_kernel[(triton.cdiv(out.numel(), _SUM_BLOCK),)](
            into, out if bias_n is None else bias_n, out, launch.parts, out.numel(), out.shape[-1], into.stride(0),
            BLOCK=_SUM_BLOCK, BIAS=bias_n is not None,
        )  # fmt: skip

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last axis, [..., n]; `weight` is [n], or [rows, n] where x is [..., rows, n].

        Computed in float32. A weight of the dtype of `x` multiplies after the rounding, a float32 one before it.
        """
        return self._norm(x, None, weight, eps)[1]

    def add_rms_norm(self, x_mn: Tensor, added_mn: Tensor, weight_n: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return ``x + added``, and its norm as `rms_norm` computes it."""
        return self._norm(x_mn, added_mn, weight_n, eps)

    def _norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        width, out = x.shape[-1], torch.empty(x.shape, dtype=x.dtype, device=x.device)
        x_rn = _by_row(x)
        added_rn = x_rn if added is None else _by_row(added)
        total = out if added is None else torch.empty_like(out)
        if out.numel():
            product_kernels.rms_norm_kernel[(len(x_rn),)](
                x_rn, added_rn, weight.contiguous(), total, out, x_rn.stride(0), added_rn.stride(0),
                weight.numel() // width, width, eps,
                BLOCK=triton.next_power_of_2(width), ADD=added is not None, WIDE=weight.dtype != x.dtype,
                num_warps=_warps(width),
            )  # fmt: skip
        return total, out

    def square_sum(self, x: Tensor) -> Tensor:
        """The sums of the squares of the last axis, in float32: [..., n] gives [...]. A program has a row, so a sum's
        bits don't hang on how many there are, as those of torch's do on a GPU."""
        x_rn = _by_row(x)
        out_r = torch.empty(len(x_rn), dtype=torch.float32, device=x.device)
        if out_r.numel():
            width = x_rn.shape[1]
            product_kernels.square_sum_kernel[(len(x_rn),)](
                x_rn, out_r, x_rn.stride(0), width, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width)
            )
        return out_r.view(x.shape[:-1])

    def silu_product(self, gate_up_mn: Tensor) -> Tensor:
        """silu(gate) * up, [M, n], of gate and up side by side, [M, 2n]; silu is computed in float32 and rounded."""
        gate_up_mn = gate_up_mn.contiguous()
        rows, width = gate_up_mn.shape[0], gate_up_mn.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up_mn.dtype, device=gate_up_mn.device)
        if out.numel():
            product_kernels.silu_product_kernel[(rows, triton.cdiv(width, _SUM_BLOCK))](
                gate_up_mn, out, width, BLOCK=_SUM_BLOCK
            )
        return out


class BlockProducts:
    """``x @ weight.T + bias`` with weights in blocks, one below the other, each of one layout."""

    def __init__(self, kernels: GpuKernels, parts: Sequence[BlockWeight], bias_n: Tensor | None) -> None:
        self._kernels, self._bias = kernels, bias_n
        self._orders = [part.order_k for part in parts]
        self._parts = [GpuBlocks.of([replace(part, order_k=None)]) for part in parts]
        self._weight = parts[0] if len(parts) == 1 else None

    def __call__(self, x_mk: Tensor) -> Tensor:
        """[m, k] to [m, n], in the dtype of x. Columns that were reordered are added up in the order of the weight."""
        bias = self._bias
        if len(self._parts) == 1:
            return self._product(x_mk, 0, bias)
        widths = [blocks.width for blocks in self._parts]
        biases: Sequence[Tensor | None] = [None] * len(widths) if bias is None else torch.split(bias, widths)
        return torch.cat([self._product(x_mk, number, each) for number, each in enumerate(biases)], dim=-1)

    def _product(self, x_mk: Tensor, number: int, bias_n: Tensor | None) -> Tensor:
        order = self._orders[number]
        x_mk = x_mk if order is None else x_mk.index_select(1, order)
        return self._kernels.block_product(x_mk, self._parts[number], bias_n)

    def rows(self, rows_m: Tensor) -> Tensor:
        """Rows of the weight, [m, k] in the dtype to compute in, where it has one layout."""
        assert self._weight is not None, "one layout"
        return self._weight.rows(rows_m).unpack(dtype=self._weight.dtype)


class _Launch:
    """How a product is launched: its tiles, and whether a program adds up all parts of the inner axis."""

    def __init__(
        self, part: int, rows: int, width: int, inner: int, dtype: torch.dtype, heads: int = 1, block_n: int = BLOCK_N
    ) -> None:
        tile_rows, warps = tiling(rows, dtype)
        tiles = triton.cdiv(rows, tile_rows) * triton.cdiv(width, block_n)
        self.parts = triton.cdiv(inner, part)
        self.whole = self.parts == 1 or rows > FEW_ROWS or heads * tiles >= _FEW_TILES
        self.grid = (tiles, heads, 1 if self.whole else self.parts)
        self.constants: dict[str, Any] = {
            "ROWS": tile_rows, "BLOCK_N": block_n, "BLOCK_K": BLOCK_K, "PART": part, "WHOLE": self.whole,
            "EVEN": inner % BLOCK_K == 0, "num_warps": warps,
            "num_stages": stages(tile_rows, dtype, device_capability()),
        }  # fmt: skip

    def into(self, out: Tensor) -> Tensor:
        """Where programs write: the result, or float32 [parts, ...] of its shape."""
        return out if self.whole else torch.empty(self.parts, *out.shape, dtype=torch.float32, device=out.device)


def tiling(rows: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the rows of a product's tiles, and the warps of its programs.

    A warp group of four has 64 rows and all columns of a tile, so its matrix instruction is the same in both sizes.
    float32 has no such instruction, and needs the registers of more warps.
    """
    if dtype == torch.float32:
        return FEW_ROWS, 8
    return (FEW_ROWS, 4) if rows <= FEW_ROWS else (MANY_ROWS, 8)


def stages(tile_rows: int, dtype: torch.dtype, capability: int) -> int:
    """Return the tiles of the inner axis that are on their way at a time: 4 for many rows, where they fit into shared
    memory, else 3. They change no bit."""
    there = _SHARED_BYTES.get(capability, _MIN_SHARED_BYTES)
    needed = 4 * (tile_rows + BLOCK_N) * BLOCK_K * dtype.itemsize
    return 4 if tile_rows > FEW_ROWS and needed <= there else 3


def _by_row(x: Tensor) -> Tensor:
    """A tensor [..., n] as rows, which may lie apart."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    return x.reshape(-1, x.shape[-1]).contiguous()


def _warps(width: int) -> int:
    """Warps of a program that has a row: by its width alone, as they are part of the order of additions."""
    return 4 if width <= 2048 else 8 if width <= 8192 else 16


def add_ranks(parts: Tensor) -> Tensor:
    """Add every rank's part in the order of the ranks, in float32, rounded once: [ranks, ...] gives [...] in the dtype
    of the parts, which lie one after the other."""
    out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    if out.numel():
        product_kernels.rank_sum_kernel[(triton.cdiv(out.numel(), _RANK_BLOCK),)](
            parts, out, out.numel(), SIZE=parts.shape[0], BLOCK=_RANK_BLOCK
        )
    return out
