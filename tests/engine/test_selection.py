"""What the torch indexer selects and what sparse attention reads, against the definitions spelled out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from tests.support.listed_plans import listed_plan
from tests.support.model_families import FAMILIES
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.engine.attention.attention_backend import IndexKeys
from twinpool.engine.attention.attention_plan import AttentionPlan
from twinpool.engine.attention.kv_quantization import dequantise, quantise
from twinpool.engine.attention.torch_backend.torch_attention import TorchAttention
from twinpool.engine.attention.torch_backend.torch_latent import best, sum_of_heads
from twinpool.engine.models.model_base import StateOptions
from twinpool.engine.models.registry import read_model
from twinpool.engine.runner import load_model
from twinpool.engine.runner.load_model import numerics_for
from twinpool.engine.tensors.row_exact_linear import FAST, HeadLinear, Numerics, probe
from twinpool.engine.tensors.shard import Shard
from twinpool.engine.tensors.weight_loader import Weights

LATENT = TorchAttention(FAST).latent
HEADS, DIM, TOP_K = 5, 12, 20
"""An odd number of index heads: the tree of halves has a rest."""
ROWS = [(30, 3), (0, 40), (199, 1), (15, 10)]
"""First position and number of queries of each sequence."""


class Step:
    """Sequences with their keys in pages, everything else NaN."""

    def __init__(self, page_tokens: int = 16) -> None:
        source = torch.Generator().manual_seed(1)
        ends = [-(-(start + count) // page_tokens) for start, count in ROWS]
        free = torch.randperm(sum(ends), generator=source).add(1).tolist()
        tables = [[free.pop() for _ in range(end)] for end in ends]
        starts, counts = zip(*ROWS, strict=True)
        self.plan: AttentionPlan = listed_plan(starts, counts, tables, page_tokens, torch.device("cpu"))
        self.keys = [torch.randn(start + count, DIM, generator=source) for start, count in ROWS]
        self.pages = torch.full((sum(ends) + 1, page_tokens, DIM), torch.nan)
        self.pages[0] = 0
        for table, keys in zip(tables, self.keys, strict=True):
            for position, key in enumerate(keys):
                self.pages[table[position // page_tokens], position % page_tokens] = key
        total = sum(counts)
        self.q = torch.randn(total, HEADS, DIM, generator=source)
        self.weights = torch.randn(total, HEADS, generator=source)
        firsts = [0, *accumulate(counts)]
        self.queries = [(firsts[b] + at, b, start + at) for b, (start, count) in enumerate(ROWS) for at in range(count)]

    def best(self, row: int, sequence: int, position: int) -> list[int]:
        """The positions that a query reads: of equal scores (zeros, where no head likes a key) the earlier."""
        order = self.scores(row, sequence, position).sort(descending=True, stable=True).indices
        return sorted(order[:TOP_K].tolist())

    def scores(self, row: int, sequence: int, position: int) -> Tensor:
        keys = self.keys[sequence][: position + 1].double()
        by_head = (self.q[row].double() @ keys.T).relu()
        return self.weights[row].double() @ by_head


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_each_query_reads_its_best_positions_or_all_it_sees(page_tokens: int) -> None:
    step = Step(page_tokens)
    found = LATENT.select(step.q, step.weights, IndexKeys(step.pages), step.plan, TOP_K)
    assert found is not None
    read = dict(zip(found.rows_s.tolist(), found.positions_sk.tolist(), strict=True))
    slots = dict(zip(found.rows_s.tolist(), found.slots_sk.tolist(), strict=True))
    flat = step.pages.view(-1, DIM)
    for row, sequence, position in step.queries:
        assert (row in read) == (position >= TOP_K), "who sees no more than it may read reads all"
        if row in read:
            assert read[row] == step.best(row, sequence, position)
            assert torch.equal(flat[slots[row]], step.keys[sequence][read[row]])


def test_short_contexts_are_not_scored_at_all() -> None:
    step = Step()
    nothing = IndexKeys(torch.full_like(step.pages, torch.nan))
    assert LATENT.select(step.q, step.weights, nothing, step.plan, 200) is None


def test_sparse_attention_is_a_softmax_over_what_was_selected() -> None:
    step, value_dim = Step(), 8
    found = LATENT.select(step.q, step.weights, IndexKeys(step.pages), step.plan, TOP_K)
    out = LATENT.attend_selected(step.q, step.pages, step.plan, found, 0.3, value_dim)
    for row, sequence, position in step.queries:
        entries = step.keys[sequence][: position + 1].double()
        if position >= TOP_K:
            entries = entries[step.best(row, sequence, position)]
        weights = (0.3 * step.q[row].double() @ entries.T).softmax(-1)
        torch.testing.assert_close(out[row].double(), weights @ entries[:, :value_dim], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_sparse_attention_to_codes_reads_what_they_stand_for(codes: torch.dtype) -> None:
    step, value_dim = Step(), 8
    found = LATENT.select(step.q, step.weights, IndexKeys(step.pages), step.plan, TOP_K)
    pages, scales = quantise(step.pages.nan_to_num(100.0), codes)
    scales[step.pages.isnan().any(-1)] = torch.nan
    out = LATENT.attend_selected(step.q, pages, step.plan, found, 0.3, value_dim, scales.unsqueeze(-1))
    for row, sequence, position in step.queries:
        entries = dequantise(*quantise(step.keys[sequence][: position + 1], codes)).double()
        if position >= TOP_K:
            entries = entries[step.best(row, sequence, position)]
        weights = (0.3 * step.q[row].double() @ entries.T).softmax(-1)
        torch.testing.assert_close(out[row].double(), weights @ entries[:, :value_dim], rtol=1e-5, atol=1e-5)


def test_a_selection_of_everything_gives_the_bits_of_attention_to_everything() -> None:
    step = Step()
    numerics = Numerics(4)
    latent = TorchAttention(numerics).latent
    whole = latent.attend(step.q, step.pages, step.plan, 0.3, 8)
    for top_k in (20, 32, 199):
        found = latent.select(step.q, step.weights, IndexKeys(step.pages), step.plan, top_k)
        sparse = latent.attend_selected(step.q, step.pages, step.plan, found, 0.3, 8)
        all_read = [row for row, _, position in step.queries if position < top_k]
        assert torch.equal(sparse[all_read], whole[all_read])


def test_of_equal_scores_the_earlier_are_the_best_and_what_is_no_number_is_the_worst() -> None:
    nan, low = torch.nan, -torch.inf
    scores = torch.tensor(
        [[1, 2, 2, 2, 0, 3], [0, 0, 0, 0, 0, 0], [nan, 5, nan, nan, low, low], [-0.0, 0, -1, 0, 0, -2]]
    )
    assert best(scores, 3).tolist() == [[1, 2, 5], [0, 1, 2], [0, 1, 2], [0, 1, 3]]


def test_heads_are_added_up_alike_wherever_an_element_lies() -> None:
    for heads in (1, 2, 3, 16, 24):
        x = torch.randn(7, 3, heads, 128)
        want = x.double().sum(2)
        got = sum_of_heads(x.clone())
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)
        for item in range(7):
            assert torch.equal(sum_of_heads(x[item : item + 1, 1:2].clone())[0, 0], got[item, 1])


def test_a_matrix_a_head_is_a_product_by_head_and_its_rows_are_exact() -> None:
    weight_hkn, x = torch.randn(3, 10, 7), torch.randn(64, 30)
    linear = HeadLinear(weight_hkn)
    want = torch.einsum("mhk,hkn->mhn", x.view(64, 3, 10), weight_hkn).reshape(64, 21)
    torch.testing.assert_close(linear(x), want)
    numerics = probe([linear], [])
    whole = numerics.linear(x, linear)
    for rows in range(numerics.quantum, 64, numerics.quantum):
        assert torch.equal(numerics.linear(x[:rows], linear), whole[:rows])


def test_ranks_divide_heads_and_have_all_of_latents_and_index_keys(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = FAMILIES["glm5"](tmp_path_factory.mktemp("ranks") / "m")
    model = read_model(folder)
    whole, parts = Weights.dry(model.spec), [Weights.dry(model.spec, shard=Shard(rank, 2)) for rank in (0, 1)]
    for weights in (whole, *parts):
        model.build(weights)
    assert parts[0].nbytes == parts[1].nbytes < whole.nbytes
    pools = [model.pools(StateOptions(torch.float32, 16, shard)) for shard in (Shard(0, 1), Shard(0, 2), Shard(1, 2))]
    assert pools[0] == pools[1] == pools[2], "the same on every rank"
    assert numerics_for(parts[0], EngineConfig(numerics="fast"), CpuDevice().torch_device) is FAST


def test_products_of_attention_are_probed_where_torch_computes_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton does, there is no quantum for them to find, and none that could make others padded."""
    probed: list[list[tuple[int, int, int]]] = []

    def note(linears: object, products: Sequence[tuple[int, int, int]], device: torch.device) -> Numerics:
        probed.append(list(products))
        return Numerics(1)

    monkeypatch.setattr(load_model, "probe", note)
    for triton in (False, True):
        weights = SimpleNamespace(linears=[], products=[(1, 40, 128), (1, 40, 128)], triton=triton)
        numerics_for(cast(Weights, weights), EngineConfig(), torch.device("cpu"))
    assert probed == [[(1, 40, 128)], []]


@pytest.mark.parametrize("tiled", [False, True])
def test_products_that_are_exact_only_in_tiles_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tiled: bool
) -> None:
    weights = SimpleNamespace(linears=[], products=[], triton=False)
    monkeypatch.setattr(load_model, "probe", lambda *_: Numerics(16, tiled=tiled))
    assert numerics_for(cast(Weights, weights), EngineConfig(), torch.device("cpu")).tiled is tiled
    assert ("tiles of 16" in caplog.text) is tiled
