"""Rotary position embedding, with the scalings that depend on the absolute position alone.

The frequencies follow transformers' definitions, operation by operation, since a last-bit difference in a frequency
grows with the position: default, ``linear`` (positions divided by a factor), ``llama3`` (long wavelengths divided,
short ones kept, a smooth passage between), ``yarn`` (arXiv 2309.00071: a ramp between divided and kept over the head's
dimensions, and a factor on cos and sin), ``factors`` (each divided by a number of its own, as GGUF files have what
Llama 3's scaling came to), ``dynamic`` (a larger base, for the longest sequence that is served instead of the one at
hand), ``ntk_alpha`` (a larger base, by a number that is given), ``longrope`` (arXiv 2402.13753: each divided by a
number of its own, from one of two lists by the longest sequence that is served, and a factor on cos and sin) and
``proportional`` (a part of a head's dimensions is rotated, at the frequencies that it has when all of them are; the
angle of the other dimensions is zero).
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from twinpool.cache.device.device_copies import copy_up
from twinpool.contracts.checkpoint.rope_spec import RopeSpec

_TABLE_STEP = 4096
"""Tables grow by this many positions, always computed in the same pieces."""


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Compute the angles (radians) a position, [head_dim / 2] float32, and the factor on cos and sin."""
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    if rope.kind == "longrope":
        return _longrope(rope, head_dim)
    if rope.kind == "proportional":
        return _proportional(rope, head_dim), 1.0
    theta = _stretched_theta(rope, head_dim)
    inv_freq = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        inv_freq /= _number(rope, "factor")
    elif rope.kind == "llama3":
        inv_freq = _llama3(rope, inv_freq)
    elif rope.kind == "factors":
        inv_freq /= torch.tensor(rope.parameters["factors"], dtype=torch.float32)
    return inv_freq, 1.0


class RopeTable:
    """The table of cos and sin by position, in the model's dtype; it grows with the largest position seen."""

    def __init__(self, rope: RopeSpec, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dim = head_dim
        self._inv_freq, self._factor = inverse_frequencies(rope, head_dim)
        self._dtype, self._device = dtype, device
        self.axes_d = torch.tensor(2 * rope.axes, device=device) if rope.axes else None
        """[head_dim] int64: by which of three positions each dimension is turned; None: there is one."""
        self._cos_pd = torch.empty(0, head_dim, dtype=dtype, device=device)
        self._sin_pd = self._cos_pd

    def at(self, positions_t: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """Look up cos and signed sin at `positions_t` ([T] int64, all below `limit`): [T, 1, head_dim] each. Positions
        of three axes are [3, T]: each dimension is turned by its own.

        The first half of sin is negated, so that a rotation is ``x * cos + swap_halves(x) * sin``: the very products
        of ``rotate_half``, whose sign is exact.
        """
        while limit > len(self._cos_pd):
            self._grow()
        if positions_t.dim() == 2:
            assert self.axes_d is not None, "one position turns all dimensions"
            places_td = positions_t.index_select(0, self.axes_d).T
            return self._cos_pd.gather(0, places_td).unsqueeze(1), self._sin_pd.gather(0, places_td).unsqueeze(1)
        return self._cos_pd[positions_t].unsqueeze(1), self._sin_pd[positions_t].unsqueeze(1)

    def _grow(self) -> None:
        start = len(self._cos_pd)
        angles = torch.arange(start, start + _TABLE_STEP, dtype=torch.float32)[:, None] * self._inv_freq
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        new_2pd = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))).to(self._dtype)
        cos_pd, sin_pd = copy_up(new_2pd, self._device)
        self._cos_pd = torch.cat((self._cos_pd, cos_pd))
        self._sin_pd = torch.cat((self._sin_pd, sin_pd))


def rotate(x_thd: Tensor, cos_t1d: Tensor, sin_t1d: Tensor) -> Tensor:
    """Rotate the half-split pairs of each head by its position's angles, as `RopeTable.at` returns them."""
    half = x_thd.shape[-1] // 2
    swapped = torch.cat((x_thd[..., half:], x_thd[..., :half]), dim=-1)
    return (x_thd * cos_t1d).add_(swapped.mul_(sin_t1d))


def rotate_first(x_thd: Tensor, cos_t1d: Tensor, sin_t1d: Tensor) -> Tensor:
    """Rotate as many of each head's first dimensions as the angles are for; the others stay as they are."""
    turning = cos_t1d.shape[-1]
    if turning == x_thd.shape[-1]:
        return rotate(x_thd, cos_t1d, sin_t1d)
    return torch.cat((rotate(x_thd[..., :turning], cos_t1d, sin_t1d), x_thd[..., turning:]), dim=-1)


def halves_apart(rope_dim: int, head_dim: int) -> Tensor:
    """The order of a head's dimensions, [head_dim] int64, in which the first `rope_dim` are half the first of each pair
    of neighbours, half the second."""
    turned, rest = torch.arange(rope_dim).view(-1, 2), torch.arange(rope_dim, head_dim)
    return torch.cat((turned[:, 0], turned[:, 1], rest))


def _number(rope: RopeSpec, key: str) -> float:
    return float(cast(float, rope.parameters[key]))


def _optional(rope: RopeSpec, key: str) -> float | None:
    value = rope.parameters.get(key)
    return None if value is None else float(cast(float, value))


def _stretched_theta(rope: RopeSpec, head_dim: int) -> float:
    """The base; of ``dynamic`` that of sequences of the length that is served, one for all of them, however long each
    is."""
    if rope.kind == "dynamic":
        factor, trained = _number(rope, "factor"), _number(rope, "original_max_position_embeddings")
        stretch = factor * _number(rope, "context") / trained - (factor - 1)
    elif rope.kind == "ntk_alpha":
        stretch = _number(rope, "alpha")
    else:
        return rope.theta
    return rope.theta if head_dim == 2 else float(rope.theta * stretch ** (head_dim / (head_dim - 2)))


def _llama3(rope: RopeSpec, inv_freq: Tensor) -> Tensor:
    factor, trained = _number(rope, "factor"), _number(rope, "original_max_position_embeddings")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > trained / low, inv_freq / factor, inv_freq)
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, blended, scaled)


def _proportional(rope: RopeSpec, head_dim: int) -> Tensor:
    turning = int(rope.partial * head_dim // 2)
    inv_freq = torch.zeros(head_dim // 2)
    inv_freq[:turning] = 1.0 / (rope.theta ** (torch.arange(0, 2 * turning, 2, dtype=torch.float32) / head_dim))
    return inv_freq / (_optional(rope, "factor") or 1.0)


def _longrope(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    factors = torch.tensor(rope.parameters[rope.factors_key], dtype=torch.float32)
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    given, factor = _optional(rope, "attention_factor"), _number(rope, "factor")
    if given is None and factor > 1:
        given = math.sqrt(1 + math.log(factor) / math.log(_number(rope, "original_max_position_embeddings")))
    return 1.0 / (factors * rope.theta**powers), 1.0 if given is None else given


def _yarn(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    factor, trained = _number(rope, "factor"), _number(rope, "original_max_position_embeddings")

    def turning_dim(rotations: float) -> float:
        """The dimension that is rotated by `rotations` full turns over the trained context."""
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turning_dim(_optional(rope, "beta_fast") or 32), turning_dim(_optional(rope, "beta_slow") or 1)
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    keep = 1 - ramp
    inv_freq = 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep
    return inv_freq, _yarn_factor(rope, factor)


def _yarn_factor(rope: RopeSpec, factor: float) -> float:
    given = _optional(rope, "attention_factor")
    if given is not None:
        return given

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all = _optional(rope, "mscale"), _optional(rope, "mscale_all_dim")
    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)
