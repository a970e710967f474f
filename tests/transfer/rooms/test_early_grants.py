"""Grants that came before their requests: each room's latest, and no more places than the bound."""

from __future__ import annotations

import pytest

from tests.support.pool_sets import pool_sets
from tests.support.room_ends import ends
from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.transfer.rooms.room_messages import GrantedPages, PageGrant
from twinpool.transfer.rooms.room_states import ExpectedPrompt, PromptArrived
from twinpool.transfer.rooms.sender import sender_peers as early_grants
from twinpool.transfer.rooms.sender.sender_peers import EarlyGrants


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


@pytest.mark.parametrize("bound", ["_EARLY", "_EARLY_PLACES"])
def test_what_is_dropped_to_make_room_is_named_and_its_places_are_given_back(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode waits for whoever was dropped, and has to be told."""
    monkeypatch.setattr(early_grants, bound, 4)
    early, each = EarlyGrants(), 1 if bound == "_EARLY" else 2
    dropped: list[PageGrant] = []
    for number in range(9):
        dropped += early.keep(grant(str(number), each))
        assert early.places == each * len(early.grants)
    kept = 4 // each
    assert [one.room for one in dropped] == [str(number) for number in range(9 - kept)]
    assert list(early.grants) == [str(number) for number in range(9 - kept, 9)]
    if bound == "_EARLY_PLACES":
        assert [one.room for one in early.keep(grant("large", 5))] == ["7", "8", "large"]
        assert (dict(early.grants), early.places) == ({}, 0)


def test_a_grant_that_was_given_up_before_its_request_came_is_not_taken_for_it_and_holds_no_places() -> None:
    """Decode gives the room up while prefill hasn't heard of the request: its places are somebody else's by then."""
    with ends(pool_sets()["full"], "shm") as both:
        first, second = both.prompt(12), both.prompt(12)
        for prompt in (first, second):
            both.receiver.open(prompt.room, both.writer, ExpectedPrompt(prompt.keys, prompt.positions))
        leases = {"full": both.target.allocators["full"].lease(3, first.room)}
        assert both.receiver.grant(first.room, leases)
        both.until(lambda: [p for p in both.sender_peers.values() if p.early.grants], "the early grant")
        (peer,) = both.sender_peers.values()
        both.receiver.abort(first.room, "the client has gone")
        both.until(lambda: not leases["full"].live, "the writer's word")
        assert (dict(peer.early.grants), peer.early.places) == ({}, 0)
        with pytest.raises(WireError, match="given up"):
            both.sender.open(first.room, PeerRef(WorkerName("decode-0"), Incarnation(1), ""))
        again = {"full": both.target.allocators["full"].lease(3, second.room)}
        assert both.receiver.grant(second.room, again)
        both.sender.open(second.room, PeerRef(WorkerName("decode-0"), Incarnation(1), ""))
        both.until(lambda: both.sender.granted(second.room), "the other grant")
        both.sender.write(second.room, second.all(), ())
        both.seal(second)
        arrived = both.outcome(second.room)
        assert isinstance(arrived, PromptArrived)
        arrived.release()
        both.quiet()
