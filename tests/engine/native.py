"""The C++ kernels for tests; where there is no compiler, tests of them are skipped."""

from __future__ import annotations

import pytest

from contracts import cpu_levels as processor
from engine.native import compile_kernels, current_kernels, native_kernels

BUILDS = (compile_kernels.MACHINE, *processor.levels())
"""All that the kernels can be compiled for and run here."""


def kernels_or_skip(build: str = compile_kernels.MACHINE) -> native_kernels.NativeKernels:
    try:
        return current_kernels.available(build)
    except compile_kernels.NativeUnavailable as error:
        pytest.skip(str(error))
