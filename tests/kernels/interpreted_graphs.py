"""Captured steps against the same steps launched kernel by kernel; run as a script by `test_step_graphs.py`."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from tests.engine.harness import Bench, Held
from tests.kernels.claims import answer
from tests.kernels.recorded_graph import RecordedRun, capture
from tests.support.model_families import FAMILIES
from twinpool.cache.allocation import TableSlice
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.batch import BatchRow, RowOutput, TokenDraw
from twinpool.engine.runner.graphs import step_graphs
from twinpool.engine.runner.graphs.graph_inputs import GraphSize
from twinpool.engine.runner.graphs.step_graphs import DraftedSteps, Run
from twinpool.engine.runner.model_runner import ModelRunner

PROMPTS = [[3, 250, 17, 17, 90, 4, 201, 33, 5], [7, 8], [60 + i for i in range(21)]]
STEPS = 4
DRAW = SamplingParams(max_tokens=1 << 20, temperature=0.0, logprobs=3)

step_graphs._FEWEST_PAGES = 5  # so that small tables come in two widths


def bench(folder: str, **config: Any) -> Bench:
    return Bench(Path(folder), page_tokens=4, tokens=256, attention="triton", **config)


def captured(host: Bench, record: Callable[[Run], RecordedRun] = capture, rows: int = 4) -> ModelRunner:
    host.engine.capture(record, rows=rows, context=40, within_s=1e9)
    return host.engine


class Sequences:
    """The prompts, computed, and their answers."""

    def __init__(self, host: Bench) -> None:
        self.host, self.held = host, [host.hold(len(prompt) + STEPS + 1) for prompt in PROMPTS]
        self.tokens = [list(prompt) for prompt in PROMPTS]
        for number in range(len(PROMPTS)):
            (out,) = host.engine.forward([self.row(number, self.tokens[number], 0)])
            self.take(number, out)

    def row(self, number: int, tokens: Sequence[int], start: int, held: Held | None = None) -> BatchRow:
        draw = TokenDraw(DRAW, (), len(PROMPTS[number]), start + len(tokens))
        return self.host.row(tokens, start, held or self.held[number], draw)

    def next(self, number: int) -> BatchRow:
        tokens = self.tokens[number]
        return self.row(number, tokens[-1:], len(tokens) - 1)

    def drafted(self, number: int, want: Sequence[int], right: int, wrong: int) -> BatchRow:
        """A row with so many drafts that are `want`'s, and then so many that aren't."""
        tokens = self.tokens[number]
        drafts = [*want[len(tokens) :][:right], *[9] * wrong]
        row = self.row(number, [tokens[-1], *drafts], len(tokens) - 1)
        return row._replace(drafted=len(drafts))

    def take(self, number: int, out: RowOutput) -> Any:
        assert out.drawn is not None
        self.tokens[number].append(out.drawn.token)
        return out.drawn

    def step(self, *numbers: int) -> list[Any]:
        """A step of some of them: tokens and log-probabilities."""
        outs = self.host.engine.forward([self.next(number) for number in numbers])
        return [self.take(number, out) for number, out in zip(numbers, outs, strict=True)]

    def answers(self) -> list[Any]:
        """Of steps with three, two, one and again three rows, which change places; a graph of four has one to spare."""
        return [self.step(*numbers) for numbers in ((0, 1, 2), (2, 0), (1,), (2, 1, 0))]


@functools.cache
def launched(name: str) -> list[Any]:
    """The answers of a family whose steps are launched kernel by kernel."""
    with tempfile.TemporaryDirectory() as folder:
        FAMILIES[name](Path(folder))
        return Sequences(bench(folder)).answers()


def same_bits(name: str) -> None:
    """A family's replayed steps against its steps launched kernel by kernel."""
    want = launched(name)
    with tempfile.TemporaryDirectory() as folder:
        FAMILIES[name](Path(folder))
        host = bench(folder)
        engine = captured(host)
        assert Sequences(host).answers() == want, name
    assert engine.graphs is not None
    assert engine.graphs.replayed == STEPS, f"{name}: {engine.graphs.replayed} steps were replayed"
    assert len(engine.graphs) == len(engine.graphs.sizes) == 6


def claim_replayed_steps_have_the_bits_of_steps_launched_kernel_by_kernel() -> None:
    same_bits("qwen3")


def claim_stale_rows_and_padding_write_nothing_where_a_step_is_replayed() -> None:
    with tempfile.TemporaryDirectory() as folder:
        FAMILIES["qwen3"](Path(folder))
        host = bench(folder)
        engine = captured(host)
        known = Sequences(host)
        before = host.region.clone()
        stale = known.next(1)
        table = stale.tables["full"]
        freed = TableSlice.of(table.pages, [epoch + 1 for epoch in table.epochs])
        reach = [len(known.tokens[number]) - 1 for number in (0, 2)]
        good, bad, last = engine.forward([known.next(0), stale._replace(tables={"full": freed}), known.next(2)])
        assert (good.stale, bad.stale, last.stale) == (False, True, False)
        assert engine.graphs is not None
        assert engine.graphs.replayed == 1
        written = {page for page in range(64) if not _same(host, before, page)}
        assert written == {known.held[n].pages[at // 4] for n, at in zip((0, 2), reach, strict=True)}


def _same(host: Bench, before: torch.Tensor, page: int) -> bool:
    """Whether a page has the bytes that it had."""
    now, then = host.region, before
    spans = [
        (buffer.offset(layer, page), buffer.entry_bytes)
        for buffer in host.buffers
        for layer in range(buffer.spec.layers)
    ]
    return all(torch.equal(now[at : at + size], then[at : at + size]) for at, size in spans)


def claim_chunks_of_prompts_and_steps_larger_than_any_graph_are_launched_kernel_by_kernel() -> None:
    with tempfile.TemporaryDirectory() as folder:
        FAMILIES["qwen3"](Path(folder))
        want = Sequences(bench(folder))
        wanted = [want.step(0, 1, 2), want.step(0, 1, 2)]
        host = bench(folder)
        captured(host, rows=2)
        known = Sequences(host)
        assert [known.step(0, 1, 2), known.step(0, 1, 2)] == wanted
        assert host.engine.graphs is not None
        assert host.engine.graphs.replayed == 0


def claim_with_no_time_left_the_largest_graph_replays_all_steps() -> None:
    with tempfile.TemporaryDirectory() as folder:
        FAMILIES["qwen3"](Path(folder))
        host = bench(folder)
        host.engine.capture(capture, rows=4, context=40, within_s=0.0)
        assert Sequences(host).answers() == launched("qwen3")
        graphs = host.engine.graphs
        assert graphs is not None
        assert (len(graphs), graphs.replayed) == (1, STEPS)


def drafted_bits(name: str, drafts: int = 3) -> None:
    """A family's replayed steps with drafts, right ones and wrong ones, against its steps a token each."""
    with tempfile.TemporaryDirectory() as folder:
        FAMILIES[name](Path(folder))
        plain = Sequences(bench(folder))
        for _ in range(STEPS):
            plain.step(0, 1, 2)
        host = bench(folder)
        host.engine.capture(capture, rows=4, context=40, within_s=1e9, drafted=DraftedSteps(2, drafts))
        known, graphs = Sequences(host), host.engine.graphs
        assert graphs is not None
        before = graphs.replayed  # A prompt that is as short as a row with drafts is replayed, too.
        for numbers, right, wrong in (((0, 1), (1, 0), (1, 0)), ((2,), (2,), (0,)), ((1, 0), (2, 0), (1, 2))):
            rows = [
                known.drafted(number, plain.tokens[number], *shape)
                for number, *shape in zip(numbers, right, wrong, strict=True)
            ]
            for number, out, some in zip(numbers, host.engine.forward(rows), right, strict=True):
                assert len(out.accepted) == some, name
                for drawn in out.accepted:
                    known.tokens[number].append(drawn.token)
                known.take(number, out)
        assert [mine == its[: len(mine)] for mine, its in zip(known.tokens, plain.tokens, strict=True)] == [True] * 3
        assert graphs.replayed - before == 3, f"{name}: {graphs.replayed - before} steps were replayed"
        assert {size.positions for size in graphs.sizes} == {1, 1 + drafts}


def claim_replayed_steps_with_drafts_have_the_bits_of_steps_of_a_token() -> None:
    drafted_bits("qwen3")


def claim_steps_with_more_rows_or_drafts_than_any_graph_are_launched_kernel_by_kernel() -> None:
    with tempfile.TemporaryDirectory() as folder:
        FAMILIES["qwen3"](Path(folder))
        host = bench(folder)
        host.engine.capture(capture, rows=4, context=40, within_s=1e9, drafted=DraftedSteps(2, 1))
        known = Sequences(host)
        graphs = host.engine.graphs
        assert graphs is not None
        before = graphs.replayed
        host.engine.forward([known.drafted(number, known.tokens[number], 0, 1) for number in (0, 1, 2)])
        host.engine.forward([known.drafted(0, known.tokens[0], 0, 2)])
        assert graphs.replayed == before
        host.engine.forward([known.drafted(number, known.tokens[number], 0, 1) for number in (0, 1)])
        assert graphs.replayed == before + 1


def claim_replayed_steps_with_drafts_of_recurrent_states_have_the_bits_of_steps_of_a_token() -> None:
    drafted_bits("qwen3_next")


def claim_a_graph_that_computes_other_bits_is_refused() -> None:
    class Off(RecordedRun):
        def replay(self) -> None:
            super().replay()
            self.output.flatten()[0].nextafter_(torch.tensor(1e9))

    with tempfile.TemporaryDirectory() as folder:
        FAMILIES["qwen3"](Path(folder))
        host = bench(folder)
        try:
            captured(host, Off)
        except ConfigError as error:
            assert "other bits" in str(error)  # noqa: PT017 (claims run without pytest)
        else:
            raise AssertionError("nothing noticed")
        assert host.engine.graphs is None


def claim_sizes_go_by_two_in_rows_and_by_four_in_pages() -> None:
    sizes = step_graphs.graph_sizes(6, 20)
    assert sorted({size.rows for size in sizes}) == [1, 2, 4, 6]
    assert sorted({size.pages for size in sizes}) == [5, 20]
    assert sizes[0] == GraphSize(1, 5)
    assert sizes[-1] == GraphSize(6, 20)
    assert len(step_graphs.graph_sizes(1, 1)) == 1
    drafted = step_graphs.graph_sizes(6, 20, DraftedSteps(4, 2))
    assert [size for size in drafted if size.positions == 1] == sizes
    assert {(size.rows, size.positions, size.tokens) for size in drafted if size.positions > 1} == {
        (1, 3, 3),
        (2, 3, 6),
        (4, 3, 12),
    }


if __name__ == "__main__":
    answer(globals())
