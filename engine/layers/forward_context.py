"""The forward context: what the layers of a model are given in one step besides the activations.

Activations are [M, hidden]: the tokens of all sequences packed on one axis, T of them, padded to the numerics'
quantum with rows that are computed like the rest and written nowhere. Every operation on activations is by row. State
is read and written through the load gates only, one layer of one pool at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinpool.cache.pool.load_gate import GateDoor, LayerBuffers
from twinpool.engine.attention.attention_backend import AttentionBackend
from twinpool.engine.attention.attention_plan import AttentionPlan, SlotPlan
from twinpool.engine.tensors.row_exact_linear import Numerics, RowExactLinear
from twinpool.engine.tensors.tensor_parallel import ALONE, TensorParallelGroup

if TYPE_CHECKING:
    from twinpool.engine.layers.rope import RopeTable


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer of the model keeps its state: the pool's name, and which of the pool's layers it is."""

    pool: str
    layer: int


@dataclass
class ForwardContext:
    """The context of one step."""

    numerics: Numerics
    attention: AttentionBackend
    positions_m: Tensor
    """[M] int64: absolute positions; 0 for padding."""
    longest: int
    """The largest position plus one."""
    count: int
    """T: rows that are tokens; the other M - T are padding."""
    plans: Mapping[str, AttentionPlan]
    """The attention plans of full and window pools, by name."""
    slots: Mapping[str, SlotPlan]
    """The slot plans of state pools, by name."""
    doors: Mapping[str, GateDoor]
    """The doors of the load gates of all pools, by name."""
    ranks: TensorParallelGroup = ALONE
    passed: Callable[[], None] = lambda: None
    """To be called after each layer of the model: what it writes of the state is written, or on its way there."""
    scratch: dict[Any, Any] = field(default_factory=dict)
    """Values that a layer leaves for later layers of the same step, such as selections."""

    def linear(self, x_mk: Tensor, linear: RowExactLinear) -> Tensor:
        """Compute a product of padded rows; summed over ranks where each rank has a part of it."""
        out = self.numerics.linear(x_mk, linear)
        return self.sum(out) if linear.partial else out

    def sum(self, x: Tensor) -> Tensor:
        """Sum every rank's `x`, adding in the order of the ranks."""
        return self.ranks.sum(x)

    def buffers(self, place: LayerPlace) -> LayerBuffers:
        """Return a layer's buffers by name, after the loads that they are waiting for."""
        return self.doors[place.pool].layer(place.layer)

    def rope(self, table: RopeTable) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin of the step's positions, [M, 1, rope_dim] each; looked up once a step."""
        key = ("rope", id(table))
        if key not in self.scratch:
            self.scratch[key] = table.at(self.positions_m, self.longest)
        found: tuple[Tensor, Tensor] = self.scratch[key]
        return found

    def padded(self, x_tn: Tensor) -> Tensor:
        """Append the padding rows (zeros) to the T rows of tokens again: [M, ...]."""
        lacking = len(self.positions_m) - len(x_tn)
        return torch.cat((x_tn, x_tn.new_zeros(lacking, *x_tn.shape[1:]))) if lacking else x_tn
