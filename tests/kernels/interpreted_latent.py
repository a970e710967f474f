"""Latent attention, indexer and sparse attention in Triton's interpreter; run as a script by `test_latent_kernels.py`.

Against the torch twin, with every byte that nobody owns NaN.
"""

from __future__ import annotations

import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.listed_plans import listed_plan

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from tests.kernels.claims import answer
from twinpool.engine.attention.attention_backend import IndexKeys, LatentBackend, SparseSelection
from twinpool.engine.attention.attention_plan import AttentionPlan, muted
from twinpool.engine.attention.torch_backend.torch_attention import TorchAttention
from twinpool.engine.attention.triton_backend.triton_latent import TritonLatent
from twinpool.engine.tensors.row_exact_linear import FAST

TRITON = TritonLatent(interpreted=True, tile_rows=16, block_tokens=16, split_tokens=32, index_block=16, index_queries=4)
TORCH = TorchAttention(FAST).latent
Run = tuple[int, int, int]
"""Sequence, start, queries."""
LENGTHS = (45, 1, 30)
MIXED: list[Run] = [(0, 38, 7), (1, 0, 1), (2, 28, 2)]
DECODED: list[Run] = [(0, 44, 1), (1, 0, 1), (2, 29, 1)]
LATE: list[Run] = [(0, 37, 8)]
ACROSS: list[Run] = [(1, 0, 1), (0, 32, 13)]
"""The second sequence begins off a multiple of a tile's queries, and has several tiles."""


class Case:
    """Sequences of one shape with all their latents and index keys."""

    def __init__(
        self, page_tokens: int = 16, heads: int = 3, latent: int = 24, turning: int = 8, index_heads: int = 16,
        index_dim: int = 24, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        source = torch.Generator().manual_seed(3)
        self.page_tokens, self.dtype, self.latent = page_tokens, dtype, latent
        self.scale = (latent + turning) ** -0.5

        def draw(*shape: int) -> list[Tensor]:
            return [2 * torch.randn(length, *shape, generator=source).to(dtype) for length in LENGTHS]

        self.q, self.latents = draw(heads, latent + turning), draw(latent + turning)
        self.index_q, self.index_k, self.weights = draw(index_heads, index_dim), draw(index_dim), draw(index_heads)

    def plan(self, rows: list[Run]) -> AttentionPlan:
        size = self.page_tokens
        ends = [-(-(start + count) // size) for _, start, count in rows]
        free = torch.randperm(sum(ends) + 2, generator=torch.Generator().manual_seed(7)).add(1).tolist()
        tables = [[free.pop() for _ in range(end)] for end in ends]
        return listed_plan([s for _, s, _ in rows], [n for *_, n in rows], tables, size, torch.device("cpu"))

    def pages(self, rows: list[Run], plan: AttentionPlan, entries: list[Tensor]) -> Tensor:
        """All that the rows see of `entries`, in pages; NaN elsewhere, zeros in the null page."""
        size = self.page_tokens
        count = int(plan.tables_bp.max()) + 3
        pages = torch.full((count, size, entries[0].shape[1]), torch.nan, dtype=self.dtype)
        pages[0] = 0
        for (sequence, start, queries), table in zip(rows, plan.tables_bp.tolist(), strict=True):
            for number in range(-(-(start + queries) // size)):
                part = slice(number * size, min((number + 1) * size, start + queries))
                pages[table[number], : part.stop - part.start] = entries[sequence][part]
        return pages

    def packed(self, rows: list[Run], values: list[Tensor]) -> Tensor:
        return torch.cat([values[sequence][start : start + count] for sequence, start, count in rows])

    def attend(self, rows: list[Run], backend: LatentBackend = TRITON) -> Tensor:
        plan = self.plan(rows)
        latents = self.pages(rows, plan, self.latents)
        return backend.attend(self.packed(rows, self.q), latents, plan, self.scale, self.latent)

    def keys(self, rows: list[Run], plan: AttentionPlan, *, float8: bool) -> IndexKeys:
        pages = self.pages(rows, plan, self.index_k)
        if not float8:
            return IndexKeys(pages)
        scales = pages.float().abs().amax(2) / 448
        return IndexKeys((pages.float() / scales.unsqueeze(2)).to(torch.float8_e4m3fn), scales)

    def select(
        self, rows: list[Run], top_k: int, backend: LatentBackend = TRITON, *, float8: bool = False
    ) -> tuple[AttentionPlan, SparseSelection | None]:
        plan = self.plan(rows)
        weights = self.packed(rows, self.weights).float()
        keys = self.keys(rows, plan, float8=float8)
        return plan, backend.select(self.packed(rows, self.index_q), weights, keys, plan, top_k)

    def sparse(self, rows: list[Run], top_k: int, backend: LatentBackend = TRITON) -> Tensor:
        plan, selection = self.select(rows, top_k, backend)
        latents = self.pages(rows, plan, self.latents)
        q_thd = self.packed(rows, self.q)
        return backend.attend_selected(q_thd, latents, plan, selection, self.scale, self.latent)

    def close(self, rows: list[Run], tolerance: float = 1e-5) -> None:
        got, want = self.attend(rows).float(), self.attend(rows, TORCH).float()
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def chosen(selection: SparseSelection | None, rows: list[Run]) -> list[list[int]]:
    """What each query reads, whatever the backend leaves out."""
    positions = [at for _, start, count in rows for at in range(start, start + count)]
    out = [list(range(position + 1)) for position in positions]
    if selection is not None:
        counts = selection.scratch.get("counts")
        for number, (row, found) in enumerate(
            zip(selection.rows_s.tolist(), selection.positions_sk.tolist(), strict=True)
        ):
            out[row] = found if counts is None else found[: int(counts[number])]
    return out


def claim_extend_and_decode_equal_the_twin_for_any_page_size() -> None:
    for page_tokens in (1, 16, 64):
        Case(page_tokens).close(MIXED)
        Case(page_tokens).close(DECODED)


def claim_any_number_of_heads_and_any_width_works_in_both() -> None:
    for heads, latent, turning in ((1, 16, 4), (16, 40, 16), (20, 64, 20)):
        wide = Case(heads=heads, latent=latent, turning=turning)
        wide.close([(2, 27, 3)])
        wide.close([(2, 29, 1), (1, 0, 1)])


def claim_half_precision_stays_within_its_rounding() -> None:
    for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 6e-2)):
        Case(dtype=dtype).close([(2, 27, 3)], tolerance)
        Case(dtype=dtype).close([(2, 29, 1)], tolerance)


def claim_a_row_is_bitwise_the_same_in_any_batch_chunk_and_page() -> None:
    whole = Case().attend([(0, 0, 45)])
    for page_tokens in (1, 64):
        case = Case(page_tokens)
        parts = [case.attend([(0, a, b - a)]) for a, b in pairwise((0, 17, 33, 44, 45))]
        assert torch.equal(torch.cat(parts), whole), page_tokens
    assert torch.equal(Case().attend(MIXED)[:7], whole[38:])
    assert torch.equal(Case().attend(DECODED)[:1], whole[44:])


def claim_results_are_bitwise_the_same_however_little_scratch_there_is() -> None:
    """Of parts, and of an indexer's scores: one token at a time, some, or all at once."""
    for rows in (MIXED, DECODED):
        attended, sparse = Case().attend(rows), Case().sparse(rows, 20)
        selected = chosen(Case().select(rows, 20)[1], rows)
        for scratch_bytes in (1, 3000):
            short = TritonLatent(
                interpreted=True, tile_rows=16, block_tokens=16, split_tokens=32, index_block=16, index_queries=4,
                scratch_bytes=scratch_bytes,
            )  # fmt: skip
            assert torch.equal(Case().attend(rows, short), attended)
            assert torch.equal(Case().sparse(rows, 20, short), sparse)
            assert chosen(Case().select(rows, 20, short)[1], rows) == selected


def claim_a_sequence_that_goes_on_through_many_waves_is_whole_wherever_it_begins() -> None:
    """In waves of four queries, as many as a tile has here: each has the end of one tile, and of the next one most."""
    whole = Case().attend(ACROSS)
    short = TritonLatent(interpreted=True, tile_rows=16, block_tokens=16, split_tokens=32, scratch_bytes=3400)
    assert torch.equal(Case().attend(ACROSS, short), whole)


def claim_the_same_positions_are_selected_as_by_the_twin() -> None:
    for page_tokens, top_k, rows in ((16, 20, MIXED), (1, 16, DECODED), (64, 37, DECODED), (16, 1, [(2, 3, 2)])):
        case = Case(page_tokens)
        got, want = chosen(case.select(rows, top_k)[1], rows), chosen(case.select(rows, top_k, TORCH)[1], rows)
        assert got == want
        assert len(got[0]) == min(top_k, rows[0][1] + 1)


def claim_float8_keys_select_as_in_the_twin() -> None:
    case = Case()
    got, want = (chosen(case.select(MIXED, 20, backend, float8=True)[1], MIXED) for backend in (TRITON, TORCH))
    assert got == want


def claim_of_equal_scores_the_earlier_positions_are_selected() -> None:
    case = Case()
    case.index_k[0][:] = case.index_k[0][0].clone()
    for backend in (TRITON, TORCH):
        assert chosen(case.select([(0, 40, 1)], 20, backend)[1], [(0, 40, 1)]) == [list(range(20))]


def claim_what_is_no_number_is_selected_last_and_only_what_is_seen() -> None:
    case = Case()
    case.index_k[0][5:30] = torch.nan
    for backend in (TRITON, TORCH):
        (read,) = chosen(case.select([(0, 40, 1)], 20, backend)[1], [(0, 40, 1)])
        assert read == [*range(9), *range(30, 41)]


def claim_a_selection_is_the_same_in_any_batch_chunk_and_page() -> None:
    whole = chosen(Case().select(LATE, 20)[1], LATE)
    for page_tokens, rows in ((1, MIXED), (64, DECODED)):
        got, count = chosen(Case(page_tokens).select(rows, 20)[1], rows), rows[0][2]
        assert got[:count] == whole[-count:]


def claim_sparse_attention_equals_the_twin() -> None:
    for rows in (MIXED, DECODED):
        torch.testing.assert_close(Case().sparse(rows, 20), Case().sparse(rows, 20, TORCH), rtol=1e-5, atol=1e-5)


def claim_sparse_rows_are_bitwise_the_same_extended_and_decoded() -> None:
    whole = Case().sparse(LATE, 40)
    assert torch.equal(Case(64).sparse(DECODED, 40)[:1], whole[-1:])
    assert torch.equal(Case(1).sparse(MIXED, 40)[:7], whole[-7:])


def claim_a_selection_of_everything_is_bitwise_attention_to_everything() -> None:
    sparse, dense = Case().sparse(LATE, 40), Case().attend(LATE)
    assert torch.equal(sparse[:3], dense[:3])
    assert not torch.equal(sparse[3:], dense[3:])


def claim_float8_keys_are_stored_as_the_twin_stores_them_and_nothing_else_is_written() -> None:
    case = Case()
    rows: list[Run] = [(0, 30, 15), (2, 0, 3)]
    plan = case.plan(rows)
    keys_td = case.packed(rows, case.index_k)
    keys_td[1], keys_td[2, 1:] = 0, 0
    for current in (plan, muted(plan, torch.tensor([False, True]))):
        stored = []
        for backend in (TRITON, TORCH):
            pages, scales = torch.zeros(20, 16, 24, dtype=torch.float8_e4m3fn), torch.full((20, 16), 7.0)
            scales[0] = 0
            backend.store_keys(keys_td, IndexKeys(pages, scales), current)
            stored.append((pages.float(), scales))
        (pages, scales), (want_pages, want_scales) = stored
        assert torch.equal(pages, want_pages)
        assert torch.equal(scales, want_scales)
        count = 18 if current is plan else 15
        assert (scales == 7.0).sum() == 19 * 16 - count
        found = pages.view(-1, 24)[plan.slots_t[:15]] * scales.view(-1, 1)[plan.slots_t[:15]]
        nearest = keys_td[:15].abs() / 15.9 + scales.view(-1, 1)[plan.slots_t[:15]] * 2**-10
        assert ((found - keys_td[:15]).abs() <= nearest).all()


def claim_no_queries_give_no_rows() -> None:
    case = Case()
    plan = case.plan([(1, 0, 1)])
    assert TRITON.attend(torch.empty(0, 3, 32), torch.zeros(3, 16, 32), plan, 1.0, 24).shape == (0, 3, 24)


def claim_the_engine_says_the_same_with_either_attention() -> None:
    from tests.engine.harness import Bench
    from tests.support.model_families import FAMILIES

    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(300, (length,), generator=generator).tolist() for length in (22, 3)]
    small: dict[str, Any] = {
        "num_hidden_layers": 2,
        "indexer_types": ["full", "shared"],
        "hidden_size": 32,
        "index_topk": 16,
    }
    with tempfile.TemporaryDirectory() as folder:
        FAMILIES["glm5"](Path(folder), **small)
        options = {"index_float8": True}
        benches = [Bench(Path(folder), tokens=256, options=options, attention=name) for name in ("triton", "torch")]
        assert type(benches[0].engine.attention.latent) is TritonLatent, "the setting has an effect"
        answers = [bench.generate_many(prompts, 2, chunk=20) for bench in benches]
        assert answers[0] == answers[1]


if __name__ == "__main__":
    answer(globals())
