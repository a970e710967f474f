"""Both workers on lazy devices: steps run late, one ahead of the host, and every answer is what it would have been."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cache.lazy import LazyDevice
from contracts.ids import Role
from contracts.sampling import SamplingParams
from decode.worker import DecodeWorker
from prefill.worker import PrefillWorker
from tests.pair import Answer, Pair, pair

SEEDS = range(8)
SECTIONS: dict[str, dict[str, Any]] = {"prefill": {"chunk_tokens": 48}, "decode": {"max_batch_tokens": 5}}


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(n)] for n in lengths]


def asks() -> list[tuple[list[int], SamplingParams]]:
    """Requests of every kind that matters to a loop ahead of its device."""
    shared, *others = prompts(1, 40, 3, 17, 70, 33, 100, 5)
    greedy = SamplingParams(max_tokens=9, temperature=0.0)
    kinds = [
        greedy,
        SamplingParams(max_tokens=12, temperature=1.1, seed=3, logprobs=2),
        SamplingParams(max_tokens=10, temperature=0.9, seed=4, repetition_penalty=1.3, frequency_penalty=0.4),
        SamplingParams(max_tokens=14, temperature=1.5, seed=5, stop_token_ids=tuple(range(0, 300, 7)), min_tokens=2),
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1),
    ]
    return [(shared + tail, params) for tail, params in zip(others, kinds, strict=True)] + [
        (shared + others[2], greedy)
    ]


@contextmanager
def lazy_pair(model: Path, seed: int, **options: Any) -> Iterator[tuple[Pair, dict[Role, LazyDevice]]]:
    """A pair on devices of its own, whose every operation has run, and was ordered, at the end."""
    devices = {role: LazyDevice(seed * 2 + i) for i, role in enumerate(Role)}
    with pair(model, devices=devices, **{**SECTIONS, **options}) as both:
        yield both, devices
    for device in devices.values():
        device.settle()


def outcome(answer: Answer) -> tuple[object, ...]:
    assert answer.done is not None
    return answer.list, answer.logprobs, answer.scores, answer.done.reason, answer.done.stop_token


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[tuple[object, ...]]:
    """The same requests on the plain device, one after the other."""
    with pair(model, **SECTIONS) as both:
        return [outcome(both.run(both.submit(prompt, params))[0]) for prompt, params in asks()]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_answers_do_not_depend_on_when_the_device_runs(
    model: Path, undisturbed: list[tuple[object, ...]], seed: int
) -> None:
    with lazy_pair(model, seed, tokens=1024) as (both, _):
        answers = both.run(*[both.submit(prompt, params) for prompt, params in asks()])
        assert [outcome(answer) for answer in answers] == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_requests_that_are_cancelled_at_any_point_disturb_nobody(
    model: Path, undisturbed: list[tuple[object, ...]], seed: int
) -> None:
    rng = random.Random(seed)
    with lazy_pair(model, seed, tokens=560) as (both, _):
        quarantined = 0
        for _ in range(2):
            kept = [both.submit(prompt, params) for prompt, params in asks()]
            gone = [both.submit(p, SamplingParams(max_tokens=30, temperature=0.0)) for p in prompts(seed, 60, 90, 20)]
            for request in gone:
                for _ in range(rng.randrange(25)):
                    both.step()
                both.cancel(request)
                for worker in (both.prefill, both.decode):
                    assert isinstance(worker, PrefillWorker | DecodeWorker)
                    quarantined += worker._pages.quarantined
            assert [outcome(answer) for answer in both.run(*kept)] == undisturbed
            for worker in (both.prefill, both.decode):
                assert worker.check().violations == ()
    seen.append(quarantined)


seen: list[int] = []


@pytest.mark.slow
def test_a11_pages_of_the_cancelled_were_held_for_a_step_under_way() -> None:
    """The control for the test above: it met the case."""
    assert not seen or sum(seen) > 0
