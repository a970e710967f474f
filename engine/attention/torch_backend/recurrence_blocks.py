"""The layout of a step's rows in blocks of absolute positions, for the torch recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from twinpool.engine.attention.attention_plan import SlotPlan
from twinpool.engine.attention.recurrence_backend import BLOCK

LARGE = 1 << 15
"""Elements of a sequence's matrices from which on gathering them is slower than reading each in its slot."""


@dataclass(frozen=True)
class _BlockRound:
    """One round of the scan: a block of each of the first `width` sequences, whose items are `first` and following."""

    first: int
    width: int
    full: int
    """How many sequences, from the first on, get this block full."""


ScanStep = tuple[slice | Tensor, int | Tensor]
"""Items and rows of T to compute at once: the same row of some items, or a row of each item's own."""


@dataclass(frozen=True)
class StepBlocks:
    """The places of one step's rows in blocks. B sequences in the order of the scan, W items; integers are int64."""

    cells_t: Tensor
    """[T]: the place of each packed row on the axis of W * BLOCK rows."""
    items: int
    """W."""
    slots_b: Tensor
    muted_b: Tensor | None
    rounds: Sequence[_BlockRound]
    last_b: Tensor
    """[B]: the last item of each sequence."""
    gone_bc: Tensor
    """[B, BLOCK] bool: rows that are zeros in the slot after the step."""
    known_bc: Tensor | None
    """[B, BLOCK] bool: rows of the first block that the slot holds from earlier steps. None: every sequence begins at a
    block's first position."""
    row_b: Tensor | None
    """[B]: the row of each sequence in its block, where every sequence has one row (decode); else None."""
    steps: Sequence[ScanStep]
    """Ordered so that a row of T is computed after the earlier rows of its item."""


def by_block(x_th: Tensor, blocks: StepBlocks, before: Tensor | None = None) -> Tensor:
    """Lay rows [T, H, ...] into blocks, [W, H, BLOCK, ...]. `before` is a state buffer that has earlier rows of each
    sequence's first block."""
    x_wch = x_th.new_zeros(blocks.items, BLOCK, *x_th.shape[1:])
    if before is not None and blocks.known_bc is not None:
        x_wch[: len(blocks.slots_b)] = before[blocks.slots_b].transpose(1, 2)
    x_wch.flatten(0, 1).index_copy_(0, blocks.cells_t, x_th)
    return x_wch.transpose(1, 2).contiguous()


def laid_out(plan: SlotPlan) -> StepBlocks:
    device = plan.tables_bp.device
    starts, counts = plan.starts, plan.counts
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    items = [-(-end // BLOCK) - start // BLOCK for start, end in zip(starts, ends, strict=True)]
    order = sorted(range(len(starts)), key=lambda b: (-items[b], ends[b] % BLOCK != 0))
    filled = [items[b] - (ends[b] % BLOCK != 0) for b in order]
    widths = [sum(n > number for n in items) for number in range(max(items))]
    offsets = [0, *accumulate(widths)]
    fresh = [(0, 0)] * offsets[-1]
    cells: list[list[int]] = [[] for _ in starts]
    for place, b in enumerate(order):
        for number in range(items[b]):
            item, base = offsets[number] + place, (starts[b] // BLOCK + number) * BLOCK
            first, stop = max(starts[b] - base, 0), min(ends[b] - base, BLOCK)
            fresh[item] = (first, stop)
            cells[b] += range(item * BLOCK + first, item * BLOCK + stop)

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    row_c, order_b = torch.arange(BLOCK, device=device), integers(order)
    muted_b = plan.muted_b[order_b] if plan.muted_b is not None else None
    gone_bc = row_c >= integers([ends[b] % BLOCK for b in order])[:, None]
    return StepBlocks(
        cells_t=integers([cell for row in cells for cell in row]),
        items=len(fresh),
        slots_b=plan.slots_b[order_b],
        muted_b=muted_b,
        rounds=[_BlockRound(offsets[n], width, sum(f > n for f in filled)) for n, width in enumerate(widths)],
        last_b=integers([offsets[items[b] - 1] + place for place, b in enumerate(order)]),
        gone_bc=gone_bc if muted_b is None else gone_bc | muted_b[:, None],
        known_bc=row_c < integers([starts[b] % BLOCK for b in order])[:, None]
        if any(start % BLOCK for start in starts)
        else None,
        row_b=integers([starts[b] % BLOCK for b in order]) if max(counts) == 1 else None,
        steps=_steps(fresh, device),
    )


def _steps(fresh: Sequence[tuple[int, int]], device: torch.device) -> list[ScanStep]:
    """The steps in which rows of T are computed; `fresh` are the new rows of each item, half-open."""
    if all(stop - first == 1 for first, stop in fresh):  # decode: all at once
        return [(torch.arange(len(fresh), device=device), torch.tensor([first for first, _ in fresh], device=device))]
    steps: list[ScanStep] = []
    for row in range(BLOCK):
        items = [item for item, (first, stop) in enumerate(fresh) if first <= row < stop]
        if items:
            together = items[-1] - items[0] == len(items) - 1
            steps.append((slice(items[0], items[-1] + 1) if together else torch.tensor(items, device=device), row))
    return steps


def conv_lines(plan: SlotPlan, taps: int) -> tuple[Tensor, Tensor]:
    """Find the inputs of a convolution on an axis that has the slots' inputs ([B * taps]), then the step's ([T]).

    Returns the places of each row's taps, [taps + 1, T], and of each sequence's last `taps` inputs, [B, taps]; int64.
    """
    lines: list[list[int]] = []
    last: list[list[int]] = []
    row = len(plan.starts) * taps
    for b, count in enumerate(plan.counts):
        mine = [*range(b * taps, (b + 1) * taps), *range(row, row + count)]
        lines += [mine[i : i + taps + 1] for i in range(count)]
        last.append(mine[count:])
        row += count
    device = plan.tables_bp.device
    return torch.tensor(lines, device=device).t().contiguous(), torch.tensor(last, device=device)
