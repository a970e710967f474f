"""The claims about the kernels, checked in Triton's interpreter; run as a script by `test_triton_attention.py`.

The interpreter is chosen when triton is first imported, for the whole process, so these can't share a process with
tests that import triton another way. Prints one JSON object: claim -> null, or the traceback of its failure.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.support.listed_plans import listed_plan

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from torch import Tensor

from tests.kernels.claims import answer
from tests.support.plain_attention import expect_within, plain_attention
from twinpool.contracts.errors import ConfigError
from twinpool.engine.attention.attention_backend import ScoreOptions
from twinpool.engine.attention.attention_plan import AttentionPlan
from twinpool.engine.attention.torch_backend.torch_attention import TorchAttention
from twinpool.engine.attention.triton_backend.triton_attention import TritonAttention
from twinpool.engine.tensors.row_exact_linear import FAST

TILES = {"tile_rows": 16, "block_tokens": 16, "split_tokens": 32, "segment_tokens": 128}
"""Small, so that short sequences already have several tiles, blocks and splits."""


@dataclass
class Case:
    """Sequences of one shape with all their keys and values; queries are the last `counts` positions of each."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    page_tokens: int

    def run(
        self, rows: list[tuple[int, int, int]], fill: float = float("nan"), **options: int
    ) -> list[Tensor]:  # fmt: skip
        """Attend for `rows` of (sequence, start, queries) in one batch; all memory that none owns holds `fill`."""
        q_thd, k_pages, v_pages, plan = self.batch(rows, fill)
        out_thd = TritonAttention(**(TILES | options)).attend(q_thd, k_pages, v_pages, plan, ScoreOptions(self.scale))
        return list(torch.split(out_thd, [count for _, _, count in rows]))

    def batch(self, rows: list[tuple[int, int, int]], fill: float) -> tuple[Tensor, Tensor, Tensor, AttentionPlan]:
        size = self.page_tokens
        needed = [-(-(start + count) // size) for _, start, count in rows]
        shape = (1 + sum(needed) + 2, size, *self.k[0].shape[1:])
        k_pages, v_pages = (torch.full(shape, fill, dtype=self.k[0].dtype) for _ in "kv")
        free = torch.randperm(shape[0] - 1, generator=torch.Generator().manual_seed(7)).add(1).tolist()
        tables = []
        for pages, (sequence, start, count) in zip(needed, rows, strict=True):
            tables.append([free.pop() for _ in range(pages)])
            for page, at in enumerate(tables[-1]):
                part = slice(page * size, min((page + 1) * size, start + count))
                k_pages[at, : part.stop - part.start] = self.k[sequence][part]
                v_pages[at, : part.stop - part.start] = self.v[sequence][part]
        starts, counts = [start for _, start, _ in rows], [count for _, _, count in rows]
        plan = listed_plan(starts, counts, tables, size, torch.device("cpu"))
        q_thd = torch.cat([self.q[sequence][start : start + count] for sequence, start, count in rows])
        return q_thd, k_pages, v_pages, plan

    @property
    def scale(self) -> float:
        return float(self.q[0].shape[2] ** -0.5)

    def check(self, rows: list[tuple[int, int, int]]) -> None:
        """As close to plain softmax as float32 allows."""
        for (sequence, start, count), got in zip(rows, self.run(rows), strict=True):
            q = self.q[sequence][start : start + count]
            want = plain_attention(q, self.k[sequence], self.v[sequence], start, scale=self.scale)
            expect_within(got, *want)

    def check_half(self, rows: list[tuple[int, int, int]], tolerance: float) -> None:
        for (sequence, start, count), got in zip(rows, self.run(rows), strict=True):
            q = self.q[sequence][start : start + count]
            want, _ = plain_attention(q, self.k[sequence], self.v[sequence], start, scale=self.scale)
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def case(
    lengths: list[int],
    page_tokens: int = 16,
    group: int = 2,
    kv_heads: int = 2,
    dim: int = 48,
    dtype: torch.dtype = torch.float32,
) -> Case:
    source = torch.Generator().manual_seed(1)

    def draw(length: int, heads: int) -> Tensor:
        return torch.randn(length, heads, dim, generator=source).to(dtype)

    return Case(
        q=[2 * draw(n, kv_heads * group) for n in lengths],
        k=[2 * draw(n, kv_heads) for n in lengths],
        v=[draw(n, kv_heads) for n in lengths],
        page_tokens=page_tokens,
    )


def claim_extend_equals_plain_softmax_for_ragged_queries_and_any_page_size() -> None:
    for page_tokens in (1, 16, 64):
        case([40, 1, 83], page_tokens, kv_heads=1).check([(0, 0, 40), (1, 0, 1), (2, 60, 23)])


def claim_decode_equals_plain_softmax_for_any_page_size() -> None:
    for page_tokens in (1, 16, 64):
        case([40, 1, 97], page_tokens, kv_heads=1).check([(0, 39, 1), (1, 0, 1), (2, 96, 1)])


def claim_any_group_of_heads_works_in_both() -> None:
    for group in (1, 3, 7, 8):
        ragged = case([37, 20], group=group, kv_heads=1, dim=16)
        ragged.check([(0, 30, 7), (1, 0, 2)])
        ragged.check([(0, 36, 1), (1, 19, 1)])


def claim_more_heads_than_a_tile_has_rows_work() -> None:
    wide = case([35], group=20, kv_heads=1, dim=16)
    wide.check([(0, 33, 2)])
    wide.check([(0, 34, 1)])


def claim_any_head_size_works_in_both() -> None:
    for dim in (8, 64, 80, 128):
        wide = case([21], kv_heads=1, dim=dim)
        wide.check([(0, 18, 3)])
        wide.check([(0, 20, 1)])


def claim_half_precision_stays_within_its_rounding() -> None:
    for dtype, tolerance in ((torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
        half = case([50], kv_heads=1, dtype=dtype)
        half.check_half([(0, 45, 5)], tolerance)
        half.check_half([(0, 49, 1)], tolerance)


def claim_a_decoded_row_is_bitwise_the_extended_row() -> None:
    both = case([140])
    (extended,) = both.run([(0, 133, 7)])
    for query in range(7):
        (decoded,) = both.run([(0, 133 + query, 1)])
        assert torch.equal(decoded[0], extended[query]), f"query {query}"


def claim_a_row_is_bitwise_the_same_whoever_shares_its_batch() -> None:
    crowd = case([70, 3, 33])
    for alone, together in (
        ((0, 60, 10), [(1, 0, 3), (0, 60, 10), (2, 32, 1)]),
        ((0, 69, 1), [(2, 32, 1), (1, 2, 1), (0, 69, 1)]),
    ):
        (want,) = crowd.run([alone])
        assert torch.equal(crowd.run(together)[together.index(alone)], want)


def claim_a_row_is_bitwise_the_same_wherever_chunks_end() -> None:
    chunked = case([70])
    (whole,) = chunked.run([(0, 0, 70)])
    for cuts in ((0, 17, 70), (0, 32, 33, 70)):
        parts = [chunked.run([(0, a, b - a)])[0] for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole), cuts


def claim_a_row_is_bitwise_the_same_for_any_page_size() -> None:
    for rows in ([(0, 50, 20)], [(0, 69, 1)]):
        small, middle, large = (case([70], page_tokens).run(rows)[0] for page_tokens in (1, 16, 64))
        assert torch.equal(small, middle)
        assert torch.equal(small, large)


def claim_a_decoded_row_is_bitwise_the_same_by_splits_and_by_segments() -> None:
    """Which of the two is launched follows from the size of the batch, and from how much scratch there is."""
    both = case([300, 40, 128], kv_heads=1)
    rows = [(0, 299, 1), (1, 39, 1), (2, 127, 1)]
    by_splits, by_segments, short_of_scratch = (
        torch.cat(both.run(rows, **options)) for options in ({}, {"split_below": 0}, {"scratch_bytes": 2048})
    )
    assert torch.equal(by_splits, by_segments)
    assert torch.equal(by_splits, short_of_scratch)


def claim_a_row_is_bitwise_the_same_however_little_scratch_there_is() -> None:
    """One token at a time, some, or all at once; tiles are then cut, and computed more than once."""
    long = case([180, 20], kv_heads=1)
    for rows in ([(0, 173, 7), (1, 0, 9)], [(0, 167, 13)]):
        want = torch.cat(long.run(rows))
        for scratch_bytes in (1, 2500, 12000):
            assert torch.equal(torch.cat(long.run(rows, scratch_bytes=scratch_bytes)), want), scratch_bytes


def claim_many_segments_are_merged_exactly_and_in_one_order() -> None:
    """More than are merged side by side, so that there are several groups of them."""
    long = case([1100], kv_heads=1, group=1, dim=16, page_tokens=64)
    (extended,) = long.run([(0, 1097, 3)], segment_tokens=64)
    expect_within(extended, *plain_attention(long.q[0][1097:], long.k[0], long.v[0], 1097, scale=long.scale))
    for query in range(3):
        (decoded,) = long.run([(0, 1097 + query, 1)], segment_tokens=64)
        assert torch.equal(decoded[0], extended[query]), f"query {query}"


def claim_memory_that_no_sequence_owns_is_never_used() -> None:
    for rows in ([(0, 30, 11), (1, 0, 5)], [(0, 40, 1), (1, 4, 1)]):
        owned = case([41, 5], page_tokens=16)
        for clean, dirty in zip(owned.run(rows, fill=0.0), owned.run(rows, fill=float("nan")), strict=True):
            assert torch.equal(clean, dirty)


def claim_store_writes_its_slots_and_nothing_else() -> None:
    for page_tokens, slots in ((1, [4, 2, 5]), (16, [17, 16, 95])):
        k_thd, v_thd = (torch.randn(3, 2, 48) for _ in "kv")
        k_pages, v_pages = (torch.full((6, page_tokens, 2, 48), 9.0) for _ in "kv")
        want_k, want_v = k_pages.clone(), v_pages.clone()
        want_k.view(-1, 2, 48)[slots], want_v.view(-1, 2, 48)[slots] = k_thd, v_thd
        TritonAttention(**TILES).store(k_thd, v_thd, k_pages, v_pages, torch.tensor(slots))
        assert torch.equal(k_pages, want_k)
        assert torch.equal(v_pages, want_v)


def claim_stale_tables_are_found_as_the_twin_finds_them() -> None:
    source = torch.Generator().manual_seed(4)
    for width in (1, 3, 64, 1500):
        now = torch.randint(100, (2000,), generator=source, dtype=torch.int32)
        now[0] = 0
        tables = [torch.randint(1, 2000, (length,), generator=source).tolist() for length in (width, max(1, width - 2))]
        epochs = [now[table].tolist() for table in tables]
        starts, counts = [len(table) - 1 for table in tables], [1, 1]
        plan = listed_plan(starts, counts, tables, 1, torch.device("cpu"), epochs)
        for wrong in (None, 0, tables[0][-1], tables[1][len(tables[1]) // 2], tables[1][-1]):
            later = now.clone()
            if wrong:
                later[wrong] += 1
            want = TorchAttention(FAST).stale(plan, later)
            assert torch.equal(TritonAttention(**TILES).stale(plan, later), want)
            assert want.tolist() == [wrong in table for table in tables]


def claim_what_no_kernel_serves_is_refused_with_the_way_out() -> None:
    mixed = case([4], dim=16)
    q_thd, k_pages, v_pages, plan = mixed.batch([(0, 0, 4)], 0.0)
    for arguments in ((q_thd.half(), k_pages, v_pages), (q_thd[:, :3], k_pages, v_pages), (q_thd.int(),) * 3):
        with pytest.raises(ConfigError, match=r"use engine\.attention=torch"):
            TritonAttention(**TILES).attend(*arguments, plan, ScoreOptions(1.0))
    for sizes in ({"tile_rows": 24}, {"block_tokens": 64, "split_tokens": 32}, {"segment_tokens": 16}):
        with pytest.raises(ConfigError):
            TritonAttention(**sizes)


def claim_no_queries_give_no_rows() -> None:
    empty = case([4], dim=16)
    _, k_pages, v_pages, plan = empty.batch([(0, 3, 1)], 0.0)
    assert TritonAttention(**TILES).attend(torch.empty(0, 4, 16), k_pages, v_pages, plan, ScoreOptions(1.0)).shape == (
        0,
        4,
        16,
    )


def claim_the_engine_says_the_same_with_either_attention() -> None:
    from tests.engine.harness import Bench
    from tests.support.checkpoints import make_checkpoint

    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(300, (length,), generator=generator).tolist() for length in (37, 3)]
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), "qwen3", heads=3, kv_heads=1, head_dim=48, hidden=32, layers=2)
        benches = [Bench(Path(folder), attention=name, tokens=256) for name in ("triton", "torch")]
    answers = [bench.generate_many(prompts, 4, chunk=20) for bench in benches]
    logits = [bench.forced(prompts[0], [20, 16, 1]) for bench in benches]
    assert type(benches[0].engine.attention) is TritonAttention, "the setting has an effect"
    assert answers[0] == answers[1]
    assert torch.allclose(logits[0], logits[1], rtol=0, atol=2e-4), (logits[0] - logits[1]).abs().max()


if __name__ == "__main__":
    answer(globals())
