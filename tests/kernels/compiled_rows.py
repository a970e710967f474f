"""Compile the kernels by row and of experts for a GPU that need not be there; run by `test_triton_compiles.py`."""

from __future__ import annotations

import json
import sys

from engine.layers.mixers import store_heads_kernel
from engine.layers.moe import expert_kernels as experts
from engine.runner.sampling import draw_kernel
from tests.kernels.compiled_claims import code_of

WORDS = ("tf32", "wgmma", "fma.rn.f32", "fma.rn.f64")
PLACES = {name: "*i64" for name in ("row_ptr", "expert_ptr", "first_ptr", "count_ptr", "place_ptr", "slots_ptr")}
PRODUCT = {"ROWS": 64, "BLOCK_N": 64, "BLOCK_K": 64, "BIAS": True, "UPCAST": False}
HEADS = {
    "HEADS": 6,
    "KV_HEADS": 2,
    "HEAD_DIM": 48,
    "BLOCK_D": 64,
    "PAGE_TOKENS": 16,
    "NORM": True,
    "ROPE": True,
    "MUTED": True,
}
DOUBLES = {name: "*fp64" for name in ("temperature_ptr", "top_p_ptr", "min_p_ptr", "uniform_ptr")}
SUMS = {"weight_ptr": "*fp32", "out_ptr": "*fp32"}
WHOLE = {"top_k_ptr": "*i64", "out_ptr": "*i64"}


def main() -> None:
    codes = {
        f"product {dtype}": code_of(experts.grouped_product_kernel, dtype, 90, PRODUCT, PLACES)
        for dtype in ("bf16", "fp32")
    }
    codes["sum"] = code_of(experts.weighted_sum_kernel, "bf16", 90, {"TOP_K": 8, "BLOCK": 512}, PLACES | SUMS)
    codes["heads"] = code_of(
        store_heads_kernel.store_heads_kernel, "bf16", 90, HEADS, PLACES | {"muted_ptr": "*i8", "eps": "fp32"}
    )
    codes["draw"] = code_of(draw_kernel.draw_kernel, "fp32", 90, {"BLOCK": 1024, "LIMITS": True}, DOUBLES | WHOLE)
    findings = {name: [word for word in WORDS if word in code] for name, code in codes.items()}
    sys.stdout.write(json.dumps(findings))


if __name__ == "__main__":
    main()
