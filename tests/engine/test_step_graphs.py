"""Step graphs over runs that are recorded, not captured: which graph replays which step, and what comes of it.

A recorded run is launched again by each replay, into memory that all runs share, as a captured one is on a GPU. The
model is a stand-in whose result of each row follows from all that the row's inputs are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from tests.engine.harness import Bench
from tests.engine.test_graph_inputs import ATTENTION, CPU, PAGE_TOKENS, PAGES, SPEC, step
from tests.support.checkpoints import VOCAB
from tests.support.model_families import FAMILIES
from tests.support.seeing_models import pattern, write_mistral3
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.messages.router_commands import Picture
from twinpool.contracts.sampling_params import ChosenExperts, SamplingParams
from twinpool.engine.attention.attention_plan import BackendPlan
from twinpool.engine.layers.decoder import Decoder, ForwardContext
from twinpool.engine.layers.picture_encoder import PlacedRows
from twinpool.engine.runner.batch import DrawnToken, TokenDraw
from twinpool.engine.runner.graphs.graph_inputs import GraphSize
from twinpool.engine.runner.graphs.step_graphs import StepGraphs
from twinpool.engine.tensors.row_exact_linear import FAST, Numerics

EXACT = Numerics(quantum=1)
ROWS = 4


class Model:
    """Implements what step graphs ask of a `Decoder`. What it makes of a plan it makes once and keeps there, as
    attention does, and all its results lie in the same memory."""

    def __init__(self) -> None:
        self.embed_vh = torch.zeros(1000, 1)
        self._out = torch.zeros(ROWS, 1, dtype=torch.float64)

    def forward(self, tokens_m: Tensor, ctx: ForwardContext) -> Tensor:
        assert not ctx.scratch
        ctx.scratch["a layer's"] = tokens_m
        result = tokens_m[: ctx.count].double() + ctx.positions_m[: ctx.count] / 1000
        plans: list[BackendPlan] = [*ctx.plans.values(), *ctx.slots.values()]
        for number, plan in enumerate(plans, start=2):
            result += plan.scratch.setdefault("made", plan.tables_bp[: ctx.count, 0].double()) / 1000.0**number
        out = self._out[: ctx.count]
        return out.copy_(result.unsqueeze(1))


class Recorded:
    """A `CapturedRun`: `spoils` makes of its result what a graph would that isn't like its step."""

    def __init__(self, run: Callable[[], Tensor], spoils: Callable[[Tensor], Tensor]) -> None:
        self._run, self._spoils, self.replays = run, spoils, 0
        self.output = run()

    def replay(self) -> None:
        self.replays += 1
        self.output.copy_(self._spoils(self._run()))


class Graphs:
    def __init__(self, numerics: Numerics = EXACT, spoils: Callable[[Tensor], Tensor] = lambda out: out) -> None:
        self.runs: list[Recorded] = []
        self._spoils = spoils
        longest = PAGES * PAGE_TOKENS
        decoder = cast(Decoder, Model())
        self.graphs = StepGraphs(decoder, numerics, ATTENTION, SPEC, {}, CPU, rows=ROWS, context=longest)

    def capture(self, within_s: float = 100.0, each_s: float = 0.0) -> list[int]:
        """Capture graphs, each of which takes so long; returns the rows of those that there are."""
        now = 0.0

        def record(run: Callable[[], Tensor]) -> Recorded:
            nonlocal now
            now += each_s
            self.runs.append(Recorded(run, self._spoils))
            return self.runs[-1]

        self.graphs.capture(record, within_s, lambda: now)
        assert len(self.graphs) == len(self.runs)
        return [len(run.output) for run in self.runs]

    def replay(self, *requests: int) -> tuple[Tensor | None, list[int]]:
        """What a replay gives for a step of these requests, and the rows of the graphs that ran for it."""
        before = [run.replays for run in self.runs]
        out = self.graphs.replay(*step(*requests))
        ran = [len(run.output) for run, count in zip(self.runs, before, strict=True) if run.replays > count]
        return None if out is None else out[: len(requests)].clone(), ran


def computed(*requests: int) -> Tensor:
    return Model().forward(*step(*requests)).clone()


def test_a_step_is_replayed_by_the_smallest_graph_that_it_fits_with_what_it_computes_itself() -> None:
    graphs = Graphs()
    assert graphs.graphs.sizes == [GraphSize(rows, PAGES) for rows in (1, 2, 4)]
    assert graphs.capture() == [4, 2, 1], "the largest first: the others use its memory again"
    for count, (requests, rows) in enumerate(
        [((1,), 1), ((7, 3), 2), ((1, 2, 3), 4), ((4, 3, 2, 1), 4), ((5,), 1), ((6, 9), 2), ((2, 8, 1), 4)], start=1
    ):
        out, ran = graphs.replay(*requests)
        assert out is not None
        assert torch.equal(out, computed(*requests)), requests
        assert ran == [rows]
        assert graphs.graphs.replayed == count
    assert graphs.replay(1, 2, 3, 4, 5) == (None, []), "no graph is as large"
    assert graphs.graphs.replayed == 7


@pytest.mark.parametrize(("within_s", "there"), [(0.0, [4]), (1.0, [4]), (1.1, [4, 2]), (100.0, [4, 2, 1])])
def test_what_there_was_no_time_to_capture_is_replayed_by_larger_graphs(within_s: float, there: list[int]) -> None:
    """One there is always."""
    graphs = Graphs()
    assert graphs.capture(within_s, each_s=1.0) == there
    for requests in ((3,), (1, 2)):
        try:
            out, ran = graphs.replay(*requests)
        except KeyError as error:
            pytest.fail(f"a graph was chosen that was never captured: {error}")
        assert out is not None
        assert torch.equal(out, computed(*requests))
        assert ran == [min(rows for rows in there if rows >= len(requests))]


def test_a_graph_that_computes_other_bits_than_its_step_is_refused_where_rows_are_exact() -> None:
    """Its result lies where that of the step has lain."""

    def spoils(out: Tensor) -> Tensor:
        return out * (1 + 2.0**-50)

    with pytest.raises(ConfigError, match="a captured step of 4 tokens and 3 pages computes other bits"):
        Graphs(EXACT, spoils).capture()
    assert Graphs(FAST, spoils).capture() == [4, 2, 1]


class Blind:
    """What replays of captured steps come to: the whole model, and of a step what its graph has inputs for."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self.replayed = decoder, 0

    def replay(self, tokens_m: Tensor, ctx: ForwardContext) -> Tensor:
        self.replayed += 1
        return self._decoder.forward(tokens_m, replace(ctx, pictured=None, adapters=None))


@pytest.mark.slow
def test_a_chunk_of_one_token_inside_a_picture_is_not_replayed(tmp_path: Path) -> None:
    """It has the shape of a decode step."""
    folder = write_mistral3(tmp_path / "mistral3")
    picture = Picture(VOCAB, 24, 24, 9, pattern(24, 24).tobytes())

    def computed(replayed: int | None) -> list[DrawnToken]:
        """What is drawn after a text's token, and after one of the picture's."""
        host = Bench(folder, page_tokens=4, tokens=64)
        graphs = Blind(host.engine.decoder)
        if replayed is not None:
            host.engine.graphs = cast(StepGraphs, graphs)
        held, found = host.hold(8), list[DrawnToken]()
        for at, parts in enumerate([(), (PlacedRows(picture, b"one", 1, [0]),)]):
            draw = TokenDraw(SamplingParams(max_tokens=8, temperature=0.0, logprobs=3), (), 2, at + 1)
            (out,) = host.engine.forward([host.row([3 if at == 0 else VOCAB], at, held, draw, pictures=parts)])
            assert out.drawn is not None
            found.append(out.drawn)
        assert graphs.replayed == (replayed or 0)
        return found

    assert computed(replayed=1) == computed(replayed=None)


@pytest.mark.slow
def test_a_step_that_tells_its_experts_is_not_replayed(tmp_path: Path) -> None:
    """A graph has kept those of the step that was captured."""
    host = Bench(FAMILIES["qwen3_moe"](tmp_path / "model", published=True), page_tokens=4, tokens=64)
    graphs = Blind(host.engine.decoder)
    found: list[list[ChosenExperts]] = []
    for replayed in (False, True):
        host.engine.graphs = cast(StepGraphs, graphs) if replayed else None
        held, told = host.hold(8), list[ChosenExperts]()
        for at, token in enumerate((3, 90, 4)):
            draw = TokenDraw(SamplingParams(max_tokens=8, temperature=0.0, logprobs=0), (), 2, at + 1)
            (out,) = host.engine.forward([host.row([token], at, held, draw, routed=at < 2)])
            assert out.drawn is not None
            assert out.drawn.logprob is not None
            assert (out.drawn.logprob.experts is None) == (at == 2), "who asks is told"
            told += [out.drawn.logprob.experts] if out.drawn.logprob.experts is not None else []
        found.append(told)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
    assert graphs.replayed == 1, "of the step that nobody asked"
