"""The towers of Gemma 3, which is SigLIP's, and of Gemma 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.picture_spec import PictureSpec, vision_fields
from twinpool.engine.layers.decoder import SANDWICH, Norm
from twinpool.engine.layers.norm import gelu_tanh, rms_norm
from twinpool.engine.layers.picture_tower import (
    ACTIVATIONS,
    Activation,
    Colours,
    Slices,
    TowerLayer,
    TowerMlp,
    Turns,
    attend,
    by_rows,
    cost_of,
    embedded,
    frequencies,
    layer_norm,
    padded,
    tower_scope,
    turns_by,
)
from twinpool.engine.layers.rope import rotate
from twinpool.engine.tensors.row_exact_linear import Numerics, RowExactLinear
from twinpool.engine.tensors.weight_loader import Weights


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
        """Read a tower for a text model of this hidden size and epsilon; None as of `tower_scope`. Raises
        `CheckpointError`."""
        below = ("vision_tower.vision_model.", "vision_tower.")
        tower = tower_scope(weights, below, "embeddings.patch_embedding.weight")
        projector = tower_scope(weights, ("multi_modal_projector.",), "mm_input_projection_weight")
        if tower is None or projector is None:
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
        x_mh = yield from embedded(x_tk, self.patches, numerics, self.places_th)
        for layer in self.layers:
            x_mh = yield from layer(x_mh, count, numerics)
        pooled_ph = _pooled(self.behind(x_mh[:count]), down, across, self.spec.merge)
        return _projected(self.before_projection(pooled_ph), self.projection, numerics)


def _pooled(x_th: Tensor, down: int, across: int, side: int) -> Tensor:
    """The means of squares of patches, `side` below and beside each other, row by row: [positions, hidden]."""
    squares = x_th.view(down // side, side, across // side, side, -1)
    return squares.float().mean((1, 3)).flatten(0, 1).to(x_th.dtype)


def _projected(x_ph: Tensor, projection: RowExactLinear, numerics: Numerics) -> Tensor:
    return numerics.linear(padded(x_ph, numerics.padded(len(x_ph))), projection)[: len(x_ph)]


@dataclass(frozen=True)
class ClippedLinear:
    """A product of whose inputs and outputs none is beyond some bounds."""

    linear: RowExactLinear
    bounds: Sequence[Tensor]
    """The least and the largest input and output, [] float32 each; none: there are none."""

    @classmethod
    def read(cls, weights: Weights, rows: int, columns: int, *, clipped: bool) -> ClippedLinear:
        names = ("input_min", "input_max", "output_min", "output_max") if clipped else ()
        bounds = [weights.tensor(name, dtype=torch.float32) for name in names]
        return cls(weights.linear({"linear": rows}, columns), bounds)

    def __call__(self, x_mk: Tensor, numerics: Numerics) -> Tensor:
        if not self.bounds:
            return numerics.linear(x_mk, self.linear)
        out_mn = numerics.linear(torch.clamp(x_mk, self.bounds[0], self.bounds[1]), self.linear)
        return torch.clamp(out_mn, self.bounds[2], self.bounds[3])


@dataclass(frozen=True)
class Gemma4TowerLayer:
    """Attention of patches to patches, whose scores aren't scaled, as queries, keys and values are normed by head; then
    a gated feed-forward layer. Norms are before and behind each."""

    norms: tuple[Norm, Norm, Norm, Norm]
    head_norms: tuple[Norm, Norm, Norm]
    """Of queries, keys and values."""
    qkv: tuple[ClippedLinear, ClippedLinear, ClippedLinear]
    out: ClippedLinear
    mlp: tuple[ClippedLinear, ClippedLinear, ClippedLinear]
    """The gate, what it lets through, and what is made of that."""
    head_dim: int

    @classmethod
    def read(cls, weights: Weights, vision: JsonFields, eps: float) -> Gemma4TowerLayer:
        width, inner = vision.size("hidden_size"), vision.size("intermediate_size")
        dim, clipped = vision.size("head_dim"), vision.flag("use_clipped_linears")
        mixed = vision.size("num_attention_heads") * dim

        def product(name: str, rows: int, columns: int) -> ClippedLinear:
            return ClippedLinear.read(weights.scope(f"{name}."), rows, columns, clipped=clipped)

        def norm(name: str, size: int) -> Norm:
            return partial(rms_norm, weight=weights.tensor(f"{name}.weight", size, dtype=torch.float32), eps=eps)

        ones_d = torch.ones(dim, device=weights.device)
        first, second, third, fourth = (norm(name, width) for name in SANDWICH)
        query, key, value = (product(f"self_attn.{one}_proj", mixed, width) for one in "qkv")
        return cls(
            (first, second, third, fourth),
            (norm("self_attn.q_norm", dim), norm("self_attn.k_norm", dim), partial(rms_norm, weight=ones_d, eps=eps)),
            (query, key, value),
            product("self_attn.o_proj", width, mixed),
            (product("mlp.gate_proj", inner, width), product("mlp.up_proj", inner, width),
             product("mlp.down_proj", width, inner)),
            dim,
        )  # fmt: skip

    def __call__(self, x_mh: Tensor, count: int, numerics: Numerics, turns: Turns) -> Slices:
        """The residual stream, [M, hidden], of `count` patches and padding. `turns`: cos and signed sin of each patch's
        column and row, each for half a head: [count, 1, 2, head_dim / 2]."""

        def projected(x_nh: Tensor) -> Tensor:
            h_nh = self.norms[0](x_nh)
            return torch.cat([each(h_nh, numerics) for each in self.qkv], dim=1)

        def rest(x_nh: Tensor, mixed_nk: Tensor) -> Tensor:
            x_nh = x_nh + self.norms[1](self.out(mixed_nk, numerics))
            h_nh, (gate, up, down) = self.norms[2](x_nh), self.mlp
            gate_nk = gate(h_nh, numerics)
            inner_nk = gelu_tanh(gate_nk.float()).to(gate_nk.dtype) * up(h_nh, numerics)
            return x_nh + self.norms[3](down(inner_nk, numerics))

        qkv_mk = yield from by_rows(projected, cost_of(*(each.linear for each in self.qkv)), numerics, x_mh)
        by_head = qkv_mk[:count].view(count, 3, -1, self.head_dim).unbind(1)
        query, key, value = (norm(x_thd) for norm, x_thd in zip(self.head_norms, by_head, strict=True))
        query, key = (rotate(x_thd.view(*x_thd.shape[:2], 2, -1), *turns).flatten(2) for x_thd in (query, key))
        mixed_thd = yield from attend(query, key, value, scale=1.0)
        cost = cost_of(self.out.linear, *(each.linear for each in self.mlp))
        return (yield from by_rows(rest, cost, numerics, x_mh, padded(mixed_thd.flatten(1), len(x_mh))))


@dataclass
class Gemma4Tower:
    """Gemma 4's tower: patches with a place of their own by column and row, which turn queries and keys, too."""

    spec: PictureSpec
    colours: Colours
    patches: RowExactLinear
    places_csh: Tensor
    """What is added at a patch by its column, and by its row: [2, places, hidden]."""
    layers: Sequence[Gemma4TowerLayer]
    frequencies: Tensor
    """Angles a column, and a row: [head_dim / 4] float32."""
    standard: tuple[Tensor, Tensor] | None
    """What is subtracted from what patches are pooled to, and the factor on the rest: [hidden] float32 each."""
    before_projection: Norm
    projection: RowExactLinear

    @classmethod
    def read(cls, weights: Weights, spec: PictureSpec, hidden: int, eps: float) -> Gemma4Tower | None:
        """As `SiglipTower.read`."""
        found = tower_scope(weights, ("",), "vision_tower.patch_embedder.input_proj.weight")
        if found is None:
            return None
        _, vision = vision_fields(weights.spec.path)
        width, quarter, patch = vision.size("hidden_size"), vision.size("head_dim") // 4, spec.patch
        eps, tower = vision.number("rms_norm_eps", 1e-6), found.scope("vision_tower.")
        theta = JsonFields(vision.path, vision.table("rope_parameters")).number("rope_theta", 100.0)
        # Of each pixel its three colours, where `Colours` has each colour's pixels.
        kernel = tower.tensor("patch_embedder.input_proj.weight", width, 3 * patch * patch)
        kernel = kernel.view(width, patch * patch, 3).transpose(1, 2).flatten(1)
        places = vision.size("position_embedding_size", 10_240)
        standard = None
        if vision.flag("standardize"):
            bias, scale = (tower.tensor(f"std_{part}", width, dtype=torch.float32) for part in ("bias", "scale"))
            standard = bias, scale
        return cls(
            spec,
            Colours.of(spec, weights.device),
            weights.made(kernel.contiguous()),
            tower.tensor("patch_embedder.position_embedding_table", 2, places, width),
            [
                Gemma4TowerLayer.read(tower.scope(f"encoder.layers.{n}."), vision, eps)
                for n in range(vision.size("num_hidden_layers"))
            ],
            frequencies(theta, quarter, weights.device),
            standard,
            partial(rms_norm, weight=torch.ones(width, device=weights.device), eps=eps),
            found.scope("embed_vision.").linear({"embedding_projection": hidden}, width),
        )

    @property
    def device(self) -> torch.device:
        return self.frequencies.device

    def __call__(self, pixels: Tensor, numerics: Numerics) -> Slices:
        x_tk, down, across = self.colours.patches(pixels)
        count = len(x_tk)
        at_t = torch.arange(count, device=self.device)
        columns_t, rows_t = at_t % across, at_t // across
        places_th = self.places_csh[0][columns_t] + self.places_csh[1][rows_t]
        x_mh = yield from embedded(2 * (x_tk - 0.5), self.patches, numerics, places_th)
        turns = turns_by(torch.stack((columns_t, rows_t), dim=1)[:, None, :, None] * self.frequencies, x_mh.dtype)
        for layer in self.layers:
            x_mh = yield from layer(x_mh, count, numerics, turns)
        pooled_ph = _pooled(x_mh[:count], down, across, self.spec.merge).float() * x_mh.shape[1] ** 0.5
        if self.standard is not None:
            pooled_ph = (pooled_ph - self.standard[0]) * self.standard[1]
        return _projected(self.before_projection(pooled_ph.to(x_mh.dtype)), self.projection, numerics)
