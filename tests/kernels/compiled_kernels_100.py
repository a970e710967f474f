"""Compile every kernel as production launches it, for compute capability 10.0; run by `test_compiled_kernels.py`."""

from __future__ import annotations

from tests.kernels.compiled_kernels import main

if __name__ == "__main__":
    main(100)
