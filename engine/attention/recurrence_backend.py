"""The interface of backends for recurrent layers (linear attention).

A recurrent layer keeps, for each sequence, the last inputs of a short convolution and a matrix a head. Both live in
slots of the state pool, and a step reads a slot, computes the sequence's rows and writes the slot again.

The state is kept *by blocks* of `BLOCK` absolute positions, and that is what makes results exact. The plain form of
the recurrence, one position after the other, is exact by nature and slow; the chunked forms of the papers are fast,
but their rounding depends on where a chunk begins. Here a block begins at a multiple of `BLOCK` whatever the chunks
are: a slot holds the matrix as it was when the current block began, and beside it the keys, values and decays of the
block's positions so far. A position's result is computed from these two, by products whose shape never changes,
whether the position came in a prompt of thousands or alone. So extend and decode are one computation, at the speed of a
chunked form, and a decode step doesn't even write the matrix: that happens once a block.

Rows of a block that no position has reached yet are zeros, in the slot as well: the bytes of a slot are a function of
the sequence's tokens and of nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace
from twinpool.engine.attention.attention_plan import SlotPlan
from twinpool.engine.tensors.shard import Shard

BLOCK = 16
"""Positions of a block. Small, so that a slot's block is small beside its matrix (a fifth of it at 128 by 128), and
the fewest rows that matrix units take."""


@dataclass(frozen=True)
class ScanState:
    """One layer's buffers of a recurrence, float32. H heads in G groups; a group's heads share queries and keys."""

    matrix: Tensor
    """[slots, H, key_dim, value_dim]: the matrix before the current block."""
    keys: Tensor
    """[slots, G, BLOCK, key_dim]: the keys of the block's positions so far."""
    values: Tensor
    """[slots, H, BLOCK, value_dim]: what each position would write if the block's earlier ones had written nothing."""
    decays: Tensor
    """[slots, H, BLOCK]: logarithms of the decays of the block's positions so far."""
    solved: Tensor | None
    """[slots, H, BLOCK, BLOCK]: weights of the block's values at each position. None without the delta rule."""

    @classmethod
    def of(cls, buffers: Mapping[str, Tensor]) -> ScanState:
        """Pick the state from a layer's buffers, named as `scan_buffers` declares them."""
        return cls(
            buffers["matrix"],
            buffers["block_keys"],
            buffers["block_values"],
            buffers["block_decays"],
            buffers.get("block_solved"),
        )


def scan_buffers(
    layers: int, heads: int, groups: int, key_dim: int, value_dim: int, *, delta: bool, shard: Shard
) -> tuple[BufferSpec, ...]:
    """Declare the buffers of `ScanState` for `layers` layers, with the heads and groups of one rank."""
    here, there = shard.heads(heads, "recurrent heads"), shard.heads(groups, "groups of recurrent heads")

    def buffer(name: str, units: range, whole: int, *shape: int) -> BufferSpec:
        size = (len(units), *shape)
        return BufferSpec(name, layers, size, torch.float32, IndexSpace.SLOT, heads=whole, first_head=units.start)

    buffers = (
        buffer("matrix", here, heads, key_dim, value_dim),
        buffer("block_keys", there, groups, BLOCK, key_dim),
        buffer("block_values", here, heads, BLOCK, value_dim),
        buffer("block_decays", here, heads, BLOCK),
    )
    return (*buffers, buffer("block_solved", here, heads, BLOCK, BLOCK)) if delta else buffers


class RecurrenceBackend(Protocol):
    """Causal convolutions and linear recurrences over slots."""

    def conv(
        self, x_tc: Tensor, states: Sequence[Tensor], weight_kc: Tensor, bias_c: Tensor | None, plan: SlotPlan
    ) -> Tensor:
        """Compute a causal depthwise convolution: tap by tap in float32, rounded once.

        `x_tc` is [T, channels]; `states` are buffers [slots, units, taps, width] in the dtype of `x_tc` whose
        channels (units * width each) together are those of `x_tc`, and hold the `taps` inputs before each sequence's
        rows; `weight_kc` is [taps + 1, channels], the last row for the position itself. Returns [T, channels] before
        any activation, and writes each sequence's last inputs into its slot (zeros where the plan is muted).
        """

    def scan(
        self,
        q_tgk: Tensor,
        k_tgk: Tensor,
        v_thv: Tensor,
        decay_th: Tensor,
        beta_th: Tensor | None,
        state: ScanState,
        plan: SlotPlan,
    ) -> Tensor:
        """Compute each head's recurrence over a sequence's rows, and write the state after them into its slot.

        With S [key_dim, value_dim] a head's matrix, at each position in turn

            S = exp(decay) * S + outer(k, u)          out = S.T @ q
            u = v                                     without `beta_th` (Mamba-2, arXiv 2405.21060)
            u = beta * (v - (exp(decay) * S).T @ k)   with it (gated delta rule, arXiv 2412.06464)

        All float32: `q_tgk` and `k_tgk` are [T, G, key_dim], `v_thv` is [T, H, value_dim], `decay_th` and `beta_th`
        are [T, H]; head h reads group h // (H // G). Returns [T, H, value_dim] float32.
        """
