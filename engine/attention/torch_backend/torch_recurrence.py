"""Recurrences in plain torch: the reference for the kernels, and the path on CPU.

The rows of a step are laid into blocks of `BLOCK` absolute positions (engine/attention/recurrence_backend.py says why),
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

from collections.abc import Sequence

import torch
from torch import Tensor

from twinpool.engine.attention.attention_plan import SlotPlan
from twinpool.engine.attention.recurrence_backend import BLOCK, ScanState
from twinpool.engine.attention.torch_backend.recurrence_blocks import LARGE, StepBlocks, by_block, conv_lines, laid_out
from twinpool.engine.tensors.row_exact_linear import Numerics


class TorchRecurrence:
    """Implements `RecurrenceBackend` in torch operations."""

    def __init__(self, numerics: Numerics) -> None:
        self._numerics = numerics

    def conv(
        self, x_tc: Tensor, states: Sequence[Tensor], weight_kc: Tensor, bias_c: Tensor | None, plan: SlotPlan
    ) -> Tensor:
        taps, batch = len(weight_kc) - 1, len(plan.starts)
        key = f"torch conv {taps}"
        if key not in plan.scratch:
            plan.scratch[key] = conv_lines(plan, taps)
        line_kt, last_bk = plan.scratch[key]
        before = [state[plan.slots_b].transpose(1, 2).reshape(batch * taps, -1) for state in states]
        lines = torch.cat((torch.cat(before, dim=1), x_tc))
        out_tc = lines[line_kt[0]].float().mul_(weight_kc[0])
        for tap in range(1, taps + 1):
            out_tc.add_(lines[line_kt[tap]].float().mul_(weight_kc[tap]))
        if bias_c is not None:
            out_tc.add_(bias_c)
        after_bkc = lines[last_bk]
        if plan.muted_b is not None:
            after_bkc.masked_fill_(plan.muted_b[:, None, None], 0.0)
        widths = [state.shape[1] * state.shape[3] for state in states]
        for state, part in zip(states, torch.split(after_bkc, widths, dim=2), strict=True):
            state.index_copy_(0, plan.slots_b, part.view(batch, taps, -1, state.shape[3]).transpose(1, 2))
        return out_tc.to(x_tc.dtype)

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
                if turn.first == 0 and blocks.known_bc is not None:
                    known = blocks.known_bc[:, None, :, None]
                    torch.where(known, state.values[blocks.slots_b], u_whcv, out=u_whcv)
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
    if blocks.known_bc is not None:
        t_whcc[: len(blocks.slots_b)] = state.solved[blocks.slots_b]
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
