"""The prefill queue of one worker: what is predicted of a worker that computes one prompt after another, by formula."""

from __future__ import annotations

import random

import pytest

from contracts.ids import RequestId
from router.state.prefill_queue import JUDGED_AT_ONCE, PrefillQueue, PromptCost

BASE_S, TOKEN_S = 0.02, 0.0005


def cost(tokens: int) -> float:
    return BASE_S + TOKEN_S * tokens


def taught(short_share: float = 0.0) -> PrefillQueue:
    """A queue that has seen prompts of several sizes, one after the other, and is empty at second 100."""
    queue, now = PrefillQueue(short_share), 50.0
    for number in range(20):
        request, tokens = RequestId(f"seen-{number}"), 100 * (1 + number % 5)
        queue.add(request, tokens, 0, now)
        now += cost(tokens)
        queue.computed(request, now)
        now += 0.3  # idle: no work
    assert now < 100
    return queue


def test_what_prompts_cost_is_learned_from_the_time_in_which_there_was_work() -> None:
    queue = taught()
    for tokens in (1, 250, 10_000):
        assert queue.predict(tokens, 0, 100.0) == pytest.approx(cost(tokens))


def test_nothing_is_predicted_before_three_prompts_were_seen() -> None:
    queue = PrefillQueue()
    for number in range(3):
        assert queue.predict(10, 0, 1.0 * number) is None
        queue.add(RequestId(str(number)), 10, 0, 1.0 * number)
        queue.computed(RequestId(str(number)), number + 0.5)
    assert queue.predict(10, 0, 3.0) is None, "an old one counts a little less"
    queue.add(RequestId("3"), 10, 0, 3.0)
    queue.computed(RequestId("3"), 3.5)
    assert queue.predict(10, 0, 4.0) == pytest.approx(0.5)


def test_a_prompt_longer_than_all_that_was_seen_is_not_refused_for_a_cost_that_nobody_knows() -> None:
    fit = PromptCost()
    for _ in range(10):
        fit.saw(10, 0.05)
    assert fit.fit() == pytest.approx((0.05, 0.0))
    for _ in range(3):
        fit.saw(10_000, 1.0)
    base, token = fit.fit() or (0.0, 0.0)
    assert base + 10 * token == pytest.approx(0.05)
    assert base + 10_000 * token == pytest.approx(1.0)


def test_a_worker_that_becomes_slower_is_believed_to_be_slower_soon() -> None:
    fit = PromptCost()
    for _ in range(200):
        fit.saw(10, 0.1)
    for _ in range(100):
        fit.saw(10, 0.4)
    base, _ = fit.fit() or (0.0, 0.0)
    assert 0.35 < base < 0.4


def test_who_comes_later_waits_for_all_before_it_less_what_is_done_of_them() -> None:
    queue = taught()
    queue.add(RequestId("a"), 1000, 0, 100.0)
    queue.add(RequestId("b"), 300, 0, 100.1)
    assert queue.predict(50, 0, 100.2) == pytest.approx(cost(1000) - 0.2 + cost(300) + cost(50))
    queue.remove(RequestId("b"), 100.2)
    assert queue.predict(50, 0, 100.2) == pytest.approx(cost(1000) - 0.2 + cost(50))
    assert queue.predict(50, 0, 200.0) == pytest.approx(cost(50)), "no more than the one under way is done"


def test_whoever_has_a_higher_priority_waits_for_its_like_alone() -> None:
    queue = taught()
    for name, priority in (("low", 0), ("same", 5), ("higher", 9)):
        queue.add(RequestId(name), 100, priority, 100.0)
    assert queue.predict(50, 5, 100.0) == pytest.approx(2 * cost(100) + cost(50))
    assert queue.predict(50, 10, 100.0) == pytest.approx(cost(50))


def test_a_short_prompt_has_its_share_of_each_step_though_a_long_one_came_first() -> None:
    queue = taught(short_share=0.25)
    queue.add(RequestId("long"), 10_000, 0, 100.0)
    queue.add(RequestId("short"), 40, 0, 100.0)
    queue.add(RequestId("longer than it"), 60, 0, 100.0)
    assert queue.predict(50, 0, 100.0) == pytest.approx((cost(40) + cost(50)) / 0.25)
    assert queue.predict(20_000, 0, 100.0) == pytest.approx(cost(10_000) + cost(40) + cost(60) + cost(20_000))


def test_whoever_ends_twice_is_counted_once() -> None:
    queue = taught()
    queue.add(RequestId("a"), 100, 0, 100.0)
    queue.computed(RequestId("a"), 100.07)
    queue.computed(RequestId("a"), 105.0)
    queue.remove(RequestId("a"), 105.0)
    assert list(queue) == []
    assert queue.predict(100, 0, 105.0) == pytest.approx(cost(100))


@pytest.mark.parametrize("seed", range(30))
def test_refused_prompts_are_judged_as_a_worker_would_have_served_them(seed: int) -> None:
    """A worker computes what it is sent, one after the other; some prompts are refused, whatever is predicted of them.
    Each would have begun when those before it were done, whatever came later."""
    rng = random.Random(seed)
    queue, free_at, now, falsely = taught(), 100.0, 100.0, 0
    events: list[tuple[float, str, int]] = []
    for number in range(60):
        now += rng.expovariate(5.0)
        for at, done, _ in [event for event in events if event[0] <= now]:
            queue.computed(RequestId(done), at)
        events = [event for event in events if event[0] > now]
        tokens = rng.choice((100, 300, 900))
        begins = max(free_at, now)
        if rng.random() < 0.4:
            due = now + rng.uniform(0.05, 1.5)
            falsely += begins + cost(tokens) <= due
            queue.refused(tokens, 0, now, due)
        else:
            queue.add(RequestId(f"{number}"), tokens, 0, now)
            free_at = begins + cost(tokens)
            events.append((free_at, f"{number}", tokens))
    for at, done, _ in events:
        queue.computed(RequestId(done), at)
    assert queue.take_false_refusals(max(now, free_at)) == falsely > 0
    assert queue.take_false_refusals(now + 100.0) == 0


def test_refusals_that_are_looked_into_are_bounded() -> None:
    queue = taught()
    queue.add(RequestId("a"), 100, 0, 100.0)
    for _ in range(JUDGED_AT_ONCE + 10):
        queue.refused(100, 0, 100.0, 200.0)
    queue.computed(RequestId("a"), 100.1)
    assert queue.take_false_refusals(100.1) == JUDGED_AT_ONCE


def test_predictions_become_as_cautious_as_it_takes_for_nine_of_ten_to_be_in_time() -> None:
    rng = random.Random(1)
    queue = taught()
    queue.add(RequestId("a"), 1000, 0, 100.0)
    exact = cost(1000) + cost(50)
    late = []
    for _ in range(4000):
        predicted = queue.predict(50, 0, 100.0)
        assert predicted is not None
        actual = exact * rng.lognormvariate(0.0, 0.3)
        late.append(actual > predicted)
        queue.came(predicted, actual)
    assert sum(late[1000:]) / 3000 == pytest.approx(0.1, abs=0.02)
    for _ in range(1000):
        queue.came(1.0, 100.0)
    assert queue.predict(50, 0, 100.0) == pytest.approx(3 * exact), "it is bounded"
    for _ in range(1000):
        queue.came(1.0, 0.1)
    assert queue.predict(50, 0, 100.0) == pytest.approx(exact / 2)
