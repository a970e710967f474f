"""The numerics class of a process: all that the bits of its results depend on besides weights and tokens.

Within one class equal inputs give equal bits, on any machine; across classes they differ by rounding. The class is a
line that people can read, made of what is really in use, and ends in a digest of results: products, exponentials and
sums of fixed numbers, computed by the very kernels and libraries that compute the model. So two machines that look
alike but compute otherwise (a library that sizes its blocks by the cache, say) are of two classes, and two that look
different in nothing that matters are of one.

Tensor-parallel sizes aren't part of it: prefill and decode may be divided differently, and whoever compares bits
across that asks for both sizes (`prefill.audit_runner`).
"""

from __future__ import annotations

import hashlib
import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from contracts import cpu_levels as processor
from engine.native import current_kernels, native_kernels
from engine.tensors.row_exact_linear import RowExactLinear

_PRODUCTS = ((96, 64), (320, 1024), (256, 4096))
"""[n, k] of the weights that are multiplied, of few and many terms a sum."""
_ROWS = 16
"""Whole quanta of any size (engine.numerics)."""
_HEADS, _DIM, _POSITIONS = 4, 64, 128


def numerics_class(
    kernels: native_kernels.NativeKernels | None, level: str, dtype: torch.dtype, device: torch.device
) -> str:
    """The class of this process, computing in `dtype` with `kernels` (None: with torch alone), at the level
    ``engine.numerics_class``: parts between slashes.

    A GPU's is its model's: kernels are compiled for it, and what runs on the host doesn't touch the state.
    """
    name = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        gpu = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
        return f"cuda/{gpu}/sm{major}{minor}/torch-{torch.__version__}/cuda-{torch.version.cuda}/{name}"
    pinned = "" if level == "auto" else level
    parts = [
        "cpu",
        platform.machine(),
        "torch" if kernels is None else f"native-{processor.described(pinned)}",
        f"torch-{torch.__version__}",
        f"aten-{torch.backends.cpu.get_cpu_capability().lower()}",
        f"onednn-{processor.onednn_isa()}" if torch.backends.mkldnn.is_available() else "no-onednn",  # type: ignore[no-untyped-call]
        name,
        f"bits-{digest(kernels, dtype)}",
    ]
    return "/".join(parts)


@torch.inference_mode()
def digest(kernels: native_kernels.NativeKernels | None, dtype: torch.dtype) -> str:
    """Of the results of fixed computations in `dtype` and in float32, 12 hexadecimal digits. Some milliseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with current_kernels.using(kernels):
            results = _results(dtype)
    finally:
        torch.set_num_threads(before)
    found = hashlib.blake2b(digest_size=6)
    for result in results:
        found.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _results(dtype: torch.dtype) -> list[Tensor]:
    results = []
    for number, (n, k) in enumerate(_PRODUCTS):
        weight, x = _numbers(number, n, k).to(dtype), _numbers(10 + number, _ROWS, k).to(dtype)
        results.append(RowExactLinear(weight)(x))
    q, keys = _numbers(20, _HEADS, _ROWS, _DIM), _numbers(21, _HEADS, _DIM, _POSITIONS)
    scores = torch.bmm(q, keys)
    weights = scores.softmax(-1)
    results += [scores, weights, torch.bmm(weights, keys.transpose(1, 2).contiguous())]
    x = 4 * _numbers(22, _ROWS, 1000)
    results += [x.exp(), x.tanh(), F.silu(x), x.square().mean(-1).add(1e-6).rsqrt(), x.sigmoid(), x.cos(), x.sum(-1)]
    return results


def _numbers(seed: int, *shape: int) -> Tensor:
    """Numbers in [-1, 1) that no library draws: by a linear congruence, the same everywhere."""
    count = 1
    for size in shape:
        count *= size
    at = torch.arange(count, dtype=torch.int64) + (seed << 24)
    mixed = (at * 6364136223846793005 + 1442695040888963407) >> 33
    mixed = (mixed ^ (mixed >> 13)) * 2654435761
    return ((mixed >> 8) & 0xFFFF).float().sub_(32768).div_(32768).view(shape)
