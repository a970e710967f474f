"""Rows with drafts: whatever is drafted, the tokens that count are those of a row a token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engine.harness import GREEDY, Bench, Held, MakeCheckpoint
from tests.support.family_transformers import MAKERS
from tests.support.model_families import FAMILIES
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Device
from twinpool.cache.memory.kv_cache_spec import PoolKind
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.batch import BatchRow, DrawnToken, RowOutput, TokenDraw
from twinpool.engine.runner.device_rows import TokenHistory
from twinpool.engine.runner.launched_step import accepted_draws
from twinpool.engine.runner.sampling.logits_processors import TokenMask

PROMPTS = [list(range(50, 87)), list(range(10, 13)), [5, 6, 7, 5, 6, 7, 5]]
SAMPLED = SamplingParams(
    max_tokens=1 << 20, temperature=1.2, top_p=0.9, seed=5, logprobs=2, stop_token_ids=(7,), min_tokens=20
)
PENALISED = SamplingParams(
    max_tokens=1 << 20, temperature=0.6, seed=5, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7
)
COUNT = 24


class Drafted:
    """One sequence whose steps carry drafts, of which some are what will be drawn and some aren't."""

    def __init__(self, bench: Bench, prompt: Sequence[int], params: SamplingParams, want: Sequence[int]) -> None:
        self.bench, self.prompt, self.params = bench, list(prompt), params
        self.want = want
        self.tokens = list(prompt)
        self.logprobs: list[object] = []
        self.held: Held = bench.hold(len(prompt) + COUNT + 8)
        self.history = TokenHistory(self.tokens)

    def first(self) -> BatchRow:
        """The whole prompt."""
        draw = TokenDraw(self.params, tuple(self.prompt), len(self.prompt))
        return self.bench.row(self.prompt, 0, self.held, draw)

    def next(self, right: int, wrong: int, *, known: bool) -> BatchRow:
        """A row with so many drafts; `known`: its draws read the host's tokens instead of the device's."""
        done, room = len(self.tokens) - len(self.prompt), self.room()
        right, wrong = min(right, room), min(wrong, max(0, room - right))
        drafts = [*self.want[done : done + right], *((token + 1) % 100 for token in self.want[done + right :][:wrong])]
        start, tokens = len(self.tokens) - 1, [self.tokens[-1], *drafts]
        history = [*self.tokens, *drafts] if known else self.history
        draw = TokenDraw(self.params, history, len(self.prompt), start + len(tokens))
        return self.bench.row(tokens, start, self.held, draw, drafted=len(drafts))

    def room(self) -> int:
        """How many drafts a row may have now: of a recurrent state, a block of 16 positions becomes one matrix."""
        recurrent = any(pool.kind is PoolKind.STATE for pool in self.bench.pools.spec.pools)
        return max(0, 14 - (len(self.tokens) - 1) % 16) if recurrent else COUNT

    def take(self, output: RowOutput) -> int:
        assert output.drawn is not None
        assert not output.nonfinite
        for drawn in (*output.accepted, output.drawn):
            self.tokens.append(drawn.token)
            self.logprobs.append(drawn.logprob)
        return len(output.accepted)


def answers(bench: Bench, params: SamplingParams) -> list[Drafted]:
    """The answers to all prompts, a row a token."""
    plain = [Drafted(bench, prompt, params, ()) for prompt in PROMPTS]
    for one, out in zip(plain, bench.engine.forward([one.first() for one in plain]), strict=True):
        one.take(out)
    for _ in range(COUNT):
        rows = [one.next(0, 0, known=True) for one in plain]
        for one, out in zip(plain, bench.engine.forward(rows), strict=True):
            one.take(out)
    return plain


def with_drafts(bench: Bench, params: SamplingParams, plain: Sequence[Drafted], rng: random.Random) -> list[Drafted]:
    """The same with drafts drawn at random; in some steps only some sequences take part."""
    want = [one.tokens[len(one.prompt) :] for one in plain]
    drafted = [Drafted(bench, one.prompt, params, answer) for one, answer in zip(plain, want, strict=True)]
    for one, out in zip(drafted, bench.engine.forward([one.first() for one in drafted]), strict=True):
        one.take(out)
    known = rng.random() < 0.5
    while going_on := [one for one in drafted if len(one.tokens) - len(one.prompt) <= COUNT]:
        some = rng.sample(going_on, rng.randint(1, len(going_on)))
        shapes = [(rng.randrange(4), rng.randrange(3)) for _ in some]
        rows = [one.next(*shape, known=known) for one, shape in zip(some, shapes, strict=True)]
        for one, out, (right, _), row in zip(some, bench.engine.forward(rows), shapes, rows, strict=True):
            assert one.take(out) == min(right, row.drafted), "those that are right are taken, and none behind them"
    return drafted


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_drafts_change_no_token_and_no_log_probability(checkpoint: MakeCheckpoint, params: SamplingParams) -> None:
    folder = checkpoint("llama")
    plain = answers(Bench(folder, tokens=512), params)
    devices: list[Device] = [CpuDevice(), *(AdversarialDevice(seed) for seed in range(3))]
    for seed, device in enumerate(devices):
        drafted = with_drafts(Bench(folder, tokens=512, device=device), params, plain, random.Random(seed))
        for one, known in zip(drafted, plain, strict=True):
            assert one.tokens[: len(known.tokens)] == known.tokens
            assert one.logprobs[: len(known.logprobs)] == known.logprobs
            assert (params.logprobs is None) == (known.logprobs[0] is None)


@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_change_no_token_of_any_family(name: str, tmp_path: Path) -> None:
    folder = FAMILIES[name](tmp_path / name)
    plain = answers(Bench(folder, tokens=512), GREEDY)
    drafted = with_drafts(Bench(folder, tokens=512), GREEDY, plain, random.Random(1))
    for one, known in zip(drafted, plain, strict=True):
        assert one.tokens[: len(known.tokens)] == known.tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stablelm", "granite_swa"])
def test_drafts_change_no_token_of_a_module(name: str, tmp_path: Path) -> None:
    folder = MAKERS[name](tmp_path / name)
    plain = answers(Bench(folder, tokens=512, models="transformers"), GREEDY)
    bench = Bench(folder, tokens=512, models="transformers")
    for one, known in zip(with_drafts(bench, GREEDY, plain, random.Random(1)), plain, strict=True):
        assert one.tokens[: len(known.tokens)] == known.tokens


def test_each_draw_of_a_row_has_a_mask_of_its_own(checkpoint: MakeCheckpoint) -> None:
    """As a grammar's, which follows from the drafts before it."""
    bench = Bench(checkpoint("llama"), tokens=512)
    one = Drafted(bench, PROMPTS[0], GREEDY, [0, 33, 34, 36])
    one.take(bench.engine.forward([one.first()])[0])
    step = bench.engine.begin([bench.row([1], 0, bench.hold(1)), one.next(3, 0, known=True)])
    assert step.drawing == [1, 1, 1, 1]
    bench.engine.draw(step, {number: TokenMask.of([token]) for number, token in enumerate((33, 34, 35, 1))})
    none, output = step.outputs()
    assert none == RowOutput()
    assert ([drawn.token for drawn in output.accepted], output.drawn) == ([33, 34], DrawnToken(35, None))


def drafted_row(*drafts: int) -> BatchRow:
    return BatchRow([9, *drafts], 4, {}, TokenDraw(GREEDY, (), 2, 5 + len(drafts)), drafted=len(drafts))


@pytest.mark.parametrize(
    ("drafts", "drawn", "accepted", "last"),
    [
        ((), (3,), (), 3),
        ((3, 4), (3, 4, 5), (3, 4), 5),
        ((3, 4), (3, 6, 5), (3,), 6),
        ((3, 4), (6, 4, 5), (), 6),
        ((3, 4), (None, 4, 5), (), None),
        ((3, 4), (3, None, 5), (3,), None),
        ((3, 4), (6, None, None), (), 6),
    ],
)
def test_a_draw_counts_where_all_drafts_before_it_were_drawn(
    drafts: tuple[int, ...], drawn: tuple[int | None, ...], accepted: tuple[int, ...], last: int | None
) -> None:
    """A draw that is no token is of no account behind a draft that was rejected, and the row's end before one."""
    output = accepted_draws(drafted_row(*drafts), [DrawnToken(t, None) if t is not None else None for t in drawn])
    assert tuple(d.token for d in output.accepted) == accepted
    assert output.drawn == (DrawnToken(last, None) if last is not None else None)
    assert output.nonfinite == (last is None)


def test_a_row_draws_behind_each_of_its_last_tokens() -> None:
    row = BatchRow([9, 3, 4], 4, {}, TokenDraw(GREEDY, [1, 2, 0, 0, 9, 3, 4], 2), drafted=2)
    assert [(draw.position, list(draw.tokens)) for draw in row.draws if not isinstance(draw.tokens, TokenHistory)] == [
        (5, [1, 2, 0, 0, 9]),
        (6, [1, 2, 0, 0, 9, 3]),
        (7, [1, 2, 0, 0, 9, 3, 4]),
    ]
    assert BatchRow([9, 3, 4], 4, {}).draws == []
