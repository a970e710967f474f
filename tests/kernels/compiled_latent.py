"""Compile the latent kernels for a GPU that need not be there; run as a script by `test_latent_compiles.py`.

At the shapes of the published models. Prints one JSON object: kernel and dtype -> what its machine-independent code
contains, and the bytes of shared memory that it needs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention.triton_backend import latent_kernels as kernels

ATTENTION = {"PAGE_TOKENS": 64, "LATENT": 512, "TURNING": 64, "BLOCK_L": 512, "BLOCK_R": 64, "SPLIT": 1024}
INDEX = {"PAGE_TOKENS": 64, "DIM": 128, "BLOCK_D": 128, "BLOCK_H": 64, "BLOCK_N": 64, "QUERIES": 8, "BLOCK": 1024}
BF16 = ATTENTION | {"ROWS": 64, "GROUP": 64, "BLOCK_N": 32, "UPCAST": False}
FP32 = ATTENTION | {"ROWS": 16, "GROUP": 16, "BLOCK_N": 16, "UPCAST": False}
TYPES = {
    "starts_ptr": "*i32", "offsets_ptr": "*i32", "tables_ptr": "*i32", "slots_ptr": "*i32", "positions_ptr": "*i32",
    "counts_ptr": "*i32", "m_ptr": "*fp32", "total_ptr": "*fp32", "acc_ptr": "*fp32", "scores_ptr": "*fp32",
    "weights_ptr": "*fp32", "scales_ptr": "*fp32", "scale_log2": "fp32",
}  # fmt: skip


def findings(kernel: Any, dtype: str, shape: dict[str, Any], **types: str) -> dict[str, Any]:
    """What `kernel` is on a GPU of compute capability 9.0, for data of `dtype` (Triton's name)."""
    names = kernel.arg_names
    known = TYPES | types

    def kind(name: str) -> str:
        if name in shape:
            return "constexpr"
        return known.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")

    source = ASTSource(
        fn=kernel,
        signature={name: kind(name) for name in names},
        constexprs={(at,): shape[name] for at, name in enumerate(names) if name in shape},
        attrs={
            (at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name.endswith(("_ptr", "_p", "_t"))
        },
    )
    attention = kernel.fn.__name__.startswith("latent")
    options = {"num_warps": 8, "num_stages": 1} if attention else {}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    words = [word for word in ("tf32", "wgmma", "fma.rn.f32", "atom.") if word in compiled.asm["ptx"]]
    return {"words": words, "shared": compiled.metadata.shared}


def main() -> None:
    found = {}
    for kernel in (kernels.latent_extend_kernel, kernels.latent_split_kernel):
        name = kernel.fn.__name__.removesuffix("_kernel")
        found[f"{name} bf16"] = findings(kernel, "bf16", BF16)
        found[f"{name} fp32"] = findings(kernel, "fp32", FP32)
    plain, float8 = INDEX | {"FLOAT8": False, "UPCAST": False}, INDEX | {"FLOAT8": True, "UPCAST": False}
    found["index_score bf16"] = findings(kernels.index_score_kernel, "bf16", plain)
    found["index_score fp8"] = findings(kernels.index_score_kernel, "bf16", float8, keys_ptr="*fp8e4nv")
    found["select"] = findings(kernels.select_kernel, "fp32", INDEX)
    found["store fp8"] = findings(kernels.store_float8_kernel, "bf16", INDEX, pages_ptr="*fp8e4nv", slots_ptr="*i64")
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
