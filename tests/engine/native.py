"""The C++ kernels for tests; where there is no compiler, tests of them are skipped."""

from __future__ import annotations

import pytest

from contracts import processor
from engine import native

BUILDS = (native.MACHINE, *processor.levels())
"""All that the kernels can be compiled for and run here."""


def kernels_or_skip(build: str = native.MACHINE) -> native.Kernels:
    try:
        return native.available(build)
    except native.NativeUnavailable as error:
        pytest.skip(str(error))
