"""The interface of backends for latent attention, the indexer and sparse attention.

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
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from twinpool.engine.attention.attention_plan import AttentionPlan


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

    def attend(self, q_thd: Tensor, latents: Tensor, plan: AttentionPlan, scale: float, value_dim: int) -> Tensor:
        """Attend each query to the positions up to its own.

        `q_thd` is [T, heads, dim]: absorbed queries; `latents` [pages, page_tokens, dim] in the same dtype. Scores are
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
    ) -> Tensor:
        """`attend` to selected positions only; `selection` is what `select` returned."""
