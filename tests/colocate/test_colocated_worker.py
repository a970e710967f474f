"""A colocated worker stepped by hand. The `colocated` context checks it for leaks at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Oracle
from tests.support.colocated_worker import Colocated, colocated
from tests.support.worker_pair import SESSION, Answer, pair
from tests.support.worker_parts import manager_of, table_of
from tests.workers.test_pair import expect_equal, greedy, prompts
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Completion, DeviceOp, LayerMarks
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.router_commands import Audit
from twinpool.contracts.messages.worker_events import Audited, AuditEnd, LegReport, Tokens
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.request import DecodePhase, DecodeRequest
from twinpool.engine.runner.batch import BatchRow, TokenFromStep
from twinpool.engine.runner.launched_step import LaunchedStep

PAGE = 16


def only(both: Colocated, request: RequestId) -> DecodeRequest:
    return next(r for r in table_of(both.worker) if r.submit.request_id == request)


def until(both: Colocated, what: Callable[[], bool], rounds: int = 2000) -> None:
    for _ in range(rounds):
        if what():
            return
        both.step()
    raise AssertionError("it never came to that")


@pytest.mark.slow
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_greedy_answers_are_the_oracles(model: Path, oracle: Oracle, page_tokens: int) -> None:
    sections: dict[str, Any] = {"cache": {"page_tokens": page_tokens}, "prefill": {"chunk_tokens": 96}}
    with colocated(model, tokens=4096, **sections) as both:
        asked = prompts(1, 1, 2, 15, 16, 17, 64, 65, 96, 97, 400)
        answers = both.run(*[both.submit(p, greedy(12)) for p in asked])
        for prompt, answer in zip(asked, answers, strict=True):
            expect_equal(oracle, prompt, answer)
            assert answer.progress[Role.PREFILL].computed_tokens == len(prompt)
            assert answer.progress[Role.DECODE].transfer_bytes == 0
        assert both.worker.status().counters["mixed_steps"] > 0


SAMPLINGS = {
    "sampled": SamplingParams(max_tokens=12, temperature=0.9, seed=5, choice=2),
    "cut": SamplingParams(max_tokens=12, temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, seed=6, logprobs=3),
    "penalties": SamplingParams(
        max_tokens=12, temperature=0.8, seed=7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4
    ),
    "bias": SamplingParams(max_tokens=12, temperature=0.8, seed=8, logit_bias=((5, 4.0), (9, -4.0)), logprobs=2),
    "mask": SamplingParams(
        max_tokens=12, temperature=0.9, seed=9, allowed_token_ids=tuple(range(3, 300, 7)), min_tokens=2
    ),
    "scores": SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=2),
    "stop": SamplingParams(max_tokens=12, temperature=1.0, seed=9, stop_token_ids=tuple(range(0, 300, 3))),
    "one": SamplingParams(max_tokens=1, temperature=1.0, seed=9, logprobs=1),
    "none": SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=1),
}


def said(answer: Answer) -> tuple[Any, ...]:
    assert answer.done is not None
    ended = answer.done.reason, answer.done.stop_token, answer.done.error
    return answer.tokens, answer.logprobs, answer.scores, ended


@pytest.mark.slow
def test_whatever_is_asked_for_the_answer_is_that_of_two_pools(model: Path) -> None:
    asked = [(p, s) for p, s in zip(prompts(5, 7, 33, 64, 12, 100, 21, 18, 40, 50), SAMPLINGS.values(), strict=True)]
    with pair(model, prefill={"chunk_tokens": 32}) as two:
        expected = [said(answer) for answer in two.run(*[two.submit(p, s) for p, s in asked])]
    with colocated(model, prefill={"chunk_tokens": 32}) as both:
        assert [said(answer) for answer in both.run(*[both.submit(p, s) for p, s in asked])] == expected


class Recording(CpuDevice):
    """Notes the names of all operations, and the pages that they write."""

    checks = True

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def submit(self, op: DeviceOp, *args: Any, **options: Any) -> Completion:
        self.ops.append(op.name)
        return super().submit(op, *args, **options)


def noted_copies(both: Colocated) -> list[str]:
    """A list that gets the name of each call that copies or clears pages from now on."""
    pools, called = manager_of(both.worker).pools, list[str]()

    def noting(name: str) -> None:
        plain = getattr(pools, name)

        def call(*args: Any) -> Any:
            called.append(name)
            return plain(*args)

        setattr(pools, name, call)

    for name in ("copy", "zero"):
        noting(name)
    return called


@pytest.mark.slow
def test_a_hand_over_is_a_lease_that_changes_hands_and_no_byte_is_copied(model: Path) -> None:
    device = Recording()
    with colocated(model, device=device, cache={"page_tokens": PAGE}) as both:
        (prompt,) = prompts(3, 100)
        request = both.submit(prompt, greedy(5))
        both.step()
        leg = only(both, request)
        copies = noted_copies(both)
        assert leg.phase is DecodePhase.RUNNING, "its prompt took one step, and was handed over in the same round"
        before = leg.held, leg.held.tables["full"].pages[:7]
        counters = both.worker.status().counters
        assert (counters["handed_over_in_place"], counters["received_bytes"]) == (1, 0)
        both.run(request)
        assert leg.allocation is None
        assert before[0].released
        assert set(device.ops) == {"forward", "draw"}, "nothing but steps was ever given to the device"
        assert copies == []
        assert both.answers[request].progress[Role.DECODE].transfer_bytes == 0
        assert both.worker.check().rooms == 0
        assert before[1] == before[0].tables["full"].pages[:7], "its pages are where they were"


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [True, False])
def test_answers_are_the_same_on_a_device_that_is_late(model: Path, oracle: Oracle, mixed: bool) -> None:
    for seed in range(3):
        device = AdversarialDevice(seed)
        sections: dict[str, Any] = {"colocate": {"mixed_steps": mixed}, "cache": {"page_tokens": PAGE}}
        with colocated(model, device=device, prefill={"chunk_tokens": 48}, **sections) as both:
            asked = prompts(seed, 5, 60, 130, 17, 90)
            for prompt, answer in zip(asked, both.run(*[both.submit(p, greedy(9)) for p in asked]), strict=True):
                expect_equal(oracle, prompt, answer)
            assert (both.worker.status().counters["mixed_steps"] > 0) == mixed
        device.settle()


# ------------------------------------------------------------ the shared step


@pytest.mark.slow
def test_every_running_request_draws_a_token_in_every_step_while_a_long_prompt_is_computed(model: Path) -> None:
    sections: dict[str, Any] = {"prefill": {"chunk_tokens": 64}, "colocate": {"prompt_tokens": 16}}
    with colocated(model, cache={"page_tokens": PAGE}, **sections) as both:
        first, long = prompts(7, 20, 1000)
        running = [both.submit(first, SamplingParams(max_tokens=100, temperature=0.9, seed=n)) for n in range(4)]
        until(both, lambda: all(len(both.answers[r].tokens) > 2 for r in running))
        late = both.submit(long, greedy(3))
        steps = 0
        while not both.answers[late].tokens:
            before = [len(both.answers[r].tokens) for r in running]
            both.step()
            steps += 1
            assert [len(both.answers[r].tokens) for r in running] == [n + 1 for n in before]
        # 64 tokens a step, less four rows: 48 tokens of whole pages each.
        assert steps == -(-1000 // 48)


@pytest.mark.slow
def test_c10_a_prompt_gets_on_in_every_step_however_many_requests_run(model: Path) -> None:
    sections: dict[str, Any] = {"prefill": {"chunk_tokens": 16}, "colocate": {"prompt_tokens": 16}}
    with colocated(model, cache={"page_tokens": PAGE}, decode={"max_batch_tokens": 64}, **sections) as both:
        first, long = prompts(8, 9, 160)
        running = [both.submit(first, SamplingParams(max_tokens=60, temperature=0.9, seed=n)) for n in range(24)]
        until(both, lambda: all(both.answers[r].tokens for r in running))
        late = both.submit(long, greedy(2))
        for _ in range(10):
            assert not both.answers[late].tokens
            both.step()
        assert both.answers[late].tokens, "a page of it was computed in each of ten steps, beside 24 rows"


def test_drafts_take_their_part_of_a_step_from_the_prompts_beside_them(model: Path) -> None:
    """Else a step would have more tokens than its budget, and each gap between tokens grow."""
    least, budget = 4, 16
    sections: dict[str, Any] = {
        "prefill": {"chunk_tokens": budget},
        "colocate": {"prompt_tokens": least},
        "decode": {"draft_tokens": 4, "draft_requests": 8},
        "cache": {"page_tokens": least},
    }
    few = (17, 40, 203)  # Answers of few tokens repeat themselves, so that much is drafted.
    with colocated(model, **sections) as both:
        steps: list[tuple[int, int]] = []
        """By step of both kinds: tokens of rows that draw with what they drafted, and tokens of prompts."""
        launch = both.worker.setup.engine.launch

        def noted(rows: Sequence[BatchRow], marks: LayerMarks | None = None) -> LaunchedStep:
            tokens = [1 if isinstance(row.tokens, TokenFromStep) else len(row.tokens) for row in rows]
            answers = sum(n for row, n in zip(rows, tokens, strict=True) if n == 1 + row.drafted and row.draw)
            if 0 < answers < sum(tokens):
                steps.append((answers, sum(tokens) - answers))
            return launch(rows, marks)

        both.worker.setup.engine.launch = noted  # type: ignore[method-assign]
        sampling = SamplingParams(max_tokens=60, temperature=0.0, allowed_token_ids=few)
        first = [both.submit([few[n % 3] for n in range(20 + k)], sampling) for k in range(2)]
        until(both, lambda: all(len(both.answers[request].tokens) > 8 for request in first))
        both.run(*first, both.submit(prompts(9, 300)[0], greedy(3)))
        assert both.worker.status().counters["tokens_drafted"] > 0
        assert max(answers for answers, _ in steps) > 2, "rows had drafts beside a prompt"
        assert [step for step in steps if sum(step) > max(budget, step[0] + least)] == []


# ------------------------------------------------------------ memory


@pytest.mark.slow
def test_a_prefix_is_computed_once_while_its_first_request_still_runs(model: Path, oracle: Oracle) -> None:
    with colocated(model, cache={"page_tokens": PAGE}) as both:
        (prefix, *tails) = prompts(2, 200, 3, 40, 1)
        first = both.submit(prefix, greedy(60))
        until(both, lambda: bool(both.answers[first].tokens))
        others = [both.submit(prefix + tail, greedy(12)) for tail in tails]
        for tail, answer in zip(tails, both.run(*others), strict=True):
            expect_equal(oracle, prefix + tail, answer)
            assert answer.progress[Role.PREFILL].cached_tokens == 192
        expect_equal(oracle, prefix, *both.run(first))


@pytest.mark.slow
def test_choices_of_one_prompt_wait_for_the_pages_that_the_first_computes(model: Path) -> None:
    with colocated(model, cache={"page_tokens": PAGE}, prefill={"chunk_tokens": 32}) as both:
        (prompt,) = prompts(4, 170)
        asked = [both.submit(prompt, SamplingParams(max_tokens=6, temperature=1, seed=1, choice=n)) for n in range(4)]
        answers = both.run(*asked)
        assert [a.progress[Role.PREFILL].computed_tokens for a in answers] == [170, 10, 10, 10]
        assert len({tuple(a.list) for a in answers}) == 4


def short_of_a_page(both: Colocated, priority: int = 0) -> tuple[RequestId, RequestId]:
    """An old request that runs, and a young one whose prompt has all other pages: the old one needs one in a moment.

    Answers were short so far, so nobody expected that."""
    both.run(*[both.submit([n, n], greedy(2)) for n in range(8)])
    old, young = (prompts(6, 46, 140)[n] for n in range(2))
    return both.submit(old, greedy(30)), both.submit(young, greedy(2), priority=priority)


SHORT: dict[str, Any] = {"prefill": {"chunk_tokens": 16}, "cache": {"page_tokens": PAGE, "prefix_reuse": False}}


@pytest.mark.slow
def test_c11_a_running_request_that_lacks_a_page_gets_those_of_the_youngest_prompt(model: Path, oracle: Oracle) -> None:
    with colocated(model, tokens=12 * PAGE, **SHORT) as both:
        old, young = short_of_a_page(both)
        until(both, lambda: both.worker.status().counters["preemptions"] > 0)
        assert only(both, young).phase is DecodePhase.WAITING
        assert both.worker.check().violations == ()
        assert both.worker.status().counters["retractions"] == 0, "before any request that runs is retracted"
        for prompt, answer in zip(prompts(6, 46, 140), both.run(old, young), strict=True):
            expect_equal(oracle, prompt, answer)


@pytest.mark.slow
def test_a_prompt_of_higher_priority_keeps_its_pages(model: Path, oracle: Oracle) -> None:
    with colocated(model, tokens=12 * PAGE, **SHORT) as both:
        old, young = short_of_a_page(both, priority=1)
        assert all(a.done is None for a in (both.answers[old], both.answers[young]))
        (first,) = both.run(young)
        assert both.answers[old].done is None, "it stood still meanwhile"
        assert both.worker.status().counters["preemptions"] == 0
        for prompt, answer in zip(prompts(6, 46, 140), (*both.run(old), first), strict=True):
            expect_equal(oracle, prompt, answer)


@pytest.mark.slow
@pytest.mark.parametrize("retract", ["copy", "recompute"])
def test_retracted_requests_come_back_and_no_answer_is_altered(model: Path, retract: str) -> None:
    asked = prompts(9, 30, 50, 20, 64, 33, 10)
    with pair(model) as two:
        expected = [two.run(two.submit(p, greedy(40)))[0].list for p in asked]
    decode = {"retract": retract, "first_answer_tokens": 1}
    cache = {"page_tokens": PAGE, "host_bytes": 1 << 23}
    with colocated(model, tokens=18 * PAGE, decode=decode, cache=cache) as both:
        answers = finish(both, asked, 40)
        counters = both.worker.status().counters
    assert answers == expected
    assert counters["retractions"] > 0
    assert (counters["recomputed"] > 0) == (retract == "recompute")


def finish(both: Colocated, asked: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Answers of `count` tokens; an attempt that is retracted goes on in the next, as a router has it do."""
    told: dict[int, list[int]] = {n: [] for n in range(len(asked))}
    live = {both.submit(prompt, greedy(count)): n for n, prompt in enumerate(asked)}
    for _ in range(20_000):
        if not live:
            return list(told.values())
        both.step()
        for request in [r for r in live if both.answers[r].done is not None]:
            n, answer = live.pop(request), both.answers[request]
            assert answer.done is not None
            told[n] += answer.list if answer.tokens else []
            if answer.done.error is ErrorKind.RETRACTED:
                live[both.submit(asked[n], greedy(count), emitted=told[n])] = n
            else:
                assert answer.done.error is None, answer.done
    raise AssertionError("they never ended")


@pytest.mark.slow
def test_b2_a_request_can_be_cancelled_in_every_phase(model: Path) -> None:
    cache = {"page_tokens": PAGE, "host_bytes": 1 << 22}
    with colocated(model, tokens=20 * PAGE, cache=cache, prefill={"chunk_tokens": 16}) as both:
        seen: set[DecodePhase] = set()
        for rounds in range(24):
            asked = [both.submit(p, greedy(30)) for p in prompts(rounds, 90, 60, 120)]
            for _ in range(rounds):
                both.step()
            seen |= {r.phase for r in table_of(both.worker)}
            for request in asked:
                both.cancel(request)
            both.settle()
        assert {DecodePhase.WAITING, DecodePhase.ARRIVING, DecodePhase.RUNNING} <= seen


def test_what_is_said_of_a_request_comes_in_order_and_once(model: Path) -> None:
    with colocated(model) as both:
        request = both.submit([1, 2, 3], greedy(3))
        events = [e for _ in range(5) for e in both.step() if getattr(e, "request_id", None) == request]
        kinds = [(type(e).__name__, e.position if isinstance(e, Tokens) else None) for e in events]
        assert [k for k in kinds if k[0] == "Tokens"] == [("Tokens", 3), ("Tokens", 4), ("Tokens", 5)]
        assert [e.role for e in events if isinstance(e, LegReport)] == [Role.PREFILL, Role.DECODE, Role.DECODE]
        assert kinds[-1][0] == "Done"


def test_a_prompt_that_could_not_be_begun_before_its_first_token_was_due_is_not_computed(
    model: Path, oracle: Oracle
) -> None:
    first, late, patient = prompts(41, 700, 900, 900)
    clock = ManualClock()
    with colocated(model, clock=clock, prefill={"chunk_tokens": 96}) as both:
        begun = both.submit(first, greedy(4), first_token_s=5.0)
        both.step()
        waits, goes = both.submit(late, greedy(4), first_token_s=5.0), both.submit(patient, greedy(4))
        both.step()
        worker: Any = both.worker
        assert worker._local.next_deadline == 5.0, "it wakes for it"
        clock.advance(5.1)
        answers = both.run(begun, waits, goes)
        assert [answer.done is not None and answer.done.error for answer in answers] == [None, ErrorKind.LATE, None]
        assert answers[1].progress == {}
        for prompt, answer in ((first, answers[0]), (patient, answers[2])):
            assert answer.list == oracle.generate(prompt, 4)


def test_an_audit_is_counted_while_it_runs_and_ends_with_its_router_and_with_the_worker(model: Path) -> None:
    """A worker that drains computes no audit any more: one that waited would hold its pages for ever."""
    prompt = prompts(51, 100)[0]
    audit = Audit(RequestId("an audit"), 0, (*prompt, 3), len(prompt), greedy(12))
    with colocated(model, audit={"chunk_tokens": 16}) as both:
        for ends in ("its router is gone", "the worker drains"):
            both.worker.handle(SESSION, audit)
            assert both.step() == []
            report = both.worker.check()
            assert report.leases > 0, "it is under way"
            assert report.violations == ()
            if ends == "the worker drains":
                both.worker.drain()
                assert [told.end for told in both.step() if isinstance(told, Audited)] == [AuditEnd.PREEMPTED]
            else:
                both.worker.drop_session(SESSION)
                assert both.step() == [], "nobody is there to be told"
            assert both.worker.check().leases == 0
        both.worker.undrain()


def test_prompts_that_wait_for_pages_count_among_the_tokens_that_are_still_to_be_computed(model: Path) -> None:
    """By this figure routers choose: a worker with a long queue would look idle."""
    first, waits = prompts(52, 300, 200)
    with colocated(model, prefill={"chunk_tokens": 64, "max_running": 1}) as both:
        asked = both.submit(first, greedy(2)), both.submit(waits, greedy(2))
        assert both.worker.status().prompt_tokens == 500
        both.step()
        assert both.worker.status().prompt_tokens == 500 - 64
        both.run(*asked)
        assert both.worker.status().prompt_tokens == 0
