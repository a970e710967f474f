"""The interface of attention backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from twinpool.engine.attention.attention_plan import AttentionPlan, BackendPlan

if TYPE_CHECKING:
    from twinpool.engine.attention.latent_backend import LatentBackend
    from twinpool.engine.attention.recurrence_backend import RecurrenceBackend


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
        self, q_thd: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan, scores: ScoreOptions
    ) -> Tensor:
        """Attend each query to the positions up to its own that it sees.

        `q_thd` is [T, heads, head_dim]; `k_pages` and `v_pages` are [pages, page_tokens, kv_heads, head_dim] in the
        dtype of `q_thd`; heads is a multiple of kv_heads, and head h reads kv head h // (heads // kv_heads).
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
