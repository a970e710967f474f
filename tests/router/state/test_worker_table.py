"""What a router knows of its workers: what a status says, what was sent since, and what others have there."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.ids import Incarnation, RequestId, Role, WorkerName
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from twinpool.router.state.worker_table import (
    DRAIN_ANSWER_S,
    REFUSAL_PAUSE_S,
    SEQUENCE_TOKENS,
    WorkerEntry,
    WorkerTable,
)

PAGE = 16


def view(name: str, role: Role, incarnation: int = 1, state: str = "ready", **said: Any) -> WorkerView:
    number, numbers = (
        Incarnation(incarnation),
        {"running": 0, "waiting": 0, "pages_total": 100, "pages_free": 50, **said},
    )
    status = WorkerStatus(WorkerName(name), role, state, 7, "n", number, **numbers)
    record = WorkerRecord(WorkerName(name), role, number, 7, "n", "e", "c", WorkerLimits(1000, 2000))
    return WorkerView(record, status)


def table(*views: WorkerView) -> WorkerTable:
    made = WorkerTable(RouterConfig(), page_tokens=PAGE, conditional=True)
    assert made.update(views) == []
    return made


def entry(made: WorkerTable, name: str) -> WorkerEntry:
    found = made.named(name)
    assert found is not None
    return found


def said(made: WorkerTable, name: str, **numbers: Any) -> WorkerEntry:
    """The entry after the controller has told a new status of it."""
    old = entry(made, name)
    status = replace(old.status, steps=old.status.steps + 1, **numbers)
    views = [WorkerView(e.record, status if e is old else e.status) for e in made]
    assert made.update(views) == []
    assert entry(made, name) is old
    return old


def test_what_was_promised_counts_until_the_next_status_which_has_it() -> None:
    made = table(view("decode-0", Role.DECODE))
    one = entry(made, "decode-0")
    assert one.headroom == 50 * PAGE
    one.book(RequestId("a"), 1, positions=100)
    one.book(RequestId("b"), 1, positions=30)
    assert one.headroom == 50 * PAGE - 130
    assert made.update([WorkerView(one.record, one.status)]) == []
    assert one.headroom == 50 * PAGE - 130, "the same status says nothing new"
    said(made, "decode-0", pages_free=42)
    assert one.headroom == 42 * PAGE, "what it has room for by now is less what has grown"
    one.book(RequestId("c"), 1, positions=5)
    assert one.headroom == 42 * PAGE - 5
    said(made, "decode-0", pages_total=0)
    assert one.headroom is None, "one that says nothing of its pages"


@pytest.mark.parametrize(
    ("role", "numbers", "mine", "others"),
    [
        (Role.PREFILL, {"prompt_tokens": 500, "running": 9}, 200, 300),
        (Role.DECODE, {"running": 5, "waiting": 6, "prompt_tokens": 500}, 3, 8),
        (Role.COLOCATED, {"running": 5, "waiting": 6, "prompt_tokens": 500}, 400, 100 + 11 * SEQUENCE_TOKENS),
    ],
)
def test_what_others_have_at_a_worker_is_what_it_says_beyond_what_was_sent_from_here(
    role: Role, numbers: dict[str, int], mine: int, others: int
) -> None:
    made = table(view("w", role))
    one = entry(made, "w")
    one.book(RequestId("a"), mine)
    said(made, "w", routers=2, **numbers)
    assert (one.load, one.others, one.whole_load) == (mine, others, mine + others)
    one.book(RequestId("b"), 1)
    assert one.whole_load == mine + others + 1, "what is sent since then is known besides"
    said(made, "w", routers=1)
    assert (one.others, one.whole_load) == (0, mine + 1), "its only router knows all of it"
    said(made, "w", routers=2, running=0, waiting=0, prompt_tokens=0)
    assert one.others == 0, "a status from before is no less than nothing"


def test_prompts_that_decode_workers_compute_for_others_count_beside_the_own_ones() -> None:
    made = table(view("decode-0", Role.DECODE), view("prefill-0", Role.PREFILL))
    one = entry(made, "decode-0")
    one.book(RequestId("a"), 1, prompt=70)
    said(made, "decode-0", routers=2, prompt_tokens=100, running=1)
    assert (one.local_tokens, one.other_local, one.others) == (70, 30, 0)
    one.prompt_done(70)
    assert (one.load, one.local_tokens, one.other_local) == (1, 0, 30)
    said(made, "decode-0", routers=1, prompt_tokens=100)
    assert one.other_local == 0
    other = entry(made, "prefill-0")
    other.book(RequestId("a"), 0, prompt=70)
    said(made, "prefill-0", routers=2, prompt_tokens=100)
    assert (other.load, other.local_tokens, other.other_local, other.others) == (70, 0, 0, 30)
    other.unbook(RequestId("a"), 0, prompt=70)
    assert (other.load, other.requests) == (0, set())


def test_an_incarnation_that_follows_has_nothing_of_the_one_before_and_no_other_loses_its_own() -> None:
    made = table(view("decode-0", Role.DECODE), view("decode-1", Role.DECODE))
    old, other = entry(made, "decode-0"), entry(made, "decode-1")
    for one in (old, other):
        one.linked = True
        one.book(RequestId("a"), 1, positions=10)
        one.request_drain(100.0)
    assert made.update([view("decode-0", Role.DECODE, 2), WorkerView(other.record, other.status)]) == [old]
    new = entry(made, "decode-0")
    assert (new.linked, new.load, new.promised, new.leaves_until, new.requests) == (False, 0, 0, 0.0, set())
    assert (other.linked, other.load, other.promised) == (True, 1, 10)
    assert made.get(old.key) is None
    assert made.get(new.key) is new
    assert made.update([view("decode-0", Role.DECODE, 1), WorkerView(other.record, other.status)]) == []
    assert entry(made, "decode-0") is new, "an older table brings nobody back"
    assert made.update([]) == [new, other]
    assert list(made) == []


def test_who_is_gone_is_lost_once_and_who_comes_back_is_another() -> None:
    made = table(view("decode-0", Role.DECODE))
    one = entry(made, "decode-0")
    for state, lost in (("draining", []), ("left", [one]), ("left", []), ("dead", [])):
        assert made.update([view("decode-0", Role.DECODE, state=state)]) == lost, state
    assert entry(made, "decode-0") is one
    assert made.update([view("decode-0", Role.DECODE, 2)]) == [one]


def test_a_worker_serves_and_stays_by_what_it_said_last_itself() -> None:
    made = table(view("decode-0", Role.DECODE), view("decode-1", Role.DECODE), view("prefill-0", Role.PREFILL))
    one, now = entry(made, "decode-0"), 100.0
    assert not one.serves(now), "no link"
    for each in made:
        each.linked = True
    assert [e.record.name for e in made.serving(Role.DECODE, now)] == ["decode-0", "decode-1"]
    made.refused(one.key, now)
    assert not one.serves(now + REFUSAL_PAUSE_S - 0.01)
    assert one.serves(now + REFUSAL_PAUSE_S)
    one.request_drain(now)
    now += DRAIN_ANSWER_S
    assert one.serves(now - 0.01)
    assert not one.stays(now - 0.01)
    assert one.stays(now), "it has not heard of it"
    one.request_drain(now)
    one.cancel_drain()
    assert one.stays(now)
    assert made.staying(Role.DECODE, now) == [one, entry(made, "decode-1")]
    said_draining = replace(one.status, state="draining")
    made.update([WorkerView(e.record, said_draining if e is one else e.status) for e in made])
    assert not one.serves(now)
    assert made.serving_counts(now) == {Role.DECODE: 1}, "the roles without which nothing can be answered"


def test_others_like_a_worker_are_those_that_are_there_or_come_back() -> None:
    decode = view("decode-0", Role.DECODE)
    for state, there in (("ready", True), ("starting", True), ("dead", True), ("draining", True), ("left", False)):
        made = table(decode, view("decode-1", Role.DECODE, state=state), view("prefill-0", Role.PREFILL))
        assert made.others_like(entry(made, "decode-0").key) is there, state
        assert not made.others_like(entry(made, "prefill-0").key)


def test_what_fits_is_the_most_of_any_worker_of_the_role_that_has_said_it() -> None:
    made = table(
        view("decode-0", Role.DECODE), view("decode-1", Role.DECODE), view("decode-2", Role.DECODE, state="dead"),
        view("prefill-0", Role.PREFILL),
    )  # fmt: skip
    sizes = {"decode-0": 0, "decode-1": 700, "decode-2": 9000, "prefill-0": 8000}
    made.update([WorkerView(replace(e.record, fits=WorkerLimits(sizes[e.record.name], 2000)), e.status) for e in made])
    assert (made.max_positions(Role.DECODE), made.max_positions(Role.PREFILL)) == (700, 8000)
    assert made.max_positions(Role.COLOCATED) is None
