"""Weights in blocks: codes of two to eight bits, of which each group of columns shares a scale.

This is the one form in which products take a quantised weight, whatever the checkpoint's layout; its definition is
`BlockWeight.unpack`, to which kernels are compared. With g = j // group and s = j // span:

    weight[n, j] = (value(code[n, j]) - zero[n, g]) * scale[n, g] * factor[n, s] + offset[n, g] * offset_factor[n, s]

computed in float32 from left to right. Column j is the input's column order_k[j] where columns were reordered (GPTQ's
`desc_act`). `block_formats` reads the layouts of published checkpoints' folders, `gguf_formats` those of GGUF files.

A product is with these values and summed in float32. Or, where `inputs` says so and codes are whole numbers, its rows
are quantised first: `quantised_inputs` is the definition of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import gcd
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from twinpool.contracts.errors import CheckpointError

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of a four-bit float: a sign, two bits of exponent, one of mantissa."""
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers of ggml's codebook of four bits (`kvalues_iq4nl`)."""
_E8M0_BIAS = 127
_E8M0_NAN = 255
SMALLEST_GROUP = 8
"""Columns that share a scale in the part of a rank whose columns begin within a group, at least."""
_TILE_BYTES = 8 << 20
"""Bytes of float32 that a product in torch unpacks at once, about."""


_MAX_INT8_COLUMNS = 1 << 16
"""Of a row with one scale: products of so many numbers of eight bits add up to one of 32 bits."""
INPUT_BLOCK = 32
"""Columns of a row of activations that share a scale, where they are quantised by block."""
Inputs = Literal["float", "int8", "int8_by_row"]
"""How rows of activations are multiplied: as they come; or in int8, with a scale for each `INPUT_BLOCK` columns, or
for a whole row (of what a rank has)."""


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
    UINT2 = 4
    UINT3 = 5
    UINT5 = 6
    UINT6 = 7
    IQ4 = 8
    """A number of `IQ4_VALUES`, by four bits."""

    @property
    def bits(self) -> int:
        return _BITS[self]


_BITS = {
    **{Code.UINT2: 2, Code.UINT3: 3, Code.UINT4: 4, Code.UINT5: 5, Code.UINT6: 6, Code.UINT8: 8},
    **{Code.E2M1: 4, Code.IQ4: 4, Code.E4M3: 8},
}
_BY_GROUP, _BY_SPAN = ("scales", "zeros", "offsets"), ("factors", "offset_factors")
"""The parts of a `BlockWeight` that have a column for each group, and for each span."""


@dataclass(frozen=True)
class BlockWeight:
    """A weight [n, k] in blocks, as one rank holds it."""

    code: Code
    codes: Tensor
    """uint8 [n, k * bits / 8]: the codes of a row as a stream of bits, the first column in the lowest ones; so of four
    bits the even column lies in the low half of a byte."""
    scales: Tensor
    """[n, groups]: float32, bfloat16, float16, float8_e4m3fn, int8 for whole numbers, or uint8 for powers of two (E8M0:
    the exponent plus 127)."""
    group: int
    """Columns that share a scale; the last group may have fewer."""
    dtype: torch.dtype
    """The dtype of activations and of products."""
    zeros: Tensor | None = None
    """[n, groups] uint8: the code that stands for zero, in each group; None: `zero` in all of them."""
    zero: int = 0
    factors: Tensor | None = None
    """[n, spans] float32 or float16, or None for 1: a factor of the scales of a span of columns. float32 where codes
    are `E2M1`; float16 where scales are whole numbers, as in two-level scales."""
    span: int = 0
    """Columns that share a factor, whole groups; 0: all of them."""
    offsets: Tensor | None = None
    """[n, groups], of the dtype of `scales`: what is added in each group; None: nothing, or as `paired` says."""
    offset_factors: Tensor | None = None
    """[n, spans] float16, or None for 1: a factor of the offsets of a span."""
    paired: bool = False
    """Whether `scales` are uint8 of two whole numbers each: a scale in the low half, an offset in the high one."""
    inputs: Inputs = "float"
    """How the rows are multiplied that it is multiplied with."""
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
        parts = (self.order_k, *(getattr(self, name) for name in ("codes", *_BY_GROUP, *_BY_SPAN)))
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def layout(self) -> tuple[object, ...]:
        """What rows of two weights must have alike to be rows of one."""
        parts = (getattr(self, name) for name in (*_BY_GROUP, *_BY_SPAN))
        dtypes = tuple(part if part is None else part.dtype for part in parts)
        rest = (self.zero, self.paired, self.dtype, self.inputs)
        return self.code, self.group, self.span, self.shape[1], *rest, dtypes

    def with_inputs(self, inputs: Inputs) -> BlockWeight:
        """The weight to be multiplied with rows as `inputs` says; with rows as they come, where its codes aren't whole
        numbers, its groups don't make up blocks of rows, or a row with one scale is too long."""
        k = self.shape[1]
        fits = not self.group % INPUT_BLOCK or self.group in (8, 16) or self.group >= k
        fits = fits and self.code is not Code.E4M3 and (inputs != "int8_by_row" or k <= _MAX_INT8_COLUMNS)
        return replace(self, inputs=inputs if fits else "float")

    def unpack(self, rows: slice = slice(None), dtype: torch.dtype = torch.float32) -> Tensor:
        """Some rows of the weight, [n, k], its columns in the order of the input; computed in float32."""
        values = self._values(unpack_codes(self.codes[rows], self.code))
        at = torch.arange(values.shape[1], device=self.device)
        groups, spans = at // self.group, at // (self.span or values.shape[1])
        if self.zeros is not None:
            values -= self.zeros[rows].float()[:, groups]
        elif self.zero:
            values -= self.zero
        scales, offsets = self._group_values(rows)
        values *= scales[:, groups]
        if self.factors is not None:
            values *= self.factors[rows].float()[:, spans]
        if offsets is not None:
            added = offsets[:, groups]
            values += added if self.offset_factors is None else added * self.offset_factors[rows].float()[:, spans]
        if self.order_k is not None:
            values = torch.empty_like(values).index_copy_(1, self.order_k, values)
        return values.to(dtype)

    def _values(self, codes: Tensor) -> Tensor:
        if self.code is Code.E4M3:
            return codes.contiguous().view(torch.float8_e4m3fn).float()
        tables: dict[Code, tuple[float, ...]] = {Code.E2M1: E2M1_VALUES, Code.IQ4: IQ4_VALUES}
        if self.code in tables:
            return torch.tensor(tables[self.code], dtype=torch.float32, device=self.device)[codes.long()]
        return codes.float()

    def _group_values(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """The scales of some rows, and what is added, [n, groups] float32 each."""
        scales = self.scales[rows]
        if self.paired:
            return (scales & 15).float(), (scales >> 4).float()
        return scale_values(scales), None if self.offsets is None else self.offsets[rows].float()

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
        """A rank's part, with the same numbers.

        Where its columns begin within a group, the part has smaller groups, to whose borders they are: a scale is
        repeated then. Where the range cuts through a span alone, the part has shorter spans, of which some share a
        factor. None where groups would be of less than `SMALLEST_GROUP` columns, or smaller within spans, and where the
        range cuts through columns that were reordered, or through a byte.
        """
        n, k = self.shape
        row_range, column_range = range(n)[rows], range(k)[columns]
        first, last = column_range.start, column_range.stop
        here, group = slice(row_range.start, row_range.stop), gcd(first, self.group)
        if len(column_range) == k:
            return self._changed(lambda _, part: part[here])
        if self.order_k is not None or group < min(SMALLEST_GROUP, self.group) or last * self.code.bits % 8:
            return None
        if self.span and (group < self.group or (last % group and last < k)):
            return None
        whole = self._with_spans(gcd(self.span, first, last)) if self.span else self
        groups, span = torch.arange(first, last, group, device=self.device) // self.group, whole.span or k

        def cut(name: str, part: Tensor) -> Tensor:
            if name == "codes":
                return part[here, first * self.code.bits // 8 : last * self.code.bits // 8]
            return part[here][:, groups] if name in _BY_GROUP else part[here, first // span : -(-last // span)]

        return replace(whole._changed(cut), group=group)

    def _with_spans(self, span: int) -> BlockWeight:
        """The same with factors for shorter spans, of which several make up one of now."""
        times = self.span // span
        longer = self._changed(lambda name, part: part.repeat_interleave(times, 1) if name in _BY_SPAN else part)
        return replace(longer, span=span)

    def _changed(self, change: Callable[[str, Tensor], Tensor]) -> BlockWeight:
        """The weight whose parts with a row for each output, of these names, were changed so."""
        parts = {name: getattr(self, name) for name in ("codes", *_BY_GROUP, *_BY_SPAN)}
        changed: dict[str, Any] = {name: change(name, part) for name, part in parts.items() if part is not None}
        return replace(self, **changed)

    def rows(self, order: Tensor) -> BlockWeight:
        """The rows in another order, [n] int64, or some of them."""
        order = order.to(self.device)
        return self._changed(lambda _, part: part[order])

    def to(self, device: torch.device) -> BlockWeight:
        """A copy with memory of its own."""
        order = None if self.order_k is None else self.order_k.to(device, copy=True)
        return replace(self._changed(lambda _, part: part.to(device, copy=True)), order_k=order)

    def check(self, name: str) -> None:
        """Raise `CheckpointError`, which names the tensor, for a scale that is zero or no number, and for codes that
        are none."""
        if self.device.type == "meta":
            return
        scales = scale_values(self.scales)
        bad = ~torch.isfinite(scales)
        if self.scales.dtype != torch.float8_e4m3fn:  # NVFP4's are zero for a group that is small beside the others.
            bad |= scales == 0
        if self.factors is not None:
            scales = scales * self.factors
            bad |= ~torch.isfinite(self.factors) | (self.factors == 0)
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


@dataclass(frozen=True)
class BlockStack:
    """Weights in blocks of unlike layouts, one below the other: [n, k] of the rows of all."""

    parts: tuple[BlockWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def inputs(self) -> Inputs:
        """How rows are multiplied with those parts that don't take them as they come."""
        return max((part.inputs for part in self.parts), key=lambda inputs: inputs != "float")

    def with_inputs(self, inputs: Inputs) -> BlockStack:
        return BlockStack(tuple(part.with_inputs(inputs) for part in self.parts))

    def dense(self) -> Tensor:
        """The whole weight, in the dtype to compute in."""
        return torch.cat([part.dense() for part in self.parts])


Weight = Tensor | BlockWeight | BlockStack
"""A weight [n, k] of a product: dense, or in blocks."""


def scale_values(scales: Tensor) -> Tensor:
    """Scales as float32; of uint8, powers of two."""
    if scales.dtype == torch.uint8:
        return torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.to(torch.int32) - _E8M0_BIAS)
    return scales.float()


def dense(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dense()


def with_inputs(weight: Weight, inputs: Inputs) -> Weight:
    """The weight to be multiplied with rows as `inputs` says, where it can be."""
    return weight if isinstance(weight, Tensor) else weight.with_inputs(inputs)


def select_rows(weight: Weight, order_n: Tensor) -> Weight:
    """Rows of a weight, in this order."""
    return weight.rows(order_n) if isinstance(weight, BlockWeight) else dense(weight)[order_n.to(weight.device)]


def like_runs(weights: Sequence[Weight]) -> list[list[Weight]]:
    """The weights in the order given, neighbours together that are all in blocks, or all dense: `stack_rows` keeps each
    run as it is."""
    runs: list[list[Weight]] = []
    for weight in weights:
        if runs and _like(runs[-1][0], weight):
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return runs


def _like(one: Weight, two: Weight) -> bool:
    return isinstance(one, Tensor) is isinstance(two, Tensor) and one.dtype == two.dtype


def stack_rows(weights: Sequence[Weight]) -> Weight:
    """One weight of the rows of several; dense where one of them is."""
    if len(weights) == 1:
        return weights[0]
    parts: list[BlockWeight] = []
    for weight in weights:
        if isinstance(weight, Tensor):
            return torch.cat([dense(weight) for weight in weights])
        parts += weight.parts if isinstance(weight, BlockStack) else [weight]
    if not all(_alike(part, parts[0]) for part in parts):
        return BlockStack(tuple(parts))
    return parts[0]._changed(lambda name, _: torch.cat([getattr(part, name) for part in parts]))


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
    """Codes [n, k], one a byte, as `BlockWeight.codes` has them; of other than 4 and 8 bits, k is a multiple of 8."""
    if code.bits == 8:
        return codes.contiguous()
    if code.bits == 4:
        pairs = codes.reshape(len(codes), -1, 2)
        return pairs[..., 0] | pairs[..., 1] << 4
    shifts = torch.arange(0, 8 * code.bits, code.bits, device=codes.device)
    words = (codes.reshape(len(codes), -1, 8).long() << shifts).sum(-1, keepdim=True)
    return words.view(torch.uint8)[..., : code.bits].flatten(1)


def unpack_codes(codes: Tensor, code: Code) -> Tensor:
    """Codes [n, k], one a byte, of `BlockWeight.codes`."""
    if code.bits == 8:
        return codes.contiguous()
    if code.bits == 4:
        return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    words = F.pad(codes.reshape(len(codes), -1, code.bits), (0, 8 - code.bits)).view(torch.int64)
    shifts = torch.arange(0, 8 * code.bits, code.bits, device=codes.device)
    return (words >> shifts & (1 << code.bits) - 1).to(torch.uint8).flatten(1)


def quantised_inputs(x_mk: Tensor, inputs: Inputs) -> Tensor:
    """Rows of activations as `inputs` says, [m, k] float32: of int8, numbers of -127 to 127 times their scale.

    A scale is the largest value / 127; a number is the value times 127 / the largest, rounded to the nearest (ties to
    even), in float32. Where the largest is below 2^-100, all are zero. A value that isn't finite makes its whole block
    so.
    """
    x = x_mk.float()
    if inputs == "float":
        return x
    m, k = x.shape
    size = k if inputs == "int8_by_row" else INPUT_BLOCK
    blocks = F.pad(x, (0, -k % max(size, 1))).view(m, -1, max(size, 1))
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127.0) / largest  # A number over a tensor is a product with its reciprocal.
    numbers = torch.round(blocks * inverse) * (largest / 127.0)
    return torch.where(largest < 2.0**-100, 0.0, numbers).view(m, -1)[:, :k]


class BlockProduct:
    """``x @ weight.T + bias`` in torch's operations, a tile of rows of the weight unpacked at a time."""

    def __init__(self, weight: BlockWeight | BlockStack, bias_n: Tensor | None) -> None:
        self._parts = weight.parts if isinstance(weight, BlockStack) else (weight,)
        self._bias = None if bias_n is None else bias_n.float()
        self._rows = max(16, _TILE_BYTES // (4 * weight.shape[1]))

    def rows(self, rows_m: Tensor) -> Tensor:
        """Rows of the weight, [m, k] in the dtype to compute in, where it has one layout."""
        (weight,) = self._parts
        return weight.rows(rows_m).unpack(dtype=weight.dtype)

    def __call__(self, x_mk: Tensor) -> Tensor:
        """[m, k] to [m, n], in the dtype of x; computed in float32 and rounded once."""
        out = x_mk.new_empty(len(x_mk), sum(part.shape[0] for part in self._parts))
        above = 0
        for part in self._parts:
            n = part.shape[0]
            x = self._rows_for(x_mk, part)
            for first in range(0, n, self._rows):
                last = min(first + self._rows, n)
                to = slice(above + first, above + last)
                out[:, to] = F.linear(
                    x, part.unpack(slice(first, last)), None if self._bias is None else self._bias[to]
                )
            above += n
        return out

    def _rows_for(self, x_mk: Tensor, part: BlockWeight) -> Tensor:
        """The rows as they are multiplied with a part; its reordered columns are quantised in their own order."""
        if part.order_k is None or part.inputs == "float":
            return quantised_inputs(x_mk, part.inputs)
        quantised = quantised_inputs(x_mk[:, part.order_k], part.inputs)
        return torch.empty_like(quantised).index_copy_(1, part.order_k, quantised)
