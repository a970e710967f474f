"""Times to first token that are asked for: refused early where they can't be had, not computed where they are past."""

from __future__ import annotations

import pytest

from tests.router.stage import Stage
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.worker_events import Done

TOKEN_S = 0.01


def prompt(number: int, tokens: int) -> tuple[int, ...]:
    """A prompt like no other."""
    return tuple(number * 1000 + n for n in range(tokens))


def taught(prefill: int = 1) -> Stage:
    """A stage whose prefill workers took 10 ms a token for prompts of several sizes."""
    stage = Stage(prefill, 1)
    for number in range(12 * prefill):
        tokens = 10 * (1 + number // prefill % 4)
        stage.submit(prompt(number, tokens))
        stage.clock.advance(TOKEN_S * tokens)
        stage.finish()
    return stage


def test_a_request_is_refused_when_its_first_token_would_be_late_and_nothing_of_it_is_kept() -> None:
    stage = taught()
    for number in (100, 101):
        stage.submit(prompt(number, 50))
    sent = len(stage.submits)
    late = stage.core.predict_slo_miss([stage.request(prompt(200, 20), within_s=1.1)])
    assert late is not None
    assert late.prediction.seconds == pytest.approx(TOKEN_S * 120)
    assert stage.core.predict_slo_miss([stage.request(prompt(200, 20), within_s=1.3)]) is None
    assert stage.core.predict_slo_miss([stage.request(prompt(200, 20))]) is None, "it names no time"
    assert stage.core.counts.refused_early == 1
    assert (len(stage.submits), stage.core.requests.in_flight) == (sent, 2)
    stage.finish()
    assert stage.core.check() == []


def test_what_the_worker_holds_of_a_prompt_needs_no_time() -> None:
    stage = taught()
    held = prompt(300, 64)
    stage.submit(held)
    stage.clock.advance(0.64)
    stage.finish()
    assert stage.core.predict_slo_miss([stage.request(prompt(301, 66), within_s=0.3)]) is not None
    assert stage.core.predict_slo_miss([stage.request((*held, 1, 2), within_s=0.3)]) is None


def test_the_quickest_worker_counts_and_many_prompts_are_shared_out() -> None:
    stage = taught(prefill=2)
    stage.submit(prompt(100, 100))
    one = [stage.request(prompt(200, 20), within_s=0.25)]
    assert stage.core.predict_slo_miss(one) is None, "the other worker is free"
    many = [stage.request(prompt(200 + n, 20), within_s=0.7) for n in range(8)]
    late = stage.core.predict_slo_miss(many)
    assert late is not None
    assert late.prediction.seconds == pytest.approx(TOKEN_S * 80)
    same = [stage.request(prompt(200, 20), within_s=0.25) for _ in range(8)]
    assert stage.core.predict_slo_miss(same) is None, "choices of one prompt are computed once"


@pytest.mark.parametrize("sizes", [(20, 120), (120, 20)])
def test_a_worker_that_is_too_small_for_one_of_those_that_come_together_is_none_of_theirs(
    sizes: tuple[int, int],
) -> None:
    stage = taught(prefill=2)
    stage.cluster["prefill-1"].positions = 100
    stage.view()
    stage.submit(prompt(100, 150))
    both = [stage.request(prompt(200 + tokens, tokens), within_s=1.5) for tokens in sizes]
    late = stage.core.predict_slo_miss(both)
    assert late is not None
    assert late.worker.record.name == "prefill-0"
    assert late.prediction.seconds == pytest.approx(TOKEN_S * 290), "each is computed"


@pytest.mark.parametrize("sizes", [(20, 120), (120, 20), (20, 120, 30)])
def test_prompts_that_come_together_take_as_long_as_the_longest_wherever_it_stands(sizes: tuple[int, ...]) -> None:
    stage = taught(prefill=2)
    together = [stage.request(prompt(200 + n, tokens), within_s=1.1) for n, tokens in enumerate(sizes)]
    late = stage.core.predict_slo_miss(together)
    assert late is not None
    assert late.prediction.seconds == pytest.approx(TOKEN_S * 120)


def test_without_a_worker_or_without_knowing_it_nothing_is_refused() -> None:
    stage = Stage(1, 1)
    request = [stage.request(prompt(1, 100_000), within_s=0.001)]
    assert stage.core.predict_slo_miss(request) is None, "nothing was seen of it"
    stage = taught()
    stage.kill("prefill-0")
    assert stage.core.predict_slo_miss([stage.request(prompt(1, 1000), within_s=0.001)]) is None


def test_a_refusal_that_turns_out_false_is_counted() -> None:
    stage = taught()
    stage.submit(prompt(100, 100))
    assert stage.core.predict_slo_miss([stage.request(prompt(200, 20), within_s=1.0)]) is not None
    assert stage.core.predict_slo_miss([stage.request(prompt(201, 20), within_s=0.1)]) is not None
    stage.clock.advance(0.2)  # It was five times as fast as expected.
    stage.finish()
    stage.tick()
    assert (stage.core.counts.refused_early, stage.core.counts.refused_falsely) == (2, 1)


def test_workers_are_told_how_long_a_first_token_is_of_use_in_the_first_attempt_alone() -> None:
    stage = Stage(2, 1)
    stage.submit(within_s=2.0)
    assert {submit.first_token_s for _, submit in stage.submits} == {2.0}
    stage.kill(stage.submits[-1][0][0])
    assert stage.submits[-1][1].attempt == 1
    assert stage.submits[-1][1].first_token_s == 0.0, "what was accepted and failed here is owed"
    stage.submit()
    assert stage.submits[-1][1].first_token_s == 0.0


def test_who_waits_for_workers_beyond_its_time_is_told_so() -> None:
    stage = Stage(1, 1)
    stage.kill("prefill-0")
    late, patient = stage.submit(within_s=1.0), stage.submit()
    stage.tick(0.9)
    assert not stage.ends
    stage.tick(0.2)
    assert stage.ends[late].error is ErrorKind.LATE
    assert patient not in stage.ends
    assert stage.core.counts.shed == 1


def test_a_worker_that_could_not_begin_in_time_ends_the_request_on_both_sides() -> None:
    stage = Stage(2, 1)
    rid = stage.submit(within_s=1.0)
    (prefill, submit) = next(sent for sent in stage.submits if sent[0][0].startswith("prefill"))
    stage.core.on_event(prefill, Done(rid, submit.attempt, "error", error=ErrorKind.LATE, message="too late"))
    stage.play()
    assert stage.ends[rid].error is ErrorKind.LATE
    assert [cancel.request_id for key, cancel in stage.cancels if key[0] == "decode-0"] == [rid]
    assert stage.core.check() == []


def test_requests_that_wait_for_workers_get_them_by_priority() -> None:
    stage = Stage(1, 1)
    stage.kill("prefill-0")
    asked: dict[RequestId, int] = {stage.submit(priority=priority): priority for priority in (0, 5, -1, 5, 2)}
    stage.submits.clear()
    stage.restart("prefill-0")
    order = [submit.request_id for key, submit in stage.submits if key[0] == "prefill-0"]
    assert [asked[rid] for rid in order] == [5, 5, 2, 0, -1]
    assert order[:2] == sorted(order[:2])


def test_what_becomes_of_predictions_that_were_close_is_learned_and_of_the_others_not() -> None:
    stage = taught()

    def predicted() -> float:
        late = stage.core.predict_slo_miss([stage.request(prompt(900, 100), within_s=0.001)])
        assert late is not None
        return late.prediction.seconds

    before = predicted()
    number = 0

    def ask(within_s: float, took_s: float) -> None:
        nonlocal number
        number += 1
        request = stage.request(prompt(1000 + number, 100), within_s=within_s)
        assert stage.core.predict_slo_miss([request]) is None
        stage.take(request)
        stage.clock.advance(took_s)
        stage.finish()

    ask(100.0, 1.0)
    assert predicted() == pytest.approx(before), "it had time enough"
    ask(1.2, 1.0)
    assert predicted() == pytest.approx(before * 0.99), "it wasn't late"
    after = predicted()
    ask(1.2, 1.1)
    assert predicted() > after * 1.09, "it was"


def test_each_of_several_that_come_together_teaches_what_became_of_its_prediction() -> None:
    stage = taught()
    before = stage.core.predict_slo_miss([stage.request(prompt(900, 100), within_s=0.001)])
    both = [stage.request(prompt(1000 + number, 100), within_s=2.2) for number in range(2)]
    both[1].id = RequestId("the other")
    assert stage.core.predict_slo_miss(both) is None
    for request in both:
        stage.take(request)
    for request, took_s in zip(both, (1.0, 1.01), strict=True):
        stage.clock.advance(took_s)
        stage.say(request.id, Role.PREFILL, 2)
    stage.finish()
    after = stage.core.predict_slo_miss([stage.request(prompt(901, 100), within_s=0.001)])
    assert before is not None
    assert after is not None
    assert after.prediction.seconds > 1.05 * before.prediction.seconds, "the second one was late"


def test_a_first_token_of_a_second_attempt_teaches_nothing_of_the_first_ones_prediction() -> None:
    """It came after the time of a worker that was lost, which the one that gave it took no part in."""
    stage = taught(prefill=2)

    def predicted() -> float:
        late = stage.core.predict_slo_miss([stage.request(prompt(900, 100), within_s=0.001)])
        assert late is not None
        return late.prediction.seconds

    before = predicted()
    for number in range(2):
        request = stage.request(prompt(1000 + number, 100), within_s=1.2)
        assert stage.core.predict_slo_miss([request]) is None
        rid = stage.take(request)
        if number == 0:
            stage.clock.advance(0.8)
            stage.kill(stage.leg(rid, Role.PREFILL))
        stage.clock.advance(1.0)
        stage.finish()
        assert request.attempt == (number == 0)
        if number == 0:
            assert predicted() == pytest.approx(before), "it took a second of the worker that gave it"
    assert predicted() < 0.995 * before, "the one after it was in time, and is learned from"


def test_what_was_begun_and_failed_here_is_owed_however_late() -> None:
    stage = Stage(1, 1)
    rid = stage.submit(within_s=1.0)
    stage.kill("prefill-0")
    stage.tick(1.5)
    assert rid not in stage.ends
    stage.restart("prefill-0")
    stage.finish()
    stage.assert_answered(rid)
