"""How prompts share prefill's steps: a short one doesn't wait for a long one, and none is starved. Time is in steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Oracle, make_checkpoint
from tests.support.model_families import FAMILIES
from tests.support.worker_pair import Pair, pair
from tests.support.worker_parts import scheduler_of
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.sampling_params import SamplingParams

CHUNK, PAGE = 128, 16
ONE = SamplingParams(max_tokens=1, temperature=0.0)
FOUR = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("order") / "m", "qwen3", layers=1, eos=None)


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300) for _ in range(count)]


class Steps:
    """The rows of every step that prefill launches: the first position and the count, by request."""

    def __init__(self, both: Pair) -> None:
        self.launched: list[dict[tuple[int, ...], tuple[int, int]]] = []
        worker: Any = both.prefill
        batch = scheduler_of(worker).next_batch

        def noted() -> Any:
            rows = batch()
            if rows:
                self.launched.append({c.request.tokens: (c.row.start, len(c.row.tokens)) for c in rows})
            return rows

        scheduler_of(worker).next_batch = noted

    def of(self, prompt: Sequence[int]) -> list[tuple[int, int, int]]:
        """Number of the step, start and count, for a prompt."""
        key = tuple(prompt)
        return [(n, *rows[key]) for n, rows in enumerate(self.launched) if key in rows]

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Budgets hold, every position is computed once and in order, and chunks end at pages or with the prompt."""
        for rows in self.launched:
            assert sum(count for _, count in rows.values()) <= CHUNK
        for prompt in prompts:
            at = self.of(prompt)[0][1]
            for _, start, count in self.of(prompt):
                assert start == at
                at += count
                assert at % PAGE == 0 or at == len(prompt)
            assert at == len(prompt)


def test_a_short_prompt_is_computed_in_the_step_after_it_comes_whatever_is_under_way(small: Path) -> None:
    oracle = Oracle(small)
    long, short = words(1, 2000), words(2, 31)
    with pair(small, prefill={"chunk_tokens": CHUNK}) as both:
        steps = Steps(both)
        first = both.submit(long, FOUR)
        both.step()
        both.step()
        done = len(steps.launched)
        second = both.submit(short, FOUR)
        answers = both.run(first, second)
        assert [n for n, *_ in steps.of(short)] == [done], "one step, the next one"
        assert len(steps.of(long)) == 2000 // CHUNK + 1, "it has waited for a part of a step"
        steps.check([long, short])
        assert [a.list for a in answers] == [oracle.generate(long, 4), oracle.generate(short, 4)]


def test_a_prompt_of_some_chunks_goes_at_its_share_beside_one_of_many(small: Path) -> None:
    long, middle = words(3, 2000), words(4, 200)
    with pair(small, prefill={"chunk_tokens": CHUNK}) as both:
        steps = Steps(both)
        both.submit(long, ONE)
        both.step()
        both.submit(middle, ONE)
        both.run()
        share = CHUNK // 4
        assert len(steps.of(middle)) == -(-200 // share)
        assert steps.of(middle)[0][0] == 1
        assert all(count == CHUNK - share for n, _, count in steps.of(long)[1:6])
        steps.check([long, middle])


def test_a_long_prompt_keeps_its_part_of_every_step_under_a_flood_of_short_ones(small: Path) -> None:
    """A new short prompt each step, for ever: three quarters of a step are the long one's."""
    long = words(5, 1600)
    with pair(small, tokens=16384, prefill={"chunk_tokens": CHUNK}) as both:
        steps = Steps(both)
        first = both.submit(long, ONE)
        flood: list[list[int]] = []
        for number in range(100):
            flood.append(words(100 + number, 40))
            both.submit(flood[-1], ONE)
            both.step()
            if both.answers[first].done is not None:
                break
        most = -(-1600 // (CHUNK - CHUNK // 4))
        assert len(steps.of(long)) <= most + 1
        assert steps.of(long)[-1][0] <= most + 1
        both.run()
        steps.check([long, *flood])


def test_of_several_long_prompts_the_oldest_is_served_first_and_none_is_starved(small: Path) -> None:
    prompts = [words(10 + n, 600) for n in range(4)]
    with pair(small, prefill={"chunk_tokens": CHUNK}) as both:
        steps = Steps(both)
        both.run(*[both.submit(p, ONE) for p in prompts])
        ends = [steps.of(p)[-1][0] for p in prompts]
        assert ends == sorted(ends)
        assert ends[-1] == -(-4 * 600 // CHUNK) - 1, "no part of a step is lost"
        steps.check(prompts)


def test_a_short_prompt_with_the_beginning_of_a_long_one_waits_for_that_beginning_only(small: Path) -> None:
    """A common system prompt: two pages of it."""
    oracle = Oracle(small)
    system = words(20, 2 * PAGE)
    long, short = system + words(21, 2000), system + words(22, 20)
    with pair(small, prefill={"chunk_tokens": CHUNK}) as both:
        steps = Steps(both)
        first, second = both.submit(long, FOUR), both.submit(short, FOUR)
        answers = both.run(first, second)
        ((step, start, count),) = steps.of(short)
        assert (start, count) == (2 * PAGE, 20), "what they have in common was computed once"
        assert step <= 2
        assert [a.list for a in answers] == [oracle.generate(long, 4), oracle.generate(short, 4)]


def test_who_computes_what_others_wait_for_is_as_urgent_as_they_are(small: Path) -> None:
    """Three long prompts; a short one has its beginning in common with the last."""
    system = words(30, 2 * PAGE)
    longs = [words(31, 1500), words(32, 1400), system + words(33, 1450)]
    with pair(small, prefill={"chunk_tokens": CHUNK}) as both:
        steps = Steps(both)
        for prompt in longs:
            both.submit(prompt, ONE)
        both.step()
        short = system + words(34, 10)
        both.submit(short, ONE)
        both.run()
        assert steps.of(short)[0][0] <= 4
        assert steps.of(short)[0][1] == 2 * PAGE
        steps.check(longs)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "places"), [(8192, 2), (3072, 8)], ids=["places are short", "pages are short"])
def test_a_prompt_that_yields_to_another_tenants_answers_as_if_it_had_not(
    small: Path, tokens: int, places: int
) -> None:
    """Also where decode has granted pages for it, and some were sent."""
    oracle, flood, quiet = Oracle(small), [words(60 + n, 1500) for n in range(3)], words(70, 100)
    sizes = {Role.PREFILL: tokens, Role.DECODE: 8192}
    with pair(small, tokens=sizes, prefill={"chunk_tokens": CHUNK, "max_running": places}) as both:
        steps = Steps(both)
        asked = [both.submit(prompt, FOUR, tenant="flood") for prompt in flood]
        both.step()
        both.step()
        last = both.submit(quiet, FOUR, tenant="quiet")
        answers = both.run(last, *asked)
        assert steps.of(quiet)[-1][0] < steps.of(flood[0])[-1][0]
        assert both.prefill.status().counters["preemptions"] >= 1
        for prompt, answer in zip([quiet, *flood], answers, strict=True):
            assert answer.list == oracle.generate(prompt, 4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "falcon_h1"])
def test_windows_and_states_are_right_where_prompts_share_steps(family: str, tmp_path: Path) -> None:
    folder = FAMILIES[family](tmp_path / "m")
    oracle = Oracle(folder)
    system = words(40, 3 * PAGE)
    prompts = [words(41, 500), system + words(42, 300), system + words(43, 21), words(44, 30), words(45, 90)]
    with pair(folder, tokens=4096, prefill={"chunk_tokens": CHUNK}) as both:
        asked: list[RequestId] = []
        for prompt in prompts:
            asked.append(both.submit(prompt, FOUR))
            both.step()
        for prompt, answer in zip(prompts, both.run(*asked), strict=True):
            assert oracle.surely_says(prompt, answer.list) or answer.list == oracle.generate(prompt, 4)
        assert answer.progress[Role.PREFILL].computed_tokens == 90


@pytest.mark.parametrize("page_tokens", [64, 128])
def test_pages_larger_than_half_a_step_change_nothing_but_the_order(small: Path, page_tokens: int) -> None:
    """Less than a page is computed where the whole budget is no more."""
    prompts = [words(50, 300), words(51, 20), words(52, 130)]
    oracle = Oracle(small)
    with pair(small, prefill={"chunk_tokens": 48}, cache={"page_tokens": page_tokens}) as both:
        answers = both.run(*[both.submit(p, FOUR) for p in prompts])
        assert [a.list for a in answers] == [oracle.generate(p, 4) for p in prompts]


def test_a_prompt_that_could_not_be_begun_before_its_first_token_was_due_is_not_computed(small: Path) -> None:
    """Who was begun is finished, however late; who has no such time is patient."""
    oracle, clock = Oracle(small), ManualClock()
    first, late, patient = words(21, 900), words(22, 1200), words(23, 1200)
    with pair(small, prefill={"chunk_tokens": CHUNK}, clock=clock) as both:
        steps = Steps(both)
        begun = both.submit(first, FOUR, first_token_s=5.0)
        both.step()
        waits = both.submit(late, FOUR, first_token_s=5.0)
        goes = both.submit(patient, FOUR)
        both.step()
        clock.advance(4.9)
        both.step()
        assert both.answers[waits].done is None
        clock.advance(0.2)
        answers = both.run(begun, waits, goes)
        assert [answer.done is not None and answer.done.error for answer in answers] == [None, ErrorKind.LATE, None]
        assert "within 5 s" in ((answers[1].done and answers[1].done.message) or "")
        assert steps.of(late) == []
        for prompt, answer in ((first, answers[0]), (patient, answers[2])):
            assert answer.list == oracle.generate(prompt, 4)


def test_an_idle_worker_wakes_for_a_prompt_that_must_be_begun(small: Path) -> None:
    """Nothing else would: prefill has no room for it before another one's room is done with, which takes long."""
    clock = ManualClock()
    with pair(small, clock=clock, prefill={"max_running": 1}) as both:
        prefill: Any = both.prefill
        waits = both.submit(words(31, 20), FOUR, legs=(Role.PREFILL,), first_token_s=5.0)
        scheduler_of(prefill).admit = lambda: None
        prefill.step()
        slept: list[float] = []
        prefill.setup.waiter.wait = slept.append
        prefill.wait(100.0)
        assert slept == [5.0]
        clock.advance(5.0)
        both.step()
        done = both.answers[waits].done
        assert done is not None
        assert done.error is ErrorKind.LATE


def test_steps_of_one_tenant_are_kept_short_by_their_measured_time_once_another_has_come(small: Path) -> None:
    """A token takes 0.4 ms here, so 10 ms are 25 tokens: a page, as chunks end at pages."""
    clock = ManualClock()
    flood, quiet = words(40, 1500), words(41, 31)
    with pair(small, clock=clock, prefill={"chunk_tokens": CHUNK, "shared_step_s": 0.01}) as both:
        steps = Steps(both)
        worker: Any = both.prefill
        batch = scheduler_of(worker).next_batch

        def timed() -> Any:
            rows = batch()
            clock.advance(sum(len(chunk.row.tokens) for chunk in rows) * 4e-4)
            return rows

        scheduler_of(worker).next_batch = timed
        both.submit(flood, ONE, tenant="flood")
        for _ in range(6):
            both.step()
        both.submit(quiet, ONE, tenant="quiet")
        both.run()
        steps.check([flood, quiet])
        (own,) = steps.of(quiet)
        counts = [(n, count) for n, _, count in steps.of(flood)]
        assert {count for n, count in counts if n < own[0]} == {CHUNK}
        assert {count for n, count in counts[:-1] if n > own[0]} == {PAGE}
        assert own[0] not in dict(counts), "its own step has nothing else in it"
        assert both.prefill.status().counters["steps_kept_short"] == len(counts) - 6 + 1
