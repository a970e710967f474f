"""Picture towers: from a picture's pixels to what stands at its positions in place of rows of the embedding.

A tower computes one picture at a time, so its bits depend on no other picture of a step, and are computed once: the
encoder keeps what it computed by the picture's digest. Within a picture every patch attends to every other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from twinpool.cache.memory.pinned_memory import to_device
from twinpool.contracts.checkpoint.picture_spec import PictureSpec, vision_fields
from twinpool.contracts.messages.router_commands import Picture
from twinpool.engine.attention.attention_plan import PictureSpan
from twinpool.engine.layers.decoder import Norm
from twinpool.engine.layers.norm import LayerNorm, gelu_tanh, rms_norm, silu
from twinpool.engine.layers.rope import rotate
from twinpool.engine.tensors.row_exact_linear import Numerics, RowExactLinear
from twinpool.engine.tensors.weight_loader import Weights

PREFIXES = ("model.", "")
"""Under what published folders, and those that transformers writes, have towers and projectors."""
_EPS = 1e-5
KEPT_BYTES = 256 * 1024**2
"""Of what a tower has computed, kept for chunks and prompts to come."""
Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {"gelu": F.gelu, "gelu_pytorch_tanh": gelu_tanh, "silu": silu}
"""By their names in `config.json`; each takes and returns float32."""
Turns = tuple[Tensor, Tensor]
Groups = Sequence[Tensor]
"""Patches that attend to each other alone, by groups of one size: [groups, patches] int64 each."""


class PlacedRows(NamedTuple):
    """Rows of a picture in a row of a step: those from `first` on of what its tower computes stand at the places `at`,
    counted from the row's first token."""

    picture: Picture
    digest: bytes
    first: int
    at: Sequence[int]


class StepPictures(NamedTuple):
    """The pictures of a step."""

    places_n: Tensor
    """[n] int64: their places among the step's tokens."""
    rows_nh: Tensor
    """What stands there, as `PictureTower` gives it."""
    spans: Sequence[PictureSpan]
    """Where positions of a picture see each other."""


class PictureTower(Protocol):
    """What computes pictures of one family."""

    spec: PictureSpec

    @property
    def device(self) -> torch.device: ...

    def __call__(self, pixels: Tensor, numerics: Numerics) -> Tensor:
        """Compute one picture, [height, width, 3] uint8: for each position a row of the text's hidden size, and behind
        it as many more as there are layers of the text that are given something of a picture."""


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
    ) -> Tensor:
        """The residual stream, [M, hidden], of `count` patches and padding. `turns`: cos and signed sin of each patch,
        [count, 1, head_dim] each. `groups`: which patches attend to each other; none: all of them."""
        qkv_t3hd = numerics.linear(self.before_attention(x_mh), self.qkv)[:count].view(count, 3, self.heads, -1)
        query, key, value = qkv_t3hd.unbind(1)
        if turns is not None:
            query, key = (rotate(x.to(turns[0].dtype), *turns).to(x.dtype) for x in (query, key))
        mixed_thd = _attend(query, key, value, groups)
        x_mh = x_mh + numerics.linear(padded(mixed_thd.flatten(1), len(x_mh)), self.out)
        return x_mh + self.mlp(self.before_mlp(x_mh), numerics)


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

    def __call__(self, pixels: Tensor, numerics: Numerics) -> Tensor:
        x_tk, down, across = self.colours.patches(pixels)
        count = len(x_tk)
        x_mk = padded(x_tk.to(self.patches.dtype), numerics.padded(count))
        x_mh = self.before(numerics.linear(x_mk, self.patches))
        turns = self._turns(down, across, x_mh.dtype)
        for layer in self.layers:
            x_mh = layer(x_mh, count, numerics, turns)
        return self._projected(x_mh[:count].view(down, across, -1), numerics)

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

    def _projected(self, grid: Tensor, numerics: Numerics) -> Tensor:
        down, across, width = grid.shape
        side = self.spec.merge
        grid = self.behind(grid.reshape(-1, width)).view(down, across, width)
        blocks = grid.view(down // side, side, across // side, side, width).permute(0, 2, 4, 1, 3)
        x_tk = blocks.reshape(down // side * (across // side), -1)
        count = len(x_tk)
        x_mh = numerics.linear(padded(x_tk, numerics.padded(count)), self.merge)
        inner = numerics.linear(x_mh, self.projections[0])
        return numerics.linear(self.activation(inner.float()).to(inner.dtype), self.projections[1])[:count]


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

    def __call__(self, pixels: Tensor, numerics: Numerics) -> Tensor:
        x_tk, down, across = self.colours.patches(pixels)
        count = len(x_tk)
        x_mk = padded(x_tk.to(self.patches.dtype), numerics.padded(count))
        x_mh = numerics.linear(x_mk, self.patches) + padded(self.places_th, len(x_mk))
        for layer in self.layers:
            x_mh = layer(x_mh, count, numerics)
        side = self.spec.merge
        grid = self.behind(x_mh[:count]).view(down // side, side, across // side, side, -1).float()
        pooled_th = self.before_projection(grid.mean((1, 3)).flatten(0, 1).to(x_mh.dtype))
        return numerics.linear(padded(pooled_th, numerics.padded(len(pooled_th))), self.projection)[: len(pooled_th)]


class PictureEncoder:
    """What a worker's tower computes, kept by the pictures' digests, as many bytes as there may be: the latest ones."""

    def __init__(self, tower: PictureTower, limit: int) -> None:
        self.tower = tower
        self._limit, self._nbytes = limit, 0
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.counters = {"pictures_computed": 0.0, "pictures_reused": 0.0}

    def placed(self, rows: Iterable[tuple[int, Sequence[PlacedRows]]], numerics: Numerics) -> StepPictures | None:
        """What stands in a step in place of embeddings; None for nothing. `rows`: the place of the first token of each
        row of the step, and its parts of pictures."""
        places, found, spans = list[int](), list[Tensor](), list[PictureSpan]()
        for number, (first, parts) in enumerate(rows):
            for picture, digest, begin, at in parts:
                places += [first + place for place in at]
                found.append(self._rows(picture, digest, numerics)[begin : begin + len(at)])
                if self.tower.spec.whole:
                    assert begin + len(at) == picture.count, "a step computes a picture to its end"
                    spans.append(PictureSpan(number, first + at[0], at[0], len(at)))
        return StepPictures(to_device(places, self.tower.device), torch.cat(found), spans) if found else None

    def _rows(self, picture: Picture, digest: bytes, numerics: Numerics) -> Tensor:
        """All rows of a picture, [count, hidden]."""
        rows = self._kept.pop(digest, None)
        self.counters["pictures_computed" if rows is None else "pictures_reused"] += 1
        if rows is None:
            pixels = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8)
            device = self.tower.device
            rows = self.tower(pixels.view(picture.height, picture.width, 3).to(device), numerics)
            self._nbytes += rows.nbytes
        self._kept[digest] = rows
        while self._nbytes > self._limit and len(self._kept) > 1:
            self._nbytes -= self._kept.popitem(last=False)[1].nbytes
        return rows


def tower_norm(weights: Weights, name: str, size: int, eps: float) -> Norm:
    return partial(rms_norm, weight=weights.tensor(f"{name}.weight", size), eps=eps)


def layer_norm(weights: Weights, name: str, size: int, eps: float) -> Norm:
    """The norm of mean 0 and variance 1 of that name, with its bias."""
    weight, bias = (weights.tensor(f"{name}.{part}", size, dtype=torch.float32) for part in ("weight", "bias"))
    return LayerNorm(weight, bias, eps)


def padded(x_tk: Tensor, rows: int) -> Tensor:
    """Append rows of zeros: [rows, ...]."""
    return torch.cat((x_tk, x_tk.new_zeros(rows - len(x_tk), x_tk.shape[1]))) if rows > len(x_tk) else x_tk


def _attend(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, groups: Groups) -> Tensor:
    """Attention of all to all, or within groups, without a table of all pairs: [T, heads, head_dim]."""
    if not groups:
        return _attend_groups(q_thd[None], k_thd[None], v_thd[None])[0]
    out_thd = torch.empty_like(v_thd)
    for members in groups:
        out_thd[members] = _attend_groups(q_thd[members], k_thd[members], v_thd[members])
    return out_thd


def _attend_groups(q_gthd: Tensor, k_gthd: Tensor, v_gthd: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (q_gthd, k_gthd, v_gthd))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
