"""Whom a draining worker offers, by itself: what routers are told of each request, and when again."""

from __future__ import annotations

from tests.support.decode_parts import DecodeParts
from twinpool.contracts.messages.worker_events import MigrationWanted
from twinpool.decode.migration.drain_offers import JUDGE_EVERY_S, STEPS_TO_TELL, DrainAdvisor, MigrationCosts
from twinpool.decode.request import DecodeRequest, RouterEvent


def advisor_of(parts: DecodeParts) -> DrainAdvisor:
    return DrainAdvisor(parts.requests, parts.manager.spec, MigrationCosts(parts.lengths), parts.clock)


def told(events: list[RouterEvent]) -> list[tuple[str, bool, bool]]:
    """Of each request that is spoken of: whether it runs, and whether it may stay after all."""
    wanted = [one.event for one in events if isinstance(one.event, MigrationWanted)]
    return [(str(event.request_id), event.started, event.withdrawn) for event in wanted]


def steady(request: DecodeRequest, step_s: float) -> None:
    """It has taken enough steps for its pace to be known."""
    request.marks["first_step"] = 0.0
    request.arrived = -step_s * (STEPS_TO_TELL - 1)
    for token in range(STEPS_TO_TELL):
        request.commit([token])


def test_who_waits_and_who_runs_is_offered_once() -> None:
    parts = DecodeParts()
    parts.run("runs")
    parts.ask("waits")
    advisor = advisor_of(parts)
    assert told(list(advisor.advise())) == [("runs", True, False), ("waits", False, False)]
    assert told(list(advisor.advise())) == []
    parts.clock.advance(10 * JUDGE_EVERY_S)
    assert told(list(advisor.advise())) == [], "its router knows"


def test_who_was_offered_before_it_began_is_offered_anew_when_it_runs() -> None:
    """Until then it had no state to take along, and could be moved without any."""
    parts = DecodeParts()
    request = parts.ask("a", most=50)
    advisor = advisor_of(parts)
    assert told(list(advisor.advise())) == [("a", False, False)]
    list(parts.scheduler.admit())
    assert told(list(advisor.advise())) == [], "its state is on its way here"
    parts.receiver.outcomes.append(parts.arrived(request))
    assert len(list(parts.transfers.poll())) == 1
    parts.scheduler.start(request)
    assert told(list(advisor.advise())) == [("a", True, False)]
    assert told(list(advisor.advise())) == []


def test_who_is_sooner_done_here_stays_and_is_judged_again() -> None:
    parts = DecodeParts()
    (request,) = parts.run("a", most=50)
    steady(request, step_s=0.001)
    advisor = advisor_of(parts)
    advisor.costs.bytes_per_s = 1.0
    assert told(list(advisor.advise())) == []
    assert advisor.counters == {"left_to_finish": 1}
    assert advisor.next_deadline is None, "the worker doesn't drain"
    parts.requests.draining = True
    assert advisor.next_deadline == JUDGE_EVERY_S
    advisor.costs.bytes_per_s = 1e12
    request.arrived -= 100.0
    assert told(list(advisor.advise())) == [], "it was judged a moment ago"
    parts.clock.advance(JUDGE_EVERY_S)
    assert told(list(advisor.advise())) == [("a", True, False)]
    assert advisor.next_deadline is None


def test_who_is_retracted_is_taken_back_and_offered_when_it_runs_again() -> None:
    parts = DecodeParts()
    (request,) = parts.run("a", most=50)
    advisor = advisor_of(parts)
    list(advisor.advise())
    parts.scheduler.retract(request)
    assert told(list(advisor.advise())) == [("a", False, True)]
    assert told(list(advisor.advise())) == []


def test_whose_migration_came_to_nothing_is_left_alone_for_a_while() -> None:
    parts = DecodeParts()
    (request,) = parts.run("a", most=50)
    advisor = advisor_of(parts)
    advisor.stays(request)
    assert told(list(advisor.advise())) == []
    parts.clock.advance(JUDGE_EVERY_S)
    assert told(list(advisor.advise())) == [("a", True, False)]


def test_where_the_worker_stays_those_that_were_offered_and_have_not_begun_to_leave_stay_too() -> None:
    parts = DecodeParts()
    first, _ = parts.run("a", "b", most=50)
    advisor = advisor_of(parts)
    list(advisor.advise())
    first.stopping = True
    assert told(advisor.withdraw()) == [("b", True, True)]
    assert told(advisor.withdraw()) == []


def test_where_the_worker_stays_nobody_is_left_to_finish_any_more() -> None:
    """`twinpool drain` counts them: those of a drain that was taken back are no part of the next one."""
    parts = DecodeParts()
    (request,) = parts.run("a", most=50)
    advisor = advisor_of(parts)
    advisor.stays(request)
    assert list(advisor.advise()) == []
    assert advisor.counters == {"left_to_finish": 1}
    assert advisor.withdraw() == []
    assert advisor.counters == {"left_to_finish": 0}


def test_who_has_ended_is_forgotten() -> None:
    parts = DecodeParts()
    (request,) = parts.run("a", most=50)
    advisor = advisor_of(parts)
    advisor.stays(request)
    advisor.forget(request)
    advisor.forget(request)
    parts.requests.draining = True
    assert advisor.next_deadline is None


def test_a_requests_pace_is_that_of_its_steps_however_long_its_prompt_took() -> None:
    """Ten more tokens at a second each: as long as ten seconds' bytes, less what a migration takes besides."""
    for bytes_per_s, goes in ((1 / 9.0, True), (1 / 11.0, False)):
        parts = DecodeParts(kind="all")
        (request,) = parts.run("a", prompt=6, most=10 + 1 + STEPS_TO_TELL)
        for token in range(STEPS_TO_TELL):
            request.commit([token])
        request.marks["first_step"] = 1000.0
        request.arrived = -1000.0 - (STEPS_TO_TELL - 1)
        advisor = advisor_of(parts)
        taken_along = {"full": 3, "window": 3, "state": 1}  # Of 10 positions, 9 of which a window sees.
        nbytes = sum(count * parts.manager.spec.unit_bytes(pool) for pool, count in taken_along.items())
        advisor.costs.bytes_per_s = bytes_per_s * nbytes
        assert [event[0] for event in told(list(advisor.advise()))] == (["a"] if goes else [])
