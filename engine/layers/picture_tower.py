"""Picture towers: from a picture's pixels to what stands at its positions in place of rows of the embedding. What they
share; those of the families are in `gemma_towers.py` and `pixtral_qwen_towers.py`.

A tower computes each picture by itself, so its bits depend on no other picture, and what it gives is kept
(`engine.layers.picture_encoder`). Within a picture every patch attends to every other.

A large picture takes a CPU minutes. So a tower computes in slices: some rows of a product, or of what attention mixes,
whose number follows from the picture's size alone, and so do the bits. Between two slices a worker may do anything
else: its steps go on, and each slice that ends is progress.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from twinpool.contracts.checkpoint.picture_spec import PictureSpec
from twinpool.engine.layers.decoder import Norm
from twinpool.engine.layers.norm import LayerNorm, gelu_tanh, rms_norm, sigmoid
from twinpool.engine.layers.rope import rotate
from twinpool.engine.tensors.row_exact_linear import Numerics, RowExactLinear, silu
from twinpool.engine.tensors.weight_loader import Weights

PREFIXES = ("model.", "")
"""Under what published folders, and those that transformers writes, have towers and projectors."""
_SLICE, _SLICE_ON_CARDS = 1 << 32, 1 << 40
"""Multiply-adds of a slice, about: less than a second of a CPU, and milliseconds of a GPU, which needs more at once."""
_QUERIES = 64
"""Patches whose attention is computed at once, at the least."""
Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "silu": silu,
}
"""By their names in `config.json`; each takes and returns float32."""
Turns = tuple[Tensor, Tensor]
Slices = Generator[None, None, Tensor]
"""What computes in slices: it yields behind each, and returns its result."""
Groups = Sequence[Tensor]
"""Patches that attend to each other alone, by groups of one size: [groups, patches] int64 each."""


class PictureTower(Protocol):
    """What computes pictures of one family."""

    spec: PictureSpec

    @property
    def device(self) -> torch.device: ...

    def __call__(self, pixels: Tensor, numerics: Numerics) -> Slices:
        """Compute one picture, [height, width, 3] uint8: for each position a row of the text's hidden size, and behind
        it as many more as there are layers of the text that are given something of a picture."""


def tower_scope(weights: Weights, below: Sequence[str], name: str) -> Weights | None:
    """The tensors of a tower, or of its projector: those below the first of these prefixes that have one of that name.
    None where none have, or only a rank's part of each tensor is wanted."""
    if weights.shard.size > 1:
        return None
    scopes = (weights.scope(prefix + one) for prefix in PREFIXES for one in below)
    return next((one for one in scopes if one.has(name)), None)


def whole(slices: Slices) -> Tensor:
    """Compute what is left of some slices at once; returns their result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: Tensor = end.value
            return result


def by_rows(compute: Callable[..., Tensor], cost: int, numerics: Numerics, *inputs: Tensor) -> Slices:
    """`compute` of the rows of `inputs`, which are padded to whole quanta, some at a time. `cost`: multiply-adds of a
    row."""
    rows = numerics.padded(max(1, _slice(inputs[0]) // cost))
    return (
        yield from _joined(
            partial(compute, *part) for part in zip(*(torch.split(x, rows) for x in inputs), strict=True)
        )
    )


def _slice(x: Tensor) -> int:
    return _SLICE if x.is_cpu else _SLICE_ON_CARDS


def _joined(parts: Iterable[Callable[[], Tensor]]) -> Slices:
    """The parts of a result, one slice each."""
    found = list[Tensor]()
    for part in parts:
        found.append(part())
        yield
    return found[0] if len(found) == 1 else torch.cat(found)


def embedded(x_tk: Tensor, kernel: RowExactLinear, numerics: Numerics, places_th: Tensor | None = None) -> Slices:
    """The products of patches, [T, k], and the `kernel` of their convolution, plus what is added at each, if anything:
    [M, hidden], with padding."""
    x_mk = padded(x_tk.to(kernel.dtype), numerics.padded(len(x_tk)))
    x_mh = yield from by_rows(lambda x_nk: numerics.linear(x_nk, kernel), cost_of(kernel), numerics, x_mk)
    return x_mh if places_th is None else x_mh + padded(places_th.to(x_mh.dtype), len(x_mh))


def cost_of(*linears: RowExactLinear) -> int:
    """Multiply-adds of one row of some products."""
    return sum(math.prod(linear.shape) for linear in linears)


@dataclass(frozen=True)
class Colours:
    """How pixels become the numbers that a tower takes."""

    patch: int
    rescale: float
    mean_c: Tensor
    std_c: Tensor

    @classmethod
    def of(cls, spec: PictureSpec, device: torch.device) -> Colours:
        mean, std = (torch.tensor(each, device=device) for each in (spec.mean, spec.std))
        return cls(spec.patch, spec.rescale, mean, std)

    def patches(self, pixels: Tensor) -> tuple[Tensor, int, int]:
        """The patches of a picture, [height, width, 3] uint8, row by row: [T, 3 * patch * patch] float32, and how many
        are below and beside each other."""
        height, width, _ = pixels.shape
        down, across, size = height // self.patch, width // self.patch, self.patch
        # In float64 first, as transformers does.
        colours = ((pixels.double() * self.rescale).float() - self.mean_c) / self.std_c
        x_tk = colours.view(down, size, across, size, 3).permute(0, 2, 4, 1, 3).reshape(down * across, -1)
        return x_tk, down, across


@dataclass(frozen=True)
class TowerMlp:
    """A feed-forward layer of a tower, gated or not."""

    first: RowExactLinear
    """Of a gated one: the gate's rows, then those of what it lets through."""
    second: RowExactLinear
    activation: Activation
    gated: bool

    def __call__(self, x_mh: Tensor, numerics: Numerics) -> Tensor:
        inner = numerics.linear(x_mh, self.first)
        gate, up = inner.chunk(2, dim=-1) if self.gated else (inner, None)
        inner = self.activation(gate.float()).to(gate.dtype)
        return numerics.linear(inner if up is None else inner * up, self.second)


@dataclass(frozen=True)
class TowerLayer:
    """Attention of patches to patches, then a feed-forward layer, each behind a norm."""

    before_attention: Norm
    qkv: RowExactLinear
    out: RowExactLinear
    before_mlp: Norm
    mlp: TowerMlp
    heads: int

    def __call__(
        self, x_mh: Tensor, count: int, numerics: Numerics, turns: Turns | None = None, groups: Groups = ()
    ) -> Slices:
        """The residual stream, [M, hidden], of `count` patches and padding. `turns`: cos and signed sin of each patch,
        [count, 1, head_dim] each. `groups`: which patches attend to each other; none: all of them."""

        def projected(x_nh: Tensor) -> Tensor:
            return numerics.linear(self.before_attention(x_nh), self.qkv)

        def rest(x_nh: Tensor, mixed_nh: Tensor) -> Tensor:
            x_nh = x_nh + numerics.linear(mixed_nh, self.out)
            return x_nh + self.mlp(self.before_mlp(x_nh), numerics)

        qkv_mk = yield from by_rows(projected, cost_of(self.qkv), numerics, x_mh)
        query, key, value = qkv_mk[:count].view(count, 3, self.heads, -1).unbind(1)
        if turns is not None:
            query, key = (rotate(x.to(turns[0].dtype), *turns).to(x.dtype) for x in (query, key))
        mixed_thd = yield from attend(query, key, value, groups)
        mixed_mh = padded(mixed_thd.flatten(1), len(x_mh))
        cost = cost_of(self.out, self.mlp.first, self.mlp.second)
        return (yield from by_rows(rest, cost, numerics, x_mh, mixed_mh))


def frequencies(theta: float, count: int, device: torch.device) -> Tensor:
    """By how much pairs of dimensions are turned from one row or column of patches to the next: [count] float32."""
    return (1.0 / (theta ** (torch.arange(count, dtype=torch.float32) / count))).to(device)


def turns_by(angles: Tensor, dtype: torch.dtype = torch.float32) -> Turns:
    """Cos and signed sin of angles, [..., dim / 2] float32, as `rotate` takes them: [..., dim] each."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def tower_norm(weights: Weights, name: str, size: int, eps: float) -> Norm:
    return partial(rms_norm, weight=weights.tensor(f"{name}.weight", size), eps=eps)


def layer_norm(weights: Weights, name: str, size: int, eps: float) -> Norm:
    """The norm of mean 0 and variance 1 of that name, with its bias."""
    weight, bias = (weights.tensor(f"{name}.{part}", size, dtype=torch.float32) for part in ("weight", "bias"))
    return LayerNorm(weight, bias, eps)


def padded(x_tk: Tensor, rows: int) -> Tensor:
    """Append rows of zeros: [rows, ...]."""
    return torch.cat((x_tk, x_tk.new_zeros(rows - len(x_tk), x_tk.shape[1]))) if rows > len(x_tk) else x_tk


def attend(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, groups: Groups = (), scale: float | None = None) -> Slices:
    """Attention of all to all, or within groups, without a table of all pairs: [T, heads, head_dim]. `scale`: the
    factor on scores; None: ``head_dim**-0.5``."""
    pair, limit = 2 * k_thd[0].numel(), _slice(q_thd)
    if not groups:
        queries = max(_QUERIES, limit // (pair * len(k_thd)))
        parts = torch.split(q_thd, queries)
        return (yield from _joined(partial(_attend_all, part, k_thd, v_thd, scale) for part in parts))
    out_thd = torch.empty_like(v_thd)
    for members in groups:
        for some in torch.split(members, max(1, limit // (pair * members.shape[1] ** 2))):
            out_thd[some] = _attend_groups(q_thd[some], k_thd[some], v_thd[some], scale)
            yield
    return out_thd


def _attend_all(q_nhd: Tensor, k_thd: Tensor, v_thd: Tensor, scale: float | None) -> Tensor:
    return _attend_groups(q_nhd[None], k_thd[None], v_thd[None], scale)[0]


def _attend_groups(q_gthd: Tensor, k_gthd: Tensor, v_gthd: Tensor, scale: float | None) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (q_gthd, k_gthd, v_gthd))
    return F.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2)
