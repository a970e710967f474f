"""The commit of decode's steps by itself: what a row draws counts, or says why not."""

from __future__ import annotations

import pytest

from contracts.errors import ErrorKind
from contracts.messages.worker_events import Tokens
from decode.request.request import DecodeRequest
from decode.request.request_outcomes import RequestFailed, RequestFinished, RouterEvent
from engine.runner.batch import NONFINITE, DrawnToken, RowOutput
from tests.decode_parts import SESSION, DecodeParts


def step(parts: DecodeParts) -> list[RouterEvent | RequestFinished | RequestFailed]:
    batch = parts.scheduler.next_batch()
    parts.steps.launch(batch)
    parts.scheduler.launched(batch)
    return list(parts.steps.landed(go_on=False))


def output(parts: DecodeParts, request: DecodeRequest, row: RowOutput, patch: pytest.MonkeyPatch) -> list[object]:
    """What is told where the next step has this row."""
    batch = parts.scheduler.next_batch()
    assert batch == [request]
    parts.steps.launch(batch)
    patch.setattr(parts.steps._overlap, "landed", lambda *, go_on: iter([[(request, row)]]))
    return list(parts.steps.landed(go_on=False))


def test_each_step_tells_a_token_at_its_position_and_the_last_the_end() -> None:
    parts = DecodeParts()
    (request,) = parts.run("a", prompt=6, most=3)
    parts.clock.advance(0.5)
    first, second = step(parts), step(parts)
    assert [told.event for told in first if isinstance(told, RouterEvent)] == [
        Tokens(request.submit.request_id, 0, 7, (request.tokens[7],), ())
    ]
    assert [told.session for told in first if isinstance(told, RouterEvent)] == [SESSION]
    assert second[1:] == [RequestFinished(request, "length", None)]
    assert (request.committed, request.generated) == (8, 3)
    assert request.marks["first_step"] == 0.5
    assert (parts.steps.steps, parts.steps.counters["tokens_generated"]) == (2, 2)
    assert parts.steps.committed
    assert len(parts.steps) == 0


def test_a_stop_token_ends_the_answer_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = DecodeParts()
    (request,) = parts.run("a", most=50)
    stop = DrawnToken(5, None)
    object.__setattr__(request.submit.sampling, "stop_token_ids", (5,))
    told = output(parts, request, RowOutput(stop), monkeypatch)
    assert told[1:] == [RequestFinished(request, "stop", 5)]


def test_a_row_of_a_page_that_was_given_away_fails_its_request_and_nothing_of_it_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = DecodeParts()
    (request,) = parts.run("a")
    tokens = list(request.tokens)
    (told,) = output(parts, request, RowOutput(stale=True), monkeypatch)
    assert told == RequestFailed(request, ErrorKind.WORKER, "a step found a page of it given away")
    assert request.tokens == tokens
    assert request.allocation is not None
    assert request.allocation.invalid
    assert parts.steps.counters["stale_pages"] == 1


def test_logits_that_are_no_numbers_fail_their_request_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = DecodeParts()
    (request,) = parts.run("a")
    (told,) = output(parts, request, RowOutput(nonfinite=True), monkeypatch)
    assert told == RequestFailed(request, ErrorKind.NONFINITE, NONFINITE)
    assert parts.fitness.rows == 1
    assert parts.steps.counters["stale_pages"] == 0


def test_who_ended_while_a_step_was_under_way_has_no_use_for_it() -> None:
    parts = DecodeParts()
    first, second = parts.run("a", "b", most=2)
    batch = parts.scheduler.next_batch()
    parts.steps.launch(batch)
    told = []
    for one in parts.steps.landed(go_on=False):
        told.append(one)
        if one == RequestFinished(first, "length", None):
            parts.scheduler.pause(second)  # As if it had ended: its phase isn't one of those that take steps.
    assert RequestFinished(second, "length", None) not in told
    assert second.committed == 6


def test_requests_whose_pages_turned_out_damaged_fail() -> None:
    parts = DecodeParts()
    first, second = parts.run("a", "b")
    assert first.allocation is not None
    told = list(parts.steps.recover([first.allocation]))
    assert told == [RequestFailed(first, ErrorKind.DAMAGED, "a page loaded for it was damaged")]
    assert second.allocation is not None


def test_a_fault_that_delays_steps_delays_each_and_without_it_none_pauses() -> None:
    slow = DecodeParts(faults={"step_delay_s": 0.25})
    slow.run("a")
    step(slow)
    assert slow.clock.now() == 0.25
    step(slow)
    assert slow.clock.now() == 0.5
