"""The promise of exactness: the bits of a logit depend on its own sequence and position alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.harness import Bench, MakeCheckpoint, row
from tests.support.checkpoints import VOCAB
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.attention.torch_backend import torch_attention
from twinpool.engine.native import compile_kernels, current_kernels, native_kernels
from twinpool.engine.runner.batch import TokenDraw
from twinpool.engine.tensors.row_exact_linear import Numerics

LENGTH = 600
MODELS = {
    "llama-16": {"kind": "llama", "head_dim": 16, "heads": 4, "kv_heads": 2, "rope": "llama3"},
    "qwen3-48": {"kind": "qwen3", "head_dim": 48, "heads": 4, "kv_heads": 2},
    # Widths that leave tails behind every vector lane.
    "qwen3-18": {"kind": "qwen3", "head_dim": 18, "heads": 4, "kv_heads": 1, "hidden": 51},
    "llama-64": {"kind": "llama", "head_dim": 64, "heads": 2, "kv_heads": 1, "rope": "yarn"},
}
PLAIN = ("llama-16", "qwen3-18")
pytestmark = pytest.mark.slow


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[*MODELS, *(f"{name} by torch" for name in PLAIN)])
def folder(
    request: pytest.FixtureRequest, checkpoint: MakeCheckpoint, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Checkpoints; of those `by torch` nothing is computed by the C++ kernels, as where there is no compiler."""
    name, _, by_torch = request.param.partition(" ")
    if by_torch:
        monkeypatch.setattr(current_kernels, "available", _unavailable)
    return checkpoint(**MODELS[name], dtype=dtype)


def _unavailable(*_: object) -> native_kernels.NativeKernels:
    raise compile_kernels.NativeUnavailable("not in this test")


def sequence(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def random_chunks(rng: random.Random, length: int) -> list[int]:
    chunks = []
    while length:
        chunks.append(min(length, rng.choice([1, 2, 3, 5, 16, 31, 64, 127, 128, 129, 250])))
        length -= chunks[-1]
    return chunks


def same(got: Tensor, want: Tensor) -> bool:
    assert not got.isnan().any(), "something of an earlier owner was read"
    return torch.equal(got, want)


def test_chunks_pages_and_pools_do_not_change_a_bit(folder: Path) -> None:
    tokens, rng = sequence(1, LENGTH), random.Random(1)
    want = Bench(folder, 16, 1024).forced(tokens, [LENGTH])
    for page_tokens, pool, seed in ((16, 4096, 1), (1, 700, 2), (64, 1024, 3), (256, 2048, 4)):
        bench = Bench(folder, page_tokens, pool, seed)
        for _ in range(2):
            chunks = random_chunks(rng, LENGTH)
            assert same(bench.forced(tokens, chunks), want), (page_tokens, chunks)


def test_neighbours_in_a_batch_do_not_change_a_bit(folder: Path) -> None:
    tokens, rng = sequence(2, LENGTH), random.Random(2)
    bench = Bench(folder, 16, 1 << 13)
    want = bench.forced(tokens, [LENGTH])
    for _ in range(4):
        begin = rng.randrange(LENGTH - 1)
        end = min(LENGTH, begin + rng.choice([1, 2, 40, 300]))
        pages = bench.lease(LENGTH)
        bench.logits([row(tokens[:begin], 0, pages)] if begin else [row(tokens[:1], 0, pages)])
        rows = [
            row(sequence(9, n), 0, bench.lease(n)) for n in rng.choices([1, 2, 3, 17, 130, 290], k=rng.randrange(6))
        ]
        place = rng.randrange(len(rows) + 1)
        rows.insert(place, row(tokens[begin:end], begin, pages))
        assert same(bench.logits(rows)[place], want[begin:end]), (begin, end, len(rows))


def test_decode_and_extend_give_the_same_bits_in_any_batch(folder: Path) -> None:
    lengths = [1, 2, 5, 100, 127, 128, 129, 255, 256, 257, 400, 599]
    bench = Bench(folder, 16, 1 << 14)
    rows, wants = [], []
    for number, length in enumerate(lengths):
        tokens = sequence(10 + number, length + 1)
        wants.append(bench.forced(tokens, [length + 1])[-1:])
        pages = bench.lease(length + 1)
        bench.logits([row(tokens[:-1], 0, pages)])
        rows.append(row(tokens[-1:], length, pages))
    for count in (1, 2, 3, 5, 8, 11, 12):
        for begin in range(0, len(rows) - count + 1, 4):
            part = slice(begin, begin + count)
            for got, want in zip(bench.logits(rows[part]), wants[part], strict=True):
                assert same(got, want), (begin, count)


def test_threads_do_not_change_a_bit(folder: Path) -> None:
    tokens = sequence(3, 300)
    want = Bench(folder, threads=1).forced(tokens, [300])
    assert same(Bench(folder, threads=2).forced(tokens, [295, *[1] * 5]), want)


def test_a_prefix_computed_by_another_request_gives_the_same_bits(folder: Path) -> None:
    """What prefix reuse does: pages of one sequence in the table of the next."""
    tokens = sequence(4, LENGTH)
    bench = Bench(folder, 16, 4096)
    want = bench.forced(tokens, [LENGTH])
    shared = bench.lease(320)
    bench.logits([row(tokens[:320], 0, shared)])
    mine = shared + bench.lease(LENGTH - 320)
    assert same(bench.logits([row(tokens[320:], 320, mine)])[0], want[320:])


def test_small_bounds_on_memory_do_not_change_a_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = sequence(5, LENGTH)
    want = Bench(folder).forced(tokens, [LENGTH])
    monkeypatch.setattr(torch_attention, "SCORE_ELEMENTS", 1 << 15)
    monkeypatch.setattr(torch_attention, "_TILE_SCORES", 1 << 13)
    monkeypatch.setattr(torch_attention, "GATHER_ELEMENTS", 1 << 13)
    monkeypatch.setattr(torch_attention, "_TILE_QUERIES", 8)
    assert same(Bench(folder).forced(tokens, [100, LENGTH - 100]), want)


def test_tiled_products_are_invariant_too(folder: Path) -> None:
    """The way out where no quantum makes rows exact."""
    tokens = sequence(6, 300)
    bench = Bench(folder, 16, 1 << 12)
    bench.engine.numerics = Numerics(16, tiled=True)
    bench.engine.attention = torch_attention.TorchAttention(bench.engine.numerics)
    want = bench.forced(tokens, [300])
    assert same(bench.forced(tokens, random_chunks(random.Random(6), 300)), want)


def test_the_null_page_stays_zero_and_only_the_rows_own_slots_are_written(folder: Path) -> None:
    bench = Bench(folder, 16, 1024)
    before = bench.region.clone()
    pages = bench.lease(40)
    bench.logits([row(sequence(7, 37), 0, pages)])
    bench.logits([row([3], 37, pages)])
    written: set[int] = set()
    for layer in range(bench.spec.layers):
        for buffer in bench.buffers:
            token_bytes = buffer.spec.shape_bytes
            for position in range(38):
                at = buffer.offset(layer, pages[position // 16]) + position % 16 * token_bytes
                written.update(range(at, at + token_bytes))
    changed = set((bench.region != before).nonzero().flatten().tolist())
    assert changed <= written
    assert len(changed) > 0.8 * len(written)
    for buffers in bench.layers:
        assert not any(view[0].any() for view in buffers.values())


def test_sampled_tokens_are_the_same_alone_and_in_a_batch(folder: Path) -> None:
    asked = [sequence(30 + n, n) for n in (1, 7, 40, 150, 300)]
    params = [SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, top_k=40, seed=n) for n in range(5)]
    together = Bench(folder, 16, 4096).generate_many(asked, 8, 64, params)
    alone = [Bench(folder, 1, 512, 5).generate_many([p], 8, 33, [s])[0] for p, s in zip(asked, params, strict=True)]
    assert together == alone


def test_what_forward_returns_is_the_same_with_and_without_scores(folder: Path) -> None:
    tokens = sequence(8, 60)
    bench = Bench(folder)
    draw = TokenDraw(SamplingParams(max_tokens=1, temperature=0.0, logprobs=4), tuple(tokens), 60)
    (plain,) = bench.engine.forward([row(tokens, 0, bench.lease(61), draw)])
    (scored,) = bench.engine.forward([row(tokens, 0, bench.lease(61), draw, score=[*tokens[1:], 0], score_top=4)])
    assert scored.drawn == plain.drawn
    assert plain.drawn is not None
    assert plain.drawn.logprob is not None
    assert scored.scores[-1].top == plain.drawn.logprob.top
