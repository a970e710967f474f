"""Weights in blocks on a GPU: one, or those of all experts, as the arguments of `block_kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from twinpool.engine.weight_formats.block_weight import IQ4_VALUES, BlockWeight, Code, Weight

_PARTS = ("codes", "scales", "zeros", "factors", "offsets", "offset_factors")
_CODES = {Code.E2M1: "e2m1", Code.E4M3: "e4m3", Code.IQ4: "table"}
"""What the kernels call a code; "int" for whole numbers of any width."""


@dataclass(frozen=True)
class GpuBlocks:
    """Weights [n, k] of one layout, one behind the other: of a product one, of a mixture those of all experts."""

    parts: tuple[Tensor, ...]
    """[e, n, *]: those of `_PARTS`; in place of one that there isn't, the codes."""
    table: Tensor
    """[16] float32: the numbers of a code that is looked up; unread for any other."""
    count: int
    width: int
    inner: int
    dtype: torch.dtype
    """The dtype of the rows that it is multiplied with."""
    nbytes: int
    constants: dict[str, Any]
    """The kernels' constants, by name."""

    @classmethod
    def of(cls, weights: Sequence[BlockWeight]) -> GpuBlocks:
        """Put weights behind each other, for which `fit` holds."""
        assert fit(weights), "weights of one layout, their columns in order"
        first = weights[0]
        stacked = {
            name: torch.stack([getattr(weight, name) for weight in weights]) if len(weights) > 1 else part.unsqueeze(0)
            for name in _PARTS
            if (part := getattr(first, name)) is not None
        }
        stacked = {name: _plain(part) for name, part in stacked.items()}
        n, k = first.shape
        constants = {
            "CODE": _CODES.get(first.code, "int"), "BITS": first.code.bits, "SCALES": _scales(first),
            "ZERO": first.zero, "GROUP": first.group, "SPAN": first.span or k,
            **{name.upper(): name in stacked for name in ("zeros", "factors", "offsets", "offset_factors")},
        }  # fmt: skip
        return cls(
            tuple(stacked.get(name, stacked["codes"]) for name in _PARTS),
            torch.tensor(IQ4_VALUES, dtype=torch.float32, device=first.device),
            len(weights), n, k, first.dtype, sum(part.nbytes for part in stacked.values()), constants,
        )  # fmt: skip

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The kernels' pointers, in their order."""
        return (*self.parts, self.table)

    @property
    def row_sizes(self) -> tuple[int, int, int]:
        """The bytes of a row's codes, its groups, and its spans."""
        codes, scales, _, factors, _, offset_factors = self.parts
        has_factors = self.constants["FACTORS"]
        spans = factors if has_factors else offset_factors
        return codes.shape[-1], scales.shape[-1], spans.shape[-1]


def fit(weights: Sequence[Weight]) -> TypeGuard[Sequence[BlockWeight]]:
    """Whether weights can lie behind each other: in blocks of one layout and shape, with columns in order, for rows as
    they come."""
    first = weights[0]
    return isinstance(first, BlockWeight) and all(
        isinstance(weight, BlockWeight)
        and (weight.layout, weight.shape) == (first.layout, first.shape)
        and weight.order_k is None
        and weight.inputs == "float"
        for weight in weights
    )


def _plain(part: Tensor) -> Tensor:
    """A part as the kernels read it: float8 as its bytes, each row behind the one before."""
    part = part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part
    return part.contiguous()


def _scales(weight: BlockWeight) -> str:
    if weight.paired:
        return "paired"
    return {torch.uint8: "e8m0", torch.float8_e4m3fn: "e4m3"}.get(weight.scales.dtype, "plain")
