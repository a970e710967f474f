"""The C++ kernels for tests; where there is no compiler, tests of them are skipped."""

from __future__ import annotations

import pytest
import torch

from twinpool.contracts import cpu_levels as processor
from twinpool.engine.native import compile_kernels, current_kernels, native_kernels

BUILDS = (compile_kernels.MACHINE, *processor.levels())
"""All that the kernels can be compiled for and run here."""


def has_products(build: str, dtype: torch.dtype) -> bool:
    """Whether a build multiplies matrices of this dtype itself: bfloat16 only for processors that have instructions for
    such products and no tiles, with which oneDNN is faster."""
    has = processor.flags()
    own = build == compile_kernels.MACHINE and "avx512_bf16" in has and "amx_bf16" not in has
    return dtype == torch.float32 or own


DTYPES = (torch.float32, torch.bfloat16)
PRODUCTS = [(build, dtype) for build in BUILDS for dtype in DTYPES if has_products(build, dtype)]


def kernels_or_skip(build: str = compile_kernels.MACHINE) -> native_kernels.NativeKernels:
    try:
        return current_kernels.available(build)
    except compile_kernels.NativeUnavailable as error:
        pytest.skip(str(error))
