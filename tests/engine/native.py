"""The C++ kernels for tests; where there is no compiler, tests of them are skipped."""

from __future__ import annotations

import pytest

from engine import native


def kernels_or_skip() -> native.Kernels:
    try:
        return native.available()
    except native.NativeUnavailable as error:
        pytest.skip(str(error))
