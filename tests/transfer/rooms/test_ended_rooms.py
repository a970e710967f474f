"""Ended rooms: bounded, and the last word of each as often as somebody asks."""

from __future__ import annotations

import pytest

from twinpool.contracts.ids import RoomId
from twinpool.transfer.rooms import room_states as ended_rooms
from twinpool.transfer.rooms.room_states import EndedRooms


def rooms(*names: str) -> list[RoomId]:
    return [RoomId(name) for name in names]


def test_a_room_that_has_ended_is_known_with_its_last_word_or_with_none() -> None:
    ended = EndedRooms[str]()
    a, b, c = rooms("a", "b", "c")
    ended.remember(a, "failed")
    ended.remember(b)
    assert (a in ended, b in ended, c in ended) == (True, True, False)
    assert (ended.last_word(a), ended.last_word(b), ended.last_word(c)) == ("failed", None, None)


def test_the_oldest_rooms_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_rooms, "_REMEMBERED", 2)
    ended = EndedRooms[str]()
    for room in rooms("a", "b", "c"):
        ended.remember(room, "over")
    assert [room in ended for room in rooms("a", "b", "c")] == [False, True, True]


def test_a_peer_is_told_again_what_it_was_told_in_order_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_rooms, "_TOLD", 3)
    ended = EndedRooms[str]()
    for room in rooms("a", "b", "c", "d"):
        ended.remember(room, f"{room} is over")
        ended.told("one", room)
    ended.remember(RoomId("e"))
    ended.told("one", RoomId("e"))
    ended.remember(RoomId("f"), "f is over")
    ended.told("other", RoomId("f"))
    assert ended.resend_to("one") == ["c is over", "d is over"], "the latest three, one of them without a word"
    assert ended.resend_to("other") == ["f is over"]
    ended.forget("one")
    assert ended.resend_to("one") == ended.resend_to("nobody") == []
    assert RoomId("c") in ended
