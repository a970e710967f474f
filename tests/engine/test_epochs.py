"""Block tables carry epochs: a step finds a page that was given away, writes nothing to it, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.harness import GREEDY, Bench, MakeCheckpoint
from tests.support.model_families import FAMILIES
from twinpool.cache.allocation import TableSlice
from twinpool.engine.runner.batch import BatchRow, TokenDraw

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
    embed = bench.engine.decoder.embed_vh
    assert isinstance(embed, torch.Tensor)
    embed.fill_(torch.inf)
    bench.engine.forward([BatchRow(PROMPT, 0, {"full": TableSlice.of(pages, [1, 0, 0, 0])})])
    assert not any(view[0].any() for buffers in bench.layers for view in buffers.values())


def leased_before(row: BatchRow, pool: str) -> BatchRow:
    """The row, whose first page or slot of `pool` alone was freed after it was leased."""
    table = row.tables[pool]
    epochs = [7, *[0] * (len(table.pages) - 1)]
    return row._replace(tables={**row.tables, pool: TableSlice.of(table.pages, epochs, first=table.first)})


@pytest.mark.parametrize(
    ("family", "pool"),
    [
        ("gemma3", "full"), ("gemma3", "window"), ("qwen3_next", "full"), ("qwen3_next", "state"),
        ("falcon_h1", "full"), ("falcon_h1", "state"), ("deepseek_v32", "full"), ("nemotron_h", "state"),
    ],
)  # fmt: skip
def test_what_is_stale_in_one_pool_is_written_in_none(family: str, pool: str, tmp_path: Path) -> None:
    """Neither by a chunk that fills blocks of a state nor by a single token, beside a row that writes."""
    bench = Bench(FAMILIES[family](tmp_path / "model"), 16, 256)
    mine, other = bench.hold(48), bench.hold(48)
    bench.engine.forward([bench.row(PROMPT, 0, mine)])
    for count in (11, 1):
        tokens = PROMPT[:count]
        before = bench.region.clone()
        (out,) = bench.engine.forward([leased_before(bench.row(tokens, 37, mine), pool)])
        assert out.stale
        assert torch.equal(bench.region, before)
        good, bad = bench.engine.forward(
            [bench.row(PROMPT[-count:], 0, other), leased_before(bench.row(tokens, 37, mine), pool)]
        )
        assert (good.stale, bad.stale) == (False, True)
        assert not torch.equal(bench.region, before), "the other row writes"
        for name in bench.pools.spec.by_name:
            for buffers in bench.views(name):
                for view in buffers.values():
                    assert not view[0].float().any(), "padding and stale rows write zeros"
