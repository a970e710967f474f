"""The attention interface: what a backend is given, and what it must answer.

One *plan* is built a step and used by every layer. All queries of a step lie packed on one axis T, sequence after
sequence; a decode row has one query, a chunk of a prompt many. Keys and values are read from pages through block
tables; those of the step's own tokens are already written when `attend` is called.

The rule for every backend under `numerics: invariant`: the result of a query depends on its own sequence and its
absolute position alone, bit for bit. Not on the batch it is in, on chunk ends, on the page size, on which pages hold
the sequence, or on whether the query came as an extend or as a decode row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

NULL_PAGE = 0
"""Zeros, always: block tables are padded with it, nothing is ever written to it."""


@dataclass(frozen=True)
class AttentionPlan:
    """Who attends to what in one step. B sequences with T queries in all; integers on the compute device."""

    starts_b: Tensor
    """[B] int32: absolute position of each sequence's first query."""
    offsets_b: Tensor
    """[B+1] int32: where each sequence's queries begin on the packed axis; the last entry is T."""
    lengths_b: Tensor
    """[B] int32: context length, the queries included; the last query is at position length-1."""
    tables_bp: Tensor
    """[B, P] int32: page of each run of `page_tokens` positions, padded with the null page 0."""
    slots_t: Tensor
    """[T] int64: where each query's own key and value lie, as page * page_tokens + offset."""
    page_tokens: int
    max_queries: int
    """The largest number of queries of one sequence."""
    epochs_bp: Tensor | None = None
    """[B, P] int32: the epoch that each page of `tables_bp` had when it was leased. None: nobody frees these pages."""
    muted_t: Tensor | None = None
    """[T] bool: queries of stale sequences. They are written as zeros, into the null page. None: there are none."""
    scratch: dict[str, Any] = field(default_factory=dict, compare=False)
    """What a backend works out once a step, kept for its later layers."""


class Attention(Protocol):
    """Causal attention over paged keys and values."""

    def attend(self, q_thd: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """Attend each query to the positions up to its own.

        `q_thd` is [T, heads, head_dim]; `k_pages` and `v_pages` are [pages, page_tokens, kv_heads, head_dim] in the
        dtype of `q_thd`; heads is a multiple of kv_heads, and head h reads kv head h // (heads // kv_heads).
        Scores are multiplied by `scale`; softmax and accumulation are in float32.
        Returns [T, heads, head_dim] in the dtype of `q_thd`.
        """

    def stale(self, plan: AttentionPlan, epochs_e: Tensor) -> Tensor:
        """Which sequences' tables name a page whose epoch in `epochs_e` ([pages] int32) is another by now: [B] bool.

        `plan.epochs_bp` must be there.
        """


def make_plan(
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[Sequence[int]],
    page_tokens: int,
    device: torch.device,
    epochs: Sequence[Sequence[int]] | None = None,
) -> AttentionPlan:
    """Build the plan of a step from each sequence's first position, number of queries, block table and its epochs.

    Only the entries of a table that hold its context are used; it may be longer.
    """
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    used = [-(-length // page_tokens) for length in lengths]
    width = max(used)

    def padded(rows: Sequence[Sequence[int]]) -> Tensor:
        """The null page is never freed, so its epoch is 0 as well."""
        full = [[*row[:n], *([NULL_PAGE] * (width - n))] for row, n in zip(rows, used, strict=True)]
        return torch.tensor(full, dtype=torch.int32, device=device)

    slots = [
        table[position // page_tokens] * page_tokens + position % page_tokens
        for table, start, length in zip(tables, starts, lengths, strict=True)
        for position in range(start, length)
    ]
    return AttentionPlan(
        starts_b=torch.tensor(starts, dtype=torch.int32, device=device),
        offsets_b=torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device),
        lengths_b=torch.tensor(lengths, dtype=torch.int32, device=device),
        tables_bp=padded(tables),
        slots_t=torch.tensor(slots, dtype=torch.int64, device=device),
        page_tokens=page_tokens,
        max_queries=max(counts),
        epochs_bp=padded(epochs) if epochs is not None else None,
    )


def muted(plan: AttentionPlan, stale_b: Tensor) -> AttentionPlan:
    """The plan with stale sequences ([B] bool) writing nothing: their pages belong to somebody else.

    Without asking the device which they are: their state goes to the null page, as the zeros that are there.
    """
    counts_b = plan.offsets_b.diff().long()
    muted_t = torch.repeat_interleave(stale_b, counts_b, output_size=len(plan.slots_t))
    return replace(plan, slots_t=plan.slots_t.masked_fill(muted_t, 0), muted_t=muted_t)
