"""Norms and activations, row-exact: a row has the same bits wherever it lies in a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from twinpool.engine.native.current_kernels import kernels_for

_GELU_SCALE = 0.7978845608028654
"""The root of 2 / pi."""
_GELU_CUBIC = 0.044715


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32.

    A weight in the dtype of `x` multiplies the result after it was rounded to that dtype, as in Llama; a float32 weight
    multiplies before the rounding, as in Gemma and gpt-oss.
    """
    kernels = kernels_for(x)
    if kernels is not None and (kernels.wide_norms or weight.dtype == x.dtype):
        return kernels.rms_norm(x, weight, eps)
    y = x.float()
    variance = y.square().mean(-1, keepdim=True)
    y = y * variance.add_(eps).rsqrt_()
    return y.to(x.dtype).mul_(weight) if weight.dtype == x.dtype else y.mul_(weight).to(x.dtype)


def add_rms_norm(x_mh: Tensor, added_mh: Tensor, weight_h: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``x + added`` and its `rms_norm`: the residual stream after a mixer, and the input of the next one."""
    kernels = kernels_for(x_mh)
    if kernels is not None and (kernels.wide_norms or weight_h.dtype == x_mh.dtype):
        return kernels.add_rms_norm(x_mh, added_mh, weight_h, eps)
    x_mh = x_mh + added_mh
    return x_mh, rms_norm(x_mh, weight_h, eps)


class LayerNorm:
    """The norm of mean 0 and variance 1 over the last axis, in float32, times a weight, plus a bias if any."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        """`weight` and `bias`: float32, of any shape that multiplies the rows."""
        self._weight, self._bias, self._eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        width, y = x.shape[-1], x.float()
        y = y - row_sum(y).div_(width)
        y = y.mul_(row_sum(y.square()).div_(width).add_(self._eps).rsqrt_()).mul_(self._weight)
        return (y if self._bias is None else y.add_(self._bias)).to(x.dtype)


def row_sum(x: Tensor) -> Tensor:
    """Sum the last axis of `x`, [..., n], to [..., 1]: one half is added to the other until one element is left, so
    that a row has the same bits wherever it lies, on a GPU as on a CPU."""
    while (width := x.shape[-1]) > 1:
        half = width // 2
        added = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat((added, x[..., 2 * half :]), dim=-1) if width % 2 else added
    return x


def square_sum(x: Tensor) -> Tensor:
    """Return the sums of the squares of the last axis, in float32: [..., n] gives [...]."""
    kernels = kernels_for(x)
    return kernels.square_sum(x) if kernels is not None else x.float().square().sum(-1)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in float32, with the same bits for an element wherever it lies, like `silu`."""
    return torch.exp(-x).add_(1.0).reciprocal_()


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) in float32 without overflow, with the same bits for an element wherever it lies."""
    return x.clamp_min(0.0).add_(x.abs().neg_().exp_().log1p_())


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its hyperbolic-tangent approximation (arXiv 1606.08415) in float32; row-exact as well.

    (1 + tanh(u)) / 2 is the sigmoid of 2u, which takes one exp and loses nothing near zero. May change `x`.
    """
    u = x.square().mul_(_GELU_CUBIC).add_(1.0).mul_(x).mul_(-2.0 * _GELU_SCALE)
    return x.div_(u.exp_().add_(1.0))
