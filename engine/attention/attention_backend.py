"""The interfaces of attention backends: to keys and values by head, to latents (with the indexer and sparse attention),
and of recurrent layers.

*Latent attention* (DeepSeek-V2, arXiv 2405.04434) keeps one compressed vector a token instead of keys and values by
head: `latent` [value_dim + rope_dim], of which the first `value_dim` are both key and value and the rest is a key that
carries the position. Keys and values by head are never made: each head's key matrix is applied to its query and its
value matrix to its result (the *absorbed* form), so that every head reads the same latents. Decode and extend use the
same form, so that a row's bits are the same in both.

The *indexer* (DeepSeek sparse attention, arXiv 2512.02556) scores every earlier position with many small heads that
share one key a token; attention then reads the `top_k` best positions only. The rules of a selection:

    a query that sees no more than top_k positions   selects them all
    any other                                        the top_k with the highest scores; of equal ones the earlier

A selection lists positions in rising order. *Sparse attention* walks it in blocks of fixed length by rank, so a row
whose selection is everything has the very bits of attention to everything, and every row's bits depend on its own
sequence and position alone (see engine/attention/attention_plan.py for the rule).

A *recurrent layer* (linear attention) keeps, for each sequence, the last inputs of a short convolution and a matrix a
head. Both live in slots of the state pool, and a step reads a slot, computes the sequence's rows and writes the slot
again.

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
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace
from twinpool.engine.attention.attention_plan import AttentionPlan, BackendPlan, SlotPlan
from twinpool.engine.attention.kv_quantization import KVScales
from twinpool.engine.tensors.shard import Shard


@dataclass(frozen=True)
class IndexKeys:
    """One layer's index keys of all pages."""

    pages: Tensor
    """[pages, page_tokens, index_dim]: in the model's dtype, or float8_e4m3fn to be multiplied by the scales."""
    scales: Tensor | None = None
    """[pages, page_tokens] float32, with float8 keys only."""


@dataclass(frozen=True)
class SparseSelection:
    """The positions that the queries of one step read."""

    rows_s: Tensor
    """[S] int64: the queries with an entry here, by their place on the packed axis; the others read all they see."""
    slots_sk: Tensor
    """[S, top_k] int32: where each of these queries reads, as page * page_tokens + offset, by rising position."""
    positions_sk: Tensor
    """[S, top_k] int32: the positions, by rising position."""
    scratch: dict[str, Any] = field(default_factory=dict, compare=False)
    """What a backend works out once a selection, kept for the layers that share it."""


class LatentBackend(Protocol):
    """Attention to latents, and the selection of positions to read."""

    def attend(
        self,
        q_thd: Tensor,
        latents: Tensor,
        plan: AttentionPlan,
        scale: float,
        value_dim: int,
        latent_scales: Tensor | None = None,
    ) -> Tensor:
        """Attend each query to the positions up to its own.

        `q_thd` is [T, heads, dim]: absorbed queries; `latents` [pages, page_tokens, dim] in the same dtype, or as codes
        with `latent_scales`, [pages, page_tokens, 1] (`engine.attention.kv_quantization`). Scores are
        multiplied by `scale`; softmax and accumulation are in float32. Returns [T, heads, value_dim]: weighted sums
        of the first `value_dim` elements of the latents, in the dtype of `q_thd`.
        """

    def store_keys(self, keys_td: Tensor, into: IndexKeys, plan: AttentionPlan) -> None:
        """Write the step's index keys [T, index_dim], rounded to float8 with a scale a token where `into` has scales.

        A scale is the key's largest magnitude divided by 448, the largest float8. Muted queries write zeros.
        """

    def select(
        self, q_thd: Tensor, weights_th: Tensor, keys: IndexKeys, plan: AttentionPlan, top_k: int
    ) -> SparseSelection | None:
        """Select the positions that each query reads. Returns None where every query reads all it sees.

        `q_thd` is [T, index_heads, index_dim], `weights_th` [T, index_heads] float32. The score of a position is
        the sum over heads of weight * relu(q . k), in float32; NaN counts as the lowest.
        """

    def attend_selected(
        self,
        q_thd: Tensor,
        latents: Tensor,
        plan: AttentionPlan,
        selection: SparseSelection | None,
        scale: float,
        value_dim: int,
        latent_scales: Tensor | None = None,
    ) -> Tensor:
        """`attend` to selected positions only; `selection` is what `select` returned."""


BLOCK = 16
"""Positions of a block. Small, so that a slot's block is small beside its matrix (a fifth of it at 128 by 128), and
the fewest rows that matrix units take."""


def conv_positions(taps: int) -> int:
    """How many positions a slot keeps the inputs of, of a convolution over `taps` positions before each: position p
    has entry p modulo that many. They are those of a block, and what its first position reads, so a step within one
    block overwrites nothing that the same positions would read if they were computed again."""
    return BLOCK + taps


@dataclass(frozen=True)
class ScanState:
    """One layer's buffers of a recurrence, float32. H heads in G groups; a group's heads share queries and keys.

    A step reads what a block's positions before its own have left, and writes its own over whatever is there. So
    positions of an unfinished block can be computed again, with other tokens: what is left of those that aren't, behind
    a sequence's end, nobody reads.
    """

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


def undoable_positions(start: int) -> int:
    """How many positions behind `start` a step may compute that may have to be computed again: those of the same block
    but its last, with which the block is folded into the matrix."""
    return max(0, BLOCK - 2 - start % BLOCK)


class RecurrenceBackend(Protocol):
    """Causal convolutions and linear recurrences over slots."""

    def conv(
        self,
        x_tc: Tensor,
        states: Sequence[Tensor],
        weight_kc: Tensor,
        bias_c: Tensor | None,
        plan: SlotPlan,
        *,
        activated: bool = False,
    ) -> Tensor:
        """Compute a causal depthwise convolution: tap by tap in float32, rounded once; with `activated` its silu.

        `x_tc` is [T, channels]; `states` are buffers [slots, units, conv_positions(taps), width] in the dtype of `x_tc`
        whose channels (units * width each) together are those of `x_tc`, and hold the `taps` inputs before each
        sequence's rows; `weight_kc` is [taps + 1, channels], the last row for the position itself. Returns
        [T, channels], and writes each sequence's inputs into its slot, the last ones where they
        are more than it holds (zeros where the plan is muted).
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


@dataclass(frozen=True, slots=True, eq=False)
class ScoreOptions:
    """How a layer computes the scores of its queries: scale, window, softcap and sinks."""

    scale: float
    """Products of queries and keys are multiplied by this."""
    window: int = 0
    """A query sees this many positions, the last ones up to its own; 0: all up to its own."""
    softcap: float = 0.0
    """Scores are squeezed to plus or minus this by a hyperbolic tangent; 0: not at all."""
    sinks_h: Tensor | None = None
    """[heads] float32: an attention sink a head, one more score in its softmax whose weight goes to no value
    (arXiv 2309.17453)."""


class AttentionBackend(Protocol):
    """Causal attention over paged keys and values."""

    def attend(
        self,
        q_thd: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        plan: AttentionPlan,
        scores: ScoreOptions,
        scales: KVScales | None = None,
    ) -> Tensor:
        """Attend each query to the positions up to its own that it sees.

        `q_thd` is [T, heads, head_dim]; `k_pages` and `v_pages` are [pages, page_tokens, kv_heads, head_dim] in the
        dtype of `q_thd`, or as codes with `scales` (`engine.attention.kv_quantization`); heads is a multiple of
        kv_heads, and head h reads kv head h // (heads // kv_heads).
        Softmax and accumulation are in float32. The plan's tables may begin at the window's first page.
        Returns [T, heads, head_dim] in the dtype of `q_thd`.
        """

    @property
    def latent(self) -> LatentBackend:
        """This backend's implementation of latent and sparse attention."""

    @property
    def recurrence(self) -> RecurrenceBackend:
        """This backend's implementation of recurrent layers."""

    def stale(self, plan: BackendPlan, epochs_e: Tensor) -> Tensor:
        """Flag sequences whose table names a page whose epoch in `epochs_e` ([pages] int32) has changed: [B] bool.

        `plan.epochs_bp` must not be None.
        """
