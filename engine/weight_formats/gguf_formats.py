"""Readers of the quantised blocks of GGUF files, as `BlockWeight`.

A block holds 32 or 256 values of a row (ggml, `ggml-common.h` and `dequantize_row_*` of `ggml-quants.c`, whose order of
bits this follows). Those of 32 have a scale each in float16, and some a smallest value. Those of 256, the K types and
IQ4_XS, have a scale in float16, and for each 16 or 32 values a whole number that it is multiplied with; some have the
same once more for the smallest values.

| type | code | a group's columns | zero | scales, and factors by 256 | offsets |
|---|---|---|---|---|---|
| Q4_0, Q5_0, Q8_0 | 4, 5, 8 bits | 32 | 8, 16, 128 | float16 | |
| Q4_1, Q5_1 | 4, 5 bits | 32 | | float16 | float16 |
| Q2_K | 2 bits | 16 | | 4 bits, paired; float16 | 4 bits; float16, negated |
| Q3_K | 3 bits | 16 | 4 | int8; float16 | |
| Q4_K, Q5_K | 4, 5 bits | 32 | | int8; float16 | int8; float16, negated |
| Q6_K | 6 bits | 16 | 32 | int8; float16 | |
| IQ4_NL | codebook | 32 | | float16 | |
| IQ4_XS | codebook | 32 | | int8; float16 | |

All products of a code, a scale and its factor are exact in float32, and so are those of an offset and its factor: at
most one rounding, that of their sum, makes a value. So it doesn't matter in which order they are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinpool.contracts.errors import CheckpointError
from twinpool.engine.weight_formats.block_weight import BlockWeight, Code, pack_codes

_SPAN = 256


@dataclass(frozen=True)
class _BlockBytes:
    """The blocks of some rows, uint8 [n, blocks, bytes], which are taken from front to back."""

    left: Tensor

    def take(self, count: int) -> tuple[Tensor, _BlockBytes]:
        """The next bytes of each block, and what is behind them."""
        return self.left[..., :count], _BlockBytes(self.left[..., count:])

    def half(self) -> tuple[Tensor, _BlockBytes]:
        """The next float16 of each block, [n, blocks]."""
        taken, rest = self.take(2)
        return taken.contiguous().view(torch.float16).flatten(1), rest


_Parts = Mapping[str, Tensor]
"""Fields of a `BlockWeight`, with its codes one a byte."""


@dataclass(frozen=True)
class _BlockType:
    code: Code
    group: int
    nbytes: int
    """Of a block."""
    read: Callable[[_BlockBytes], _Parts]
    zero: int = 0
    span: int = 0
    paired: bool = False

    @property
    def values(self) -> int:
        """Of a block."""
        return self.span or self.group


def read_gguf_blocks(kind: str, rows: Tensor, dtype: torch.dtype, file_rows_n: Tensor | None = None) -> BlockWeight:
    """The weight [n, k] whose rows these are in a file: uint8 [n, bytes of a row], of a type of `GGUF_TYPES`.

    `dtype` is the one to compute in. `file_rows_n`: which rows of the file's tensor they are, [n] int64; None: its
    first ones. Raises `CheckpointError` for a scale that is no finite number, which names its row in the file.
    """
    form = GGUF_TYPES[kind]
    parts: dict[str, Any] = dict(form.read(_BlockBytes(rows.view(len(rows), -1, form.nbytes))))
    for name in ("scales", "factors", "offsets", "offset_factors"):
        part = parts.get(name)
        if part is None or part.dtype != torch.float16 or part.device.type == "meta":
            continue
        bad = ~torch.isfinite(part)
        if bool(bad.any()):
            row, block = (int(i) for i in bad.nonzero()[0])
            row = row if file_rows_n is None else int(file_rows_n[row])
            raise CheckpointError(f"block {block} of row {row} of {kind} has a scale that is no finite number")
    codes = pack_codes(parts.pop("codes"), form.code)
    return BlockWeight(
        form.code, codes, parts.pop("scales"), form.group, dtype,
        zero=form.zero, span=form.span, paired=form.paired, **parts,
    )  # fmt: skip


def _shifted(packed: Tensor, bits: int, run: int) -> Tensor:
    """Codes [..., values] of which each run of bytes holds several runs, one above the other in its bits, lowest first:
    with 4 bits the low halves of `run` bytes, then their high halves."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(-1, 1)
    runs = packed.reshape(*packed.shape[:-1], -1, 1, run)
    codes: Tensor = runs >> shifts & (1 << bits) - 1
    return codes.flatten(-3)


def _simple(blocks: _BlockBytes) -> _Parts:
    scales, rest = blocks.half()
    return {"codes": _shifted(rest.left, 4, 16).flatten(1), "scales": scales}


def _q8_0(blocks: _BlockBytes) -> _Parts:
    scales, rest = blocks.half()
    return {"codes": (rest.left ^ 128).flatten(1), "scales": scales}  # Two's complement, plus 128.


def _q4_1(blocks: _BlockBytes) -> _Parts:
    scales, rest = blocks.half()
    offsets, rest = rest.half()
    return {"codes": _shifted(rest.left, 4, 16).flatten(1), "scales": scales, "offsets": offsets}


def _q5(blocks: _BlockBytes) -> Tensor:
    """Codes of five bits: the fifth bits of 32 values in four bytes, then the others."""
    high, rest = blocks.take(4)
    fifth = _shifted(high, 1, 1)
    return (_shifted(rest.left, 4, 16) | fifth << 4).flatten(1)


def _q5_0(blocks: _BlockBytes) -> _Parts:
    scales, rest = blocks.half()
    return {"codes": _q5(rest), "scales": scales}


def _q5_1(blocks: _BlockBytes) -> _Parts:
    scales, rest = blocks.half()
    offsets, rest = rest.half()
    return {"codes": _q5(rest), "scales": scales, "offsets": offsets}


def _q2_k(blocks: _BlockBytes) -> _Parts:
    scales, rest = blocks.take(16)
    packed, rest = rest.take(64)
    factors, rest = rest.half()
    smallest, _ = rest.half()
    codes = _shifted(packed, 2, 32).flatten(1)
    return {"codes": codes, "scales": scales.flatten(1), "factors": factors, "offset_factors": -smallest}


def _q3_k(blocks: _BlockBytes) -> _Parts:
    high, rest = blocks.take(32)
    packed, rest = rest.take(64)
    scales, rest = rest.take(12)
    factors, _ = rest.half()
    codes = _shifted(packed, 2, 32) | _shifted(high, 1, 32) << 2
    numbers = _shifted(scales[..., :8], 4, 8) | _shifted(scales[..., 8:], 2, 4) << 4
    return {"codes": codes.flatten(1), "scales": _signed(numbers, 32), "factors": factors}


def _scales_and_smallest(packed: Tensor) -> dict[str, Tensor]:
    """Eight scales and eight smallest values of six bits, in twelve bytes: the first four of each in four bytes of
    their own, whose two highest bits, with four of the last bytes, are the others."""
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, rest & 15 | first >> 2 & 48), -1)
    smallest = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), -1)
    return {"scales": _signed(scales, 0), "offsets": _signed(smallest, 0)}


def _q4_k(blocks: _BlockBytes) -> _Parts:
    factors, rest = blocks.half()
    smallest, rest = rest.half()
    packed, rest = rest.take(12)
    codes = _shifted(rest.left, 4, 32).flatten(1)
    return {"codes": codes, "factors": factors, "offset_factors": -smallest, **_scales_and_smallest(packed)}


def _q5_k(blocks: _BlockBytes) -> _Parts:
    factors, rest = blocks.half()
    smallest, rest = rest.half()
    packed, rest = rest.take(12)
    high, rest = rest.take(32)
    codes = (_shifted(rest.left, 4, 32) | _shifted(high, 1, 32) << 4).flatten(1)
    return {"codes": codes, "factors": factors, "offset_factors": -smallest, **_scales_and_smallest(packed)}


def _q6_k(blocks: _BlockBytes) -> _Parts:
    low, rest = blocks.take(128)
    high, rest = rest.take(64)
    scales, rest = rest.take(16)
    factors, _ = rest.half()
    codes = _shifted(low, 4, 64) | _shifted(high, 2, 32) << 4
    return {"codes": codes.flatten(1), "scales": scales.flatten(1).view(torch.int8), "factors": factors}


def _iq4_xs(blocks: _BlockBytes) -> _Parts:
    factors, rest = blocks.half()
    high, rest = rest.take(2)
    low, rest = rest.take(4)
    numbers = _shifted(low, 4, 1) | _shifted(high, 2, 1) << 4
    return {"codes": _shifted(rest.left, 4, 16).flatten(1), "scales": _signed(numbers, 32), "factors": factors}


def _signed(numbers: Tensor, taken: int) -> Tensor:
    """Whole numbers [n, blocks, groups] less so many, as int8 [n, groups of all blocks]."""
    return (numbers.to(torch.int8) - taken).flatten(1)


GGUF_TYPES: Mapping[str, _BlockType] = {
    "Q4_0": _BlockType(Code.UINT4, 32, 18, _simple, zero=8),
    "Q4_1": _BlockType(Code.UINT4, 32, 20, _q4_1),
    "Q5_0": _BlockType(Code.UINT5, 32, 22, _q5_0, zero=16),
    "Q5_1": _BlockType(Code.UINT5, 32, 24, _q5_1),
    "Q8_0": _BlockType(Code.UINT8, 32, 34, _q8_0, zero=128),
    "Q2_K": _BlockType(Code.UINT2, 16, 84, _q2_k, span=_SPAN, paired=True),
    "Q3_K": _BlockType(Code.UINT3, 16, 110, _q3_k, zero=4, span=_SPAN),
    "Q4_K": _BlockType(Code.UINT4, 32, 144, _q4_k, span=_SPAN),
    "Q5_K": _BlockType(Code.UINT5, 32, 176, _q5_k, span=_SPAN),
    "Q6_K": _BlockType(Code.UINT6, 16, 210, _q6_k, zero=32, span=_SPAN),
    "IQ4_NL": _BlockType(Code.IQ4, 32, 18, _simple),
    "IQ4_XS": _BlockType(Code.IQ4, 32, 136, _iq4_xs, span=_SPAN),
}
"""The types of tensors that stay in memory as a file has them, by the format's names."""
