"""What the layers of a model are given in one step, besides the activations.

Activations are [M, hidden]: the tokens of all sequences packed on one axis, T of them, padded to the numerics'
quantum with rows that are computed like the rest and written nowhere. Every operation on them is by row. State is read
and written through the gates only, one layer of one pool at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cache.pool.load_gate import GateDoor, LayerBuffers
from engine.attention.attention_backend import AttentionBackend
from engine.attention.attention_plan import AttentionPlan, SlotPlan
from engine.tensors.row_exact_linear import Numerics, RowExactLinear
from engine.tensors.tensor_parallel import ALONE, TensorParallelGroup

if TYPE_CHECKING:
    from engine.layers.rope import RopeTable


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer keeps its state: which layer of which pool."""

    pool: str
    layer: int


@dataclass
class ForwardContext:
    """One step."""

    numerics: Numerics
    attention: AttentionBackend
    positions_m: Tensor
    """[M] int64: absolute positions; 0 for padding."""
    longest: int
    """The largest position plus one."""
    count: int
    """T: rows that are tokens; the other M - T are padding."""
    plans: Mapping[str, AttentionPlan]
    """Of full and window pools, by name."""
    slots: Mapping[str, SlotPlan]
    """Of state pools, by name."""
    doors: Mapping[str, GateDoor]
    ranks: TensorParallelGroup = ALONE
    scratch: dict[Any, Any] = field(default_factory=dict)
    """What a layer leaves for later layers of the same step: selections, keys that others share."""

    def linear(self, x_mk: Tensor, linear: RowExactLinear) -> Tensor:
        """A product of padded rows, summed over ranks where each has a part of it."""
        out = self.numerics.linear(x_mk, linear)
        return self.sum(out) if linear.partial else out

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, in an order of additions that depends on the ranks alone."""
        return self.ranks.sum(x)

    def buffers(self, place: LayerPlace) -> LayerBuffers:
        """A layer's state, complete when it is handed out."""
        return self.doors[place.pool].layer(place.layer)

    def rope(self, table: RopeTable) -> tuple[Tensor, Tensor]:
        """cos and signed sin of the step's positions, [M, 1, rope_dim] each; looked up once a step."""
        key = ("rope", id(table))
        if key not in self.scratch:
            self.scratch[key] = table.at(self.positions_m, self.longest)
        found: tuple[Tensor, Tensor] = self.scratch[key]
        return found

    def padded(self, x_tn: Tensor) -> Tensor:
        """Rows of tokens with the padding rows (zeros) behind them again."""
        lacking = len(self.positions_m) - len(x_tn)
        return torch.cat((x_tn, x_tn.new_zeros(lacking, *x_tn.shape[1:]))) if lacking else x_tn
