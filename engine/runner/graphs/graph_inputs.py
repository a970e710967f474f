"""The inputs of step graphs: tensors that stay where they are, into which each replayed step is copied.

All graphs read the same tensors, each as many rows and pages of them as its size says. Rows behind those of the step
are padding: sequences at position 0 whose writes go to the null page (or slot) as zeros, as a stale row's do, so that
they touch nothing and nobody reads what comes of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from cache.memory.kv_cache_spec import PoolKind, PoolSetSpec, PoolSpec
from cache.pool.load_gate import GateDoor
from engine.attention.attention_backend import AttentionBackend
from engine.attention.attention_plan import AttentionPlan, SlotPlan
from engine.layers.forward_context import ForwardContext
from engine.tensors.row_exact_linear import Numerics


class GraphSize(NamedTuple):
    """The size of a graph: what a step may have at most to be replayed by it."""

    rows: int
    """Sequences, of one position each."""
    pages: int
    """Entries of a block table."""


class _PoolInputs(NamedTuple):
    """The inputs of one pool of pages."""

    tables_bp: Tensor
    slots_t: Tensor
    firsts_b: Tensor | None


class GraphInputs:
    """The inputs of all graphs of a model, up to `most`."""

    def __init__(self, spec: PoolSetSpec, numerics: Numerics, most: GraphSize, device: torch.device) -> None:
        self._numerics, self._page_tokens, rows = numerics, spec.page_tokens, most.rows
        self._paged = [pool for pool in spec.pools if pool.kind is not PoolKind.STATE]
        self._tokens_m = torch.zeros(numerics.padded(rows), dtype=torch.int64, device=device)
        self._positions_m = torch.zeros_like(self._tokens_m)
        self._starts_b = torch.zeros(rows, dtype=torch.int32, device=device)
        self._offsets_b = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._muted_t = torch.ones(rows, dtype=torch.bool, device=device)
        self._pools = {
            pool.name: _PoolInputs(
                torch.zeros(rows, self.width(pool, most), dtype=torch.int32, device=device),
                torch.zeros(rows, dtype=torch.int64, device=device),
                torch.zeros(rows, dtype=torch.int32, device=device) if pool.window_tokens else None,
            )
            for pool in self._paged
        }
        self._states = {
            pool.name: torch.zeros(rows, 1, dtype=torch.int32, device=device)
            for pool in spec.pools
            if pool.kind is PoolKind.STATE
        }

    def width(self, pool: PoolSpec, size: GraphSize) -> int:
        """How many entries of a block table of `pool` a graph of this size reads."""
        if not pool.window_tokens:
            return size.pages
        return min(size.pages, (pool.window_tokens - 1) // self._page_tokens + 2)

    def fit(self, ctx: ForwardContext, size: GraphSize) -> bool:
        """Whether a graph of this size can replay the step of `ctx`, which has one position a row."""
        return ctx.count <= size.rows and all(
            ctx.plans[pool.name].tables_bp.shape[1] <= self.width(pool, size) for pool in self._paged
        )

    def context(
        self, size: GraphSize, attention: AttentionBackend, doors: Mapping[str, GateDoor], longest: int
    ) -> tuple[Tensor, ForwardContext]:
        """The tokens [M] and the forward context that a graph of this size is captured with. `longest`: the positions
        of the longest context."""
        rows, padded = size.rows, self._numerics.padded(size.rows)
        plans = {
            pool.name: AttentionPlan(
                starts_b=self._starts_b[:rows],
                offsets_b=self._offsets_b[: rows + 1],
                tables_bp=tables_bp[:rows, : self.width(pool, size)],
                slots_t=slots_t[:rows],
                page_tokens=self._page_tokens,
                max_queries=1,
                firsts_b=None if firsts_b is None else firsts_b[:rows],
                muted_t=self._muted_t[:rows],
            )
            for pool, (tables_bp, slots_t, firsts_b) in zip(self._paged, self._pools.values(), strict=True)
        }
        slots = {
            name: SlotPlan(
                tables_bp=slots_b1[:rows],
                starts=(0,) * rows,
                counts=(1,) * rows,
                starts_b=self._starts_b[:rows],
                offsets_b=self._offsets_b[: rows + 1],
                muted_b=self._muted_t[:rows],
            )
            for name, slots_b1 in self._states.items()
        }
        ctx = ForwardContext(self._numerics, attention, self._positions_m[:padded], longest, rows, plans, slots, doors)
        return self._tokens_m[:padded], ctx

    def fill(self, size: GraphSize, tokens_m: Tensor, ctx: ForwardContext) -> None:
        """Copy a step that fits into the inputs of a graph of this size."""
        count, rows = ctx.count, size.rows
        _put(self._tokens_m, tokens_m[:count], rows, 0)
        _put(self._positions_m, ctx.positions_m[:count], rows, 0)
        plans = list(ctx.plans.values())
        _put(self._starts_b, plans[0].starts_b, rows, 0)
        muted_t = plans[0].muted_t
        _put(self._muted_t, muted_t if muted_t is not None else self._muted_t.new_zeros(count), rows, 1)
        for name, (tables_bp, slots_t, firsts_b) in self._pools.items():
            plan = ctx.plans[name]
            tables_bp[:count, : plan.tables_bp.shape[1]].copy_(plan.tables_bp)
            tables_bp[count:rows, :1].fill_(0)  # Of a sequence at position 0 no other entry is read.
            _put(slots_t, plan.slots_t, rows, 0)
            if firsts_b is not None:
                assert plan.firsts_b is not None, "tables of windows begin somewhere"
                _put(firsts_b, plan.firsts_b, rows, 0)
        for name, slots_b1 in self._states.items():
            _put(slots_b1, ctx.slots[name].tables_bp, rows, 0)

    def try_out(self, size: GraphSize, vocabulary: int) -> None:
        """Fill in a step of padding alone, with tokens that differ."""
        rows = size.rows
        tokens_b = (torch.arange(rows, device=self._tokens_m.device) * 7919 + 1) % vocabulary
        _put(self._tokens_m, tokens_b, rows, 0)
        slots = [pool.slots_t for pool in self._pools.values()]
        for numbers in (self._positions_m, self._starts_b, *slots, *self._states.values()):
            numbers[:rows].fill_(0)
        self._muted_t[:rows].fill_(1)
        for tables_bp, _, firsts_b in self._pools.values():
            tables_bp[:rows].fill_(0)
            if firsts_b is not None:
                firsts_b[:rows].fill_(0)


def _put(into: Tensor, values: Tensor, rows: int, padding: int) -> None:
    """Copy values to the begin of `into`, and the padding behind them up to `rows`."""
    count = len(values)
    into[:count].copy_(values)
    if count < rows:
        into[count:rows].fill_(padding)
