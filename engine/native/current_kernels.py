"""Kernels in C++ for the CPU, compiled on the machine that runs them; torch does the same wherever they can't be had.

Layers ask `kernels_for`, and are told of kernels while a thread is within `using`: a decoder is built and computes
there. So two engines of one process may differ.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from engine.native.compile_kernels import MACHINE, load_library
from engine.native.native_kernels import NativeKernels


class _Current(threading.local):
    kernels: NativeKernels | None = None


_current = _Current()


def available(level: str = MACHINE) -> NativeKernels:
    """The kernels, compiled if this is the first time on this machine. Raises `NativeUnavailable`."""
    return NativeKernels(load_library(level))


@contextmanager
def using(kernels: NativeKernels | None) -> Iterator[None]:
    """Within, this thread's layers compute with these kernels, or with torch's operations alone."""
    before, _current.kernels = _current.kernels, kernels
    try:
        yield
    finally:
        _current.kernels = before


def in_use() -> bool:
    return _current.kernels is not None


def kernels_for(x: Tensor) -> NativeKernels | None:
    """The kernels in use, if they know tensors like this one."""
    kernels = _current.kernels
    return kernels if kernels is not None and kernels.knows(x) else None
