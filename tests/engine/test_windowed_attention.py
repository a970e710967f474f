"""Windows, sinks and soft-capping on CPUs: plain softmax's answer, and the same bits in any company."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.native import BUILDS, kernels_or_skip
from tests.support.listed_plans import listed_plan
from tests.support.plain_attention import expect_within, plain_attention
from twinpool.engine.attention.attention_backend import ScoreOptions
from twinpool.engine.attention.attention_plan import AttentionPlan
from twinpool.engine.attention.torch_backend.torch_attention import NativeAttention, TorchAttention
from twinpool.engine.tensors.row_exact_linear import FAST, Numerics

HEADS, KV_HEADS, DIM = 4, 2, 24
SCALE = DIM**-0.5
LENGTHS = (400, 3, 290)
Run = tuple[int, int, int]
"""A row of a batch: sequence, start, queries."""


@dataclass
class Shape:
    """What one layer asks of attention."""

    window: int = 0
    sinks: bool = False
    softcap: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        return {"window": self.window, "sinks_h": SINKS if self.sinks else None, "softcap": self.softcap}


def draw(seed: int, *shape: int) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SINKS = draw(9, HEADS)
Q = [draw(1, n, HEADS, DIM) for n in LENGTHS]
K = [draw(2, n, KV_HEADS, DIM) for n in LENGTHS]
V = [draw(3, n, KV_HEADS, DIM) for n in LENGTHS]
SHAPES = [
    Shape(window=1), Shape(window=7), Shape(window=128), Shape(window=129), Shape(window=200), Shape(window=1000),
    Shape(sinks=True), Shape(softcap=5.0), Shape(window=150, sinks=True, softcap=8.0),
]  # fmt: skip


def paged(rows: list[Run], page_tokens: int, window: int) -> tuple[Tensor, Tensor, Tensor, AttentionPlan]:
    """Queries and pages of `rows`; what no window sees is not in the tables, and every byte that nobody owns is NaN."""
    firsts = [max(0, start - window + 1) // page_tokens if window else 0 for _, start, _ in rows]
    ends = [-(-(start + count) // page_tokens) for _, start, count in rows]
    total = sum(end - first for first, end in zip(firsts, ends, strict=True))
    k_pages, v_pages = (torch.full((total + 3, page_tokens, KV_HEADS, DIM), torch.nan) for _ in "kv")
    k_pages[0], v_pages[0] = 0, 0
    free = torch.randperm(total + 2, generator=torch.Generator().manual_seed(5)).add(1).tolist()
    tables = []
    for (sequence, start, count), first, end in zip(rows, firsts, ends, strict=True):
        tables.append([free.pop() for _ in range(first, end)])
        for number, at in enumerate(tables[-1], first):
            part = slice(number * page_tokens, min((number + 1) * page_tokens, start + count))
            k_pages[at, : part.stop - part.start] = K[sequence][part]
            v_pages[at, : part.stop - part.start] = V[sequence][part]
    plan = listed_plan(
        [start for _, start, _ in rows], [count for *_, count in rows], tables, page_tokens, torch.device("cpu"),
        firsts=firsts if window else None,
    )  # fmt: skip
    return torch.cat([Q[s][start : start + count] for s, start, count in rows]), k_pages, v_pages, plan


@pytest.fixture(params=["invariant", "fast", *BUILDS])
def attention(request: pytest.FixtureRequest) -> TorchAttention:
    if request.param in BUILDS:
        return NativeAttention(Numerics(8), kernels_or_skip(request.param))
    return TorchAttention(Numerics(8) if request.param == "invariant" else FAST)


def attend(attention: TorchAttention, rows: list[Run], shape: Shape, page_tokens: int = 16) -> list[Tensor]:
    q_thd, k_pages, v_pages, plan = paged(rows, page_tokens, shape.window)
    out_thd = attention.attend(q_thd, k_pages, v_pages, plan, ScoreOptions(SCALE, **shape.options))
    return list(torch.split(out_thd, [count for *_, count in rows]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_windows_sinks_and_caps_are_plain_softmaxes(attention: TorchAttention, shape: Shape, page_tokens: int) -> None:
    rows = [(0, 260, 140), (1, 0, 3), (2, 289, 1), (0, 0, 150), (2, 128, 1)]
    for row, got in zip(rows, attend(attention, rows, shape, page_tokens), strict=True):
        sequence, start, count = row
        q_qhd = Q[sequence][start : start + count]
        expect_within(got, *plain_attention(q_qhd, K[sequence], V[sequence], start, scale=SCALE, **shape.options))


@pytest.mark.parametrize("attention", ["invariant", *BUILDS], indirect=True)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_pages_neighbours_and_decoding_do_not_change_a_bit(attention: TorchAttention, shape: Shape) -> None:
    (want,) = attend(attention, [(0, 0, 400)], shape)
    for page_tokens, cuts in ((1, (0, 17, 400)), (64, (0, 128, 129, 257, 400)), (16, (0, 127, 391, 399, 400))):
        parts = [
            attend(attention, [(2, 5, 9), (0, a, b - a), (1, 2, 1)], shape, page_tokens)[1] for a, b in pairwise(cuts)
        ]
        assert torch.equal(torch.cat(parts), want), (page_tokens, cuts)
    decoded = [(0, position, 1) for position in (0, 6, 127, 128, 129, 255, 399)]
    for row, got in zip(decoded, attend(attention, decoded, shape), strict=True):
        assert torch.equal(got[0], want[row[1]]), row


def test_blocks_that_the_window_has_left_are_not_computed() -> None:
    q_thd, k_pages, v_pages, plan = paged([(0, 384, 16)], 16, 100)
    TorchAttention(Numerics(8)).attend(q_thd, k_pages, v_pages, plan, ScoreOptions(SCALE, window=100))
    (batches,) = plan.scratch.values()
    assert [len(batch.tile_w) for batch in batches] == [2], "positions 285 to 399 lie in two blocks of 128"
