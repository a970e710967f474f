"""Attention plans: what backends need to know of a step's sequences, and the rule that every backend keeps.

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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from twinpool.cache.allocation import NULL_PAGE


@dataclass(frozen=True)
class AttentionPlan:
    """Positions, block tables and slots of one step. B sequences, T queries in all; tensors on the compute device."""

    starts_b: Tensor
    """[B] int32: the absolute position of each sequence's first query."""
    offsets_b: Tensor
    """[B+1] int32: where each sequence's queries begin on the packed axis; the last entry is T."""
    tables_bp: Tensor
    """[B, P] int32: the block tables, a page for each run of `page_tokens` positions. Behind a sequence's last position
    there are pages of its own for later positions, or the null page 0: none is read."""
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
    whole: bool = False
    """Whether a query sees its sequence's queries behind it as well, as positions of a picture do; for the torch
    backend alone."""
    scratch: dict[str, Any] = field(default_factory=dict, compare=False)
    """What a backend works out once a step, kept for its later layers."""


class PictureSpan(NamedTuple):
    """Positions of one picture in a step that see each other."""

    sequence: int
    """The number of the row of the step."""
    first: int
    """The place of the first of them among the step's tokens."""
    place: int
    """The same, counted from the row's first token."""
    positions: int
    """How many they are."""


@dataclass(frozen=True)
class SlotPlan:
    """The slots of one step's recurrent states. B sequences with T rows in all."""

    tables_bp: Tensor
    """[B, 1] int32: the slot of each sequence."""
    starts: tuple[int, ...]
    """Absolute position of each sequence's first row."""
    counts: tuple[int, ...]
    """How many rows each sequence has on the packed axis, one sequence after the other."""
    starts_b: Tensor
    """[B] int32: the same starts on the compute device."""
    offsets_b: Tensor
    """[B+1] int32: where the rows of each sequence begin on the packed axis; the last entry is T."""
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


@dataclass(frozen=True)
class StepShape:
    """Where the sequences of a step begin and how many positions each has, on the host."""

    starts: np.ndarray[Any, np.dtype[np.int32]]
    """[B]: the absolute position of each sequence's first query."""
    counts: np.ndarray[Any, np.dtype[np.int32]]
    """[B]: how many queries each sequence has."""
    sequences: np.ndarray[Any, np.dtype[np.int64]]
    """[T]: the sequence of each query on the packed axis."""
    positions: np.ndarray[Any, np.dtype[np.int64]]
    """[T]: the absolute position of each query."""
    offsets: np.ndarray[Any, np.dtype[np.int32]]
    """[B+1]: where each sequence's queries begin on the packed axis; the last entry is T."""
    ends: np.ndarray[Any, np.dtype[np.int32]]
    """[B]: the position behind each sequence's last query."""

    @staticmethod
    def of(starts: Sequence[int], counts: Sequence[int]) -> StepShape:
        first, many = np.array(starts, np.int32), np.array(counts, np.int32)
        offsets = np.zeros(len(many) + 1, np.int32)
        np.cumsum(many, out=offsets[1:])
        sequences = np.arange(len(many))
        if offsets[-1] == len(many):  # one each, as in decode
            return StepShape(first, many, sequences, first.astype(np.int64), offsets, first + many)
        sequences = np.repeat(sequences, many)
        positions = np.arange(offsets[-1], dtype=np.int64) + (first - offsets[:-1])[sequences]
        return StepShape(first, many, sequences, positions, offsets, first + many)


def make_plan(
    shape: StepShape,
    on_device: Sequence[Tensor],
    tables_bp: Tensor,
    page_tokens: int,
    epochs_bp: Tensor | None = None,
    firsts: np.ndarray[Any, np.dtype[np.int32]] | None = None,
    firsts_b: Tensor | None = None,
) -> AttentionPlan:
    """Build the plan of a step over block tables.

    `on_device`: the shape's starts, offsets, sequences and positions there. `firsts` are the page numbers that the
    tables begin with, on the host, and `firsts_b` the same on the device; None: 0. A table may be longer than its
    sequence; entries past the last position are not read.
    """
    starts_b, offsets_b, sequence_t, position_t = on_device
    slots_t = _slots(shape, sequence_t, position_t, tables_bp, page_tokens, firsts, firsts_b)
    return AttentionPlan(
        starts_b=starts_b,
        offsets_b=offsets_b,
        tables_bp=tables_bp,
        slots_t=slots_t,
        page_tokens=page_tokens,
        max_queries=int(shape.counts.max()),
        firsts_b=firsts_b,
        epochs_bp=epochs_bp,
    )


def _slots(
    shape: StepShape,
    sequence_t: Tensor,
    position_t: Tensor,
    tables_bp: Tensor,
    page_tokens: int,
    firsts: np.ndarray[Any, np.dtype[np.int32]] | None,
    firsts_b: Tensor | None,
) -> Tensor:
    """Where the key and value of each query's own position lie: [T] int64."""
    if tables_bp.is_cpu:
        # numpy has less overhead for small operations, and this runs in every step.
        number_t, offset_t = np.divmod(shape.positions, page_tokens)
        if firsts is not None:
            number_t -= firsts[shape.sequences]
        pages_t = tables_bp.numpy()[shape.sequences, number_t].astype(np.int64)
        return torch.from_numpy(pages_t * page_tokens + offset_t)
    page_t = position_t // page_tokens
    if firsts_b is not None:
        page_t = page_t - firsts_b[sequence_t]
    return tables_bp[sequence_t, page_t].long() * page_tokens + position_t % page_tokens


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
