"""Steps launched ahead of the host: what a row continues with is still on the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache.device.adversarial_device import AdversarialDevice
from cache.device.device_backends import CpuDevice
from cache.device.device_port import Device
from contracts.sampling_params import SamplingParams
from engine.runner.batch import DrawnToken, StepHandle, TokenDraw, TokenFromStep
from engine.runner.sampling.token_history import TokenHistory
from engine.runner.sampling.token_mask import TokenMask
from tests.engine.harness import GREEDY, Bench, MakeCheckpoint, row

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
