"""The model runner: launches a step, which draws tokens and writes its state into pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cache.allocation.block_table import BlockTable
from cache.device.device_port import DEVICE, Device, DeviceOp, DeviceStream, spans
from cache.memory.kv_cache_spec import PoolKind, PoolSetSpec
from cache.pool.epoch_table import EpochTable
from cache.pool.load_gate import GateDoor, LoadGate
from contracts.messages.rank_order_codec import OrderChannel
from contracts.messages.rank_orders import PagePlaces, RowOrder, RunStep
from engine.attention.attention_backend import AttentionBackend
from engine.attention.attention_plan import (
    AttentionPlan,
    BackendPlan,
    SlotPlan,
    make_plan,
    make_slot_plan,
    muted,
    muted_slots,
)
from engine.layers.decoder import Decoder
from engine.layers.forward_context import ForwardContext
from engine.runner.batch import BatchRow, RowOutput, StepHandle
from engine.runner.launched_step import LaunchedStep, StepResults, input_tokens
from engine.runner.redraw import RedrawnTokens, redraw
from engine.runner.sampler import DrawnRows, Logprobs, draw_tokens, token_logprobs
from engine.tensors.pinned_memory import to_device, to_host
from engine.tensors.row_exact_linear import Numerics
from engine.tensors.tensor_parallel import ALONE, TensorParallelGroup

_LOGIT_ELEMENTS = 1 << 23
"""Logits computed at once when prompts are scored: 32 MiB in float32."""


class ModelRunner:
    """Computes steps of one model over the buffers of one pool set."""

    def __init__(
        self,
        decoder: Decoder,
        numerics: Numerics,
        attention: AttentionBackend,
        spec: PoolSetSpec,
        gates: Mapping[str, LoadGate],
        epochs: Mapping[str, EpochTable],
        device: Device,
        *,
        ranks: TensorParallelGroup = ALONE,
        followers: OrderChannel | None = None,
        triton: bool = False,
    ) -> None:
        """`gates` and `epochs` are by pool. `followers`: the order channel to the other ranks, on the leader of several
        `ranks`. `triton`: tokens are drawn by Triton's kernel."""
        self.ranks, self._followers = ranks, followers
        self.decoder, self.numerics, self.attention = decoder, numerics, attention
        self.spec = spec
        self._gates, self._epochs = dict(gates), dict(epochs)
        self._device = device
        self._triton = triton

    @property
    def device(self) -> Device:
        return self._device

    def launch(self, rows: Sequence[BatchRow]) -> StepHandle:
        """Submit one step to the device: compute and write the rows' state, and draw, score or replay as a row asks.

        Returns as soon as the step is submitted; on a CPU it is complete by then. The rows are read when the step runs,
        so they must not change until it is complete.
        """
        assert rows, "a step has at least one row"
        tables = [{self.spec.full.name: BlockTable(0, row.pages, row.epochs), **row.others} for row in rows]
        for row, mine in zip(rows, tables, strict=True):
            self._check(row, mine)
        # Sets of all pages of a batch cost more than the rest of the plan: they are made for a device that checks them.
        reads, writes = self._named(rows, tables) if self._device.checks else ({}, {})
        op = DeviceOp("forward", DeviceStream.COMPUTE, reads=spans(DEVICE, reads), writes=spans(DEVICE, writes))
        passages = {pool.name: self._gates[pool.name].enter(pool.name) for pool in self.spec.pools}
        gates = {gate: loads for passage in passages.values() for gate, loads in passage.gates.items()}
        step = LaunchedStep(rows)
        step.completion = self._device.submit(op, lambda: step.fill(self._step(rows, tables, passages)), gates=gates)
        return step

    def forward(self, rows: Sequence[BatchRow]) -> list[RowOutput]:
        """Launch one step and wait for it: one output a row, in order."""
        return self.launch(rows).outputs()

    @torch.inference_mode()
    def _step(
        self, rows: Sequence[BatchRow], tables: Sequence[Mapping[str, BlockTable]], doors: Mapping[str, GateDoor]
    ) -> StepResults:
        device = self._device.torch_device
        if self._followers is not None:
            self._followers.send(compute_order(rows, tables))
        ctx = self.context(rows, tables, doors)
        stale_b = self._stale(ctx)
        tokens_m = input_tokens(rows, len(ctx.positions_m) - ctx.count, device)
        if self._followers is not None:
            self.ranks.first(torch.cat((tokens_m, stale_b.long())))
        self._mute(ctx, stale_b)
        x_mh = self.decoder.forward(tokens_m, ctx)
        counts = [len(row.tokens) for row in rows]
        firsts = [0, *accumulate(counts)][:-1]
        drawing = [i for i, row in enumerate(rows) if row.draw is not None]
        draws = self._draw(rows, x_mh, firsts, drawing) if drawing else None
        parts = [(row, x_mh[first:]) for row, first in zip(rows, firsts, strict=True)]
        scores = [tuple(self._score(row, x_th)) if row.score else () for row, x_th in parts]
        replays = [tuple(self._redraw(row, x_th)) if row.replay is not None else () for row, x_th in parts]
        return StepResults(
            drawing,
            draws.tokens_n if draws is not None else None,
            draws.to_host() if draws is not None else None,
            [[part.to_host() for part in parts] for parts in scores],
            [[part.to_host() for part in parts] for parts in replays],
            to_host(stale_b),
        )

    @torch.inference_mode()
    def follow(self, order: RunStep) -> None:
        """Compute a follower's part of a step; the leader broadcasts tokens and stale rows."""
        rows = [BatchRow((0,) * row.tokens, row.start, (), epochs=()) for row in order.rows]
        tables = [
            {at.pool: BlockTable(at.first, at.indices, (0,) * len(at.indices)) for at in row.tables}
            for row in order.rows
        ]
        doors = {pool.name: self._gates[pool.name].enter(pool.name) for pool in self.spec.pools}
        ctx = self.context(rows, tables, doors)
        count = len(ctx.positions_m)
        told = self.ranks.first(ctx.positions_m.new_zeros(count + len(rows)))
        self._mute(ctx, told[count:].bool())
        self.decoder.forward(told[:count], ctx)

    def context(
        self, rows: Sequence[BatchRow], tables: Sequence[Mapping[str, BlockTable]], doors: Mapping[str, GateDoor]
    ) -> ForwardContext:
        """Make the forward context of a step; `tables` are each row's block tables by pool, `doors` the gates'."""
        device, size = self._device.torch_device, self.spec.page_tokens
        starts, counts = [row.start for row in rows], [len(row.tokens) for row in rows]
        plans: dict[str, AttentionPlan] = {}
        slots: dict[str, SlotPlan] = {}
        for pool in self.spec.pools:
            mine = [table[pool.name] for table in tables]
            pages, epochs = [t.pages for t in mine], [t.epochs for t in mine]
            if pool.kind is PoolKind.STATE:
                slots[pool.name] = make_slot_plan(starts, counts, pages, device, epochs)
            else:
                firsts = [t.first for t in mine] if pool.kind is PoolKind.WINDOW else None
                plans[pool.name] = make_plan(starts, counts, pages, size, device, epochs, firsts)
        count = sum(counts)
        positions = [p for row in rows for p in range(row.start, row.start + len(row.tokens))]
        positions += [0] * (self.numerics.padded(count) - count)
        return ForwardContext(
            self.numerics,
            self.attention,
            to_device(positions, device),
            max(positions) + 1,
            count,
            plans,
            slots,
            doors,
            self.ranks,
        )

    def _stale(self, ctx: ForwardContext) -> Tensor:
        """[B] bool: sequences of which a page or slot was freed after it was leased."""
        device = self._device.torch_device
        tables: dict[str, BackendPlan] = {**ctx.plans, **ctx.slots}
        found = [self.attention.stale(plan, self._epochs[pool].on(device)) for pool, plan in tables.items()]
        return found[0] if len(found) == 1 else torch.stack(found).any(0)

    def _mute(self, ctx: ForwardContext, stale_b: Tensor) -> None:
        """Redirect the writes of stale sequences to the null page and the null slot, as zeros."""
        if not stale_b.is_cpu or stale_b.any():
            ctx.plans = {pool: muted(plan, stale_b) for pool, plan in ctx.plans.items()}
            ctx.slots = {pool: muted_slots(plan, stale_b) for pool, plan in ctx.slots.items()}

    def _draw(self, rows: Sequence[BatchRow], x_mh: Tensor, firsts: Sequence[int], drawing: Sequence[int]) -> DrawnRows:
        last = [firsts[i] + len(rows[i].tokens) - 1 for i in drawing]
        wanted = [draw for row in rows if (draw := row.draw) is not None]
        x_nh = x_mh.index_select(0, to_device(last, x_mh.device))
        return draw_tokens(self.decoder.logits(x_nh, self.numerics), wanted, triton=self._triton)

    def _score(self, row: BatchRow, x_th: Tensor) -> Iterator[Logprobs]:
        """Log-probabilities of the tokens in `row.score`, some rows of logits at a time."""
        follow = to_device(row.score or (), x_th.device)
        step = max(1, _LOGIT_ELEMENTS // self.decoder.head.shape[0])
        for begin in range(0, len(follow), step):
            part = follow[begin : begin + step]
            logits_nv = self.decoder.logits(x_th[begin : begin + len(part)], self.numerics)
            yield token_logprobs(logits_nv, part, [row.score_top] * len(part))

    def _redraw(self, row: BatchRow, x_th: Tensor) -> Iterator[RedrawnTokens]:
        """Draw a known answer again, some rows of logits at a time."""
        most = _LOGIT_ELEMENTS // self.decoder.head.shape[0]
        return redraw(row, x_th, lambda x_nh: self.decoder.logits(x_nh, self.numerics), most, triton=self._triton)

    def _check(self, row: BatchRow, tables: Mapping[str, BlockTable]) -> None:
        assert len(row.tokens), "a row has at least one token"
        for pool in self.spec.pools:
            table = tables[pool.name]
            assert len(table.epochs) == len(table.pages), "a block table has an epoch for each page"
            end = (table.first + len(table.pages)) * self.spec.page_tokens
            assert pool.kind is PoolKind.STATE or end >= row.start + len(row.tokens), "the block table is too short"

    def _named(
        self, rows: Sequence[BatchRow], tables: Sequence[Mapping[str, BlockTable]]
    ) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """The pages and slots that a step reads, and the ones that it writes, by pool, sorted."""
        size = self.spec.page_tokens
        reads: dict[str, list[int]] = {}
        writes: dict[str, list[int]] = {}
        for pool in self.spec.pools:
            read: set[int] = set()
            written: set[int] = set()
            for row, mine in zip(rows, tables, strict=True):
                table = mine[pool.name]
                first, end = row.start // size - table.first, -(-(row.start + len(row.tokens)) // size) - table.first
                state = pool.kind is PoolKind.STATE
                read.update(table.pages if state else table.pages[:end])
                written.update(table.pages if state else table.pages[first:end])
            reads[pool.name], writes[pool.name] = sorted(read), sorted(written)
        return reads, writes


def compute_order(rows: Sequence[BatchRow], tables: Sequence[Mapping[str, BlockTable]]) -> RunStep:
    """Make the order by which followers compute a step: positions and block tables, without tokens."""
    return RunStep(
        tuple(
            RowOrder(
                row.start,
                len(row.tokens),
                tuple(PagePlaces(pool, table.first, tuple(table.pages)) for pool, table in mine.items()),
            )
            for row, mine in zip(rows, tables, strict=True)
        )
    )
