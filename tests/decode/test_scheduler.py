"""The decode scheduler by itself: admission, the batch, and the one queue that each request is in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.decode_parts import DecodeParts
from twinpool.cache.manager.allocations import Allocations
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.messages.router_commands import BACKGROUND
from twinpool.decode.request import DecodePhase, DecodeRequest, RequestFailed
from twinpool.decode.retraction.memory_pressure import KNOWN


def test_requests_are_admitted_first_come_first_served() -> None:
    parts = DecodeParts(pages=8)
    first, second, third = (parts.ask(name, prompt=12, most=4) for name in "abc")
    assert list(parts.scheduler.admit()) == []
    assert (first.phase, second.phase) == (DecodePhase.ARRIVING, DecodePhase.WAITING)
    assert third.phase is DecodePhase.WAITING, "the one before it goes first"
    assert list(parts.scheduler.waiting) == [second, third]
    parts.leave(first)
    list(parts.scheduler.admit())
    assert second.phase is DecodePhase.ARRIVING
    assert "grant" in second.marks
    parts.leave(second, third)
    assert parts.scheduler.check() == parts.manager.check() == []


def test_whoever_has_the_higher_priority_gets_pages_first_and_equals_by_arrival() -> None:
    parts = DecodeParts(pages=8)
    asked = {"a": 0, "b": 2, "c": 0, "d": 2, "e": 1}
    requests = {}
    for name, priority in asked.items():
        requests[name] = parts.ask(name, prompt=12, most=4, priority=priority)
        parts.clock.advance(1)
    assert [str(r.submit.request_id) for r in parts.scheduler.waiting] == ["b", "d", "e", "a", "c"]
    list(parts.scheduler.admit())
    assert [name for name, r in requests.items() if r.phase is DecodePhase.ARRIVING] == ["b"]
    parts.scheduler.requeue(requests["b"])
    assert next(iter(parts.scheduler.waiting)) is requests["b"], "it keeps its place"


def test_who_migrates_and_finds_no_room_is_told_at_once() -> None:
    parts = DecodeParts(pages=8)
    first = parts.ask("a", prompt=20, most=4)
    moving = parts.ask("b", prompt=20, most=4, migrating=True)
    assert list(parts.scheduler.admit()) == [RequestFailed(moving, ErrorKind.OVERLOADED, "there is no room for it now")]
    assert first.phase is DecodePhase.ARRIVING


def test_who_migrates_is_told_at_once_also_while_a_retracted_request_comes_first() -> None:
    parts = DecodeParts()
    (leaving,) = parts.run("a")
    leaving.launched += 1  # Its last step is under way, so it stays.
    parts.scheduler.retract(leaving)
    waits, moving = parts.ask("b"), parts.ask("c", migrating=True)
    assert list(parts.scheduler.admit()) == [RequestFailed(moving, ErrorKind.OVERLOADED, "there is no room for it now")]
    assert waits.phase is DecodePhase.WAITING


def test_a_batch_takes_its_budget_and_who_waited_longest_comes_first() -> None:
    parts = DecodeParts(decode={"max_batch_tokens": 2})
    first, second, third = parts.run("a", "b", "c")
    batch = parts.scheduler.next_batch()
    assert batch == [first, second]
    assert [r.planned - r.launched for r in (first, second, third)] == [1, 1, 0]
    parts.scheduler.launched(batch)
    assert list(parts.scheduler.running) == [third, first, second]


def test_prefills_rate_is_that_of_prompts_which_prefill_computed() -> None:
    """What another decode worker hands on takes no prefill: it says nothing of how long a prompt takes again."""
    parts = DecodeParts()
    for name, computed, expected in (("a", 0, 0.0), ("b", 6, 3.0), ("c", 0, 3.0)):
        request = parts.ask(name, prompt=6)
        parts.clock.advance(7.0)  # In decode's own queue: prefill hasn't been asked.
        list(parts.scheduler.admit())
        parts.clock.advance(0.5 if not computed else 2.0)
        arrived = parts.arrived(request)
        metadata = replace(arrived.metadata, computed_tokens=computed)
        parts.receiver.outcomes.append(replace(arrived, metadata=metadata))
        assert len(list(parts.transfers.poll())) == 1
        parts.scheduler.start(request)
        assert parts.scheduler.retraction.rates.positions_per_s == expected


def test_who_is_paused_is_in_no_batch_and_resumes_last() -> None:
    parts = DecodeParts()
    first, second = parts.run("a", "b")
    parts.scheduler.pause(first)
    assert str(first.phase) == "leaving"
    assert parts.scheduler.next_batch() == [second]
    parts.scheduler.resume(first)
    assert str(first.phase) == "running"
    assert list(parts.scheduler.running) == [second, first]
    assert parts.scheduler.check() == []


def test_who_lacks_a_page_for_its_step_has_another_leave_the_device() -> None:
    parts = DecodeParts(pages=5)
    for _ in range(KNOWN):
        parts.lengths.ended(1)  # So both are let in, with two pages each.
    first, second = parts.run("a", "b", prompt=4, most=8)
    for _ in range(5):
        for request in parts.scheduler.next_batch():
            request.launched = request.planned
            request.commit([1])
    assert {first.phase, second.phase} == {DecodePhase.RUNNING, DecodePhase.RETRACTING}
    assert parts.scheduler.busy
    assert len(parts.scheduler.running) == 1
    assert parts.scheduler.check() == []


def test_prompts_computed_here_make_way_by_the_highest_priority_of_those_that_lack_a_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts, asked = DecodeParts(pages=5), list[int]()
    monkeypatch.setattr(parts.transfers, "preempt", asked.append)
    for _ in range(KNOWN):
        parts.lengths.ended(1)
    for name, priority in (("a", 3), ("b", 1)):
        parts.run(name, prompt=4, most=8, priority=priority)
    for _ in range(5):
        for request in parts.scheduler.next_batch():
            request.launched = request.planned
            request.commit([1])
    assert asked == [3]
    assert parts.scheduler.next_batch() == []
    assert asked == [3], "pages of one that leaves the device are about to be free"


def test_every_so_many_steps_all_leave_on_purpose() -> None:
    parts = DecodeParts(faults={"retract_every": 2})
    requests = parts.run("a", "b")
    parts.scheduler.launched(parts.scheduler.next_batch())
    assert {r.phase for r in requests} == {DecodePhase.RUNNING}
    parts.scheduler.launched([])
    assert {r.phase for r in requests} == {DecodePhase.RETRACTING}
    assert [r.retractions for r in requests] == [0, 0], "it says nothing of how often they were in the way"


def test_whoever_ends_is_in_no_queue_any_more() -> None:
    parts = DecodeParts()
    waiting, (running, retracted, paused) = parts.ask("w"), parts.run("a", "b", "c")
    parts.scheduler.retract(retracted)
    parts.scheduler.pause(paused)
    parts.leave(waiting, running, retracted, paused)
    assert not parts.scheduler.waiting
    assert not parts.scheduler.busy
    assert parts.scheduler.check() == parts.manager.check() == []
    assert len(parts.manager.allocations) == 0


def granted(parts: DecodeParts, *asked: str) -> list[str]:
    """Who gets pages, one after the other, as each lets go of them."""
    order: list[str] = []
    while len(order) < len(asked):
        list(parts.scheduler.admit())
        (one,) = (r for r in parts.requests if r.phase is DecodePhase.ARRIVING)
        order.append(str(one.submit.request_id))
        parts.leave(one)
    return order


def test_tenants_get_pages_by_what_each_had_and_each_first_come_first_served() -> None:
    parts = DecodeParts(pages=8)
    names = ("a1", "a2", "a3", "a4", "z1", "z2")
    for name in names:
        parts.ask(name, prompt=12, most=4, tenant=name[0])
        parts.clock.advance(1)
    assert granted(parts, *names) == ["a1", "z1", "a2", "z2", "a3", "a4"]
    assert parts.scheduler.check() == parts.manager.check() == []


def test_weights_hold_for_pages_too_and_priorities_come_before_them() -> None:
    parts = DecodeParts(pages=8)
    names = ("a1", "a2", "a3", "z1", "z2", "z3", "urgent")
    for name in names:
        own = {"tenant": name[0], "weight": 2 if name[0] == "z" else 1, "priority": name == "urgent"}
        parts.ask(name, prompt=12, most=4, **own)
        parts.clock.advance(1)
    assert granted(parts, *names) == ["urgent", "a1", "z1", "z2", "a2", "z3", "a3"]


def test_what_a_tenant_draws_while_others_wait_is_on_its_account() -> None:
    """Of two that came at once the one that has drawn meanwhile comes second, though it was first."""
    for tenant, order in (("a", ["z1", "a1"]), ("z", ["a1", "z1"])):
        parts = DecodeParts(pages=16)
        (running,) = parts.run(f"{tenant}0", prompt=12, most=40, tenant=tenant)
        for name in ("a1", "z1"):
            parts.ask(name, prompt=32, most=8, tenant=name[0])
            parts.clock.advance(1)
        for _ in range(3):
            assert list(parts.scheduler.admit()) == []
            assert parts.scheduler.next_batch() == [running]
            running.launched = running.planned
            running.commit([1])
        parts.leave(running)
        assert granted(parts, *order) == order


def test_what_the_tree_had_of_a_prompt_is_on_no_account() -> None:
    """Nothing of the first prompt has to be sent, so its tenant has had nothing yet when the next ones' turn comes."""
    parts = DecodeParts(pages=9)
    parts.leave(*parts.run("ab", prompt=24, most=4))
    names = {"ba": 24, "a2": 20, "z1": 20, "z2": 20}
    for name, prompt in names.items():
        parts.ask(name, prompt=prompt, most=4, tenant="z" if name[0] == "z" else "a")
        parts.clock.advance(1)
    assert granted(parts, *names) == ["ba", "a2", "z1", "z2"]


def test_where_nobody_waits_nothing_is_remembered() -> None:
    parts = DecodeParts(pages=8)
    assert granted(parts, *[str(parts.ask(f"a{n}", prompt=12, most=4, tenant="a").submit.room) for n in range(3)])
    list(parts.scheduler.admit())
    names = ("a3", "z1")
    for name in names:
        parts.ask(name, prompt=12, most=4, tenant=name[0])
        parts.clock.advance(1)
    assert granted(parts, *names) == ["a3", "z1"]


@pytest.mark.parametrize("shared", ["its prompt", "all of it"])
def test_a_request_that_shares_pages_anew_waits_for_those_that_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch, shared: str
) -> None:
    """The tree may have the same pages, and they may still be loading: until they came, no step reads its state."""
    parts = DecodeParts()
    (request,) = parts.run("a", most=20)
    loading = False
    monkeypatch.setattr(Allocations, "ready", lambda allocations, allocation: not loading)
    assert parts.scheduler.next_batch() == [request]
    parts.steps.launch([request])
    assert list(parts.steps.landed(go_on=False)) == []
    loading = True
    share = parts.pages.cache_prompt if shared == "its prompt" else parts.pages.cache
    share(request)
    assert parts.scheduler.next_batch() == []
    loading = False
    assert parts.scheduler.next_batch() == [request]


def test_a_step_has_a_page_for_its_position_in_every_pool_however_few_are_asked_for() -> None:
    parts = DecodeParts(pages=6)
    (request,) = parts.run("a", prompt=6, most=40)
    for position in range(6, 20):  # Five pages of four tokens, and the null page.
        assert parts.scheduler.next_batch() == [request], position
        assert 4 * len(request.held.tables["full"]) > position
        parts.steps.launch([request])
        assert list(parts.steps.landed(go_on=False)) == []
    assert parts.scheduler.next_batch() == []


def _end(parts: DecodeParts, *requests: DecodeRequest) -> None:
    parts.leave(*requests)
    assert parts.scheduler.check() == []


def test_background_requests_take_steps_only_while_no_other_runs() -> None:
    parts = DecodeParts()
    (batch,) = parts.run("a", priority=BACKGROUND)
    assert parts.scheduler.next_batch() == [batch]
    (live,) = parts.run("b", priority=BACKGROUND + 1)
    parts.scheduler.launched([batch])
    batch.commit([1])
    for _ in range(3):
        assert parts.scheduler.next_batch() == [live]
        parts.scheduler.launched([live])
        live.commit([1])
    _end(parts, live)
    assert parts.scheduler.next_batch() == [batch]
    _end(parts, batch)


def test_background_requests_rest_while_the_prompt_of_one_that_just_came_is_under_way() -> None:
    """Its first step would wait for theirs. A prompt that takes longer stops them no longer."""
    parts = DecodeParts(decode={"background_rest_s": 2.0})
    (batch,) = parts.run("a", priority=BACKGROUND)
    parts.clock.advance(60.0)
    arriving = parts.ask("b", priority=BACKGROUND + 1)
    assert parts.scheduler.next_batch() == []
    parts.clock.advance(1.9)
    assert parts.scheduler.next_batch() == []
    parts.clock.advance(0.2)
    assert parts.scheduler.next_batch() == [batch]
    parts.scheduler.launched([batch])
    batch.commit([1])
    another = parts.ask("c", priority=BACKGROUND)
    assert parts.scheduler.next_batch() == [batch], "one of their own stops nobody"
    _end(parts, batch, arriving, another)


def test_so_many_background_rows_as_are_configured_go_beside_others() -> None:
    parts = DecodeParts(decode={"background_rows": 1})
    first, second = parts.run("a", "b", priority=BACKGROUND)
    (live,) = parts.run("c")
    assert parts.scheduler.next_batch() == [first, live]
    parts.scheduler.launched([first, live])
    assert parts.scheduler.next_batch() == [second, live], "those that have waited longest"
    _end(parts, first, second, live)


def test_a_background_request_gets_pages_once_no_other_is_here() -> None:
    parts = DecodeParts()
    (live,) = parts.run("a")
    waits = parts.ask("b", priority=BACKGROUND)
    assert list(parts.scheduler.admit()) == []
    assert waits in parts.scheduler.waiting
    _end(parts, live)
    assert list(parts.scheduler.admit()) == []
    assert waits.phase is DecodePhase.ARRIVING
    _end(parts, waits)


def test_a_background_request_leaves_for_another_that_lacks_room_and_comes_back_last() -> None:
    parts = DecodeParts(pages=8, host_pages=8, decode={"retract": "copy"})
    (batch,) = parts.run("a", prompt=12, most=4, priority=BACKGROUND)
    live = parts.ask("b", prompt=20, most=4)
    more = parts.ask("c", prompt=12, most=4, priority=BACKGROUND)
    assert list(parts.scheduler.admit()) == []
    assert batch.phase is DecodePhase.RETRACTING
    for _ in range(20):
        assert list(parts.scheduler.admit()) == []
        if live.phase is DecodePhase.ARRIVING:
            break
    assert (batch.phase, live.phase) == (DecodePhase.RETRACTED, DecodePhase.ARRIVING)
    _end(parts, live)
    for _ in range(20):
        assert list(parts.scheduler.admit()) == []
        assert parts.scheduler.returned() == []
    assert (batch.phase, more.phase) == (DecodePhase.RUNNING, DecodePhase.WAITING)
    _end(parts, batch, more)


def test_a_background_request_that_was_retracted_stays_away_while_another_runs() -> None:
    parts = DecodeParts(pages=8, host_pages=8, decode={"retract": "copy"})
    (batch,) = parts.run("a", prompt=12, most=4, priority=BACKGROUND)
    (live,) = parts.run("b", prompt=4, most=4)
    parts.scheduler.retract(batch)
    for _ in range(20):
        assert list(parts.scheduler.admit()) == []
        assert parts.scheduler.returned() == []
    assert (batch.phase, list(parts.scheduler.running)) == (DecodePhase.RETRACTED, [live]), (
        "it would take no step, and leave again for the next that lacks room"
    )
    _end(parts, live)
    for _ in range(20):
        assert list(parts.scheduler.admit()) == []
        parts.scheduler.returned()
    assert batch.phase is DecodePhase.RUNNING
    _end(parts, batch)


def test_prompts_of_equals_still_wait_for_who_was_retracted() -> None:
    parts = DecodeParts()
    (leaving,) = parts.run("a", priority=BACKGROUND)
    leaving.launched += 1  # Its last step is under way, so it stays.
    parts.scheduler.retract(leaving)
    waits = parts.ask("b", priority=BACKGROUND)
    assert list(parts.scheduler.admit()) == []
    assert waits.phase is DecodePhase.WAITING
