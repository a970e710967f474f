"""Recurrences in plain torch: the reference for the kernels, and the path on CPU.

The rows of a step are laid into blocks of `BLOCK` absolute positions (engine/attention/attention_backend.py says why),
with one *item* for each block that a sequence has rows in. Items are ordered by their number within the sequence, and
sequences by falling number of items: round n of the scan works on a leading run of the sequences, in which sequences
whose block gets full come first.

In one block, with G_i the sum of the logarithms of decays up to position i, S the matrix before the block, and for
the delta rule (arXiv 2406.06484, section 3; arXiv 2412.06464, section 3.2)

    A_ij = beta_i exp(G_i - G_j) (k_i . k_j)           for j < i, else 0
    R_i  = beta_i (v_i - exp(G_i) S.T k_i)
    U    = T R,   T = (1 + A)^-1                        row by row: T_i = e_i - sum_j A_ij T_j
    out_i = exp(G_i) S.T q_i + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) U_j
    S'   = exp(G_last) S + sum_j exp(G_last - G_j) outer(k_j, U_j)

T needs no S, so it is found for all blocks at once, in at most `BLOCK` steps; the rest is a few batched products a
block. Rows i of T and R depend on positions up to i alone, so a slot keeps them for an unfinished block. Without
`beta`, U is v.

Why this is exact: each product has one shape, whatever the step is (a block's rows, padded with zeros), and row i of
it reads rows up to i of the block: later ones are masked, and adding zeros is exact. In a batched product, the
computation of each matrix depends on its shape alone. All other operations are by element.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from twinpool.engine.attention.attention_backend import BLOCK, ScanState, conv_positions
from twinpool.engine.attention.attention_plan import SlotPlan
from twinpool.engine.native.native_kernels import NativeKernels
from twinpool.engine.tensors.row_exact_linear import Numerics, silu

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


class KnownRows(NamedTuple):
    """The rows of sequences' first blocks that their slots hold from earlier steps: positions of the block before the
    step. What a slot has behind them was computed for tokens that didn't come to be. [n] int64 each."""

    slots_n: Tensor
    items_n: Tensor
    """The item of the step, on the axis of W, whose block each row is laid into."""
    rows_n: Tensor
    """The position in the block, 0 to BLOCK - 1."""

    def of(self, buffer: Tensor) -> Tensor:
        """Those of a state buffer, [n, H, ...]."""
        return buffer[self.slots_n, :, self.rows_n]


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
    known: KnownRows | None
    """None: every sequence begins at a block's first position."""
    row_b: Tensor | None
    """[B]: the row of each sequence in its block, where every sequence has one row (decode); else None."""
    steps: Sequence[ScanStep]
    """Ordered so that a row of T is computed after the earlier rows of its item."""


def by_block(x_th: Tensor, blocks: StepBlocks, before: Tensor | None = None) -> Tensor:
    """Lay rows [T, H, ...] into blocks, [W, H, BLOCK, ...]. `before` is a state buffer that has earlier rows of each
    sequence's first block."""
    x_wch = x_th.new_zeros(blocks.items, BLOCK, *x_th.shape[1:])
    x_wch.flatten(0, 1).index_copy_(0, blocks.cells_t, x_th)
    if before is not None and blocks.known is not None:
        x_wch[blocks.known.items_n, blocks.known.rows_n] = blocks.known.of(before)
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
        known=_known(plan, order),
        row_b=integers([starts[b] % BLOCK for b in order]) if max(counts) == 1 else None,
        steps=_steps(fresh, device),
    )


def _known(plan: SlotPlan, order: Sequence[int]) -> KnownRows | None:
    """The known rows of a step whose sequences are scanned in this `order`."""
    held = [plan.starts[b] % BLOCK for b in order]
    if not any(held):
        return None
    device = plan.tables_bp.device
    items_n = torch.tensor([item for item, count in enumerate(held) for _ in range(count)], device=device)
    rows_n = torch.tensor([row for count in held for row in range(count)], device=device)
    return KnownRows(plan.slots_b[torch.tensor(order, device=device)[items_n]], items_n, rows_n)


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


@dataclass(frozen=True)
class ConvPlaces:
    """What a convolution over `taps` positions reads and writes in one step; integers are int64."""

    read_bk: Tensor
    """[B, taps]: the entries of each sequence's slot that its rows read."""
    lines_kt: Tensor
    """[taps + 1, T]: the inputs of each row, on an axis that has what is read of the slots ([B * taps]), then the
    step's rows ([T])."""
    kept_n: Tensor | None
    """[n]: the rows that are written into slots; None: all."""
    slots_n: Tensor
    """[n]: the slots of those rows."""
    entries_n: Tensor
    """[n]: the entries that they get there."""


def conv_places(plan: SlotPlan, taps: int) -> ConvPlaces:
    held, batch = conv_positions(taps), len(plan.starts)
    read: list[list[int]] = []
    lines: list[list[int]] = []
    kept: list[int] = []
    entries: list[int] = []
    sequences: list[int] = []
    first = 0
    for b, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
        read.append([at % held for at in range(start - taps, start)])
        mine = [*range(b * taps, (b + 1) * taps), *range(batch * taps + first, batch * taps + first + count)]
        lines += [mine[i : i + taps + 1] for i in range(count)]
        rows = range(max(0, count - held), count)
        kept += [first + row for row in rows]
        entries += [(start + row) % held for row in rows]
        sequences += [b] * len(rows)
        first += count
    device = plan.tables_bp.device
    return ConvPlaces(
        torch.tensor(read, dtype=torch.int64, device=device),
        torch.tensor(lines, device=device).t().contiguous(),
        None if len(kept) == first else torch.tensor(kept, device=device),
        plan.slots_b if len(kept) == batch else plan.slots_b[torch.tensor(sequences, device=device)],
        torch.tensor(entries, device=device),
    )


class TorchRecurrence:
    """Implements `RecurrenceBackend` in torch operations."""

    def __init__(self, numerics: Numerics) -> None:
        self._numerics = numerics

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
        taps, batch = len(weight_kc) - 1, len(plan.starts)
        key = f"torch conv {taps}"
        if key not in plan.scratch:
            plan.scratch[key] = conv_places(plan, taps)
        places: ConvPlaces = plan.scratch[key]
        slots_b1 = plan.slots_b.unsqueeze(1)
        before = [state[slots_b1, :, places.read_bk].reshape(batch * taps, -1) for state in states]
        lines = torch.cat((torch.cat(before, dim=1), x_tc))
        out_tc = lines[places.lines_kt[0]].float().mul_(weight_kc[0])
        for tap in range(1, taps + 1):
            out_tc.add_(lines[places.lines_kt[tap]].float().mul_(weight_kc[tap]))
        if bias_c is not None:
            out_tc.add_(bias_c)
        kept_nc = x_tc if places.kept_n is None else x_tc[places.kept_n]
        if plan.muted_b is not None:
            muted_t = plan.muted_b.repeat_interleave(plan.offsets_b.diff())
            kept_nc = kept_nc.masked_fill((muted_t if places.kept_n is None else muted_t[places.kept_n])[:, None], 0.0)
        widths = [state.shape[1] * state.shape[3] for state in states]
        for state, part in zip(states, torch.split(kept_nc, widths, dim=1), strict=True):
            state[places.slots_n, :, places.entries_n] = part.reshape(len(part), -1, state.shape[3])
        out_tc = out_tc.to(x_tc.dtype)
        return silu(out_tc.float()).to(x_tc.dtype) if activated else out_tc

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
        if "torch blocks" not in plan.scratch:
            plan.scratch["torch blocks"] = laid_out(plan)
        blocks: StepBlocks = plan.scratch["torch blocks"]
        group = v_thv.shape[1] // k_tgk.shape[1]
        q_wgck, k_wgck = by_block(q_tgk, blocks), by_block(k_tgk, blocks, state.keys)
        v_whcv = by_block(v_thv, blocks, state.values if beta_th is None else None)
        decay_whc = by_block(decay_th, blocks, state.decays)
        sum_whc = decay_whc.cumsum(-1)
        within_whcc = _within(sum_whc)
        since_whc1, until_whc1 = sum_whc.exp().unsqueeze(3), (sum_whc[..., -1:] - sum_whc).exp_().unsqueeze(3)
        k_whck = _by_head(k_wgck, group)
        attend_whcc = _by_head(self._products(q_wgck, k_wgck.transpose(2, 3)), group) * within_whcc
        reads = _by_head(q_wgck, group) * since_whc1
        solved_whcc = None
        if beta_th is not None:
            beta_whc1 = by_block(beta_th, blocks).unsqueeze(3)
            v_whcv = v_whcv.mul_(beta_whc1)
            a_whcc = _by_head(self._products(k_wgck, k_wgck.transpose(2, 3)), group) * within_whcc
            solved_whcc = _solve(a_whcc.mul_(beta_whc1).tril_(-1), blocks, state)
            reads = torch.cat((reads, k_whck * since_whc1 * beta_whc1), dim=2)
        k_until = k_whck * until_whc1
        out_whcv = self._rounds(reads, attend_whcc, solved_whcc, v_whcv, k_until, since_whc1[:, :, -1:], state, blocks)
        for buffer, found in (
            (state.keys, k_wgck),
            (state.values, v_whcv),
            (state.decays, decay_whc),
            (state.solved, solved_whcc),
        ):
            if buffer is not None and found is not None:
                _keep(buffer, found, blocks)
        return out_whcv.transpose(1, 2).flatten(0, 1)[blocks.cells_t]

    def _rounds(
        self,
        reads: Tensor,
        attend_whcc: Tensor,
        solved_whcc: Tensor | None,
        v_whcv: Tensor,
        k_until_whck: Tensor,
        decay_wh11: Tensor,
        state: ScanState,
        blocks: StepBlocks,
    ) -> Tensor:
        """Compute block after block: the output, [W, H, BLOCK, value_dim]; writes the matrices into their slots.

        `reads` are the rows that are multiplied with the matrix before the block: each query's and, with `solved_whcc`,
        then each key's; `v_whcv` is overwritten with R in that case.
        """
        out_whcv = torch.empty_like(v_whcv)
        changed = blocks.rounds[0].full
        matrix_bhkv = state.matrix[blocks.slots_b[:changed]]
        for turn in blocks.rounds:
            here = slice(turn.first, turn.first + turn.width)
            found = self._before(reads[here], matrix_bhkv[: turn.width], state, blocks)
            u_whcv = v_whcv[here]
            if solved_whcc is not None:
                u_whcv -= found[:, :, BLOCK:]
                if turn.first == 0 and blocks.known is not None:
                    u_whcv[blocks.known.items_n, :, blocks.known.rows_n] = blocks.known.of(state.values)
                u_whcv = self._products(solved_whcc[here], u_whcv)
            out_whcv[here] = self._products(attend_whcc[here], u_whcv).add_(found[:, :, :BLOCK])
            if turn.full:
                done = slice(turn.first, turn.first + turn.full)
                written = self._products(k_until_whck[done].transpose(2, 3), u_whcv[: turn.full])
                matrix_bhkv[: turn.full] = (matrix_bhkv[: turn.full] * decay_wh11[done]).add_(written)
        if changed:
            if blocks.muted_b is not None:
                matrix_bhkv.masked_fill_(blocks.muted_b[:changed, None, None, None], 0.0)
            state.matrix.index_copy_(0, blocks.slots_b[:changed], matrix_bhkv)
        return out_whcv

    def _before(self, reads: Tensor, matrix_bhkv: Tensor, state: ScanState, blocks: StepBlocks) -> Tensor:
        """Multiply rows of some sequences with their matrices: from `matrix_bhkv`, and past its end from the slots."""
        changed, shape = len(matrix_bhkv), state.matrix.shape[1:]
        if changed == len(reads):
            return self._products(reads, matrix_bhkv)
        if not state.matrix.is_cpu or shape.numel() < LARGE:
            return self._products(reads, state.matrix[blocks.slots_b[: len(reads)]])
        found = reads.new_empty(*reads.shape[:3], shape[2])
        if changed:
            found[:changed] = self._products(reads[:changed], matrix_bhkv)
        for at, slot in enumerate(blocks.slots_b[changed : len(reads)].tolist(), changed):
            self._numerics.bmm(reads[at], state.matrix[slot], found[at])
        return found

    def _products(self, a_whmk: Tensor, b_whkn: Tensor) -> Tensor:
        """Batched products, [W, H, m, n] float32. How each of the W * H is computed doesn't depend on their number."""
        out = a_whmk.new_empty(*a_whmk.shape[:3], b_whkn.shape[3])
        self._numerics.bmm(a_whmk.flatten(0, 1), b_whkn.flatten(0, 1), out.flatten(0, 1))
        return out


def _by_head(x_wg: Tensor, group: int) -> Tensor:
    return x_wg.repeat_interleave(group, dim=1) if group > 1 else x_wg


def _within(sum_whc: Tensor) -> Tensor:
    """exp(G_i - G_j) for j up to i, else 0: [W, H, BLOCK, BLOCK]."""
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=sum_whc.device).triu_(1)
    return (sum_whc.unsqueeze(3) - sum_whc.unsqueeze(2)).masked_fill_(later, -torch.inf).exp_()


def _solve(a_whcc: Tensor, blocks: StepBlocks, state: ScanState) -> Tensor:
    """T = (1 + A)^-1, row by row: [W, H, BLOCK, BLOCK]. Rows of earlier steps are taken from the slots."""
    assert state.solved is not None, "the delta rule keeps T"
    t_whcc = torch.zeros_like(a_whcc)
    if blocks.known is not None:
        t_whcc[blocks.known.items_n, :, blocks.known.rows_n] = blocks.known.of(state.solved)
    for items, row in blocks.steps:
        some = t_whcc[items]
        a_n1c = a_whcc[items, :, row].reshape(-1, 1, BLOCK)
        found = torch.bmm(a_n1c, some.flatten(0, 1)).neg_().view(len(some), -1, BLOCK)
        if isinstance(row, int):
            found[:, :, row] = 1.0
        else:
            found.scatter_(2, row[:, None, None].expand(-1, found.shape[1], 1), 1.0)
        t_whcc[items, :, row] = found
    return t_whcc


def _keep(buffer: Tensor, x_wh: Tensor, blocks: StepBlocks) -> None:
    """Write each sequence's last block into its slot: its rows where it is unfinished, zeros for all others."""
    if blocks.row_b is not None:
        changed = blocks.rounds[0].full
        items, slots, row = blocks.last_b[changed:], blocks.slots_b[changed:], blocks.row_b[changed:]
        mine = x_wh[items, :, row]
        if blocks.muted_b is not None:
            mine = mine.masked_fill_(blocks.muted_b[changed:].view(-1, *[1] * (mine.dim() - 1)), 0.0)
        buffer[slots, :, row] = mine
        buffer.index_fill_(0, blocks.slots_b[:changed], 0.0)
        return
    last = x_wh[blocks.last_b]
    gone = blocks.gone_bc.view(len(last), 1, BLOCK, *[1] * (last.dim() - 3))
    buffer.index_copy_(0, blocks.slots_b, last.masked_fill_(gone, 0.0))


def _addresses(*values: Tensor | int | None) -> ctypes.Array[ctypes.c_long]:
    """A struct of the kernels whose fields are addresses and whole numbers: of tensors where they lie, of None 0."""
    given = [v if isinstance(v, int) else 0 if v is None else v.data_ptr() for v in values]
    return (ctypes.c_long * len(given))(*given)


class NativeRecurrence:
    """Implements `RecurrenceBackend` by the C++ kernels (engine/native/recurrence.h)."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels

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
        x_tc = x_tc if x_tc.stride(1) == 1 else x_tc.contiguous()
        out_tc = torch.empty_like(x_tc, memory_format=torch.contiguous_format)
        first, fields = 0, list[Tensor | int]()
        for state in states:
            units, held, width = state.shape[1:]
            assert state.stride()[1:] == (held * width, width, 1), "entries of a slot follow each other"
            fields += [state, state.stride(0), units, width, first]
            first += units * width
        shape = _addresses(len(plan.starts), len(states), first, len(weight_kc) - 1, held, activated)
        self._kernels.functions["conv", x_tc.dtype](
            shape,
            _addresses(*fields),
            x_tc.data_ptr(),
            x_tc.stride(0),
            weight_kc.data_ptr(),
            None if bias_c is None else bias_c.data_ptr(),
            out_tc.data_ptr(),
            self._slots(plan),
        )
        return out_tc

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
        rows = [x if x is None else x.contiguous() for x in (q_tgk, k_tgk, v_thv, decay_th, beta_th)]
        out_thv = torch.empty_like(v_thv, memory_format=torch.contiguous_format)
        buffers = (state.matrix, state.keys, state.values, state.decays, state.solved)
        (_, groups, key_dim), (heads, value_dim) = k_tgk.shape, v_thv.shape[1:]
        size = key_dim * value_dim
        assert state.matrix.stride()[1:] == (size, value_dim, 1), "what a slot has of a buffer is in one piece"
        apart = (0 if x is None else x.stride(0) for x in buffers)
        shape = _addresses(len(plan.starts), heads, groups, key_dim, value_dim, *apart)
        self._kernels.functions["scan", torch.float32](shape, _addresses(*rows, out_thv, *buffers), self._slots(plan))
        return out_thv

    def _slots(self, plan: SlotPlan) -> ctypes.Array[ctypes.c_long]:
        """The struct of the step's sequences, made once a step."""
        if "native slots" not in plan.scratch:
            tensors = plan.tables_bp[:, 0].contiguous(), plan.starts_b, plan.offsets_b, plan.muted_b
            plan.scratch["native slots"] = tensors, _addresses(*tensors)
        found: ctypes.Array[ctypes.c_long] = plan.scratch["native slots"][1]
        return found
