"""Norms and activations: by row, and the same bits for a row wherever it lies."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.native import kernels_for


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32, rounded before the weight as transformers does."""
    kernels = kernels_for(x)
    if kernels is not None and weight.dtype == x.dtype:
        return kernels.rms_norm(x, weight, eps)
    y = x.float()
    variance = y.square().mean(-1, keepdim=True)
    return (y * variance.add_(eps).rsqrt_()).to(x.dtype).mul_(weight)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) in float32, the same bits for an element wherever it lies.

    Not torch's silu or sigmoid: their vector lanes and their scalar tails round differently, and where a tail falls
    depends on the number of rows and threads. exp and a quotient are the same everywhere.
    """
    return x / torch.exp(-x).add_(1.0)
