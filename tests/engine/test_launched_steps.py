"""Steps launched ahead of the host: what a row continues with is still on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.engine.harness import GREEDY, Bench, MakeCheckpoint, row
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Device
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.batch import DrawnToken, StepHandle, TokenDraw, TokenFromStep
from twinpool.engine.runner.device_rows import TokenHistory
from twinpool.engine.runner.sampling.logits_processors import TokenMask

PROMPTS = [list(range(50, 87)), list(range(10, 13))]
SAMPLED = SamplingParams(max_tokens=1 << 20, temperature=1.2, top_p=0.9, seed=5, logprobs=2, stop_token_ids=(7,))

PENALISED = SamplingParams(
    max_tokens=1 << 20, temperature=0.6, seed=5, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7
)


def ahead(folder: Path, params: SamplingParams, count: int, device: Device) -> list[list[DrawnToken]]:
    """Draws of both prompts, all steps launched before the first is waited for."""
    bench = Bench(folder, tokens=512, device=device)
    pages = [bench.lease(len(prompt) + count) for prompt in PROMPTS]
    rows = [row(p, 0, t, TokenDraw(params, tuple(p), len(p))) for p, t in zip(PROMPTS, pages, strict=True)]
    steps: list[StepHandle] = [bench.engine.launch(rows)]
    histories = [TokenHistory(list(prompt)) for prompt in PROMPTS]
    for n in range(1, count):
        rows = [
            row(TokenFromStep(steps[-1], i), len(p) + n - 1, t, TokenDraw(params, history, len(p), at=len(p) + n))
            for i, (p, t, history) in enumerate(zip(PROMPTS, pages, histories, strict=True))
        ]
        steps.append(bench.engine.launch(rows))
    drawn = [[out.drawn for out in step.outputs()] for step in steps]
    return [[d for d in column if d is not None] for column in zip(*drawn, strict=True)]


def one_by_one(folder: Path, params: SamplingParams, count: int) -> list[list[int]]:
    return Bench(folder, tokens=512).generate_many(PROMPTS, count, params=[params] * len(PROMPTS))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED])
def test_steps_launched_ahead_draw_what_steps_one_by_one_draw(
    checkpoint: MakeCheckpoint, params: SamplingParams
) -> None:
    folder = checkpoint("llama")
    want = one_by_one(folder, params, 8)
    devices: list[Device] = [CpuDevice(), *(AdversarialDevice(seed) for seed in range(6))]
    for device in devices:
        got = ahead(folder, params, 8, device)
        assert [[d.token for d in column] for column in got] == want
        assert all((d.logprob is not None) == (params.logprobs is not None) for column in got for d in column)


def test_a_launched_step_has_not_run_and_is_run_by_who_asks_for_it(checkpoint: MakeCheckpoint) -> None:
    device = AdversarialDevice(1, stray=0.0)
    bench = Bench(checkpoint("llama"), tokens=512, device=device)
    before = bench.region.clone()
    step = bench.engine.launch([row(PROMPTS[0], 0, bench.lease(37), TokenDraw(GREEDY, tuple(PROMPTS[0]), 37))])
    assert device.queued == 2, "the forward pass, and the draw"
    assert bench.region.equal(before)
    (out,) = step.outputs()
    assert out.drawn is not None
    assert step.done
    assert not bench.region.equal(before)


@pytest.mark.parametrize("draw", [None, TokenDraw(GREEDY, (1,), 1)])
def test_what_a_step_raises_is_raised_by_its_outputs(checkpoint: MakeCheckpoint, draw: TokenDraw | None) -> None:
    bench = Bench(checkpoint("llama"), tokens=512, device=AdversarialDevice(1))
    step = bench.engine.launch([row([1 << 20], 0, bench.lease(1), draw)])
    with pytest.raises(IndexError):
        step.outputs()


def test_a_mask_may_be_made_while_the_forward_pass_runs(checkpoint: MakeCheckpoint) -> None:
    """Of each draw by its number, besides what it allows itself; the step after goes on from what was drawn so."""
    folder = checkpoint("llama")
    device = AdversarialDevice(1, stray=0.0)
    bench = Bench(folder, tokens=512, device=device)
    pages = [bench.lease(len(prompt) + 1) for prompt in PROMPTS]
    even = TokenMask.of(range(0, 100, 2))
    middle = row(PROMPTS[1][:1], 0, bench.lease(1))
    rows = [row(p, 0, t, TokenDraw(GREEDY, (), len(p), len(p), even)) for p, t in zip(PROMPTS, pages, strict=True)]
    step = bench.engine.begin([rows[0], middle, rows[1]])
    step.forward.wait()
    assert device.queued == 0
    bench.engine.draw(step, {1: TokenMask.of([33, 36, 39])})
    then = [
        row(TokenFromStep(step, at), len(p), t, TokenDraw(GREEDY, (), len(p), len(p) + 1))
        for at, p, t in zip((0, 2), PROMPTS, pages, strict=True)
    ]
    after = bench.engine.launch(then)
    first, none, last = step.outputs()
    assert first.drawn is not None
    assert last.drawn is not None
    assert none.drawn is None
    assert (first.drawn.token % 2, last.drawn.token) == (0, 36)
    plain = Bench(folder, tokens=512)
    known = [[*PROMPTS[0], first.drawn.token], [*PROMPTS[1], 36]]
    want = plain.generate_many(known, 1, params=[GREEDY] * 2)
    assert [[out.drawn.token] for out in after.outputs() if out.drawn is not None] == want


def test_a_step_that_draws_nothing_has_no_draw(checkpoint: MakeCheckpoint) -> None:
    device = AdversarialDevice(1, stray=0.0)
    bench = Bench(checkpoint("llama"), tokens=512, device=device)
    step = bench.engine.launch([row(PROMPTS[0], 0, bench.lease(37))])
    assert device.queued == 1
    assert [out.drawn for out in step.outputs()] == [None]


@pytest.mark.slow
def test_a_row_with_penalties_has_its_own_history_beside_rows_that_draw_otherwise(checkpoint: MakeCheckpoint) -> None:
    """Greedy rows come first and in between, so no row's place among those that are shaped is its place in the step."""
    folder, count = checkpoint("llama"), 8
    heavy = replace(PENALISED, temperature=0.0, repetition_penalty=2.5, frequency_penalty=2.0)
    params = [GREEDY, PENALISED, GREEDY, SAMPLED, heavy]
    prompts = [list(range(first, first + 9 + 4 * n)) for n, first in enumerate((50, 10, 90, 30, 70))]
    alone = Bench(folder, tokens=512)
    want = [alone.generate_many([p], count, params=[its])[0] for p, its in zip(prompts, params, strict=True)]
    bench = Bench(folder, tokens=512, device=AdversarialDevice(3))
    pages = [bench.lease(len(prompt) + count) for prompt in prompts]
    histories = [TokenHistory(list(prompt)) for prompt in prompts]

    def draw(row: int, at: int) -> TokenDraw:
        return TokenDraw(params[row], histories[row], len(prompts[row]), at=at)

    rows = [row(p, 0, t, TokenDraw(its, tuple(p), len(p))) for p, t, its in zip(prompts, pages, params, strict=True)]
    steps: list[StepHandle] = [bench.engine.launch(rows)]
    for n in range(1, count):
        # The rows change places from step to step, as they do when some wait for their turn.
        order = [(number + n) % len(prompts) for number in range(len(prompts))]
        before = [(number + n - 1) % len(prompts) for number in range(len(prompts))]
        rows = [
            row(
                TokenFromStep(steps[-1], before.index(i)), len(prompts[i]) + n - 1, pages[i],
                draw(i, len(prompts[i]) + n),
            )
            for i in order
        ]  # fmt: skip
        steps.append(bench.engine.launch(rows))
    got: list[list[int]] = [[] for _ in prompts]
    for n, step in enumerate(steps):
        for place, out in enumerate(step.outputs()):
            assert out.drawn is not None
            got[(place + n) % len(prompts)].append(out.drawn.token)
    assert got == want
