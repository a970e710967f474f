"""The compute capability of the GPU at hand, by which kernels' tiles and stages are chosen."""

from __future__ import annotations

from functools import cache

import torch


@cache
def device_capability() -> int:
    """The compute capability of the current GPU, times 10; 90 where there is none, as in Triton's interpreter."""
    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
