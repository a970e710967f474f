"""The kernels that layers compute with where there are any: those in C++ on a CPU, those in Triton on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""``x @ weight.T + bias`` with a weight that was packed: [m, k] gives [m, n], in the dtype of x. Rows are exact."""


class LayerKernels(Protocol):
    """Products, norms and activations; shapes are those of the torch operations that they replace."""

    wide_norms: bool
    """Whether norms know weights of float32 beside states of another dtype."""

    @property
    def devices(self) -> Collection[str]:
        """The types of devices whose tensors these kernels compute with."""

    @property
    def dtypes(self) -> Collection[torch.dtype]:
        """The dtypes of those tensors."""

    def begin(self) -> None:
        """Get ready to compute on this thread."""

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Whether products of this dtype are these kernels'."""

    def packed(self, weight_nk: Tensor, bias_n: Tensor | None) -> Product:
        """Return the product with a weight and bias."""

    def packed_heads(self, weight_hkn: Tensor) -> Product | None:
        """Return the product with one matrix a head ([m, heads * k] gives [m, heads * n]); None where there is none."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return `engine.layers.norm.rms_norm`; the weight has the dtype of x, or `wide_norms`."""

    def add_rms_norm(self, x_mn: Tensor, added_mn: Tensor, weight_n: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return ``x + added`` and its norm."""

    def square_sum(self, x: Tensor) -> Tensor:
        """Return `engine.layers.norm.square_sum`."""

    def silu_product(self, gate_up_mn: Tensor) -> Tensor:
        """Return silu(gate) * up of gate and up side by side, [M, 2n] to [M, n]."""
