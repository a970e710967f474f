"""Drafts of decode's requests: who gets how many, and what becomes of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs

from tests.support.decode_parts import DecodeParts
from tests.support.pool_sets import pool_sets
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.device_port import Device
from twinpool.cache.memory.kv_cache_spec import BufferSpec
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import WorkerName
from twinpool.contracts.messages.worker_events import Event, LegNote, Tokens
from twinpool.decode.drafting import StepTimes, StepVerdict, WantedDraft, with_speculation
from twinpool.decode.request import DecodeRequest, RequestFailed, RequestFinished
from twinpool.engine.attention.attention_backend import undoable_positions
from twinpool.engine.layers.decoder import FEATURES
from twinpool.engine.runner.sampling.logits_processors import TokenMask
from twinpool.engine.structured_output.grammar_engine import AnswerGrammar, StartedGrammar

MANY = 40


class Answers:
    """A drafter that knows the answers: those of the same requests without drafts. `wrong`: at which places of a draft
    it errs; `silent`: whether it says nothing."""

    def __init__(self, wrong: Sequence[int] = (), kind: str = "full") -> None:
        self.wrong, self.silent, self.kind = wrong, False, kind
        self.asked: list[int] = []
        self._known: dict[str, list[int]] = {}

    def right(self, request: DecodeRequest) -> list[int]:
        """Its prompt and its answer."""
        name = str(request.submit.request_id)
        if name not in self._known:
            self.known(request, MANY)
        return self._known[name]

    def known(self, request: DecodeRequest, most: int) -> None:
        """Compute its answer of so many tokens."""
        name, submit = str(request.submit.request_id), request.submit
        parts = DecodeParts(128, kind=self.kind)
        (plain,) = parts.run(name, prompt=len(submit.tokens), most=most)
        while plain.generated < most:
            step(parts)
        self._known[name] = plain.tokens

    def ready(self, request: DecodeRequest) -> bool:
        return not self.silent

    def propose(self, wanted: Sequence[WantedDraft]) -> list[list[int]]:
        return [self._draft(request, most) for request, most in wanted]

    def _draft(self, request: DecodeRequest, most: int) -> list[int]:
        self.asked.append(most)
        draft = self.right(request)[len(request.tokens) :][:most]
        return [token + 1 if at in self.wrong else token for at, token in enumerate(draft)]


def drafting(
    wrong: Sequence[int] = (), device: Device | None = None, pages: int = 64, kind: str = "full", **decode: Any
) -> tuple[DecodeParts, Answers]:
    drafter = Answers(wrong, kind)
    config = {"draft_tokens": 4, "draft_requests": 2, **decode}
    return DecodeParts(pages, device, kind=kind, drafter=drafter, decode=config), drafter


def step(parts: DecodeParts, *, go_on: bool = False) -> list[Event | RequestFinished | RequestFailed]:
    batch = parts.scheduler.next_batch()
    if batch:
        parts.steps.launch(batch)
        parts.scheduler.launched(batch)
    ended = list(parts.steps.landed(go_on=go_on and bool(batch)))
    return [*(event for _, event in parts.requests.take_events()), *ended]


def said(told: Sequence[object]) -> list[tuple[int, tuple[int, ...]]]:
    """Positions and tokens."""
    return [(event.position, event.tokens) for event in told if isinstance(event, Tokens)]


def test_a_step_tells_all_drafts_that_were_drawn_and_the_token_behind_them() -> None:
    parts, drafter = drafting()
    (request,) = parts.run("a", most=MANY)
    want = drafter.right(request)
    assert said(step(parts)) == [(7, tuple(want[7:10]))], "the first has two drafts"
    assert said(step(parts)) == [(10, tuple(want[10:15]))], "and who was right has twice as many, up to the limit"
    assert said(step(parts)) == [(15, tuple(want[15:20]))]
    assert (request.committed, request.launched, request.planned) == (19, 19, 19)
    counters = parts.drafting.counters
    assert (counters["tokens_drafted"], counters["drafts_accepted"], counters["rows_drafted"]) == (10, 10, 3)
    assert [counters[f"accepted_at_{place}"] for place in (1, 2, 3, 4)] == [3, 3, 2, 2]
    assert parts.steps.counters["tokens_generated"] == 13
    assert request.check(0) == []


@pytest.mark.parametrize("wrong", [(0,), (1,), (2,), (0, 1, 2, 3)])
def test_tokens_are_the_same_wherever_drafts_are_wrong(wrong: tuple[int, ...]) -> None:
    parts, drafter = drafting(wrong)
    (request,) = parts.run("a", most=MANY)
    want = drafter.right(request)
    while len(request.tokens) < 30:
        step(parts)
        assert request.check(0) == []
        assert request.draft_limit == max(1, min(wrong)) or request.draft_limit <= 4
    assert request.tokens == want[: len(request.tokens)]
    assert parts.drafting.counters["drafts_accepted"] < parts.drafting.counters["tokens_drafted"]


def test_who_was_wrong_has_as_many_drafts_as_were_right() -> None:
    parts, _ = drafting((1,))
    (request,) = parts.run("a", most=MANY)
    limits = []
    for _ in range(3):
        step(parts)
        limits.append(request.draft_limit)
    assert limits == [1, 2, 1], "one was right of two; that one alone is right, so two again"


def test_what_follows_a_wrong_draft_is_not_judged_and_one_is_tried_again() -> None:
    parts, _ = drafting((0,))
    (request,) = parts.run("a", most=MANY)
    step(parts)
    assert (request.drafted, request.accepted, request.draft_limit) == (2, 0, 1)
    assert request.draft_rates == pytest.approx([0.45, 0.5, 0.5, 0.5])
    step(parts)
    assert (request.drafted, request.accepted, request.draft_limit) == (3, 0, 1)


class OneAnswer:
    """A grammar's matcher that allows one answer alone."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._left = list(answer)

    def consume(self, tokens: Sequence[int]) -> None:
        assert self._left[: len(tokens)] == list(tokens)
        del self._left[: len(tokens)]

    def fitting(self, tokens: Sequence[int]) -> int:
        return next((at for at, one in enumerate(tokens) if one != self._left[at]), len(tokens))

    def forced(self) -> Sequence[int]:
        return self._left


def test_what_a_grammar_forces_is_no_draft_while_a_step_is_under_way() -> None:
    """That step's token is the first of it, and has yet to come."""
    parts, drafter = drafting()
    drafter.silent = True
    (request,) = parts.run("a", most=MANY)
    answer = drafter.right(request)[request.submit.prompt_len :]
    batch = parts.scheduler.next_batch()
    parts.steps.launch(batch)
    parts.scheduler.launched(batch)
    request.grammar = AnswerGrammar(StartedGrammar(OneAnswer(answer), TokenMask.of([answer[0]])), emitted=0)
    parts.drafting.plan([request], StepVerdict(4), 8)
    assert (request.under_way, request.drafts) == (1, ())
    list(parts.steps.landed(go_on=False))
    parts.drafting.plan([request], StepVerdict(4), 8)
    assert request.drafts == tuple(answer[2:4])


class OneAnswerUnforced(OneAnswer):
    """One that says of no token that it is the only one."""

    def forced(self) -> Sequence[int]:
        return ()


def test_of_a_draft_as_much_is_computed_as_the_grammar_allows() -> None:
    parts, drafter = drafting()
    (request,) = parts.run("a", most=MANY)
    answer = drafter.right(request)[request.submit.prompt_len :]
    at = request.generated
    allowed = [*answer[: at + 1], *(token + 1 for token in answer[at + 1 :])]
    request.grammar = AnswerGrammar(StartedGrammar(OneAnswerUnforced(allowed), TokenMask.of([answer[0]])), emitted=0)
    parts.drafting.plan([request], StepVerdict(4), 8)
    assert drafter.asked == [2]
    assert request.drafts == (answer[at],)


def test_who_was_to_have_a_draft_and_has_ended_leaves_its_turn_to_another() -> None:
    parts, _ = drafting(draft_requests=1)
    one, other = parts.run("a", "b", most=MANY)
    timed(parts, 0.004, 0.1)
    for request in (one, other):
        request.draft_rates = [0.0] * 4
    for _ in range(32):
        parts.drafting.plan([one, other], StepVerdict(0), 8)
    for running, tried in (([one, other], one), ([one, other], one), ([other], other)):
        verdict = parts.drafting.verdict(running)
        assert verdict is not None
        assert verdict.tried == {id(tried)}


def test_no_row_has_more_drafts_than_the_configuration_says() -> None:
    parts, _ = drafting(draft_tokens=1)
    (request,) = parts.run("a", most=MANY)
    for _ in range(4):
        assert parts.scheduler.next_batch() == [request]
        assert len(request.drafts) == 1
        parts.steps.launch([request])
        list(parts.steps.landed(go_on=False))


def test_an_answer_ends_at_its_limit_and_no_state_is_computed_beyond_it() -> None:
    parts, drafter = drafting()
    (request,) = parts.run("a", prompt=6, most=6)
    want = drafter.right(request)
    step(parts)
    told = step(parts)
    assert said(told) == [(10, tuple(want[10:12]))]
    assert told[-1] == RequestFinished(request, "length", None)
    assert request.generated == 6
    assert request.launched <= request.positions
    assert drafter.asked[-1] == 1, "the last token is computed by no step"


def test_what_is_drawn_behind_a_stop_token_is_no_part_of_the_answer() -> None:
    parts, drafter = drafting()
    (request,) = parts.run("a", most=MANY)
    want = drafter.right(request)
    structs.force_setattr(request.submit.sampling, "stop_token_ids", (want[8],))
    told = step(parts)
    assert said(told) == [(7, (want[7], want[8]))]
    assert told[-1] == RequestFinished(request, "stop", want[8])
    assert request.tokens == want[:9]
    assert (request.committed, request.launched) == (8, 8)


def test_steps_of_many_requests_have_no_drafts() -> None:
    parts, drafter = drafting()
    requests = parts.run("a", "b", "c", most=MANY)
    step(parts)
    assert drafter.asked == []
    assert [len(request.tokens) for request in requests] == [8, 8, 8]


def test_drafts_share_what_requests_leave_of_a_steps_tokens() -> None:
    parts, _ = drafting(max_batch_tokens=5)
    first, second = parts.run("a", "b", most=MANY)
    batch = parts.scheduler.next_batch()
    assert sum(1 + len(request.drafts) for request in batch) == 5
    assert sorted(len(request.drafts) for request in (first, second)) == [1, 2]


def test_drafts_take_no_page_that_is_not_there() -> None:
    """Nobody is retracted for a draft."""
    parts, _ = drafting()
    (request,) = parts.run("a", prompt=6, most=MANY)
    allocator = parts.manager.pools.allocators["full"]
    others = allocator.lease(allocator.free, "others")
    assert parts.scheduler.next_batch() == [request]
    assert (len(request.drafts), request.planned) == (1, 8), "to the end of its second page"
    assert parts.scheduler.retraction.counters["retractions"] == 0
    others.release()


def test_who_has_drafts_under_way_takes_no_step_until_they_are_known() -> None:
    device = AdversarialDevice(3, stray=0.0)
    parts, drafter = drafting(device=device)
    (request,) = parts.run("a", most=MANY)
    want = drafter.right(request)
    assert step(parts, go_on=True) == []
    assert (request.drafts, request.under_way) == (tuple(want[7:9]), 3)
    assert request.check(1) == []
    assert parts.scheduler.next_batch() == [], "how far it comes isn't known"
    others = parts.run("b", "c", most=MANY)
    assert parts.scheduler.next_batch() == others, "nor where so many run that steps have no drafts any more"
    for other in others:
        other.planned = other.launched
    parts.leave(*others)
    assert list(parts.steps.landed(go_on=False)) == []
    assert said([event for _, event in parts.requests.take_events()]) == [(7, tuple(want[7:10]))]
    assert parts.scheduler.next_batch() == [request]


def test_who_has_a_draft_to_come_waits_for_the_step_under_way_and_others_run_ahead() -> None:
    device = AdversarialDevice(3, stray=0.0)
    parts, drafter = drafting(device=device)
    drafter.silent = True
    (request,) = parts.run("a", most=MANY)
    step(parts, go_on=True)
    assert parts.scheduler.next_batch() == [request], "without a draft it is launched ahead"
    parts.steps.launch([request])
    assert request.under_way == 2
    drafter.silent = False
    assert parts.scheduler.next_batch() == []


def test_a_retracted_request_has_no_drafts_under_way() -> None:
    device = AdversarialDevice(3, stray=0.0)
    parts, drafter = drafting((1,), device=device)
    (request,) = parts.run("a", most=MANY)
    want = drafter.right(request)
    step(parts, go_on=True)
    parts.scheduler.retract(request, on_purpose=True)
    list(parts.steps.landed(go_on=False))
    assert (request.drafts, request.committed, request.launched) == ((), 8, 8)
    assert request.tokens == want[:9]


def test_a_request_says_where_its_drafts_and_lengths_disagree() -> None:
    parts, _ = drafting()
    (request,) = parts.run("a", most=MANY)
    at, request.drafts = request.committed, (1, 2)
    for ahead, steps in ((0, 1), (1, 1), (2, 1), (4, 1), (3, 0)):
        request.launched = request.planned = at + ahead
        says = f"has {at} positions and says {(at, at + ahead, at + ahead)}, with 2 drafts"
        assert request.check(steps) == [f"request {request.submit.request_id} {says}"]
    request.launched = request.planned = at + 3
    assert request.check(1) == []


@pytest.mark.parametrize("kind", ["full+state", "all"])
def test_drafts_of_recurrent_states_end_before_their_block_of_16_positions_does(kind: str) -> None:
    """And no snapshot is taken of what may not come to be. The pages are of 4 positions."""
    for wrong, most in (((), 12), ((1,), 12), ((2, 5), 12), ((), 2)):
        parts, drafter = drafting(wrong, kind=kind, draft_tokens=most, pages=128)
        (request,) = parts.run("a", most=80)
        drafter.known(request, 80)
        want, rows = drafter.right(request), list[tuple[int, int]]()
        while len(request.tokens) < 70:
            at = request.committed
            batch = parts.scheduler.next_batch()
            rows.append((at, len(request.drafts)))
            parts.steps.launch(batch)
            parts.scheduler.launched(batch)
            list(parts.steps.landed(go_on=False))
        assert request.tokens == want[: len(request.tokens)], wrong
        drafted = [(at, at + 1 + drafts) for at, drafts in rows if drafts]
        sure = {at + 1 for at, drafts in rows if not drafts}
        assert {kept.depth * 4 for kept in request.held.snapshots["state"]} <= sure
        assert max(end - at for at, end in drafted) > (2 if wrong or most == 2 else 8)
        assert all(at // 16 == end // 16 for at, end in drafted)
        assert most == 12 or any(end % 4 == 0 for _, end in drafted)


def test_the_last_of_16_positions_is_no_draft_of_a_recurrent_state() -> None:
    """It folds the block into the matrix, which can't be undone, whatever pages there are."""
    assert [undoable_positions(at) for at in (0, 1, 13, 14, 15, 16, 31)] == [14, 13, 1, 0, 0, 14, 0]


def test_drafts_are_counted_by_their_place_up_to_the_first_that_was_not_drawn() -> None:
    parts, _ = drafting((1,))
    (request,) = parts.run("a", most=MANY)
    step(parts)
    counters = parts.drafting.counters
    assert [counters[f"drafted_at_{place}"] for place in (1, 2, 3, 4)] == [1, 1, 0, 0]
    assert [counters[f"accepted_at_{place}"] for place in (1, 2, 3, 4)] == [1, 0, 0, 0]
    assert (request.drafted, request.accepted) == (2, 1)
    assert request.draft_rates == pytest.approx([0.55, 0.45, 0.5, 0.5]), "the first two places were judged"
    request.undrafted, request.marks["done"] = 3, 1.0
    (note,) = request.report(WorkerName("decode-0")).notes
    assert note == LegNote(
        "drafted",
        1.0,
        text="1 of 2 drafts were drawn (of late, by place: 55%, 45%, 50%, 50%); 3 steps had none, as none was known to "
        "pay",
    )


def timed(parts: DecodeParts, step_s: float, position_s: float) -> None:
    """Have steps of several sizes taken in."""
    for number in range(40):
        positions = 1 + number % 8
        parts.drafting.saw(positions, step_s + position_s * positions)


@pytest.mark.parametrize(("by_position", "drafted"), [(0.0001, [1, 3, 4]), (0.1, [0, 0, 0])])
def test_in_large_steps_a_request_has_as_many_drafts_as_pay(by_position: float, drafted: list[int]) -> None:
    """By how often its drafts are right, and what a position adds to a step."""
    parts, _ = drafting(draft_requests=1)
    requests = parts.run("a", "b", "c", most=MANY)
    for request, rate in zip(requests, (0.3, 0.6, 0.9), strict=True):
        request.draft_rates = [rate] * 4
    parts.scheduler.next_batch()
    assert [len(request.drafts) for request in requests] == [0, 0, 0], "nothing is measured yet"
    for request in requests:
        request.planned = request.launched
    timed(parts, 0.004, by_position)
    parts.scheduler.next_batch()
    assert [len(request.drafts) for request in requests] == drafted


@pytest.mark.parametrize(("kind", "prompt", "reach"), [("full", 13, 4), ("full+state", 13, 1), ("full+state", 14, 0)])
def test_what_drafts_are_expected_to_gain_ends_where_a_request_has_room_for_no_more(
    kind: str, prompt: int, reach: int
) -> None:
    parts, _ = drafting(kind=kind)
    (request,) = parts.run("a", prompt=prompt, most=MANY)
    assert request.planned == prompt
    timed(parts, 0.004, 0.0001)
    request.draft_rates = [0.9] * 4
    verdict = parts.drafting.verdict([request])
    tokens = 1.0 + sum(0.9**place for place in range(1, reach + 1))
    assert verdict is not None
    assert verdict.depth == reach
    assert verdict.gain == pytest.approx(tokens / (0.0041 + 0.0001 * reach) * 0.0041)


def test_one_request_alone_has_no_drafts_where_they_lose() -> None:
    parts, drafter = drafting((0,))
    (request,) = parts.run("a", most=MANY)
    timed(parts, 0.004, 0.001)
    request.draft_rates = [0.1] * 4
    step(parts)
    assert drafter.asked == []
    assert (request.undrafted, parts.drafting.counters["draft_gain"]) == (1, 1.0)
    request.draft_rates = [0.9, 0.1, 0.9, 0.9]
    step(parts)
    assert drafter.asked == [1], "the second is seldom drawn, and what is behind it as seldom"
    assert parts.drafting.counters["draft_gain"] == pytest.approx(1.9 / 0.006 * 0.005)
    assert parts.drafting.counters["draft_steps_paying"] == parts.drafting.counters["draft_steps_without"] == 1


def test_drafts_that_take_longer_to_propose_than_they_save_are_not_asked_for() -> None:
    parts, drafter = drafting()
    (request,) = parts.run("a", most=MANY)
    timed(parts, 0.004, 0.0001)
    propose = drafter.propose

    def slowly(wanted: Sequence[WantedDraft]) -> list[list[int]]:
        parts.clock.advance(0.01 * max(most for _, most in wanted))
        return propose(wanted)

    drafter.propose = slowly  # type: ignore[method-assign]
    step(parts)
    assert drafter.asked == [4]
    assert parts.drafting.propose_s == pytest.approx(0.01)
    request.draft_rates = [0.99] * 4
    step(parts)
    assert drafter.asked == [4], "each takes twice a step"


def test_where_drafts_never_pay_one_request_in_eight_has_one_now_and_then() -> None:
    """Else nobody would see that they are right again."""
    parts, _ = drafting(draft_requests=1)
    requests = parts.run("a", "b", most=MANY)
    timed(parts, 0.004, 0.1)
    tried: list[list[int]] = []
    for _ in range(360):
        for request in requests:
            request.draft_rates = [0.0] * 4
        parts.scheduler.next_batch()
        tried.append([len(request.drafts) for request in requests])
        for request in requests:
            request.drafts, request.planned = (), request.launched
    looked = [number for number, drafts in enumerate(tried) if any(drafts)]
    assert looked == [32, 97, 226, 355], "more seldom each time"
    assert [tried[number] for number in looked] == [[1, 0], [0, 1], [1, 0], [0, 1]], "in turns"


def test_who_is_to_have_a_draft_now_and_then_has_it_behind_the_step_under_way_while_others_run_ahead() -> None:
    """A step that goes without the request, as its own one hasn't landed, has tried nothing."""
    parts, drafter = drafting(draft_requests=1, pages=80, device=AdversarialDevice(3, stray=0.0))
    requests = parts.run("a", "b", "c", most=MANY)
    for request in requests:
        drafter.right(request)
    timed(parts, 0.004, 0.1)
    while all(request.generated < MANY - 2 for request in requests):
        for request in requests:
            request.draft_rates = [0.0] * 4
        step(parts, go_on=True)
    assert [request.drafted for request in requests] == [1, 0, 0]
    assert parts.drafting.counters["draft_steps_tried"] == 1


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("right", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("position_s", [0.0001, 0.002])
@pytest.mark.parametrize("running", [1, 6])
def test_no_load_has_fewer_tokens_a_second_than_without_drafts(running: int, position_s: float, right: float) -> None:
    """In time that is made up: a step takes 4 ms and its positions theirs, a place of proposals half a millisecond.
    What is lost to seeing whether drafts pay is within a hundredth."""
    rng, answer = random.Random(f"{running} {right}"), 240
    parts, drafter = drafting(pages=80 * running)

    def propose(wanted: Sequence[WantedDraft]) -> list[list[int]]:
        parts.clock.advance(0.0005 * max(most for _, most in wanted))
        drafts = [drafter.right(request)[len(request.tokens) :][:most] for request, most in wanted]
        return [[token + (rng.random() >= right) for token in draft] for draft in drafts]

    drafter.propose = propose  # type: ignore[method-assign]
    requests = parts.run(*(f"r{number}" for number in range(running)), prompt=4, most=answer)
    for request in requests:
        drafter.known(request, answer)
    began, before, steps = 0.0, 0, 0
    while all(request.generated < answer - 8 for request in requests):
        if steps == 40:  # The costs are known.
            began, before = parts.clock.now(), sum(request.generated for request in requests)
        batch, steps = parts.scheduler.next_batch(), steps + 1
        parts.steps.launch(batch)
        parts.scheduler.launched(batch)
        parts.clock.advance(0.004 + position_s * sum(1 + len(request.drafts) for request in batch))
        assert list(parts.steps.landed(go_on=False)) == []
    tokens = sum(request.generated for request in requests) - before
    gain = tokens / (parts.clock.now() - began) / (running / (0.004 + position_s * running))
    assert gain >= 0.99
    if right == 0.9 and position_s == 0.0001:
        assert gain > 1.6


def test_what_a_position_adds_to_a_step_is_fitted_by_the_latest_steps() -> None:
    times = StepTimes()
    for number in range(64):
        assert times.alike == (number >= 16)
        times.saw(4, 0.010)
    assert times.fit(4) is None, "steps of one size tell nothing"
    for number in range(300):
        times.saw(4 + number % 5, 0.006 + 0.001 * (4 + number % 5))
    assert times.fit(6) == pytest.approx((0.006, 0.001), rel=0.05)
    assert times.seconds(6) == pytest.approx(0.012, rel=0.02)
    times.saw(6, 3600.0)
    assert times.seconds(6) == pytest.approx(0.0125, rel=0.1), "a pause of the machine's counts for little"


def test_steps_of_many_requests_do_not_tell_what_a_draft_of_one_costs() -> None:
    """A batch's lines run in steps of another kind than the stream's that comes after them, and again after those."""
    times = StepTimes()
    for _ in range(3):
        for number in range(40):
            times.saw(1 + number % 5, 0.004 + 0.0002 * (1 + number % 5))
        for number in range(1000):
            times.saw(32 + number % 17, 0.015 * (32 + number % 17))
        base, slope = times.fit(2) or (0.0, 0.0)
        assert [base + slope * size for size in (1, 5)] == pytest.approx([0.0042, 0.005], rel=0.05)
        assert slope < 0.0004
        assert times.seconds(40) == pytest.approx(0.6, rel=0.05)


@pytest.mark.parametrize("kind", ["full+state", "full"])
def test_a_draft_model_is_what_drafts_where_there_is_one(kind: str) -> None:
    spec = pool_sets(4)[kind]
    config = config_from_dict({}).decode
    assert with_speculation(config, spec).speculation == "prompt_lookup"
    full = replace(spec.full, buffers=(*spec.full.buffers, BufferSpec(FEATURES, 1, (8,), torch.float32)))
    spec = replace(spec, pools=tuple(full if pool.name == full.name else pool for pool in spec.pools))
    assert with_speculation(config, spec).speculation == "draft_model"
    for asked in ("prompt_lookup", "off"):
        assert with_speculation(replace(config, speculation=asked), spec).speculation == asked
