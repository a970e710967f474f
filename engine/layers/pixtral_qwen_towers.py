"""The towers of Pixtral, Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.

Qwen's take patches in the order of what they are merged into: the four patches of the first position, then those of the
second, and so on. Patches are turned by their row and column. Qwen2.5-VL's attend within windows of neighbouring
positions, and in a few layers to all. Those of Qwen3-VL and Qwen3.5 have a place of their own, between those that were
trained, and some of Qwen3-VL's layers are shown to the text as well: what they give is added behind the text's first
layers (DeepStack, arXiv 2406.04334).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.picture_spec import PictureSpec, tower_widths, vision_fields
from twinpool.engine.layers.decoder import Norm
from twinpool.engine.layers.picture_tower import (
    ACTIVATIONS,
    Activation,
    Colours,
    Groups,
    Slices,
    TowerLayer,
    TowerMlp,
    Turns,
    by_rows,
    cost_of,
    embedded,
    frequencies,
    layer_norm,
    padded,
    tower_norm,
    tower_scope,
    turns_by,
)
from twinpool.engine.tensors.row_exact_linear import Numerics, RowExactLinear
from twinpool.engine.tensors.weight_loader import Weights

_EPS, _PIXTRALS_EPS = 1e-6, 1e-5
_FRAMES = 2
"""A picture is a film of two equal frames."""
_THETA = 10_000.0


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
        """As `SiglipTower.read`."""
        found = tower_scope(weights, ("",), "vision_tower.patch_conv.weight")
        if found is None:
            return None
        config, vision = vision_fields(weights.spec.path)
        tower, projector = found.scope("vision_tower."), found.scope("multi_modal_projector.")
        width, heads = vision.size("hidden_size"), vision.size("num_attention_heads")
        inner, patch, dim = vision.size("intermediate_size"), spec.patch, vision.size("head_dim", width // heads)
        activation = ACTIVATIONS[vision.text("hidden_act", "gelu", tuple(ACTIVATIONS))]
        rope = JsonFields(vision.path, vision.table("rope_parameters"))
        theta = rope.number("rope_theta", vision.number("rope_theta", _THETA))
        inverse = frequencies(theta, dim // 2, weights.device)
        bias = config.flag("multimodal_projector_bias")
        first, second = (
            projector.linear({f"linear_{n}": hidden}, columns, bias=bias) for n, columns in ((1, width), (2, hidden))
        )
        return cls(
            spec,
            Colours.of(spec, weights.device),
            weights.made(tower.tensor("patch_conv.weight", width, 3, patch, patch).flatten(1)),
            tower_norm(tower, "ln_pre", width, _PIXTRALS_EPS),
            [
                cls._layer(tower.scope(f"transformer.layers.{n}."), width, inner, heads, activation)
                for n in range(vision.size("num_hidden_layers"))
            ],
            torch.cat((inverse[0::2], inverse[1::2])),
            tower_norm(projector, "norm", width, eps),
            projector.linear({"patch_merger.merging_layer": width}, width * spec.merge**2),
            (first, second),
            ACTIVATIONS[config.text("projector_hidden_act", "gelu", tuple(ACTIVATIONS))],
        )

    @staticmethod
    def _layer(weights: Weights, width: int, inner: int, heads: int, activation: Activation) -> TowerLayer:
        attention, mlp = weights.scope("attention."), weights.scope("feed_forward.")
        return TowerLayer(
            tower_norm(weights, "attention_norm", width, _PIXTRALS_EPS),
            attention.linear(dict.fromkeys(("q_proj", "k_proj", "v_proj"), width), width),
            attention.linear({"o_proj": width}, width),
            tower_norm(weights, "ffn_norm", width, _PIXTRALS_EPS),
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
        x_mh = self.before((yield from embedded(x_tk, self.patches, numerics)))
        turns = self._turns(down, across, x_mh.dtype)
        for layer in self.layers:
            x_mh = yield from layer(x_mh, count, numerics, turns)
        return (yield from self._projected(x_mh[:count].view(down, across, -1), numerics))

    def _turns(self, down: int, across: int, dtype: torch.dtype) -> Turns:
        """Of each patch's row and column, [T, 1, head_dim] each."""
        half = len(self.frequencies) // 2
        device = self.frequencies.device
        rows, columns = (torch.arange(n, dtype=torch.float32, device=device) for n in (down, across))
        by_row = (rows[:, None] * self.frequencies[:half])[:, None].expand(-1, across, -1)
        by_column = (columns[:, None] * self.frequencies[half:])[None].expand(down, -1, -1)
        return turns_by(torch.cat((by_row, by_column), dim=-1).flatten(0, 1)[:, None], dtype)

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


@dataclass(frozen=True)
class _TowerKind:
    """In what the families' towers differ."""

    activation: str
    """Of feed-forward layers, where `config.json` doesn't say."""
    mlp: tuple[str, ...]
    """The names of their linear layers; three: a gated one."""
    norm: Callable[[Weights, str, int, float], Norm] = layer_norm
    merger: tuple[str, str, str] = ("norm", "linear_fc1", "linear_fc2")
    """The names of the merger's norm and linear layers."""
    windowed: bool = False
    placed: bool = False
    """Whether something is added at each patch by its place; then the convolution of patches has a bias, too."""
    stacked: bool = False
    """Whether layers are shown to the text."""


_MERGER = ("ln_q", "mlp.0", "mlp.2")
_LATER = _TowerKind("gelu_pytorch_tanh", ("linear_fc1", "linear_fc2"), placed=True)
_TOWER_KINDS = {
    "qwen2_vl": _TowerKind("quick_gelu", ("fc1", "fc2"), merger=_MERGER),
    "qwen2_5_vl": _TowerKind("silu", ("gate_proj", "up_proj", "down_proj"), tower_norm, _MERGER, windowed=True),
    "qwen3_vl": replace(_LATER, stacked=True),
    "qwen3_5": _LATER,
}
QWEN_TOWERS = tuple(_TOWER_KINDS)
"""The families, by their names in `PictureSpec`."""


@dataclass(frozen=True)
class QwenMerger:
    """What makes one row of the text's hidden size of the patches of a position."""

    norm: Norm
    first: RowExactLinear
    second: RowExactLinear
    merged_first: bool
    """Whether the norm is of a position's patches together."""

    @classmethod
    def read(
        cls, weights: Weights, norm: Norm, names: Sequence[str], wide: int, hidden: int, *, merged_first: bool
    ) -> QwenMerger:
        first, second = names
        return cls(
            norm,
            weights.linear({first: wide}, wide, bias=True),
            weights.linear({second: hidden}, wide, bias=True),
            merged_first,
        )

    def __call__(self, x_th: Tensor, numerics: Numerics) -> Slices:
        wide = self.first.shape[1]
        x_pk = self.norm(x_th.reshape(-1, wide)) if self.merged_first else self.norm(x_th).reshape(-1, wide)

        def merged(x_nk: Tensor) -> Tensor:
            inner = numerics.linear(x_nk, self.first)
            return numerics.linear(F.gelu(inner.float()).to(inner.dtype), self.second)

        x_mk = padded(x_pk, numerics.padded(len(x_pk)))
        rows_mh = yield from by_rows(merged, cost_of(self.first, self.second), numerics, x_mk)
        return rows_mh[: len(x_pk)]


@dataclass
class QwenTower:
    """The tower of one of Qwen's families."""

    spec: PictureSpec
    colours: Colours
    patches: RowExactLinear
    """The convolution of patches as a product: [hidden, 3 * 2 * patch * patch]."""
    layers: Sequence[TowerLayer]
    frequencies: Tensor
    """Angles a row of patches, and a column: [head_dim / 4] float32."""
    merger: QwenMerger
    window: int
    """Positions of a window's side; 0: every layer attends to all patches."""
    full: frozenset[int]
    """The layers that attend to all patches, where others have windows."""
    places_ssh: Tensor | None
    """What is added at a patch, by its row and column, [side, side, hidden] float32: between these if there are more or
    fewer patches; None: nothing is."""
    stacked: Mapping[int, QwenMerger]
    """By layer, what makes of its result the rows that are added in the text."""

    @classmethod
    def read(cls, weights: Weights, spec: PictureSpec, hidden: int, eps: float) -> QwenTower | None:
        """As `SiglipTower.read`."""
        tower = tower_scope(weights, ("visual.",), "patch_embed.proj.weight")
        if tower is None:
            return None
        _, vision = vision_fields(weights.spec.path)
        (width, inner), heads, patch = tower_widths(vision, spec.family), vision.size("num_heads"), spec.patch
        kind = _TOWER_KINDS[spec.family]
        kernel = tower.tensor("patch_embed.proj.weight", width, 3, _FRAMES, patch, patch).flatten(1)
        bias = tower.tensor("patch_embed.proj.bias", width) if kind.placed else None
        wide = width * spec.merge**2
        below, (norm, *names) = tower.scope("merger."), kind.merger
        window = vision.size("window_size", 112) // spec.unit if kind.windowed else 0
        return cls(
            spec,
            Colours.of(spec, weights.device),
            weights.made(kernel, bias_n=bias),
            [_layer(tower.scope(f"blocks.{n}."), vision, kind, width, inner) for n in range(vision.size("depth"))],
            frequencies(_THETA, width // heads // 4, weights.device),
            QwenMerger.read(below, kind.norm(below, norm, width, _EPS), names, wide, hidden, merged_first=False),
            window,
            frozenset(_numbers(vision, "fullatt_block_indexes", (7, 15, 23, 31))) if window else frozenset(),
            _places(tower, vision) if kind.placed else None,
            _stacked(tower, vision, wide, hidden) if kind.stacked else {},
        )

    @property
    def device(self) -> torch.device:
        return self.frequencies.device

    def __call__(self, pixels: Tensor, numerics: Numerics) -> Slices:
        x_tk, down, across = self.colours.patches(pixels)
        order_t = self._order(down, across)
        # [T, 3, patch * patch] to [T, 3, frames, patch * patch].
        x_tk = x_tk[order_t].view(len(x_tk), 3, 1, -1).expand(-1, -1, _FRAMES, -1).reshape(len(x_tk), -1)
        count = len(x_tk)
        places_th = None if self.places_ssh is None else self._between(self.places_ssh, down, across)[order_t]
        x_mh = yield from embedded(x_tk, self.patches, numerics, places_th)
        turns, groups = self._turns(down, across, order_t), self._windows(down, across)
        stacked: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            x_mh = yield from layer(x_mh, count, numerics, turns, () if number in self.full else groups)
            if number in self.stacked:
                stacked.append((yield from self.stacked[number](x_mh[:count], numerics)))
        merged = yield from self.merger(x_mh[:count], numerics)
        return torch.cat((merged, *stacked), dim=1)

    def _order(self, down: int, across: int) -> Tensor:
        """[T] int64: of each patch in the tower's order, its number row by row."""
        side = self.spec.merge
        numbers = torch.arange(down * across, device=self.device).view(down // side, side, across // side, side)
        return numbers.transpose(1, 2).flatten()

    def _turns(self, down: int, across: int, order_t: Tensor) -> Turns:
        """Of each patch's row and column, [T, 1, head_dim] float32 each."""
        rows_t, columns_t = order_t // across, order_t % across
        angles = [at_t[:, None, None] * self.frequencies for at_t in (rows_t, columns_t)]
        return turns_by(torch.cat(angles, dim=-1))

    def _windows(self, down: int, across: int) -> Groups:
        """The patches of each window, those of windows of one size together."""
        if not self.window:
            return ()
        side, area = self.window, self.spec.merge**2
        down, across = down // self.spec.merge, across // self.spec.merge
        numbers = torch.arange(down * across * area, device=self.device).view(down, across, area)
        found: defaultdict[int, list[Tensor]] = defaultdict(list)
        for y in range(0, down, side):
            for x in range(0, across, side):
                members = numbers[y : y + side, x : x + side].flatten()
                found[len(members)].append(members)
        return [torch.stack(members) for members in found.values()]

    @staticmethod
    def _between(table_ssh: Tensor, down: int, across: int) -> Tensor:
        """The table's values between its places, at so many in equal distances, the first and the last its own: row by
        row, [down * across, hidden]."""
        (below, rest_y), (right, rest_x) = (_steps(count, len(table_ssh), table_ssh.device) for count in (down, across))
        last = len(table_ssh) - 1
        corners = torch.zeros(down, across, table_ssh.shape[2], device=table_ssh.device)
        for dy, weight_y in ((0, 1 - rest_y), (1, rest_y)):
            for dx, weight_x in ((0, 1 - rest_x), (1, rest_x)):
                at_y, at_x = (below + dy).clamp_max(last), (right + dx).clamp_max(last)
                corners += table_ssh[at_y[:, None], at_x[None]] * (weight_y[:, None] * weight_x[None])[..., None]
        return corners.flatten(0, 1)


def _steps(count: int, side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of `count` places in equal distances over `side` ones: the place before each, and how far behind that it is."""
    at = torch.arange(count, dtype=torch.float32, device=device) * (side - 1) / max(1, count - 1)
    before = at.floor()
    return before.long(), at - before


def _layer(weights: Weights, vision: JsonFields, kind: _TowerKind, width: int, inner: int) -> TowerLayer:
    activation: Activation = ACTIVATIONS[vision.text("hidden_act", kind.activation, tuple(ACTIVATIONS))]
    attention, mlp = weights.scope("attn."), weights.scope("mlp.")
    *first, second = kind.mlp
    return TowerLayer(
        kind.norm(weights, "norm1", width, _EPS),
        attention.linear({"qkv": 3 * width}, width, bias=True),
        attention.linear({"proj": width}, width, bias=True),
        kind.norm(weights, "norm2", width, _EPS),
        TowerMlp(
            mlp.linear(dict.fromkeys(first, inner), width, bias=True),
            mlp.linear({second: width}, inner, bias=True),
            activation,
            gated=len(first) > 1,
        ),
        vision.size("num_heads"),
    )


def _places(tower: Weights, vision: JsonFields) -> Tensor:
    count, width = vision.size("num_position_embeddings"), vision.size("hidden_size")
    side = int(count**0.5)
    if side * side != count:
        raise vision.refuse(f"num_position_embeddings must be a square, got {count}")
    return tower.tensor("pos_embed.weight", count, width, dtype=torch.float32).view(side, side, width)


def _stacked(tower: Weights, vision: JsonFields, wide: int, hidden: int) -> dict[int, QwenMerger]:
    found: dict[int, QwenMerger] = {}
    for at, number in enumerate(_numbers(vision, "deepstack_visual_indexes", (8, 16, 24))):
        weights = tower.scope(f"deepstack_merger_list.{at}.")
        norm = layer_norm(weights, "norm", wide, _EPS)
        found[number] = QwenMerger.read(weights, norm, ("linear_fc1", "linear_fc2"), wide, hidden, merged_first=True)
    return found


def _numbers(vision: JsonFields, key: str, usual: Sequence[int]) -> list[int]:
    """Numbers of layers, in order."""
    given = vision.values.get(key, list(usual))
    if not isinstance(given, list) or any(type(one) is not int for one in given) or sorted(set(given)) != given:
        raise vision.refuse(f"{key} must be numbers of layers in order, got {given!r}")
    return [*given]
