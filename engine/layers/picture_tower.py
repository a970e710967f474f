"""Picture towers: from a picture's pixels to what stands at its positions in place of rows of the embedding.

A tower computes one picture at a time, so its bits depend on no other picture of a step, and are computed once: the
encoder keeps what it computed by the picture's digest. Within a picture every patch attends to every other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twinpool.cache.memory.pinned_memory import to_device
from twinpool.contracts.checkpoint.picture_spec import PictureSpec, vision_fields
from twinpool.contracts.messages.router_commands import Picture
from twinpool.engine.layers.decoder import Norm
from twinpool.engine.layers.norm import gelu_tanh, rms_norm, silu
from twinpool.engine.layers.rope import rotate
from twinpool.engine.tensors.row_exact_linear import Numerics, RowExactLinear
from twinpool.engine.tensors.weight_loader import Weights

_PREFIXES = ("model.", "")
"""Under what published folders, and those that transformers writes, have towers and projectors."""
_EPS = 1e-5
Activation = Callable[[Tensor], Tensor]
_ACTIVATIONS: dict[str, Activation] = {"gelu": F.gelu, "gelu_pytorch_tanh": gelu_tanh, "silu": silu}
"""By their names in `config.json`; each takes and returns float32."""
Turns = tuple[Tensor, Tensor]


class PlacedRows(NamedTuple):
    """Rows of a picture in a row of a step: those from `first` on of what its tower computes stand at the places `at`,
    counted from the row's first token."""

    picture: Picture
    digest: bytes
    first: int
    at: Sequence[int]


class TowerLayer:
    """Attention of all patches to all, then a gated feed-forward layer, each behind a norm."""

    def __init__(self, weights: Weights, hidden: int, inner: int, heads: int, activation: Activation) -> None:
        attention, mlp = weights.scope("attention."), weights.scope("feed_forward.")
        self._norms = [_norm(weights, f"{name}_norm", hidden, _EPS) for name in ("attention", "ffn")]
        self._qkv = attention.linear(dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden), hidden)
        self._out = attention.linear({"o_proj": hidden}, hidden)
        self._gate_up = mlp.linear({"gate_proj": inner, "up_proj": inner}, hidden)
        self._down = mlp.linear({"down_proj": hidden}, inner)
        self._heads, self._activation = heads, activation

    def __call__(self, x_mh: Tensor, turns: Turns, numerics: Numerics) -> Tensor:
        """The residual stream, [M, hidden], of patches as many as `turns` has angles, and padding."""
        count = len(turns[0])
        qkv_t3hd = numerics.linear(self._norms[0](x_mh), self._qkv)[:count].view(count, 3, self._heads, -1)
        query, key, value = qkv_t3hd.unbind(1)
        mixed_thd = _attend(rotate(query, *turns), rotate(key, *turns), value)
        x_mh = x_mh + numerics.linear(_padded(mixed_thd.flatten(1), len(x_mh)), self._out)
        gate, up = numerics.linear(self._norms[1](x_mh), self._gate_up).chunk(2, dim=-1)
        inner = self._activation(gate.float()).to(gate.dtype) * up
        return x_mh + numerics.linear(inner, self._down)


@dataclass
class PixtralTower:
    """Pixtral's tower, with the patch merger and projector of Mistral 3."""

    spec: PictureSpec
    mean_c: Tensor
    std_c: Tensor
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
        scopes = [weights.scope(prefix) for prefix in _PREFIXES]
        found = next((one for one in scopes if one.has("vision_tower.patch_conv.weight")), None)
        if found is None or weights.shard.size > 1:
            return None
        config, vision = vision_fields(weights.spec.path)
        tower, projector = found.scope("vision_tower."), found.scope("multi_modal_projector.")
        width, heads = vision.size("hidden_size"), vision.size("num_attention_heads")
        inner, patch, dim = vision.size("intermediate_size"), spec.patch, vision.size("head_dim", width // heads)
        activation = _ACTIVATIONS[vision.text("hidden_act", "gelu", tuple(_ACTIVATIONS))]
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
            torch.tensor(spec.mean, device=weights.device),
            torch.tensor(spec.std, device=weights.device),
            weights.made(tower.tensor("patch_conv.weight", width, 3, patch, patch).flatten(1)),
            _norm(tower, "ln_pre", width, _EPS),
            [
                TowerLayer(tower.scope(f"transformer.layers.{n}."), width, inner, heads, activation)
                for n in range(vision.size("num_hidden_layers"))
            ],
            torch.cat((inverse[0::2], inverse[1::2])).to(weights.device),
            _norm(projector, "norm", width, eps),
            projector.linear({"patch_merger.merging_layer": width}, width * spec.merge**2),
            (first, second),
            _ACTIVATIONS[config.text("projector_hidden_act", "gelu", tuple(_ACTIVATIONS))],
        )

    def __call__(self, pixels: Tensor, numerics: Numerics) -> Tensor:
        """Compute one picture, [height, width, 3] uint8: a row of the text's hidden size for each position."""
        height, width, _ = pixels.shape
        down, across, size = height // self.spec.patch, width // self.spec.patch, self.spec.patch
        # In float64 first, as transformers does.
        colours = ((pixels.double() * self.spec.rescale).float() - self.mean_c) / self.std_c
        x_tk = colours.view(down, size, across, size, 3).permute(0, 2, 4, 1, 3).reshape(down * across, -1)
        count = len(x_tk)
        x_mk = _padded(x_tk.to(self.patches.dtype), numerics.padded(count))
        x_mh = self.before(numerics.linear(x_mk, self.patches))
        turns = self._turns(down, across, x_mh.dtype)
        for layer in self.layers:
            x_mh = layer(x_mh, turns, numerics)
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
        x_mh = numerics.linear(_padded(x_tk, numerics.padded(count)), self.merge)
        inner = numerics.linear(x_mh, self.projections[0])
        return numerics.linear(self.activation(inner.float()).to(inner.dtype), self.projections[1])[:count]


class PictureEncoder:
    """What a worker's tower computes, kept by the pictures' digests, as many bytes as there may be: the latest ones."""

    def __init__(self, tower: PixtralTower, limit: int) -> None:
        self.tower = tower
        self._limit, self._nbytes = limit, 0
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.counters = {"pictures_computed": 0.0, "pictures_reused": 0.0}

    def placed(
        self, rows: Iterable[tuple[int, Sequence[PlacedRows]]], numerics: Numerics
    ) -> tuple[Tensor, Tensor] | None:
        """Places among a step's tokens, [n] int64, and what stands there, [n, hidden]; None for none. `rows`: the place
        of the first token of each row of the step, and its parts of pictures."""
        places, found = list[int](), list[Tensor]()
        for first, parts in rows:
            for picture, digest, begin, at in parts:
                places += [first + place for place in at]
                found.append(self._rows(picture, digest, numerics)[begin : begin + len(at)])
        return (to_device(places, self.tower.mean_c.device), torch.cat(found)) if found else None

    def _rows(self, picture: Picture, digest: bytes, numerics: Numerics) -> Tensor:
        """All rows of a picture, [count, hidden]."""
        rows = self._kept.pop(digest, None)
        self.counters["pictures_computed" if rows is None else "pictures_reused"] += 1
        if rows is None:
            pixels = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8)
            device = self.tower.mean_c.device
            rows = self.tower(pixels.view(picture.height, picture.width, 3).to(device), numerics)
            self._nbytes += rows.nbytes
        self._kept[digest] = rows
        while self._nbytes > self._limit and len(self._kept) > 1:
            self._nbytes -= self._kept.popitem(last=False)[1].nbytes
        return rows


def _norm(weights: Weights, name: str, size: int, eps: float) -> Norm:
    return partial(rms_norm, weight=weights.tensor(f"{name}.weight", size), eps=eps)


def _padded(x_tk: Tensor, rows: int) -> Tensor:
    return torch.cat((x_tk, x_tk.new_zeros(rows - len(x_tk), x_tk.shape[1]))) if rows > len(x_tk) else x_tk


def _attend(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> Tensor:
    """Attention of all to all, without a table of all pairs: [T, heads, head_dim]."""
    query, key, value = (x.transpose(0, 1)[None] for x in (q_thd, k_thd, v_thd))
    return F.scaled_dot_product_attention(query, key, value)[0].transpose(0, 1)
