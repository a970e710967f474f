"""Block tables carry epochs: a step finds a page that was given away, writes nothing to it, and says so."""

from __future__ import annotations

import torch

from cache.allocation.block_table import TableSlice
from engine.runner.batch import BatchRow, TokenDraw
from tests.engine.harness import GREEDY, Bench, MakeCheckpoint

PROMPT = list(range(40, 77))


def test_a_row_with_a_stale_page_is_flagged_and_writes_nothing(checkpoint: MakeCheckpoint) -> None:
    bench = Bench(checkpoint("llama"), 16, 512)
    pages = bench.lease(64)
    draw = TokenDraw(GREEDY, tuple(PROMPT), len(PROMPT))
    for stale in range(3):
        epochs = [0] * len(pages)
        epochs[stale] = 7
        before = bench.region.clone()
        (out,) = bench.engine.forward([BatchRow(PROMPT, 0, {"full": TableSlice.of(pages, epochs)}, draw)])
        assert out.stale
        assert torch.equal(bench.region, before)


def test_a_page_beyond_the_rows_last_position_does_not_matter(checkpoint: MakeCheckpoint) -> None:
    bench = Bench(checkpoint("llama"), 16, 512)
    pages = bench.lease(64)
    (out,) = bench.engine.forward([BatchRow(PROMPT, 0, {"full": TableSlice.of(pages, [0, 0, 0, 9])})])
    assert not out.stale


def test_a_stale_row_changes_no_bit_of_its_neighbours(checkpoint: MakeCheckpoint) -> None:
    bench = Bench(checkpoint("llama"), 16, 1024)
    draw = TokenDraw(GREEDY, tuple(PROMPT), len(PROMPT))
    states, tokens = [], []
    for stale in (False, True):
        good, bad = bench.lease(48), bench.lease(48)
        rows = [
            BatchRow(PROMPT[:30], 0, {"full": TableSlice.of(bad, [int(stale), 0, 0])}),
            BatchRow(PROMPT, 0, {"full": TableSlice.of(good, [0, 0, 0])}, draw),
            BatchRow(PROMPT[3:9], 0, {"full": TableSlice.of(bench.lease(16), [0])}),
        ]
        outputs = bench.engine.forward(rows)
        assert [out.stale for out in outputs] == [stale, False, False]
        assert outputs[1].drawn is not None
        tokens.append(outputs[1].drawn.token)
        states.append([buffers[name][good].view(-1)[: 37 * 16].clone() for buffers in bench.layers for name in "kv"])
    assert tokens[0] == tokens[1]
    assert all(map(torch.equal, *states))


def test_the_null_page_stays_zero_when_a_stale_row_computed_infinities(checkpoint: MakeCheckpoint) -> None:
    bench = Bench(checkpoint("llama"), 16, 256)
    pages = bench.lease(64)
    bench.engine.decoder.embed_vh.fill_(torch.inf)
    bench.engine.forward([BatchRow(PROMPT, 0, {"full": TableSlice.of(pages, [1, 0, 0, 0])})])
    assert not any(view[0].any() for buffers in bench.layers for view in buffers.values())
