"""Norms and activations: by row, and the same bits for a row wherever it lies."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32, rounded before the weight as transformers does."""
    y = x.float()
    variance = y.square().mean(-1, keepdim=True)
    return (y * variance.add_(eps).rsqrt_()).to(x.dtype).mul_(weight)


def rms_norm_late(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same with a float32 weight, rounded once, after it: what Gemma, Qwen3-Next and Nemotron-H compute."""
    y = x.float()
    variance = y.square().mean(-1, keepdim=True)
    return (y * variance.add_(eps).rsqrt_()).mul_(weight).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in float32, exact by element as `silu` is."""
    return torch.exp(-x).add_(1.0).reciprocal_()


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) in float32 without overflow, exact by element as `silu` is."""
    return x.clamp_min(0.0).add_(x.abs().neg_().exp_().log1p_())


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) in float32, the same bits for an element wherever it lies.

    Not torch's silu or sigmoid: their vector lanes and their scalar tails round differently, and where a tail falls
    depends on the number of rows and threads. exp and a quotient are the same everywhere.
    """
    return x / torch.exp(-x).add_(1.0)
