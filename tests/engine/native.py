"""The C++ kernels for tests; where there is no compiler, tests of them are skipped."""

from __future__ import annotations

import pytest
import torch

from twinpool.contracts import cpu_levels as processor
from twinpool.engine.native import compile_kernels, current_kernels, native_kernels

COMMON = (compile_kernels.COMMON, *processor.levels())
"""The builds that have one order of additions, each with other instructions."""
BUILDS = (compile_kernels.MACHINE, *COMMON)
"""All that the kernels can be compiled for and run here."""
DTYPES = (torch.float32, torch.bfloat16)


def has_pairs(build: str) -> bool:
    """Whether a build multiplies bfloat16 by the instruction that adds two products at a time, in its own order."""
    has = processor.flags()
    return build == compile_kernels.MACHINE and "avx512_bf16" in has and "amx_bf16" not in has


def kernels_or_skip(build: str = compile_kernels.MACHINE) -> native_kernels.NativeKernels:
    try:
        return current_kernels.available(build)
    except compile_kernels.NativeUnavailable as error:
        pytest.skip(str(error))
