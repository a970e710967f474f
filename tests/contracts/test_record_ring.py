"""Request records that are kept: their bytes, whose they are, what is notable, and the order that an operator reads."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from twinpool.contracts.ids import Role
from twinpool.contracts.messages.request_record import (
    ANSWER_PREFIXES,
    RUNNING,
    PlacementChoice,
    RecordEvent,
    RecordRing,
    RecordSpan,
    RequestRecord,
    WorkerCandidate,
    in_order,
)

BARE = RequestRecord("r1-0", "r1", "c1", "router", "model", "", 10.0, 2.0, 0.5, "stop")


def ring(most: int = 10, max_bytes: int = 1 << 20) -> RecordRing[RequestRecord]:
    return RecordRing(most, max_bytes)


def test_a_rings_bytes_are_those_of_what_is_in_it() -> None:
    kept = ring(max_bytes=3 * replace(BARE, message="x" * 500).nbytes)
    for number in range(20):
        kept.put(replace(BARE, request_id=f"r{number % 3}-0", message="x" * (number * 37 % 500)))
        assert kept.nbytes == sum(one.nbytes for one in kept)
        assert kept.nbytes <= 3 * replace(BARE, message="x" * 500).nbytes
    kept.put(replace(BARE, message="x" * 10_000))
    assert (len(kept), kept.nbytes) == (0, 0), "one that is larger than all of it isn't kept"


def test_as_many_records_are_kept_as_fit_to_the_last_byte() -> None:
    exact = ring(max_bytes=4 * BARE.nbytes)
    for number in range(6):
        exact.put(replace(BARE, request_id=f"r{number}-0"))
    assert [one.request_id for one in exact] == ["r2-0", "r3-0", "r4-0", "r5-0"]


def test_a_record_that_comes_again_takes_the_place_of_its_own_and_is_the_newest() -> None:
    """The same id of another router is another request."""
    kept = ring()
    for router, request_id, outcome in (
        ("a", "r1-0", RUNNING), ("a", "r2-0", "stop"), ("b", "r1-0", "stop"), ("a", "r1-0", "length"),
    ):  # fmt: skip
        kept.put(replace(BARE, router=router, request_id=request_id, outcome=outcome))
    assert [(one.router, one.request_id, one.outcome) for one in kept] == [
        ("a", "r2-0", "stop"), ("b", "r1-0", "stop"), ("a", "r1-0", "length"),
    ]  # fmt: skip
    assert kept.get("b", "r1-0") is not kept.get("a", "r1-0")
    assert [one.outcome for one in kept.recent(2)] == ["length", "stop"]
    assert kept.recent(0) == kept.recent(-1) == []
    assert len(kept.recent(99)) == 3


def test_how_far_back_a_ring_goes_is_told_by_its_oldest() -> None:
    kept = ring()
    assert kept.kept_s(100.0) == 0.0
    for arrived in (40.0, 90.0):
        kept.put(replace(BARE, request_id=f"r{arrived}", arrived=arrived))
    assert kept.kept_s(100.0) == 60.0
    assert kept.kept_s(1.0) == 0.0, "clocks of machines differ"


def test_choices_are_in_order_of_their_numbers_and_requests_of_their_first_arrival() -> None:
    """Ten choices and more: 10 comes behind 9. Some end, and are told, before others."""
    made = [
        replace(BARE, request_id=f"{answer}-{number}", answer_id=answer, arrived=arrived + number)
        for answer, arrived in (("late", 20.0), ("early", 10.0))
        for number in (11, 2, 10, 0)
    ]
    refused = replace(BARE, request_id="refused", answer_id="", arrived=15.0)
    names = [one.request_id for one in in_order([made[0], refused, *reversed(made[1:])])]
    assert names == [
        "early-0", "early-2", "early-10", "early-11", "refused", "late-0", "late-2", "late-10", "late-11",
    ]  # fmt: skip


@pytest.mark.parametrize("prefix", ["", *ANSWER_PREFIXES])
def test_a_request_is_found_by_every_id_that_anybody_has_of_it(prefix: str) -> None:
    for asked in (f"{prefix}r1", f"{prefix}r1-0", "c1"):
        assert BARE.is_of(asked), asked
    for asked in (f"{prefix}c1" if prefix else "c2", f"{prefix}r1-1", f"{prefix}r", f"other-{prefix}r1"):
        assert not BARE.is_of(asked), asked


@pytest.mark.parametrize(
    ("change", "notable"),
    [
        ({}, False), ({"outcome": "length"}, False), ({"outcome": RUNNING}, False), ({"outcome": "abandoned"}, True),
        ({"outcome": "worker"}, True), ({"attempts": 2}, True), ({"migrations": 1}, True), ({"retractions": 1}, True),
    ],
)  # fmt: skip
def test_what_went_otherwise_than_usual_is_notable(change: dict[str, object], notable: bool) -> None:
    assert replace(BARE, **change).notable is notable


def test_every_part_of_a_record_takes_memory() -> None:
    candidate = WorkerCandidate("w", 1.0)
    choice = PlacementChoice(0.0, 1, Role.PREFILL, "w", "tokens")
    parts = {
        "spans": (RecordSpan("queue", 0.0, 1.0),),
        "events": (RecordEvent(0.0, "retried"),),
        "choices": (choice,),
        "message": "x" * 300,
    }
    for name, value in parts.items():
        assert replace(BARE, **{name: value}).nbytes >= BARE.nbytes + 100, name
    one = replace(BARE, choices=(choice,))
    assert replace(one, choices=(replace(choice, candidates=(candidate,)),)).nbytes > one.nbytes
    long: dict[str, RecordSpan | RecordEvent] = {
        "spans": RecordSpan("queue", 0.0, 1.0, detail="x" * 900),
        "events": RecordEvent(0.0, "retried", text="x" * 900),
    }
    for name, text in long.items():
        short = replace(BARE, **{name: parts[name]})
        assert replace(BARE, **{name: (text,)}).nbytes == short.nbytes + 900
