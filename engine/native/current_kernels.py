"""The kernels that the current thread computes with, or none; layers then compute the same with torch.

Layers ask `kernels_for`, which returns kernels only within `using`: decoders are built and compute there. So two
engines of one process may use different kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from twinpool.engine.native.compile_kernels import MACHINE, load_library
from twinpool.engine.native.layer_kernels import LayerKernels
from twinpool.engine.native.native_kernels import NativeKernels


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
