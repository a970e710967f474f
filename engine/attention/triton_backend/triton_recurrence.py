"""Recurrences on an NVIDIA GPU: shapes and grids of the kernels in `recurrence_kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from twinpool.engine.attention.attention_backend import BLOCK, ScanState
from twinpool.engine.attention.attention_plan import SlotPlan
from twinpool.engine.attention.triton_backend import recurrence_kernels as kernels
from twinpool.engine.tensors.row_exact_linear import silu

_CONV_ROWS = 16
_CONV_COLUMNS = 128
_SCAN_COLUMNS = 64
"""Columns of a head's matrix that one program takes."""
_SCAN_DIMS = 16
"""Rows of the matrix that are in registers at once. A sum over all of them is one chain, whatever this is."""


@dataclass(frozen=True)
class _Rows:
    """The rows and slots of a step's sequences. B sequences; integer tensors on the compute device."""

    offsets_b: Tensor
    """[B+1] int32: where the rows of each sequence begin on the packed axis."""
    starts_b: Tensor
    """[B] int32: the absolute position of each sequence's first row."""
    slots_b: Tensor
    """[B] int32: the slot of each sequence."""
    muted_b: Tensor
    """[B]: not zero for stale sequences; of any content where `muted` is not set."""
    muted: bool
    longest: int


class TritonRecurrence:
    """Implements `RecurrenceBackend` on CUDA tensors, or on CPU tensors in Triton's interpreter."""

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
        rows, x_tc = _rows(plan), x_tc if x_tc.stride(1) == 1 else x_tc.contiguous()
        out_tc = torch.empty_like(x_tc, memory_format=torch.contiguous_format)
        first = 0
        for state in states:
            units, held, width = state.shape[1:]
            channels = units * width
            columns = min(_CONV_COLUMNS, triton.next_power_of_2(channels))
            grid = (len(plan.starts), triton.cdiv(rows.longest, _CONV_ROWS), triton.cdiv(channels, columns))
            kernels.conv_kernel[grid](
                x_tc,
                x_tc.stride(0),
                state,
                state.stride(0),
                weight_kc,
                weight_kc if bias_c is None else bias_c,
                out_tc,
                out_tc.stride(0),
                rows.offsets_b,
                rows.starts_b,
                rows.slots_b,
                rows.muted_b,
                first,
                weight_kc.shape[1],
                UNITS=units,
                WIDTH=width,
                TAPS=len(weight_kc) - 1,
                HELD=held,
                ROWS=_CONV_ROWS,
                COLUMNS=columns,
                BIAS=bias_c is not None,
                MUTED=rows.muted,
            )
            first += channels
        return silu(out_tc.float()).to(out_tc.dtype) if activated else out_tc

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
        rows, batch, delta = _rows(plan), len(plan.starts), beta_th is not None
        q_tgk, k_tgk, v_thv, decay_th = (x.contiguous() for x in (q_tgk, k_tgk, v_thv, decay_th))
        beta = decay_th if beta_th is None else beta_th.contiguous()
        solved = state.decays if state.solved is None else state.solved
        (_, groups, key_dim), (heads, value_dim) = k_tgk.shape, v_thv.shape[1:]
        left = v_thv.new_empty(batch, heads, BLOCK, BLOCK) if delta else v_thv
        out_thv = torch.empty_like(v_thv)
        block_k, block_v = _width(key_dim), min(_SCAN_COLUMNS, _width(value_dim))
        places = (rows.offsets_b, rows.starts_b, rows.slots_b, rows.muted_b)
        kernels.scan_kernel[batch, heads, triton.cdiv(value_dim, block_v)](
            q_tgk,
            k_tgk,
            v_thv,
            decay_th,
            beta,
            out_thv,
            left,
            state.matrix,
            state.keys,
            state.values,
            state.decays,
            solved,
            *places,
            state.matrix.stride(0),
            state.keys.stride(0),
            state.values.stride(0),
            state.decays.stride(0),
            solved.stride(0),
            HEADS=heads,
            GROUPS=groups,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            DIMS=_SCAN_DIMS,
            BLOCK_V=block_v,
            DELTA=delta,
            MUTED=rows.muted,
            num_warps=4,
            num_stages=1,
        )
        kernels.keep_keys_kernel[batch, groups](
            k_tgk,
            state.keys,
            state.keys.stride(0),
            *places,
            GROUPS=groups,
            KEY_DIM=key_dim,
            BLOCK_K=block_k,
            MUTED=rows.muted,
        )
        kernels.keep_rows_kernel[batch, heads](
            decay_th,
            left,
            state.decays,
            state.decays.stride(0),
            solved,
            solved.stride(0),
            *places,
            HEADS=heads,
            DELTA=delta,
            MUTED=rows.muted,
        )
        return out_thv


def _width(size: int) -> int:
    """The width of a tile that holds `size` columns: a power of two of `BLOCK` or more."""
    return max(BLOCK, int(triton.next_power_of_2(size)))


def _rows(plan: SlotPlan) -> _Rows:
    """The rows of a plan, computed once a step."""
    if "triton rows" not in plan.scratch:
        slots_b = plan.tables_bp[:, 0].contiguous()
        muted_b = plan.starts_b if plan.muted_b is None else plan.muted_b.to(torch.int8)
        plan.scratch["triton rows"] = _Rows(
            plan.offsets_b, plan.starts_b, slots_b, muted_b, plan.muted_b is not None, max(plan.counts)
        )
    found: _Rows = plan.scratch["triton rows"]
    return found
