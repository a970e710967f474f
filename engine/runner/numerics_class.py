"""The numerics class of a process: all that the bits of its results depend on besides weights, tokens and the engine's
code; and the digest of that code.

Within one class equal inputs give equal bits, on any machine; across classes they differ by rounding. The class is a
line that people can read, made of what is really in use. On CPUs it ends in a digest of results: products, exponentials
and sums of fixed numbers, computed by the very kernels and libraries that compute the model. So two machines that look
alike but compute otherwise (a library that sizes its blocks by the cache, say) are of two classes, and two machines
whose differences don't touch results are of one.

Results of fixed computations tell machines and libraries apart, but not builds: a kernel that adds in another order is
found only by a computation that runs it, at a shape at which that shows. So the source itself is compared
(`code_digest`). A comment counts as a change: the price is that answers end where they began while a cluster is
upgraded, where they could have moved.

Tensor-parallel sizes aren't part of the class: prefill and decode may be divided differently, and code that compares
bits across workers checks both sizes as well (`prefill.audit_runner`).
"""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from twinpool.contracts import cpu_levels as processor
from twinpool.engine.native import current_kernels, native_kernels
from twinpool.engine.tensors.row_exact_linear import RowExactLinear

ENGINE = Path(__file__).resolve().parents[1]
COMPUTES = ("attention", "gpu", "layers", "models", "native", "runner", "tensors", "weight_formats")
"""The folders of the engine on which results depend. Masks of structured output are named by the library that makes
them."""
SUFFIXES = (".py", ".cpp", ".h")
DIGITS = 10


@cache
def code_digest() -> str:
    """The digest of this process's code, read from the files once, at the first call."""
    return digest_of(ENGINE)


def digest_of(engine: Path) -> str:
    """The digest of the code in the folder `engine`, 10 hexadecimal digits. Takes milliseconds."""
    digest = hashlib.sha256()
    for folder in COMPUTES:
        for path in sorted((engine / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                digest.update(f"{path.relative_to(engine)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:DIGITS]


_PRODUCTS = ((96, 64), (320, 1024), (256, 4096))
"""[n, k] of the weights that are multiplied, with few and with many terms a sum."""
_ROWS = 16
"""A multiple of every quantum (`engine.tensors.row_exact_linear`)."""
_HEADS, _DIM, _POSITIONS = 4, 64, 128


def numerics_class(
    kernels: native_kernels.NativeKernels | None, level: str, dtype: torch.dtype, device: torch.device
) -> str:
    """Name the class of this process, which computes in `dtype` with `kernels` (None: with torch alone) at `level`, the
    value of ``engine.numerics_class``. The name is parts between slashes.

    The class of a GPU follows from its model and the versions of torch and CUDA: kernels are compiled for the GPU, and
    the host's computations don't touch the state.
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
    """Digest the results of fixed computations in `dtype` and in float32: 12 hexadecimal digits. Takes milliseconds."""
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
    """Make numbers in [-1, 1) by a linear congruence, not by a library's generator: the same everywhere."""
    count = 1
    for size in shape:
        count *= size
    at = torch.arange(count, dtype=torch.int64) + (seed << 24)
    mixed = (at * 6364136223846793005 + 1442695040888963407) >> 33
    mixed = (mixed ^ (mixed >> 13)) * 2654435761
    return ((mixed >> 8) & 0xFFFF).float().sub_(32768).div_(32768).view(shape)
