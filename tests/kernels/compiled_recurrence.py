"""Compile the kernels of recurrences for a GPU that need not be there; a script of `test_recurrence_kernels.py`."""

from __future__ import annotations

import json
import sys

from engine.attention.triton_backend import recurrence_kernels as kernels
from tests.kernels.compiled_claims import code_of

SHAPE = {"HEADS": 4, "GROUPS": 2, "KEY_DIM": 24, "VALUE_DIM": 48, "BLOCK_K": 32, "BLOCK_V": 64, "MUTED": True}
SHAPE |= {"UNITS": 4, "WIDTH": 24, "TAPS": 3, "ROWS": 16, "COLUMNS": 128, "BIAS": True}


def main() -> None:
    findings = {}
    for kernel in (
        kernels.conv_kernel, kernels.scan_kernel, kernels.keep_keys_kernel, kernels.keep_rows_kernel,
    ):  # fmt: skip
        for delta in (True, False):
            code = code_of(kernel, "fp32", 90, SHAPE | {"DELTA": delta})
            findings[f"{kernel.fn.__name__} {delta}"] = "tf32" in code
    sys.stdout.write(json.dumps(findings))


if __name__ == "__main__":
    main()
