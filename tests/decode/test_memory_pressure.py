"""Who leaves the device under pressure, by itself: never the last that could go on, unless it is in its own way."""

from __future__ import annotations

import pytest

from tests.support.decode_parts import DecodeParts
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.decode.request import DecodeRequest


def stepped(parts: DecodeParts, *names: str) -> list[DecodeRequest]:
    requests = parts.run(*names)
    for request in requests:
        request.stepped = True
    return requests


def test_of_several_that_could_all_leave_one_stays() -> None:
    parts = DecodeParts()
    first, second = stepped(parts, "a", "b")
    chosen = parts.scheduler.pressure.choose_victims([first, second], [first, second])
    assert len(chosen) == 1


def test_while_one_is_on_its_way_out_nobody_follows() -> None:
    parts = DecodeParts()
    first, second, third = stepped(parts, "a", "b", "c")
    parts.scheduler.retract(third)
    assert parts.scheduler.pressure.choose_victims([first], [first, second]) == [], "its pages are about to be free"


def test_a_request_that_has_all_that_is_allocated_leaves_and_nothing_else_would_make_room_for_it() -> None:
    parts = DecodeParts()
    (only,) = stepped(parts, "a")
    assert parts.scheduler.pressure.choose_victims([only], [only]) == [only]


def test_a_request_alone_waits_where_somebody_elses_pages_or_copies_are_still_to_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = DecodeParts()
    (only,) = stepped(parts, "a")
    parts.ask("arriving")
    list(parts.scheduler.admit())
    assert parts.scheduler.pressure.choose_victims([only], [only]) == [], "the other's pages may come back first"
    parts = DecodeParts()
    (only,) = stepped(parts, "a")
    monkeypatch.setattr(KVCacheManager, "busy", property(lambda self: True))
    assert parts.scheduler.pressure.choose_victims([only], [only]) == [], "a copy is under way"


def test_cached_pages_of_a_prompt_that_nobody_holds_are_room_and_not_beside_that_the_requests_own() -> None:
    """Of 31 pages the first is expected to come to 14: 17 are left for the other, the 6 of its prompt among them."""
    for most, expected in (44, 17), (48, 18):
        parts = DecodeParts(32)
        parts.leave(*parts.run("ab", prompt=24, most=4))
        (first,) = parts.run("c", prompt=6, most=50)
        other = parts.ask("ba", prompt=24, most=most)
        supply, pressure = parts.manager.supply, parts.scheduler.pressure
        assert (supply.cached_pages(other.prefix), supply.kept_pages(other.prefix)) == (6, 0)
        assert [pressure._expected_pages(request) for request in (first, other)] == [14, expected]
        assert list(parts.scheduler.admit()) == []
        assert (other.allocation is not None) == (expected == 17)


def test_who_is_to_leave_no_more_comes_back_where_there_is_room_for_all_of_its_answer() -> None:
    """Of 31 pages the other has 7; its answer may come to 27 in all, and is expected to come to 3."""
    parts = DecodeParts(32, decode={"retract_limit": 2, "first_answer_tokens": 4})
    parts.run("b", prompt=24, most=4)
    often = parts.ask("a", prompt=6, most=100)
    room = []
    for often.retractions in (1, 2):
        room.append(parts.scheduler.pressure.has_room_for(often))
    assert room == [True, False]
