"""The inputs of step graphs: a step's rows, and behind them padding, whatever steps were there before."""

from __future__ import annotations

from typing import Any, cast

import torch

from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace, PoolKind, PoolSetSpec, PoolSpec
from twinpool.engine.attention.attention_plan import AttentionPlan, SlotPlan
from twinpool.engine.layers.decoder import ForwardContext
from twinpool.engine.runner.graphs.graph_inputs import GraphInputs, GraphSize
from twinpool.engine.tensors.row_exact_linear import FAST

CPU = torch.device("cpu")
PAGE_TOKENS, PAGES = 4, 3
ATTENTION = cast("Any", None)  # Nothing is computed.
KEYS = BufferSpec("k", 1, (1, 2), torch.float32)
SPEC = PoolSetSpec(
    PAGE_TOKENS,
    (
        PoolSpec("pages", (KEYS,)),
        PoolSpec("near", (KEYS,), PoolKind.WINDOW, 9),
        PoolSpec("sum", (BufferSpec("s", 1, (2,), torch.float32, index=IndexSpace.SLOT),), PoolKind.STATE),
    ),
)


def step(*requests: int) -> tuple[torch.Tensor, ForwardContext]:
    """A step of one token each of these requests, counted from 1; all that it reads of a request are its own numbers,
    none of which is 0."""
    own_b = torch.tensor(requests, dtype=torch.int32)
    starts_b, offsets_b = own_b + 4, torch.arange(len(requests) + 1, dtype=torch.int32)
    pages_bp = 10 * own_b.unsqueeze(1) + torch.arange(PAGES, dtype=torch.int32)
    slots_t = pages_bp[:, 1].long() * PAGE_TOKENS + 1
    plans = {
        "pages": AttentionPlan(starts_b, offsets_b, pages_bp, slots_t, PAGE_TOKENS, 1),
        "near": AttentionPlan(starts_b, offsets_b, pages_bp + 500, slots_t + 500, PAGE_TOKENS, 1, own_b + 20),
    }
    slots = {"sum": SlotPlan(own_b.unsqueeze(1) + 30, tuple(starts_b.tolist()), (1,) * len(own_b), starts_b, offsets_b)}
    ctx = ForwardContext(FAST, ATTENTION, starts_b.long(), 40, len(requests), plans, slots, {})
    return own_b.long() + 100, ctx


def test_behind_a_steps_rows_is_padding_that_names_nothing_of_the_steps_before() -> None:
    """What padding writes goes to the null page and the null slot: others have those of the steps before by now."""
    sizes = [GraphSize(2, PAGES), GraphSize(4, PAGES)]
    inputs = GraphInputs(SPEC, FAST, sizes, CPU)
    for size, requests in ((4, (1, 2, 3, 4)), (4, (4, 2, 3)), (2, (1, 2)), (2, (2,)), (4, (3, 1, 4)), (4, (4,))):
        chosen = sizes[size == 4]
        tokens_m, ctx = inputs.context(chosen, ATTENTION, {}, 40)
        inputs.fill(chosen, *step(*requests))
        padding = [0] * (size - len(requests))
        assert tokens_m.tolist() == [100 + n for n in requests] + padding
        assert ctx.positions_m.tolist() == [4 + n for n in requests] + padding
        assert ctx.slots["sum"].slots_b.tolist() == [30 + n for n in requests] + padding
        for plan, more in ((ctx.plans["pages"], 0), (ctx.plans["near"], 500)):
            assert plan.tables_bp[:, 0].tolist() == [10 * n + more for n in requests] + padding
            assert plan.slots_t.tolist() == [(10 * n + 1) * PAGE_TOKENS + 1 + more for n in requests] + padding
            assert plan.starts_b.tolist() == [4 + n for n in requests] + padding
            assert plan.muted_t is not None
            assert plan.muted_t.tolist() == [False] * len(requests) + [True] * len(padding)
        assert ctx.plans["near"].firsts_b is not None
        assert ctx.plans["near"].firsts_b.tolist() == [20 + n for n in requests] + padding
