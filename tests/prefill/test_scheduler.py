"""The prefill scheduler by itself: how a step's budget is divided, by how far each request has come."""

from __future__ import annotations

from typing import cast

import pytest

from tests.support.prefill_parts import PrefillParts
from twinpool.cache.tiers.prefetch import PrefetchRequest
from twinpool.contracts.messages.router_commands import BACKGROUND
from twinpool.prefill.request import PrefillPhase, PrefillRequest


def admitted(parts: PrefillParts) -> list[PrefillPhase]:
    parts.scheduler.admit()
    return [request.phase for request in parts.requests]


def test_who_is_launched_to_its_end_is_not_the_oldest_any_more() -> None:
    """Its last step is under way: it needs nothing, and short prompts have their share before the one behind it."""
    parts = PrefillParts(chunk_tokens=16, short_share=0.25)
    parts.ask("done", 12)
    assert admitted(parts) == [PrefillPhase.RUNNING]
    assert parts.step() == {"done": list(range(12))}
    parts.ask("long", 80)
    parts.ask("short", 6)
    admitted(parts)
    assert parts.step() == {"long": list(range(12)), "short": [0, 1, 2, 3]}
    assert parts.step() == {"long": list(range(12, 24)), "short": [4, 5]}


def test_who_nobody_waits_for_any_more_is_as_urgent_as_its_own_prompt() -> None:
    parts = PrefillParts(chunk_tokens=16, short_share=0.25)
    parts.ask("oldest", 60)
    longer = parts.ask("longer", 100)
    admitted(parts)
    assert parts.step() == {"oldest": list(range(16))}
    longer.awaited = 4
    assert longer.left == 4
    assert parts.step() == {"oldest": list(range(16, 28)), "longer": [0, 1, 2, 3]}
    assert longer.left == 96, "what was waited for is there"
    assert parts.step() == {"oldest": list(range(28, 44))}


@pytest.mark.parametrize("common", [(8, 24), (24, 8)])
def test_of_several_that_wait_for_a_prompt_the_one_that_waits_for_least_says_how_urgent_it_is(
    common: tuple[int, int],
) -> None:
    """Whichever came first; when that one has its pages, the other says."""
    parts = PrefillParts(chunk_tokens=16, short_share=0.25)
    oldest = parts.ask("oldest", 60)
    admitted(parts)
    for name, count in zip("ab", common, strict=True):
        parts.ask(name, 40, begins=oldest.tokens[:count])
    assert admitted(parts) == [PrefillPhase.RUNNING, PrefillPhase.WAITING, PrefillPhase.WAITING]
    assert (oldest.awaited, oldest.left) == (8, 8)
    oldest.planned = oldest.launched = oldest.shared = 8
    assert admitted(parts)[0] is PrefillPhase.RUNNING
    assert (oldest.awaited, oldest.left) == (24, 16)


def test_of_the_tokens_that_are_scored_a_chunk_has_as_many_as_it_computes() -> None:
    parts = PrefillParts(chunk_tokens=16)
    request = parts.ask("scored", 20, prompt_logprobs=1)
    admitted(parts)
    (chunk,) = parts.scheduler.next_batch()
    assert chunk.row.score == request.tokens[1:17]
    request.launched = request.planned
    (chunk,) = parts.scheduler.next_batch()
    assert chunk.row.score == request.tokens[17:], "nothing follows the last one"


def test_whoever_is_preempted_is_the_youngest_without_a_grant_and_each_is_counted_once() -> None:
    parts = PrefillParts(pages=9)
    old, young = parts.ask("old", 12), parts.ask("young", 12)
    admitted(parts)
    entitled = parts.ask("entitled", 20)
    parts.granted.add(entitled)
    assert admitted(parts) == [PrefillPhase.RUNNING, PrefillPhase.WAITING, PrefillPhase.RUNNING]
    assert (old.allocation is None, young.allocation is None) == (False, True)
    assert parts.scheduler.counters["preemptions"] == 1
    assert parts.manager.check() == []


def test_whoever_has_the_higher_priority_is_admitted_first_and_computed_first() -> None:
    parts = PrefillParts(max_running=2, chunk_tokens=16, short_share=0.25)
    low, _, same = parts.ask("low", 40), parts.ask("high", 60, priority=3), parts.ask("other", 12, priority=3)
    assert admitted(parts) == [PrefillPhase.WAITING, PrefillPhase.RUNNING, PrefillPhase.RUNNING]
    assert parts.step() == {"high": list(range(12)), "other": [0, 1, 2, 3]}, "a short one has its share among its like"
    assert (low.launched, same.left) == (0, 8)


def test_a_short_prompt_has_no_share_of_what_goes_to_a_higher_priority() -> None:
    parts = PrefillParts(chunk_tokens=16, short_share=0.25)
    parts.ask("short", 6)
    parts.ask("urgent", 24, priority=1)
    admitted(parts)
    assert parts.step() == {"urgent": list(range(16))}
    assert parts.step() == {"short": list(range(6)), "urgent": list(range(16, 24))}


def test_a_grant_comes_before_any_priority() -> None:
    parts = PrefillParts(max_running=1)
    parts.ask("urgent", 12, priority=9)
    parts.granted.add(parts.ask("granted", 12))
    assert admitted(parts) == [PrefillPhase.WAITING, PrefillPhase.RUNNING]


def test_of_those_without_a_grant_the_lowest_priority_is_preempted_and_of_these_the_youngest() -> None:
    parts = PrefillParts(pages=13)
    names = {"a": 1, "b": 0, "c": 0, "d": 1}
    requests = {name: parts.ask(name, 12, priority=priority) for name, priority in names.items()}
    admitted(parts)
    parts.granted.add(parts.ask("granted", 12))
    admitted(parts)
    assert [name for name, request in requests.items() if request.allocation is None] == ["c"]


def test_who_starts_over_is_as_urgent_as_its_own_tokens_make_it() -> None:
    parts = PrefillParts()
    first = parts.ask("a", 40)
    parts.scheduler.admit()
    parts.ask("b", 30, begins=first.tokens[:8])
    parts.scheduler.admit()
    assert (first.awaited, first.left) == (8, 8)
    parts.pages.preempt(first)
    assert first.left == 40, "nobody waits for what it doesn't compute"


def test_of_what_was_prefetched_the_youngests_is_given_up_first_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, given_up = PrefillParts(), list[PrefillRequest]()
    monkeypatch.setattr(parts.pages, "release_prefetch", given_up.append)
    waiting = [parts.ask(name, 9) for name in "abc"]
    for request in waiting[:2]:
        request.prefetch = cast(PrefetchRequest, object())
    assert parts.scheduler.give_up_prefetch(waiting)
    assert given_up == [waiting[1]]
    assert parts.scheduler.counters["prefetches_given_up"] == 1
    parts.pages.take(waiting[2])
    assert not parts.scheduler.give_up_prefetch(waiting), "pages come back without that"


def test_a_prompt_whose_last_step_is_under_way_yields_its_place_to_nobody() -> None:
    parts = PrefillParts()
    first, second = (parts.ask(name, 8, tenant="a") for name in ("a1", "a2"))
    other = parts.ask("b", 8, tenant="b")
    parts.granted.add(other)
    assert parts.scheduler.overserved(other, [first, second]) is second
    second.launched = len(second.tokens)
    assert parts.scheduler.overserved(other, [first, second]) is first
    first.launched = len(first.tokens)
    assert parts.scheduler.overserved(other, [first, second]) is None


def test_background_prompts_are_computed_only_in_steps_without_others() -> None:
    parts = PrefillParts(chunk_tokens=16, background_rest_s=0)
    batch, live = parts.ask("batch", 40, BACKGROUND), parts.ask("live", 20, BACKGROUND + 1)
    admitted(parts)
    assert parts.step() == {"live": list(range(16))}
    assert parts.step() == {"live": [16, 17, 18, 19]}, "what it leaves of the step stays empty"
    assert parts.scheduler.next_batch(beside=True) == [], "rows of others are in it"
    assert parts.step() == {"batch": list(range(16))}
    parts.leave(batch)
    parts.leave(live)


@pytest.mark.parametrize("last", ["prompt", "row"])
def test_background_prompts_rest_for_a_while_after_others_and_then_go_on_by_themselves(last: str) -> None:
    parts = PrefillParts(chunk_tokens=16, background_rest_s=0.5)
    scheduler, clock = parts.scheduler, parts.clock
    parts.ask("batch", 40, BACKGROUND)
    admitted(parts)
    assert (len(parts.step()["batch"]), scheduler.rest.ends(parts.requests)) == (16, None), "nobody else was here"
    if last == "prompt":
        parts.ask("live", 8)
        admitted(parts)
        assert parts.step() == {"live": list(range(8))}
    else:
        assert scheduler.next_batch(beside=True) == []
    ends = clock.now() + 0.5
    clock.advance(0.499)
    assert parts.step() == {}
    assert (
        scheduler.next_deadline,
        scheduler.rest.ends(parts.requests),
        scheduler.rest.computable(parts.requests),
    ) == (ends, ends, last == "prompt")
    clock.advance(0.001)
    assert (scheduler.rest.ends(parts.requests), scheduler.rest.computable(parts.requests)) == (None, True)
    assert parts.step() == {"batch": list(range(16, 32))}


def test_a_prompt_that_only_waits_lets_nobody_rest_and_beside_tokens_there_is_no_rest() -> None:
    """Who waits for what a background prompt holds would else wait for one that rests for its sake."""
    parts = PrefillParts(pages=11, chunk_tokens=16)
    parts.ask("batch", 36, BACKGROUND)
    admitted(parts)
    parts.ask("live", 12)
    assert admitted(parts) == [PrefillPhase.RUNNING, PrefillPhase.WAITING]
    assert [sum(map(len, parts.step().values())) for _ in range(2)] == [16, 16], "the pages that it waits for get free"
    parts = PrefillParts(chunk_tokens=16, background_tokens=4, background_rest_s=60)
    parts.ask("batch", 40, BACKGROUND)
    admitted(parts)
    assert len(parts.scheduler.next_batch(beside=True)[0].row.tokens) == 4
    assert (parts.scheduler.rest.ends(parts.requests), parts.scheduler.rest.computable(parts.requests)) == (None, True)


def test_a_step_has_so_many_background_tokens_beside_others_as_are_configured() -> None:
    parts = PrefillParts(chunk_tokens=16, background_tokens=8)
    for name, priority in (("far", BACKGROUND - 1), ("near", BACKGROUND), ("live", 0)):
        parts.ask(name, 6 if name == "near" else 20, priority)
    admitted(parts)
    assert parts.step() == {"live": list(range(16))}
    assert parts.step() == {"live": [16, 17, 18, 19], "near": [0, 1, 2, 3, 4, 5]}, "less than a page is left"


def test_steps_of_background_prompts_alone_are_short_as_somebody_may_come() -> None:
    parts = PrefillParts(pages=128, chunk_tokens=64, shared_step_s=0.010)
    parts.ask("batch", 200, BACKGROUND)
    admitted(parts)
    assert len(parts.step()["batch"]) == 64, "it isn't known what a token takes"
    for tokens in (16, 32, 64, 48):
        parts.cost.saw(tokens, 0, 0.002 + 0.0005 * tokens)
    assert len(parts.step()["batch"]) == 16, "a little less than 20, which take 10 ms"
    parts.ask("live", 100)
    admitted(parts)
    assert len(parts.step()["live"]) == 64


def test_nobody_waits_for_pages_that_a_background_prompt_computes_but_another_one() -> None:
    parts = PrefillParts(chunk_tokens=16)
    batch = parts.ask("batch", 40, BACKGROUND)
    admitted(parts)
    parts.ask("live", 40, begins=batch.tokens[:32])
    parts.ask("next", 40, BACKGROUND, begins=batch.tokens[:32])
    assert admitted(parts) == [PrefillPhase.RUNNING, PrefillPhase.RUNNING, PrefillPhase.WAITING]
