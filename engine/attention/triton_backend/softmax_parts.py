"""Scratch for parts of a softmax (`merge_kernels`): how much of it, and its bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SCRATCH_BYTES = 128 << 20
"""What one call keeps of parts of results at most, whatever its batch and contexts: where all of them would be more,
some queries are computed and merged after the others."""
_ALIGNED = 16
"""Elements of float32: where each of the tensors begins, so that a kernel is compiled once, for aligned ones."""
_PADDING_BYTES = 2 * _ALIGNED * 4


@dataclass(frozen=True, slots=True)
class Parts:
    """Room for `count` parts with values `width` wide."""

    count: int
    width: int

    @property
    def nbytes(self) -> int:
        return self.count * (self.width + 2) * torch.float32.itemsize

    def fit(self, scratch_bytes: int) -> bool:
        return self.nbytes + _PADDING_BYTES <= scratch_bytes

    def times(self, many: int) -> Parts:
        return Parts(self.count * many, self.width)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Maxima and sums [count] and weighted values [count * width], float32, of any content."""
        each = -(-self.count // _ALIGNED) * _ALIGNED
        numbers = torch.empty(2 * each + self.count * self.width, dtype=torch.float32, device=device)
        return numbers[: self.count], numbers[each : each + self.count], numbers[2 * each :]


def waves(tokens: int, bytes_a_token: int, scratch_bytes: int, quantum: int) -> Iterator[tuple[int, int]]:
    """Cut [0, tokens) into runs whose parts fit into the scratch: where each begins, and how many tokens it has.

    Whole multiples of `quantum` where so many fit; a single token always does.
    """
    fits = max(1, (scratch_bytes - _PADDING_BYTES) // bytes_a_token if bytes_a_token else tokens)
    at_once = fits // quantum * quantum if quantum <= fits < tokens else fits
    for first in range(0, tokens, at_once):
        yield first, min(at_once, tokens - first)
