"""Attention plans made from lists: what a step's block tables are to it, without requests and without a runner."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from twinpool.cache.allocation import NULL_PAGE
from twinpool.cache.device.device_copies import to_device
from twinpool.engine.attention.attention_plan import AttentionPlan, SlotPlan, StepShape, make_plan


def listed_plan(
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[Sequence[int]],
    page_tokens: int,
    device: torch.device,
    epochs: Sequence[Sequence[int]] | None = None,
    firsts: Sequence[int] | None = None,
) -> AttentionPlan:
    """The plan of sequences with these first positions, numbers of queries, block tables and epochs.

    `firsts` are the page numbers that the tables begin with; None: 0. A table may be longer than its sequence.
    """
    shape = StepShape.of(starts, counts)
    begins = np.array(firsts, np.int32) if firsts is not None else np.zeros(len(starts), np.int32)
    used = (-(-shape.ends // page_tokens) - begins).tolist()
    arrays = (shape.starts, shape.offsets, shape.sequences, shape.positions)
    return make_plan(
        shape,
        [torch.from_numpy(array).to(device) for array in arrays],
        _rectangle(tables, used, device),
        page_tokens,
        _rectangle(epochs, used, device) if epochs is not None else None,
        begins if firsts is not None else None,
        torch.from_numpy(begins).to(device) if firsts is not None else None,
    )


def listed_slots(
    starts: Sequence[int], counts: Sequence[int], slots: Sequence[Sequence[int]], device: torch.device
) -> SlotPlan:
    """The plan of the recurrent states of sequences, whose slots are never freed."""
    begins, offsets = (to_device(some, device, torch.int32) for some in (starts, [0, *accumulate(counts)]))
    return SlotPlan(to_device(slots, device, torch.int32), tuple(starts), tuple(counts), begins, offsets)


def _rectangle(rows: Sequence[Sequence[int]], used: Sequence[int], device: torch.device) -> torch.Tensor:
    """The first `used` entries of each row, padded with the null page, which is never freed: its epoch is 0 as well."""
    full = np.full((len(rows), max(used)), NULL_PAGE, dtype=np.int32)
    for line, row, n in zip(full, rows, used, strict=True):
        line[:n] = row[:n]
    return to_device(full, device, torch.int32)
