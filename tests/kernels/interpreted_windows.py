"""Windows, sinks and soft-capping in the kernels, in Triton's interpreter; run as a script by `test_window_kernels.py`.

Against the torch twin, on tables that begin where the window does, with every byte that nobody owns NaN.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.listed_plans import listed_plan

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from tests.engine.harness import Bench
from tests.kernels.claims import answer
from tests.support.model_families import FAMILIES
from tests.support.plain_attention import expect_within, plain_attention
from twinpool.engine.attention.attention_backend import ScoreOptions
from twinpool.engine.attention.attention_plan import AttentionPlan
from twinpool.engine.attention.torch_backend.torch_attention import TorchAttention
from twinpool.engine.attention.triton_backend.triton_attention import TritonAttention
from twinpool.engine.tensors.row_exact_linear import FAST

TRITON = TritonAttention(tile_rows=16, block_tokens=16, split_tokens=32, segment_tokens=64)
TORCH = TorchAttention(FAST)
Run = tuple[int, int, int]
"""Sequence, start, queries."""
LENGTHS = (130, 2, 75)


class Case:
    """Sequences of one shape, and what a layer asks of attention."""

    def __init__(
        self,
        page_tokens: int = 16,
        heads: int = 2,
        kv_heads: int = 1,
        dim: int = 24,
        dtype: torch.dtype = torch.float32,
        sinks: bool = False,
        lengths: Sequence[int] = LENGTHS,
        **options: Any,
    ) -> None:
        source = torch.Generator().manual_seed(3)
        self.page_tokens, self.dtype, self.options = page_tokens, dtype, options
        self.window = options.get("window", 0)
        if sinks:
            options["sinks_h"] = 2 * torch.randn(heads, generator=source)
        self.q, self.k, self.v = (
            [2 * torch.randn(length, count, dim, generator=source).to(dtype) for length in lengths]
            for count in (heads, kv_heads, kv_heads)
        )

    def batch(self, rows: list[Run]) -> tuple[Tensor, Tensor, Tensor, AttentionPlan]:
        size = self.page_tokens
        firsts = [max(0, start - self.window + 1) // size if self.window else 0 for _, start, _ in rows]
        ends = [-(-(start + count) // size) for _, start, count in rows]
        total = sum(ends) - sum(firsts) + 2
        pages = [torch.full((total + 1, size, *self.k[0].shape[1:]), torch.nan, dtype=self.dtype) for _ in "kv"]
        free = torch.randperm(total, generator=torch.Generator().manual_seed(7)).add(1).tolist()
        tables = []
        for (sequence, start, count), first, end in zip(rows, firsts, ends, strict=True):
            tables.append([free.pop() for _ in range(first, end)])
            for number, at in enumerate(tables[-1], first):
                part = slice(number * size, min((number + 1) * size, start + count))
                for buffer, entries in zip(pages, (self.k, self.v), strict=True):
                    buffer[at, : part.stop - part.start] = entries[sequence][part]
        starts, counts = [start for _, start, _ in rows], [count for *_, count in rows]
        known = firsts if self.window else None
        plan = listed_plan(starts, counts, tables, size, torch.device("cpu"), firsts=known)
        q_thd = torch.cat([self.q[sequence][start : start + count] for sequence, start, count in rows])
        return q_thd, pages[0], pages[1], plan

    def run(self, rows: list[Run], backend: TritonAttention | TorchAttention = TRITON) -> list[Tensor]:
        q_thd, k_pages, v_pages, plan = self.batch(rows)
        if backend is TORCH:
            k_pages[0], v_pages[0] = 0, 0
        out_thd = backend.attend(q_thd, k_pages, v_pages, plan, ScoreOptions(q_thd.shape[2] ** -0.5, **self.options))
        return list(torch.split(out_thd, [count for *_, count in rows]))

    def check(self, rows: list[Run]) -> None:
        """Each of both, the kernels and the twin, as close to plain softmax in float64 as float32 allows."""
        for row, *both in zip(rows, self.run(rows), self.run(rows, TORCH), strict=True):
            sequence, start, count = row
            q, k, v = self.q[sequence][start : start + count], self.k[sequence], self.v[sequence]
            want, bound = plain_attention(q, k, v, start, scale=q.shape[2] ** -0.5, **self.options)
            for got in both:
                expect_within(got, want, bound)

    def check_half(self, rows: list[Run], tolerance: float) -> None:
        for got, want in zip(self.run(rows), self.run(rows, TORCH), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


EXTEND = [(0, 108, 22), (1, 0, 2), (2, 74, 1)]
DECODE = [(0, 129, 1), (1, 0, 1), (2, 64, 1), (0, 32, 1)]


def claim_windows_are_the_twins() -> None:
    for window in (1, 33, 64, 500):
        Case(window=window).check(EXTEND)
        Case(window=window).check(DECODE)


def claim_windows_are_the_twins_for_any_page_size() -> None:
    for page_tokens in (1, 64):
        Case(page_tokens, window=40).check(EXTEND)
        Case(page_tokens, window=40).check(DECODE)


def claim_a_row_is_bitwise_the_same_wherever_the_segments_that_its_window_reaches_are_counted_from() -> None:
    """The first of a tile may be an earlier one than the row's own: by chunk, and by what it shares a tile with."""
    for window in (33, 70, 200):
        case = Case(window=window, heads=1, sinks=True, lengths=(300,))
        case.check([(0, 285, 15)])
        (whole,) = case.run([(0, 240, 60)])
        for start, count in ((298, 2), (299, 1), (262, 8), (270, 30), (256, 1)):
            (part,) = case.run([(0, start, count)])
            assert torch.equal(part, whole[start - 240 : start - 240 + count]), (window, start)


def claim_sinks_are_the_twins() -> None:
    Case(sinks=True, heads=3).check(EXTEND)
    Case(sinks=True, heads=6, kv_heads=2).check(DECODE)


def claim_soft_capping_is_the_twins() -> None:
    Case(softcap=4.0).check(EXTEND)
    Case(softcap=4.0).check(DECODE)


def claim_all_of_them_together_are_the_twins() -> None:
    Case(window=45, sinks=True, softcap=6.0, heads=4, kv_heads=2).check(EXTEND)
    Case(window=45, sinks=True, softcap=6.0, heads=4, kv_heads=2).check(DECODE)


def claim_half_precision_stays_within_its_rounding() -> None:
    for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 6e-2)):
        Case(dtype=dtype, window=45, sinks=True, softcap=6.0).check_half(EXTEND[:1], tolerance)
        Case(dtype=dtype, window=45, sinks=True, softcap=6.0).check_half(DECODE[:1], tolerance)


def claim_heads_as_wide_as_gemma_4s_are_the_twins() -> None:
    wide = Case(dim=320, heads=2, window=40)
    wide.check([(0, 120, 10), (1, 0, 2)])
    wide.check([(0, 129, 1), (1, 1, 1)])


def claim_a_decoded_row_is_bitwise_the_extended_row() -> None:
    both = Case(window=45, sinks=True, softcap=6.0)
    (extended,) = both.run([(0, 90, 40)])
    for position in (90, 95, 96, 129):
        (decoded,) = both.run([(0, position, 1)])
        assert torch.equal(decoded[0], extended[position - 90]), position


def claim_a_row_is_bitwise_the_same_wherever_chunks_end_and_for_any_page_size() -> None:
    (whole,) = Case(window=45, sinks=True).run([(0, 0, 110)])
    for page_tokens, cuts in ((1, (0, 17, 110)), (64, (0, 64, 65, 110))):
        chunked = Case(page_tokens, window=45, sinks=True)
        parts = [chunked.run([(0, a, b - a)])[0] for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole), cuts


def claim_a_row_is_bitwise_the_same_whoever_shares_its_batch() -> None:
    crowd = Case(window=45, sinks=True, softcap=6.0)
    for alone, together in (((0, 100, 9), EXTEND[1:]), ((0, 100, 1), DECODE)):
        (want,) = crowd.run([alone])
        assert torch.equal(crowd.run([together[0], alone, *together[1:]])[1], want)


def claim_whole_models_say_with_the_kernels_what_they_say_with_torch() -> None:
    tokens = torch.randint(300, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    families: dict[str, dict[str, Any]] = {"gemma3": {}, "gemma4": {"num_kv_shared_layers": 0}, "gpt_oss": {}}
    for name, changes in families.items():
        turns = ["sliding_attention", "full_attention"]
        with tempfile.TemporaryDirectory() as folder:
            FAMILIES[name](Path(folder), num_hidden_layers=2, layer_types=turns, sliding_window=18, **changes)
            benches = [Bench(Path(folder), attention=backend, tokens=256) for backend in ("triton", "torch")]
            got, want = (bench.forced(tokens, [30, 9, 1]) for bench in benches)
        assert isinstance(benches[0].engine.attention, TritonAttention), "the setting has an effect"
        torch.testing.assert_close(got, want, rtol=0, atol=2e-4)


if __name__ == "__main__":
    answer(globals())
