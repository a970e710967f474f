"""The prefill queue of one worker: what is predicted of a worker that computes one prompt after another, by formula."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from twinpool.contracts.ids import RequestId
from twinpool.router.state.ttft_prediction import JUDGED_AT_ONCE, PrefillQueue, PromptCost, TenantWeight, TtftPrediction

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


def seconds(queue: PrefillQueue, tokens: int, priority: int, now: float) -> float | None:
    predicted = queue.predict(tokens, priority, now)
    return predicted.seconds if predicted is not None else None


def test_what_prompts_cost_is_learned_from_the_time_in_which_there_was_work() -> None:
    queue = taught()
    for tokens in (1, 250, 10_000):
        assert seconds(queue, tokens, 0, 100.0) == pytest.approx(cost(tokens))


def test_nothing_is_predicted_before_three_prompts_were_seen() -> None:
    queue = PrefillQueue()
    for number in range(3):
        assert seconds(queue, 10, 0, 1.0 * number) is None
        queue.add(RequestId(str(number)), 10, 0, 1.0 * number)
        queue.computed(RequestId(str(number)), number + 0.5)
    assert seconds(queue, 10, 0, 3.0) is None, "an old one counts a little less"
    queue.add(RequestId("3"), 10, 0, 3.0)
    queue.computed(RequestId("3"), 3.5)
    assert seconds(queue, 10, 0, 4.0) == pytest.approx(0.5)


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


def test_work_on_a_prompt_that_was_taken_back_is_no_part_of_the_next_ones() -> None:
    """It was alone: the worker is idle from its end to the next one's arrival."""
    queue = taught()
    queue.add(RequestId("long"), 50_000, 0, 100.0)
    queue.remove(RequestId("long"), 119.0)
    queue.add(RequestId("short"), 100, 0, 500.0)
    assert queue.first_worked == (100, 500.0)
    queue.computed(RequestId("short"), 500.0 + cost(100))
    for tokens in (1, 250, 10_000):
        assert seconds(queue, tokens, 0, 600.0) == pytest.approx(cost(tokens))


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
    assert seconds(queue, 50, 0, 100.2) == pytest.approx(cost(1000) - 0.2 + cost(300) + cost(50))
    queue.remove(RequestId("b"), 100.2)
    assert seconds(queue, 50, 0, 100.2) == pytest.approx(cost(1000) - 0.2 + cost(50))
    assert seconds(queue, 50, 0, 200.0) == pytest.approx(cost(50)), "no more than the one under way is done"


def test_whoever_has_a_higher_priority_waits_for_its_like_alone() -> None:
    queue = taught()
    for name, priority in (("low", 0), ("same", 5), ("higher", 9)):
        queue.add(RequestId(name), 100, priority, 100.0)
    assert seconds(queue, 50, 5, 100.0) == pytest.approx(2 * cost(100) + cost(50))
    assert seconds(queue, 50, 10, 100.0) == pytest.approx(cost(50))


def test_a_short_prompt_has_its_share_of_each_step_though_a_long_one_came_first() -> None:
    queue = taught(short_share=0.25)
    queue.add(RequestId("long"), 10_000, 0, 100.0)
    queue.add(RequestId("short"), 40, 0, 100.0)
    queue.add(RequestId("longer than it"), 60, 0, 100.0)
    assert seconds(queue, 50, 0, 100.0) == pytest.approx((cost(40) + cost(50)) / 0.25)
    assert seconds(queue, 20_000, 0, 100.0) == pytest.approx(cost(10_000) + cost(40) + cost(60) + cost(20_000))


def test_whoever_ends_twice_is_counted_once() -> None:
    queue = taught()
    queue.add(RequestId("a"), 100, 0, 100.0)
    queue.computed(RequestId("a"), 100.07)
    queue.computed(RequestId("a"), 105.0)
    queue.remove(RequestId("a"), 105.0)
    assert list(queue) == []
    assert seconds(queue, 100, 0, 105.0) == pytest.approx(cost(100))


@pytest.mark.parametrize("seed", range(30))
def test_refused_prompts_are_judged_as_a_worker_would_have_served_them(seed: int) -> None:
    """A worker computes what it is sent, one after the other; some prompts are refused, whatever is predicted of them.
    Each would have begun when those before it were done, whatever came later, and when it had been idle for as long as
    those take that were refused for nothing before."""
    rng = random.Random(seed)
    queue, now, free_at = taught(), 100.0, 100.0
    sent: list[tuple[float, float]] = []
    refused: list[tuple[float, float, int, float]] = []
    calls: list[tuple[float, int, Callable[[], None]]] = []
    for number in range(60):
        now += rng.expovariate(5.0)
        tokens = rng.choice((100, 300, 900))
        if rng.random() < 0.4:
            due = now + rng.uniform(0.05, 1.5)
            refused.append((max(free_at, now), now, tokens, due))
            calls.append((now, 1, partial(queue.refused, tokens, 0, now, due)))
        else:
            request, begins = RequestId(f"{number}"), max(free_at, now)
            free_at = begins + cost(tokens)
            sent.append((begins, free_at))
            calls.append((now, 1, partial(queue.add, request, tokens, 0, now)))
            calls.append((free_at, 0, partial(queue.computed, request, free_at)))
    for _, _, call in sorted(calls, key=lambda one: one[:2]):
        call()

    def idle_s(start: float, end: float) -> float:
        return end - start - sum(max(0.0, min(end, done) - max(start, began)) for began, done in sent)

    falsely, owed, since = 0, 0.0, 100.0
    for begins, _, tokens, due in sorted(refused):
        owed, since = max(0.0, owed - idle_s(since, begins)), begins
        if begins + owed + cost(tokens) <= due:
            falsely, owed = falsely + 1, owed + cost(tokens)
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
        late.append(actual > predicted.seconds)
        queue.came(predicted, actual)
    assert sum(late[1000:]) / 3000 == pytest.approx(0.1, abs=0.02)
    for _ in range(1000):
        queue.came(TtftPrediction(1.0, False), 100.0)
    assert seconds(queue, 50, 0, 100.0) == pytest.approx(3 * exact), "it is bounded"
    for _ in range(1000):
        queue.came(TtftPrediction(1.0, False), 0.1)
    assert seconds(queue, 50, 0, 100.0) == pytest.approx(exact / 2)


def test_whoever_shares_steps_teaches_nothing_of_those_that_have_their_turn() -> None:
    queue = taught(short_share=0.25)
    queue.add(RequestId("long"), 10_000, 0, 100.0)
    shared, in_turn = queue.predict(50, 0, 100.0), queue.predict(20_000, 0, 100.0)
    assert shared is not None
    assert in_turn is not None
    assert (shared.share, in_turn.share) == (True, False)
    for _ in range(1000):
        queue.came(shared, 100.0)
    assert seconds(queue, 50, 0, 100.0) == pytest.approx(3 * shared.seconds)
    assert seconds(queue, 20_000, 0, 100.0) == pytest.approx(in_turn.seconds)


A, B, HEAVY = TenantWeight("a"), TenantWeight("b"), TenantWeight("b", 3)


def shared(queue: PrefillQueue, tokens: int, whose: TenantWeight, priority: int = 0) -> float:
    predicted = queue.predict(tokens, priority, 100.0, whose)
    assert predicted is not None
    return predicted.seconds


def test_beside_another_tenants_flood_a_prompt_takes_twice_its_time_and_not_the_floods() -> None:
    queue = taught()
    for number in range(20):
        queue.add(RequestId(f"{number}"), 1000, 0, 100.0, A)
    assert shared(queue, 100, B) == pytest.approx(2 * cost(100))
    assert shared(queue, 100, HEAVY) == pytest.approx(4 / 3 * cost(100))
    assert shared(queue, 100, A) == pytest.approx(20 * cost(1000) + cost(100))
    queue.add(RequestId("mine"), 300, 0, 100.0, B)
    assert shared(queue, 100, B) == pytest.approx(2 * (cost(300) + cost(100)))
    assert shared(queue, 100, B, priority=1) == pytest.approx(cost(100))
    assert shared(queue, 100, B, priority=-1) == pytest.approx(20 * cost(1000) + cost(300) + cost(100))


def test_who_waits_for_less_than_its_share_costs_others_no_more_than_that() -> None:
    queue = taught()
    queue.add(RequestId("other"), 50, 0, 100.0, A)
    assert shared(queue, 1000, B) == pytest.approx(cost(50) + cost(1000))
    queue.add(RequestId("third"), 2000, 0, 100.0, TenantWeight("c"))
    assert shared(queue, 1000, B) == pytest.approx(cost(50) + 2 * cost(1000))


def test_a_short_one_has_its_share_of_its_tenants_part() -> None:
    queue = taught(short_share=0.25)
    queue.add(RequestId("other"), 10_000, 0, 100.0, A)
    queue.add(RequestId("mine"), 10_000, 0, 100.0, B)
    assert shared(queue, 50, B) == pytest.approx(2 * cost(50) / 0.25)


def shares_served(prompts: list[tuple[int, str]], weights: dict[str, int], quantum: float) -> list[float]:
    """When each of these prompts, in order of arrival, all there at second 0, is done by a worker that gives `quantum`
    seconds at a time to the tenant that has had least by its weight: the oracle, of no formula."""
    left = [cost(tokens) for tokens, _ in prompts]
    done, had, now = [0.0] * len(prompts), dict.fromkeys(weights, 0.0), 0.0
    while any(left):
        waiting = {tenant: n for n, (_, tenant) in reversed(list(enumerate(prompts))) if left[n]}
        tenant = min(waiting, key=lambda t: (had[t] / weights[t], t))
        n = waiting[tenant]
        part = min(quantum, left[n])
        left[n] = left[n] - part if left[n] - part > 1e-9 else 0.0
        had[tenant] += part
        now += part
        if not left[n]:
            done[n] = now
    return done


@pytest.mark.parametrize("seed", range(20))
def test_what_is_predicted_is_what_fair_shares_come_to(seed: int) -> None:
    rng = random.Random(seed)
    weights = {"a": rng.randint(1, 3), "b": rng.randint(1, 3), "c": rng.randint(1, 3)}
    prompts = [(rng.choice((100, 400, 900)), rng.choice("abc")) for _ in range(rng.randint(1, 12))]
    queue = taught()
    for number, (tokens, tenant) in enumerate(prompts):
        queue.add(RequestId(f"{number}"), tokens, 0, 100.0, TenantWeight(tenant, weights[tenant]))
    for tenant in "abc":
        predicted = shared(queue, 300, TenantWeight(tenant, weights[tenant]))
        served = shares_served([*prompts, (300, tenant)], weights, quantum=0.002)[-1]
        assert predicted == pytest.approx(served, rel=0.05, abs=0.02)


def test_a_refusal_beside_a_flood_is_judged_by_its_share() -> None:
    """With the flood's prompts as they are done, in turns with its own time."""
    queue = taught()
    for number in range(10):
        queue.add(RequestId(f"{number}"), 1000, 0, 100.0, A)
    queue.refused(1000, 0, 100.0, 100.0 + 2 * cost(1000) + 0.1, B)
    queue.refused(1000, 0, 100.0, 100.0 + 1.5 * cost(1000), B)
    assert queue.take_false_refusals(100.0) == 0, "one of the flood comes first"
    queue.computed(RequestId("0"), 100.0 + cost(1000))
    assert queue.take_false_refusals(100.0 + cost(1000)) == 1


def test_a_refusal_waits_for_no_prompt_of_anothers_that_stands_behind_a_longer_one() -> None:
    """Its short one would fit into the other tenant's share, but comes after the long one, which isn't done by then."""
    queue = taught()
    for number, tokens in enumerate((1000, 100)):
        queue.add(RequestId(f"{number}"), tokens, 0, 100.0, A)
    queue.refused(500, 0, 100.0, 100.0 + 2 * cost(500) + 0.01, B)
    assert queue.take_false_refusals(100.0) == 1
