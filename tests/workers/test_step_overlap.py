"""Both workers on lazy devices: steps run late, one ahead of the host, and every answer is what it would have been."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.pool_sets import free_list
from tests.support.worker_pair import Answer, Pair, pair, turns
from tests.support.worker_parts import manager_of, scheduler_of, steps_of, table_of
from twinpool.cache.allocation import Allocation
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.contracts.ids import PAIR, Role
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.request import DecodePhase, DecodeRequest
from twinpool.decode.worker import DecodeWorker
from twinpool.prefill.worker import PrefillWorker

SEEDS = range(8)
SECTIONS: dict[str, Any] = {"prefill": {"chunk_tokens": 48}, "decode": {"max_batch_tokens": 5}}


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
def adversarial_pair(model: Path, seed: int, **options: Any) -> Iterator[tuple[Pair, dict[Role, AdversarialDevice]]]:
    """A pair on devices of its own, whose every operation has run, and was ordered, at the end."""
    devices = {role: AdversarialDevice(seed * 2 + i) for i, role in enumerate(PAIR)}
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
    with adversarial_pair(model, seed, tokens=1024) as (both, _):
        answers = both.run(*[both.submit(prompt, params) for prompt, params in asks()])
        assert [outcome(answer) for answer in answers] == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_requests_that_are_cancelled_at_any_point_disturb_nobody(
    model: Path, undisturbed: list[tuple[object, ...]], seed: int
) -> None:
    rng = random.Random(seed)
    with adversarial_pair(model, seed, tokens=560) as (both, _):
        for _ in range(2):
            kept = [both.submit(prompt, params) for prompt, params in asks()]
            gone = [both.submit(p, SamplingParams(max_tokens=30, temperature=0.0)) for p in prompts(seed, 60, 90, 20)]
            for request in gone:
                for _ in range(rng.randrange(25)):
                    both.step()
                both.cancel(request)
            assert [outcome(answer) for answer in both.run(*kept)] == undisturbed
            for worker in (both.prefill, both.decode):
                assert worker.check().violations == ()


@contextmanager
def lagging_pair(model: Path, **options: Any) -> Iterator[tuple[Pair, PrefillWorker, DecodeWorker]]:
    """Devices that run nothing before somebody waits for it, but that prefill's sends are polled for."""
    devices = {role: AdversarialDevice(1, stray=0.0, polled=0.0 if role is Role.DECODE else 0.1) for role in PAIR}
    sections = {**SECTIONS, **options}
    # Nobody waits for a check of what arrived, so none would ever end here.
    sections["cache"] = {**sections.get("cache", {}), "verify": False}
    with pair(model, devices=devices, **sections) as both:
        yield both, both.prefill, both.decode
    for device in devices.values():
        device.settle()


def running(both: Pair, decode: DecodeWorker, params: SamplingParams, length: int = 20) -> DecodeRequest:
    """A request that decode has a step under way for."""
    both.submit(prompts(7, length)[0], params)
    for _ in turns(1000):
        both.step()
        if scheduler_of(decode).running and scheduler_of(decode).running[0].under_way:
            return scheduler_of(decode).running[0]
    raise AssertionError("no step was ever under way")


def test_decode_launches_a_step_before_it_has_committed_the_last(model: Path) -> None:
    with lagging_pair(model) as (both, _, decode):
        request = running(both, decode, SamplingParams(max_tokens=6, temperature=0.0))
        ahead = []
        while request.phase is DecodePhase.RUNNING:
            ahead.append((request.planned, request.launched, request.committed))
            assert decode.check().violations == ()
            both.step(Role.DECODE)
        # Five tokens after the first; each round but the last ends with a step under way.
        assert ahead == [(20 + n, 20 + n, 19 + n) for n in range(1, 6)]
        assert len(steps_of(decode)) == 0, "it was known to end there"


def test_a_draw_that_looks_back_is_launched_before_the_token_before_it_is_known(model: Path) -> None:
    """What penalties count is read on the device: the steps are those of a request without them."""
    with lagging_pair(model) as (both, _, decode):
        params = SamplingParams(max_tokens=6, temperature=0.0, presence_penalty=0.5, repetition_penalty=1.2)
        request = running(both, decode, params)
        ahead = []
        while request.phase is DecodePhase.RUNNING:
            ahead.append(request.under_way)
            both.step(Role.DECODE)
        assert ahead == [1] * 5


def named(allocation: Allocation | None) -> set[int]:
    assert allocation is not None
    return set(allocation.named()["full"])


def held_until_complete(both: Pair, worker: PrefillWorker | DecodeWorker, pages: set[int]) -> None:
    """Nobody gets `pages`, also not by eviction, before the step under way is complete; then all can be had."""
    pool = manager_of(worker).pools.allocators["full"]
    manager_of(worker).supply.evict("full", pool.total)
    assert not pages & set(free_list(pool))
    assert pool.quarantined >= len(pages) > 0
    assert len(steps_of(worker)) > 0
    for _ in range(2):
        both.step(worker.role)
    manager_of(worker).supply.evict("full", pool.total)
    assert (pool.quarantined, pool.free) == (0, pool.total)


def test_a11_pages_of_a_request_cancelled_under_way_are_held_until_its_step_is_complete(model: Path) -> None:
    with lagging_pair(model) as (both, _, decode):
        request = running(both, decode, SamplingParams(max_tokens=9, temperature=0.0))
        pages = named(request.allocation)
        both.cancel(request.submit.request_id)
        assert not decode.drained
        held_until_complete(both, decode, pages)


def test_a11_pages_of_a_request_that_drew_a_stop_token_are_held_for_the_step_launched_ahead(model: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0)
    with pair(model) as both:
        (answer,) = both.run(both.submit(prompts(7, 20)[0], params))
    stop = next(n for n, token in enumerate(answer.list) if n >= 3 and token not in answer.list[:n])
    with lagging_pair(model) as (both, _, decode):
        request = running(both, decode, replace(params, stop_token_ids=(answer.list[stop],)))
        pages = named(request.allocation)
        while request.phase is DecodePhase.RUNNING:
            both.step(Role.DECODE)
        assert next(iter(both.answers.values())).list == answer.list[: stop + 1]
        held_until_complete(both, decode, pages)


def test_a11_prefill_holds_what_a_cancelled_chunk_reads_and_writes(model: Path) -> None:
    with lagging_pair(model) as (both, prefill, _):
        (prompt,) = prompts(8, 200)
        greedy = SamplingParams(max_tokens=3, temperature=0.0)
        both.run(both.submit(prompt[:64], greedy))
        request = both.submit(prompt, greedy)
        while not any(r.launched > r.committed for r in table_of(prefill)):
            both.step()
        (mine,) = list(table_of(prefill))
        assert mine.allocation is not None
        assert mine.allocation.depth > 0, "part of it is the tree's"
        pages = named(mine.allocation)
        both.cancel(request)
        held_until_complete(both, prefill, pages)


def test_what_a_preempted_request_had_under_way_is_dropped(model: Path, undisturbed: list[tuple[object, ...]]) -> None:
    with lagging_pair(model, tokens=1024) as (both, prefill, _):
        prompt, params = asks()[3]
        request = both.submit(prompt, params, legs=(Role.PREFILL,))
        while not any(r.launched > r.committed for r in table_of(prefill)):
            both.step()
        assert scheduler_of(prefill).preempt_youngest()
        for _ in range(50):
            both.step(Role.PREFILL)
        answer = both.answers[request]
        assert answer.list == undisturbed[3][0][:1]  # type: ignore[index]
        assert answer.progress[Role.PREFILL].computed_tokens == len(prompt), "the chunk under way counts for nothing"
        assert prefill.status().counters["stale_pages"] == 0
        both.cancel(request)
