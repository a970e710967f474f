"""The orders in which products are added up, one operation after the other in float64 that is rounded: the definitions
that kernels are compared with, bit for bit. Of rows of bfloat16 (engine/native/tile_gemm.h), and of rows that are
quantised to int8 (engine/native/int8_gemm.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from twinpool.engine.weight_formats.block_weight import E2M1_VALUES, IQ4_VALUES, BlockWeight, Code, unpack_codes

_STEP = 32
_SMALLEST = 2.0**-126
"""Numbers below are zero, once they were rounded."""


def _rounded(x: Tensor) -> Tensor:
    """float64 as float32, numbers that are denormal then as zero."""
    return torch.where(x.abs() < _SMALLEST - 2.0**-151, 0.0, x).float()


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return _rounded(a.double() * b.double() + c.double())


def _add(a: Tensor, b: Tensor) -> Tensor:
    return _rounded(a.double() + b.double())


def _chain(x_mk: Tensor, w_nk: Tensor) -> Tensor:
    """Sums [m, n] of the columns of one group."""
    total = torch.zeros(len(x_mk), len(w_nk))
    for first in range(0, x_mk.shape[1], _STEP):
        sums = [torch.zeros_like(total), torch.zeros_like(total)]
        for column in range(first, min(first + _STEP, x_mk.shape[1])):
            at = (column - first) % 2
            sums[at] = _fma(x_mk[:, column, None], w_nk[None, :, column], sums[at])
        total = _add(total, _add(*sums))
    return total


def dense_product(x_mk: Tensor, w_nk: Tensor, bias_n: Tensor | None = None) -> Tensor:
    """``x @ w.T + bias`` of bfloat16, [m, n]."""
    x, w = (_rounded(value.double()) for value in (x_mk, w_nk))
    sums = _chain(x, w)
    return (sums if bias_n is None else _add(sums, bias_n)).bfloat16()


def block_product(x_mk: Tensor, weight: BlockWeight, bias_n: Tensor | None = None) -> Tensor:
    """The same of a weight in blocks: each group's sum times its scale, and the sum of its inputs times its offset."""
    x = _rounded(x_mk.double())
    if weight.order_k is not None:
        x = x[:, weight.order_k]
    values, k = _numbers(weight), x.shape[1]
    sums = torch.zeros(len(x), len(values))
    for group, first in enumerate(range(0, k, weight.group)):
        columns, span = slice(first, min(first + weight.group, k)), first // (weight.span or k)
        own = values[:, columns]
        if weight.zeros is not None:
            own = own - weight.zeros[:, group, None].float()
        scale, offset = _scale(weight, group, span)
        sums = _fma(_chain(x[:, columns], own), scale[None], sums)
        if offset is not None:
            sums = _fma(_chain(x[:, columns], torch.ones(1, own.shape[1])), offset[None], sums)
    return (sums if bias_n is None else _add(sums, bias_n)).bfloat16()


def quantised_rows(x_mk: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Numbers [m, k] in float64, and the scale of each column's block [m, k] in float32, for blocks of `size`
    columns."""
    numbers, scales = torch.zeros(x_mk.shape, dtype=torch.float64), torch.zeros(x_mk.shape)
    for first in range(0, x_mk.shape[1], size):
        block = x_mk[:, first : first + size].double()
        largest = block.abs().max(1, keepdim=True).values
        inverse = (127 / largest).float().double()
        whole = (block * inverse).float().round()  # Of two that are as near, the even one.
        numbers[:, first : first + size] = torch.where(largest < 2.0**-100, 0.0, whole.double())
        scales[:, first : first + size] = torch.where(largest < 2.0**-100, 0.0, largest / 127).float()
    return numbers, scales


def int8_product(x_mk: Tensor, weight: BlockWeight, bias_n: Tensor | None = None) -> Tensor:
    """``x @ w.T + bias``, [m, n] in the dtype of x, of rows that are quantised as the weight's `inputs` says."""
    if weight.order_k is not None:
        x_mk = x_mk[:, weight.order_k]
    by_row, k = weight.inputs == "int8_by_row", x_mk.shape[1]
    numbers, scales = quantised_rows(x_mk, k if by_row else 32)
    values, sums = _numbers(weight).double(), torch.zeros(len(x_mk), weight.shape[0])
    whole = -(-k // 32) * 32
    group = whole if weight.group >= k else weight.group
    unit = group if by_row and not whole % group else min(group, 32)
    for first in range(0, k, unit):
        at, columns = first // weight.group, slice(first, min(first + unit, k))
        own = values[:, columns]
        if weight.zeros is not None:
            own = own - weight.zeros[:, at, None].double()
        scale, offset = _scale(weight, at, first // (weight.span or k))
        of_row = scales[:, first, None].double()
        scaled = ((numbers[:, columns] @ own.T).float().double() * of_row).float()
        sums = (scaled.double() * scale.double() + sums.double()).float()
        if offset is not None:
            added = (numbers[:, columns].sum(1, keepdim=True).float().double() * of_row).float()
            sums = (added.double() * offset.double() + sums.double()).float()
    return (sums if bias_n is None else sums + bias_n).to(x_mk.dtype)


def _numbers(weight: BlockWeight) -> Tensor:
    codes = unpack_codes(weight.codes, weight.code)
    if weight.code is Code.E4M3:
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    tables = {Code.E2M1: E2M1_VALUES, Code.IQ4: IQ4_VALUES}
    if weight.code in tables:
        return torch.tensor(tables[weight.code])[codes.long()]
    return codes.float() - weight.zero


def _scale(weight: BlockWeight, group: int, span: int) -> tuple[Tensor, Tensor | None]:
    """The scale and the offset of a group, [n] each in float32."""
    stored = weight.scales[:, group]
    scale, offset = stored.float(), None if weight.offsets is None else weight.offsets[:, group].float()
    if weight.paired:
        scale, offset = (stored & 15).float(), (stored >> 4).float()
    elif stored.dtype == torch.uint8:
        scale = torch.exp2(stored.double() - 127).float()
    if weight.factors is not None:
        scale = scale * weight.factors[:, span].float()
    if offset is not None and weight.offset_factors is not None:
        offset = offset * weight.offset_factors[:, span].float()
    return scale, offset
