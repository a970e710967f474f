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
from dataclasses import dataclass, field
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


def make_plan(
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[Sequence[int]],
    page_tokens: int,
    device: torch.device,
) -> AttentionPlan:
    """Build the plan of a step from each sequence's first position, number of queries and block table.

    Only the entries of a table that hold its context are used; it may be longer.
    """
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    used = [-(-length // page_tokens) for length in lengths]
    width = max(used)
    padded = [list(table[:n]) + [NULL_PAGE] * (width - n) for table, n in zip(tables, used, strict=True)]
    slots = [
        table[position // page_tokens] * page_tokens + position % page_tokens
        for table, start, length in zip(tables, starts, lengths, strict=True)
        for position in range(start, length)
    ]
    return AttentionPlan(
        starts_b=torch.tensor(starts, dtype=torch.int32, device=device),
        offsets_b=torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device),
        lengths_b=torch.tensor(lengths, dtype=torch.int32, device=device),
        tables_bp=torch.tensor(padded, dtype=torch.int32, device=device),
        slots_t=torch.tensor(slots, dtype=torch.int64, device=device),
        page_tokens=page_tokens,
        max_queries=max(counts),
    )
