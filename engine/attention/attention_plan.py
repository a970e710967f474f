"""Attention plans: what backends need to know of a step's sequences, and the rule that every backend keeps.

One *plan* is built a step and used by every layer. All queries of a step lie packed on one axis T, sequence after
sequence; a decode row has one query, a chunk of a prompt many. Keys and values are read from pages through block
tables; those of the step's own tokens are already written when `attend` is called.

The rule for every backend under `numerics: invariant`: the result of a query depends on its own sequence and its
absolute position alone, bit for bit. Not on the batch it is in, on chunk ends, on the page size, on which pages hold
the sequence, or on whether the query came as an extend or as a decode row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cache.allocation.block_table import NULL_PAGE
from engine.tensors.pinned_memory import to_device


@dataclass(frozen=True)
class AttentionPlan:
    """Positions, block tables and slots of one step. B sequences, T queries in all; tensors on the compute device."""

    starts_b: Tensor
    """[B] int32: the absolute position of each sequence's first query."""
    offsets_b: Tensor
    """[B+1] int32: where each sequence's queries begin on the packed axis; the last entry is T."""
    tables_bp: Tensor
    """[B, P] int32: the block tables, a page for each run of `page_tokens` positions, padded with the null page 0."""
    slots_t: Tensor
    """[T] int64: where the key and value of each query's own position lie, as page * page_tokens + offset."""
    page_tokens: int
    max_queries: int
    """The largest number of queries of one sequence."""
    firsts_b: Tensor | None = None
    """[B] int32: the page number of each table's first column. None: 0, as for every full pool."""
    epochs_bp: Tensor | None = None
    """[B, P] int32: the epoch of each page of `tables_bp` when it was leased. None: these pages are never freed."""
    muted_t: Tensor | None = None
    """[T] bool: queries of stale sequences. They write zeros into the null page. None: there are none."""
    scratch: dict[str, Any] = field(default_factory=dict, compare=False)
    """What a backend works out once a step, kept for its later layers."""


@dataclass(frozen=True)
class SlotPlan:
    """The slots of one step's recurrent states. B sequences with T rows in all."""

    tables_bp: Tensor
    """[B, 1] int32: the slot of each sequence."""
    starts: tuple[int, ...]
    """Absolute position of each sequence's first row."""
    counts: tuple[int, ...]
    """How many rows each sequence has on the packed axis, one sequence after the other."""
    epochs_bp: Tensor | None = None
    """[B, 1] int32: the epoch of each slot when it was leased. None: these slots are never freed."""
    muted_b: Tensor | None = None
    """[B] bool: stale sequences, whose slot is the null slot, to which zeros are written. None: there are none."""
    scratch: dict[str, Any] = field(default_factory=dict, compare=False)
    """What a backend works out once a step, kept for its later layers."""

    @property
    def slots_b(self) -> Tensor:
        """[B] int64: the slot of each sequence."""
        return self.tables_bp[:, 0].long()


BackendPlan = AttentionPlan | SlotPlan


def make_plan(
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[Sequence[int]],
    page_tokens: int,
    device: torch.device,
    epochs: Sequence[Sequence[int]] | None = None,
    firsts: Sequence[int] | None = None,
) -> AttentionPlan:
    """Build the plan of a step from each sequence's first position, number of queries, block table and epochs.

    `firsts` are the page numbers that the tables begin with; None: 0. A table may be longer than its sequence; entries
    past the last position are ignored.
    """
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    begins = list(firsts) if firsts is not None else [0] * len(lengths)
    used = [-(-length // page_tokens) - first for length, first in zip(lengths, begins, strict=True)]

    def integers(rows: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return to_device(rows, device, dtype)

    slots = [
        table[position // page_tokens - first] * page_tokens + position % page_tokens
        for table, first, start, length in zip(tables, begins, starts, lengths, strict=True)
        for position in range(start, length)
    ]
    return AttentionPlan(
        starts_b=integers(starts),
        offsets_b=integers([0, *accumulate(counts)]),
        tables_bp=_rectangle(tables, used, device),
        slots_t=integers(slots, torch.int64),
        page_tokens=page_tokens,
        max_queries=max(counts),
        firsts_b=integers(begins) if firsts is not None else None,
        epochs_bp=_rectangle(epochs, used, device) if epochs is not None else None,
    )


def make_slot_plan(
    starts: Sequence[int],
    counts: Sequence[int],
    slots: Sequence[Sequence[int]],
    device: torch.device,
    epochs: Sequence[Sequence[int]] | None = None,
) -> SlotPlan:
    """Build the plan of a state pool from each sequence's first position, number of rows, slot and its epoch."""
    ones = [1] * len(starts)
    return SlotPlan(
        _rectangle(slots, ones, device),
        tuple(starts),
        tuple(counts),
        _rectangle(epochs, ones, device) if epochs is not None else None,
    )


def _rectangle(rows: Sequence[Sequence[int]], used: Sequence[int], device: torch.device) -> Tensor:
    """The first `used` entries of each row, padded with the null page, which is never freed: its epoch is 0 as well."""
    full = np.full((len(rows), max(used)), NULL_PAGE, dtype=np.int32)
    for line, row, n in zip(full, rows, used, strict=True):
        # Tables of allocations are int32 side by side already (`cache.allocation.allocation.numbers`); others are
        # lists.
        line[:n] = np.frombuffer(row, np.int32, n) if isinstance(row, array) else np.fromiter(row, np.int32, n)
    return to_device(full, device, torch.int32)


def muted(plan: AttentionPlan, stale_b: Tensor) -> AttentionPlan:
    """Return the plan with the writes of stale sequences ([B] bool) redirected, since others own their pages now.

    Their state is written to the null page as zeros, which are its content; so the host needn't know which they are.
    """
    counts_b = plan.offsets_b.diff().long()
    muted_t = torch.repeat_interleave(stale_b, counts_b, output_size=len(plan.slots_t))
    return replace(plan, slots_t=plan.slots_t.masked_fill(muted_t, 0), muted_t=muted_t)


def muted_slots(plan: SlotPlan, stale_b: Tensor) -> SlotPlan:
    """`muted` for a plan of slots."""
    return replace(plan, tables_bp=plan.tables_bp.masked_fill(stale_b[:, None], NULL_PAGE), muted_b=stale_b)


BLOCK_TOKENS = 128
"""Absolute positions of a block of keys in the torch backend."""
