"""Compile the kernels for a GPU that need not be there; run as a script by `test_triton_compiles.py`.

Prints one JSON object: kernel and dtype -> what its machine-independent code contains.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention.triton_backend import attention_kernels as kernels

SHAPE = {"PAGE_TOKENS": 16, "HEAD_DIM": 48, "HEADS_PER_KV": 3, "GROUP": 4, "ROWS": 64, "BLOCK_D": 64, "BLOCK_N": 64}
SHAPE |= {"SPLIT": 256, "UPCAST": False, "WIDTH": 96, "BLOCK": 128}
PLAIN = SHAPE | {"WINDOW": 0, "FIRSTS": False, "SINKS": False, "CAPPED": False}
WINDOWED = SHAPE | {"WINDOW": 128, "FIRSTS": True, "SINKS": True, "CAPPED": True}
INTEGERS = {"starts_ptr": "*i32", "offsets_ptr": "*i32", "tables_ptr": "*i32", "slots_ptr": "*i64"}
INTEGERS |= {"epochs_ptr": "*i32", "now_ptr": "*i32", "stale_ptr": "*i8"}
INTEGERS |= {"firsts_ptr": "*i32"}
PARTS = {"m_ptr": "*fp32", "total_ptr": "*fp32", "acc_ptr": "*fp32", "sinks_ptr": "*fp32"}
FLOATS = ("scale_log2", "cap_log2")


def code_of(
    kernel: Any, dtype: str, capability: int, shape: dict[str, int], types: Mapping[str, str] | None = None
) -> str:
    """PTX of `kernel` for data of `dtype` (Triton's name) on a GPU of compute capability `capability`.

    `types` of arguments that are neither data of that dtype nor known by their names.
    """

    def kind(name: str) -> str:
        if name in shape:
            return "constexpr"
        if types and name in types:
            return types[name]
        if name.endswith("_ptr"):
            return {**INTEGERS, **PARTS}.get(name, f"*{dtype}")
        return "fp32" if name in FLOATS else "i32"

    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: kind(name) for name in names},
        constexprs={(at,): shape[name] for at, name in enumerate(names) if name in shape},
        attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name.endswith("_ptr")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return str(compiled.asm["ptx"])


def main() -> None:
    findings = {}
    for kernel in (
        kernels.extend_kernel, kernels.decode_split_kernel, kernels.decode_merge_kernel, kernels.store_kernel,
        kernels.epoch_check_kernel,
    ):  # fmt: skip
        for dtype in ("bf16", "fp32"):
            name = kernel.fn.__name__.removesuffix("_kernel")
            for kind, shape in (("", PLAIN), ("windowed ", WINDOWED)):
                if kind and "WINDOW" not in kernel.arg_names:
                    continue
                code = code_of(kernel, dtype, 90, shape)
                findings[f"{kind}{name} {dtype}"] = [word for word in ("tf32", "wgmma", "fma.rn.f32") if word in code]
    sys.stdout.write(json.dumps(findings))


if __name__ == "__main__":
    main()
