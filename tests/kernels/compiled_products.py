"""Compile the products of a GPU that need not be there; run as a script by `test_triton_compiles.py`.

Prints one JSON object: kind of product -> the matrix instructions in its code, and whether its loads are asynchronous.
"""

from __future__ import annotations

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.gpu import gpu_kernels as gpu
from engine.gpu.product_kernels import product_kernel

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
KINDS = {"few rows": (1, True), "few rows, in parts": (64, False), "many rows": (65, True)}


def code_of(dtype: torch.dtype, rows: int, whole: bool) -> str:
    """PTX for compute capability 9.0 of the product that is launched for so many rows."""
    tile_rows, warps = gpu.tiling(rows, dtype)
    fixed = {"ROWS": tile_rows, "BLOCK_N": gpu.BLOCK_N, "BLOCK_K": gpu.BLOCK_K, "PART": gpu.PART, "GROUP": 8}
    fixed |= {"WHOLE": whole, "BIAS": True, "UPCAST": False, "weight_stride_k": 1}
    data = f"*{NAMES[dtype]}"
    types = {"x_ptr": data, "weight_ptr": data, "bias_ptr": data, "out_ptr": data if whole else "*fp32"}
    names = product_kernel.arg_names
    source = ASTSource(
        fn=product_kernel,
        signature={name: "constexpr" if name in fixed else types.get(name, "i32") for name in names},
        constexprs={(at,): fixed[name] for at, name in enumerate(names) if name in fixed},
        attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name not in fixed},
    )
    options = {"num_warps": warps, "num_stages": gpu.STAGES}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def main() -> None:
    findings = {}
    for dtype, name in NAMES.items():
        for kind, (rows, whole) in KINDS.items():
            code = code_of(dtype, rows, whole)
            instructions = sorted(set(re.findall(r"wgmma\.mma_async[.\w]*", code)))
            findings[f"{kind} {name}"] = {
                "instructions": instructions, "asynchronous": "cp.async" in code, "tf32": "tf32" in code,
            }  # fmt: skip
    sys.stdout.write(json.dumps(findings))


if __name__ == "__main__":
    main()
