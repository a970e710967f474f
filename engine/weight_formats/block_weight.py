"""Weights in blocks: codes of four or eight bits, of which each group of columns shares a scale.

This is the one form in which products take a quantised weight, whatever the checkpoint's layout; its definition is
`BlockWeight.unpack`, to which kernels are compared:

    weight[n, j] = (value(code[n, j]) - zero[n, j // group]) * scale[n, j // group] * factor[n]

computed in float32 from left to right. `block_formats` reads the layouts of published checkpoints.

Every product is the one of the unpacked weight in float32: activations aren't quantised, so that a checkpoint that
declares quantised activations (W8A8) computes closer to the model that it was made from than it asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from twinpool.contracts.errors import CheckpointError

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of a four-bit float: a sign, two bits of exponent, one of mantissa."""
_E8M0_BIAS = 127
_E8M0_NAN = 255
_TILE_BYTES = 8 << 20
"""Bytes of float32 that a product in torch unpacks at once, about."""


class Code(Enum):
    """What a code stands for. The values are those of `enum Code` in native/block_gemm.h."""

    UINT4 = 0
    """A whole number of 0 to 15."""
    UINT8 = 1
    """A whole number of 0 to 255."""
    E2M1 = 2
    """A four-bit float, of `E2M1_VALUES`."""
    E4M3 = 3
    """A float8 of four bits of exponent and three of mantissa, without infinities."""

    @property
    def bits(self) -> int:
        return 4 if self in {Code.UINT4, Code.E2M1} else 8


@dataclass(frozen=True)
class BlockWeight:
    """A weight [n, k] in blocks, as one rank holds it."""

    code: Code
    codes: Tensor
    """uint8: [n, k], or [n, k // 2] with the even column in the low half of a byte where codes have four bits."""
    scales: Tensor
    """[n, groups]: float32, bfloat16, float16, float8_e4m3fn, or uint8 for powers of two (E8M0: the exponent plus
    127)."""
    group: int
    """Columns that share a scale; the last group may have fewer."""
    dtype: torch.dtype
    """The dtype of activations and of products."""
    zeros: Tensor | None = None
    """[n, groups] uint8: the code that stands for zero, in each group; None: `zero` in all of them."""
    zero: int = 0
    factor_n: Tensor | None = None
    """[n] float32, or None for 1: a factor of a row's scales, where codes are `E2M1`."""
    order_k: Tensor | None = None
    """[k] int64: the input column that column j is multiplied with, where they were reordered so that those of a group
    lie together; None: j."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.code.bits

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.factor_n, self.order_k)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def layout(self) -> tuple[object, ...]:
        """What rows of two weights must have alike to be rows of one."""
        zeros, factor = self.zeros is not None, self.factor_n is not None
        return self.code, self.group, self.shape[1], self.scales.dtype, self.zero, zeros, factor, self.dtype

    def unpack(self, rows: slice = slice(None), dtype: torch.dtype = torch.float32) -> Tensor:
        """Some rows of the weight, [n, k], its columns in the order of the input; computed in float32."""
        values = self._values(unpack_codes(self.codes[rows], self.code))
        columns = torch.arange(values.shape[1], device=self.device) // self.group
        if self.zeros is not None:
            values -= self.zeros[rows].float()[:, columns]
        elif self.zero:
            values -= self.zero
        values *= scale_values(self.scales[rows])[:, columns]
        if self.factor_n is not None:
            values *= self.factor_n[rows, None]
        if self.order_k is not None:
            values = torch.empty_like(values).index_copy_(1, self.order_k, values)
        return values.to(dtype)

    def _values(self, codes: Tensor) -> Tensor:
        if self.code is Code.E4M3:
            return codes.contiguous().view(torch.float8_e4m3fn).float()
        if self.code is Code.E2M1:
            return torch.tensor(E2M1_VALUES, device=self.device)[codes.long()]
        return codes.float()

    def expand(self, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        """A part of the weight, unpacked by tiles of rows into memory of its own."""
        n, k = self.shape
        first, stop, _ = rows.indices(n)
        out = torch.empty(stop - first, len(range(k)[columns]), dtype=dtype, device=self.device)
        step = max(1, _TILE_BYTES // (4 * max(k, 1)))
        for begin in range(first, stop, step) if self.device.type != "meta" else ():
            end = min(begin + step, stop)
            out[begin - first : end - first] = self.unpack(slice(begin, end))[:, columns]
        return out

    def dense(self) -> Tensor:
        """The whole weight, in the dtype to compute in."""
        return self.expand(slice(None), slice(None), self.dtype)

    def part(self, rows: slice, columns: slice) -> BlockWeight | None:
        """A rank's part; None where the range of columns cuts through a group, or the columns were reordered."""
        n, k = self.shape
        row_range, column_range = range(n)[rows], range(k)[columns]
        first, last = column_range.start, column_range.stop
        if len(column_range) == k:
            at, groups = slice(None), slice(None)
        elif first % self.group or (last % self.group and last < k) or self.order_k is not None:
            return None
        else:
            at = slice(first * self.code.bits // 8, last * self.code.bits // 8)
            groups = slice(first // self.group, -(-last // self.group))
        here = slice(row_range.start, row_range.stop)
        return replace(
            self,
            codes=self.codes[here, at],
            scales=self.scales[here, groups],
            zeros=None if self.zeros is None else self.zeros[here, groups],
            factor_n=None if self.factor_n is None else self.factor_n[here],
        )

    def rows(self, order: Tensor) -> BlockWeight:
        """The rows in another order, [n] int64, or some of them."""
        order = order.to(self.device)
        return replace(
            self,
            codes=self.codes[order],
            scales=self.scales[order],
            zeros=None if self.zeros is None else self.zeros[order],
            factor_n=None if self.factor_n is None else self.factor_n[order],
        )

    def to(self, device: torch.device) -> BlockWeight:
        """A copy with memory of its own."""
        moved = {
            name: part.to(device, copy=True)
            for name in ("codes", "scales", "zeros", "factor_n", "order_k")
            if (part := getattr(self, name)) is not None
        }
        return replace(self, **moved)

    def check(self, name: str) -> None:
        """Raise `CheckpointError`, which names the tensor, for a scale that is zero or no number, and for codes that
        are none."""
        if self.device.type == "meta":
            return
        scales = scale_values(self.scales)
        bad = ~torch.isfinite(scales)
        if self.scales.dtype != torch.float8_e4m3fn:  # NVFP4's are zero for a group that is small beside the others.
            bad |= scales == 0
        if self.factor_n is not None:
            scales = scales * self.factor_n[:, None]
            bad |= (~torch.isfinite(self.factor_n) | (self.factor_n == 0))[:, None]
        if self.scales.dtype == torch.uint8:
            bad |= self.scales == _E8M0_NAN
        if bool(bad.any()):
            row, group = (int(i) for i in bad.nonzero()[0])
            raise CheckpointError(
                f"{name}: the scale of row {row}, group {group} is {float(scales[row, group])}; scales must be finite "
                "and not zero"
            )
        if self.code is Code.E4M3 and bool(((self.codes & 0x7F) == 0x7F).any()):
            raise CheckpointError(f"{name}: float8 values that are not a number")


Weight = Tensor | BlockWeight
"""A weight [n, k] of a product: dense, or in blocks."""


def scale_values(scales: Tensor) -> Tensor:
    """Scales as float32; of uint8, powers of two."""
    if scales.dtype == torch.uint8:
        return torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.to(torch.int32) - _E8M0_BIAS)
    return scales.float()


def dense(weight: Weight) -> Tensor:
    return weight.dense() if isinstance(weight, BlockWeight) else weight


def select_rows(weight: Weight, order_n: Tensor) -> Weight:
    """Rows of a weight, in this order."""
    return weight.rows(order_n) if isinstance(weight, BlockWeight) else weight[order_n.to(weight.device)]


def stack_rows(weights: Sequence[Weight]) -> Weight:
    """One weight of the rows of several; dense where their layouts differ, or the order of their columns."""
    if len(weights) == 1:
        return weights[0]
    blocks = [weight for weight in weights if isinstance(weight, BlockWeight)]
    first = blocks[0] if blocks else None
    alike = len(blocks) == len(weights) and all(_alike(b, blocks[0]) for b in blocks)
    if first is None or not alike:
        return torch.cat([dense(weight) for weight in weights])
    return replace(
        first,
        codes=torch.cat([b.codes for b in blocks]),
        scales=torch.cat([b.scales for b in blocks]),
        zeros=None if first.zeros is None else torch.cat([b.zeros for b in blocks if b.zeros is not None]),
        factor_n=None if first.factor_n is None else torch.cat([b.factor_n for b in blocks if b.factor_n is not None]),
    )


def _alike(one: BlockWeight, two: BlockWeight) -> bool:
    if one.layout != two.layout or (one.order_k is None) != (two.order_k is None):
        return False
    return one.order_k is None or two.order_k is None or torch.equal(one.order_k, two.order_k)


def quantise(weight_nk: Tensor, bits: int, group: int) -> BlockWeight:
    """A dense weight in whole numbers of 4 or 8 bits, symmetric, with a float32 scale for each `group` columns: the
    nearest ones, where the largest of a group has the largest code. k is even for 4 bits; where all of a group is zero,
    its scale is 1."""
    n, k = weight_nk.shape
    groups = -(-k // group)
    padded = F.pad(weight_nk.float(), (0, groups * group - k)).view(n, groups, group)
    largest = padded.abs().amax(-1)
    top = 2 ** (bits - 1) - 1
    scales = torch.where(largest > 0, largest / top, 1.0)
    codes = (padded / scales.unsqueeze(-1)).round_().add_(top + 1).to(torch.uint8).view(n, -1)[:, :k]
    code = Code.UINT4 if bits == 4 else Code.UINT8
    return BlockWeight(code, pack_codes(codes, code), scales, group, weight_nk.dtype, zero=top + 1)


def pack_codes(codes: Tensor, code: Code) -> Tensor:
    """Codes [n, k], one a byte, as `BlockWeight.codes` has them."""
    if code.bits == 8:
        return codes.contiguous()
    pairs = codes.reshape(len(codes), -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack_codes(codes: Tensor, code: Code) -> Tensor:
    """Codes [n, k], one a byte, of `BlockWeight.codes`."""
    if code.bits == 8:
        return codes.contiguous()
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


class BlockProduct:
    """``x @ weight.T + bias`` in torch's operations, a tile of rows of the weight unpacked at a time."""

    def __init__(self, weight: BlockWeight, bias_n: Tensor | None) -> None:
        self._weight, self._bias = weight, None if bias_n is None else bias_n.float()
        self._rows = max(16, _TILE_BYTES // (4 * weight.shape[1]))

    def __call__(self, x_mk: Tensor) -> Tensor:
        """[m, k] to [m, n], in the dtype of x; computed in float32 and rounded once."""
        n = self._weight.shape[0]
        x, out = x_mk.float(), x_mk.new_empty(len(x_mk), n)
        for first in range(0, n, self._rows):
            tile = slice(first, min(first + self._rows, n))
            bias = None if self._bias is None else self._bias[tile]
            out[:, tile] = F.linear(x, self._weight.unpack(tile), bias)
        return out
