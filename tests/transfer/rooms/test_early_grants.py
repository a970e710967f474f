"""Grants that came before their requests: each room's latest, and no more places than the bound."""

from __future__ import annotations

from contracts.ids import RoomId
from transfer.rooms.room_messages import GrantedPages, PageGrant
from transfer.rooms.sender.early_grants import EarlyGrants


def grant(room: str, places: int, ticket: int = 1) -> PageGrant:
    pages = GrantedPages("full", 0, tuple(range(1, 1 + places)), (0,) * places)
    return PageGrant(RoomId(room), (pages,), 0, 0, ticket)


def test_a_grant_takes_the_place_of_an_older_one_of_its_room_and_counts_once() -> None:
    early = EarlyGrants()
    for ticket in range(1, 5):
        assert early.keep(grant("a", 3, ticket)) == []
    assert early.places == 3
    assert early.keep(grant("b", 2)) == []
    assert early.take(RoomId("a")) == grant("a", 3, 4)
    assert early.places == 2
    assert early.take(RoomId("a")) is None


def test_a_grant_that_came_again_is_no_older_than_the_others() -> None:
    early = EarlyGrants()
    early.keep(grant("a", 1))
    early.keep(grant("b", 1))
    early.keep(grant("a", 1, 2))
    assert list(early.grants) == ["b", "a"], "the oldest, that makes room first, is b"
