"""Picture towers: from a picture's pixels to what stands at its positions in place of rows of the embedding.

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

from twinpool.contracts.checkpoint.picture_spec import PictureSpec, vision_fields
from twinpool.engine.layers.decoder import Norm
from twinpool.engine.layers.norm import LayerNorm, gelu_tanh, rms_norm, sigmoid, silu
from twinpool.engine.layers.rope import rotate
from twinpool.engine.tensors.row_exact_linear import Numerics, RowExactLinear
from twinpool.engine.tensors.weight_loader import Weights

PREFIXES = ("model.", "")
"""Under what published folders, and those that transformers writes, have towers and projectors."""
_EPS = 1e-5
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
        mixed_thd = yield from _attend(query, key, value, groups)
        mixed_mh = padded(mixed_thd.flatten(1), len(x_mh))
        cost = cost_of(self.out, self.mlp.first, self.mlp.second)
        return (yield from by_rows(rest, cost, numerics, x_mh, mixed_mh))


@dataclass
class PixtralTower:
    """Pixtral's tower, with the patch merger and projector of Mistral 3."""

    spec: PictureSpec
    colours: Colours
    patches: RowExactLinear
    """The convolution of patches as a product: [hidden, 3 * patch * patch]."""
    before: Norm
    layers: Sequence[TowerLayer]
    frequencies: Tensor
    """Angles a row of patches, then those a column, [head_dim / 2] float32."""
    behind: Norm
    merge: RowExactLinear
    projections: tuple[RowExactLinear, RowExactLinear]
    activation: Activation

    @classmethod
    def read(cls, weights: Weights, spec: PictureSpec, hidden: int, eps: float) -> PixtralTower | None:
        """Read a tower for a text model of this hidden size and epsilon; None where the checkpoint has none, or only a
        rank's part of its tensors is wanted. Raises `CheckpointError`."""
        scopes = [weights.scope(prefix) for prefix in PREFIXES]
        found = next((one for one in scopes if one.has("vision_tower.patch_conv.weight")), None)
        if found is None or weights.shard.size > 1:
            return None
        config, vision = vision_fields(weights.spec.path)
        tower, projector = found.scope("vision_tower."), found.scope("multi_modal_projector.")
        width, heads = vision.size("hidden_size"), vision.size("num_attention_heads")
        inner, patch, dim = vision.size("intermediate_size"), spec.patch, vision.size("head_dim", width // heads)
        activation = ACTIVATIONS[vision.text("hidden_act", "gelu", tuple(ACTIVATIONS))]
        rope = vision.table("rope_parameters")
        theta = rope.get("rope_theta", vision.number("rope_theta", 10_000.0))
        assert isinstance(theta, int | float), "a number"
        inverse = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        bias = config.flag("multimodal_projector_bias")
        first, second = (
            projector.linear({f"linear_{n}": hidden}, columns, bias=bias) for n, columns in ((1, width), (2, hidden))
        )
        return cls(
            spec,
            Colours.of(spec, weights.device),
            weights.made(tower.tensor("patch_conv.weight", width, 3, patch, patch).flatten(1)),
            tower_norm(tower, "ln_pre", width, _EPS),
            [
                cls._layer(tower.scope(f"transformer.layers.{n}."), width, inner, heads, activation)
                for n in range(vision.size("num_hidden_layers"))
            ],
            torch.cat((inverse[0::2], inverse[1::2])).to(weights.device),
            tower_norm(projector, "norm", width, eps),
            projector.linear({"patch_merger.merging_layer": width}, width * spec.merge**2),
            (first, second),
            ACTIVATIONS[config.text("projector_hidden_act", "gelu", tuple(ACTIVATIONS))],
        )

    @staticmethod
    def _layer(weights: Weights, width: int, inner: int, heads: int, activation: Activation) -> TowerLayer:
        attention, mlp = weights.scope("attention."), weights.scope("feed_forward.")
        return TowerLayer(
            tower_norm(weights, "attention_norm", width, _EPS),
            attention.linear(dict.fromkeys(("q_proj", "k_proj", "v_proj"), width), width),
            attention.linear({"o_proj": width}, width),
            tower_norm(weights, "ffn_norm", width, _EPS),
            TowerMlp(
                mlp.linear({"gate_proj": inner, "up_proj": inner}, width),
                mlp.linear({"down_proj": width}, inner),
                activation,
                gated=True,
            ),
            heads,
        )

    @property
    def device(self) -> torch.device:
        return self.frequencies.device

    def __call__(self, pixels: Tensor, numerics: Numerics) -> Slices:
        x_tk, down, across = self.colours.patches(pixels)
        count = len(x_tk)
        x_mk = padded(x_tk.to(self.patches.dtype), numerics.padded(count))
        x_mh = yield from by_rows(
            lambda x_nk: self.before(numerics.linear(x_nk, self.patches)), cost_of(self.patches), numerics, x_mk
        )
        turns = self._turns(down, across, x_mh.dtype)
        for layer in self.layers:
            x_mh = yield from layer(x_mh, count, numerics, turns)
        return (yield from self._projected(x_mh[:count].view(down, across, -1), numerics))

    def _turns(self, down: int, across: int, dtype: torch.dtype) -> Turns:
        """Cos and signed sin of each patch's row and column, [T, 1, head_dim] each."""
        half = len(self.frequencies) // 2
        device = self.frequencies.device
        rows, columns = (torch.arange(n, dtype=torch.float32, device=device) for n in (down, across))
        by_row = (rows[:, None] * self.frequencies[:half])[:, None].expand(-1, across, -1)
        by_column = (columns[:, None] * self.frequencies[half:])[None].expand(down, -1, -1)
        angles = torch.cat((by_row, by_column), dim=-1).flatten(0, 1)
        cos, sin = angles.cos(), angles.sin()
        return tuple(torch.cat(two, dim=-1).to(dtype)[:, None] for two in ((cos, cos), (-sin, sin)))  # type: ignore[return-value]

    def _projected(self, grid: Tensor, numerics: Numerics) -> Slices:
        down, across, width = grid.shape
        side = self.spec.merge
        grid = self.behind(grid.reshape(-1, width)).view(down, across, width)
        blocks = grid.view(down // side, side, across // side, side, width).permute(0, 2, 4, 1, 3)
        x_tk = blocks.reshape(down // side * (across // side), -1)
        count = len(x_tk)

        def projected(x_nk: Tensor) -> Tensor:
            inner = numerics.linear(numerics.linear(x_nk, self.merge), self.projections[0])
            return numerics.linear(self.activation(inner.float()).to(inner.dtype), self.projections[1])

        cost = cost_of(self.merge, *self.projections)
        x_mh = yield from by_rows(projected, cost, numerics, padded(x_tk, numerics.padded(count)))
        return x_mh[:count]


@dataclass
class SiglipTower:
    """SigLIP's tower, with the pooling and the projection of Gemma 3."""

    spec: PictureSpec
    colours: Colours
    patches: RowExactLinear
    places_th: Tensor
    """What is added at each patch, [T, hidden]."""
    layers: Sequence[TowerLayer]
    behind: Norm
    before_projection: Norm
    projection: RowExactLinear

    @classmethod
    def read(cls, weights: Weights, spec: PictureSpec, hidden: int, eps: float) -> SiglipTower | None:
        """As `PixtralTower.read`."""
        scopes = [weights.scope(a + b) for a in PREFIXES for b in ("vision_tower.vision_model.", "vision_tower.")]
        tower = next((one for one in scopes if one.has("embeddings.patch_embedding.weight")), None)
        projectors = [weights.scope(f"{prefix}multi_modal_projector.") for prefix in PREFIXES]
        projector = next((one for one in projectors if one.has("mm_input_projection_weight")), None)
        if tower is None or projector is None or weights.shard.size > 1:
            return None
        _, vision = vision_fields(weights.spec.path)
        width, heads = vision.size("hidden_size"), vision.size("num_attention_heads")
        inner, eps, patch = vision.size("intermediate_size"), vision.number("layer_norm_eps", 1e-6), spec.patch
        activation = ACTIVATIONS[vision.text("hidden_act", "gelu_pytorch_tanh", tuple(ACTIVATIONS))]
        embedded = tower.scope("embeddings.")
        bias = embedded.tensor("patch_embedding.bias", width)
        scale = projector.tensor("mm_soft_emb_norm.weight", width, dtype=torch.float32).add_(1.0)
        return cls(
            spec,
            Colours.of(spec, weights.device),
            weights.made(embedded.tensor("patch_embedding.weight", width, 3, patch, patch).flatten(1), bias_n=bias),
            embedded.tensor("position_embedding.weight", (spec.longest // patch) ** 2, width),
            [
                cls._layer(tower.scope(f"encoder.layers.{n}."), width, inner, heads, eps, activation)
                for n in range(vision.size("num_hidden_layers"))
            ],
            layer_norm(tower, "post_layernorm", width, eps),
            partial(rms_norm, weight=scale, eps=eps),
            weights.made(projector.tensor("mm_input_projection_weight", width, hidden).T.contiguous()),
        )

    @staticmethod
    def _layer(weights: Weights, width: int, inner: int, heads: int, eps: float, activation: Activation) -> TowerLayer:
        attention, mlp = weights.scope("self_attn."), weights.scope("mlp.")
        return TowerLayer(
            layer_norm(weights, "layer_norm1", width, eps),
            attention.linear(dict.fromkeys(("q_proj", "k_proj", "v_proj"), width), width, bias=True),
            attention.linear({"out_proj": width}, width, bias=True),
            layer_norm(weights, "layer_norm2", width, eps),
            TowerMlp(
                mlp.linear({"fc1": inner}, width, bias=True), mlp.linear({"fc2": width}, inner, bias=True), activation,
                gated=False,
            ),
            heads,
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        return self.places_th.device

    def __call__(self, pixels: Tensor, numerics: Numerics) -> Slices:
        x_tk, down, across = self.colours.patches(pixels)
        count = len(x_tk)
        x_mk = padded(x_tk.to(self.patches.dtype), numerics.padded(count))
        x_mh = yield from by_rows(
            lambda x_nk, places_nh: numerics.linear(x_nk, self.patches) + places_nh,
            cost_of(self.patches), numerics, x_mk, padded(self.places_th, len(x_mk)),
        )  # fmt: skip
        for layer in self.layers:
            x_mh = yield from layer(x_mh, count, numerics)
        side = self.spec.merge
        grid = self.behind(x_mh[:count]).view(down // side, side, across // side, side, -1).float()
        pooled_th = self.before_projection(grid.mean((1, 3)).flatten(0, 1).to(x_mh.dtype))
        return numerics.linear(padded(pooled_th, numerics.padded(len(pooled_th))), self.projection)[: len(pooled_th)]


def tower_norm(weights: Weights, name: str, size: int, eps: float) -> Norm:
    return partial(rms_norm, weight=weights.tensor(f"{name}.weight", size), eps=eps)


def layer_norm(weights: Weights, name: str, size: int, eps: float) -> Norm:
    """The norm of mean 0 and variance 1 of that name, with its bias."""
    weight, bias = (weights.tensor(f"{name}.{part}", size, dtype=torch.float32) for part in ("weight", "bias"))
    return LayerNorm(weight, bias, eps)


def padded(x_tk: Tensor, rows: int) -> Tensor:
    """Append rows of zeros: [rows, ...]."""
    return torch.cat((x_tk, x_tk.new_zeros(rows - len(x_tk), x_tk.shape[1]))) if rows > len(x_tk) else x_tk


def _attend(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, groups: Groups) -> Slices:
    """Attention of all to all, or within groups, without a table of all pairs: [T, heads, head_dim]."""
    pair, limit = 2 * k_thd[0].numel(), _slice(q_thd)
    if not groups:
        queries = max(_QUERIES, limit // (pair * len(k_thd)))
        return (yield from _joined(partial(_attend_all, part, k_thd, v_thd) for part in torch.split(q_thd, queries)))
    out_thd = torch.empty_like(v_thd)
    for members in groups:
        for some in torch.split(members, max(1, limit // (pair * members.shape[1] ** 2))):
            out_thd[some] = _attend_groups(q_thd[some], k_thd[some], v_thd[some])
            yield
    return out_thd


def _attend_all(q_nhd: Tensor, k_thd: Tensor, v_thd: Tensor) -> Tensor:
    return _attend_groups(q_nhd[None], k_thd[None], v_thd[None])[0]


def _attend_groups(q_gthd: Tensor, k_gthd: Tensor, v_gthd: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (q_gthd, k_gthd, v_gthd))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
