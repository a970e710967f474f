"""The kernels that layers compute with where there are any: those in C++ on a CPU, those in Triton on a GPU; and which
of them the current thread computes with. Without any, layers compute the same with torch.

What both have in common is `LayerKernels`.

Layers ask `kernels_for`, which returns kernels only within `using`: decoders are built and compute there. So two
engines of one process may use different kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from twinpool.engine.native.compile_kernels import MACHINE, load_library
from twinpool.engine.native.native_kernels import NativeKernels
from twinpool.engine.weight_formats.block_weight import BlockStack, BlockWeight

Product = Callable[[Tensor], Tensor]
"""``x @ weight.T + bias`` with a weight that was packed: [m, k] gives [m, n], in the dtype of x. Rows are exact."""


@runtime_checkable
class BlockRows(Protocol):
    """A product with a weight in blocks, of which rows can be looked up."""

    def rows(self, rows_m: Tensor) -> Tensor:
        """Rows of the weight, [m] int64, unpacked: [m, k]."""


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

    def packed_blocks(self, weight: BlockWeight | BlockStack, bias_n: Tensor | None) -> Product | None:
        """Return the product with a weight in blocks; None where there is none. Of a weight of one layout it can look
        up rows (`BlockRows`)."""

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


class _Current(threading.local):
    kernels: LayerKernels | None = None


_current = _Current()


def available(level: str = MACHINE) -> NativeKernels:
    """Load the C++ kernels, compiling them the first time on this machine. Raises `NativeUnavailable`."""
    return NativeKernels(load_library(level))


@contextmanager
def using(kernels: LayerKernels | None) -> Iterator[None]:
    """Let this thread's layers compute with these kernels (None: with torch's operations alone) inside the context."""
    before, _current.kernels = _current.kernels, kernels
    try:
        if kernels is not None:
            kernels.begin()
        yield
    finally:
        _current.kernels = before


def in_use() -> bool:
    return _current.kernels is not None


def kernels_for(x: Tensor) -> LayerKernels | None:
    """Return the kernels in use if they compute with tensors of this device and dtype, else None."""
    kernels = _current.kernels
    if kernels is None or x.dtype not in kernels.dtypes or x.device.type not in kernels.devices:
        return None
    return kernels


def native_for(x: Tensor) -> NativeKernels | None:
    """Return the kernels in use if they are those in C++ and compute with such tensors, else None."""
    kernels = kernels_for(x)
    return kernels if isinstance(kernels, NativeKernels) else None
