"""Triton kernels of norms and activations: a program has a whole row, or elements by themselves."""

# The compiler reads these functions, Python does not run them: they have no types that mypy could check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr, added_ptr, weight_ptr, sum_ptr, out_ptr, x_stride, added_stride, weight_rows, width, eps,
    BLOCK: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out[r] = weight[r % weight_rows] * x[r] / root of (mean of squares + eps), in float32. Grid (rows,).

    `ADD`: x is x + added, rounded to its dtype and stored to sum [rows, width] as well. `WIDE`: the weight is float32
    and multiplies before the rounding; else after it, in the dtype of x.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0)
    if ADD:
        added = tl.load(added_ptr + row * added_stride + at, mask=mask, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * width + at, x, mask=mask)
    y = x.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(y * y, 0) / width + eps)
    weight = tl.load(weight_ptr + (row % weight_rows) * width + at, mask=mask, other=0.0)
    if WIDE:
        out = (y * scale * weight).to(x.dtype)
    else:
        out = ((y * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + row * width + at, out, mask=mask)


@triton.jit
def square_sum_kernel(x_ptr, out_ptr, x_stride, width, BLOCK: tl.constexpr):
    """out[r] = the sum of the squares of x[r], in float32. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(x * x, 0))


@triton.jit
def silu_product_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """out[r, i] = silu(gate[r, i]), rounded, times up[r, i]; gate and up lie side by side. Grid (rows, columns)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_up_ptr + row * 2 * width + at, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * width + width + at, mask=mask, other=0.0)
    x = gate.to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(gate.dtype)
    tl.store(out_ptr + row * width + at, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=mask)
