"""Prefixes pushed to another worker and pulled from there, by themselves: each half-way end gives everything back."""

from __future__ import annotations

from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.decode.migration.test_outgoing_migrations import SenderByHand
from tests.support.decode_parts import PAGE, PEER, SESSION, DecodeParts
from twinpool.cache.prefix_cache.tree_node import TokenPrefix
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, RoomId
from twinpool.contracts.messages.router_commands import PullPrefix, PushPrefix
from twinpool.contracts.messages.worker_events import PullDone, PushReady
from twinpool.decode.migration.prefix_push import PrefixPulls, PrefixPushes
from twinpool.decode.request import DecodeRequest, RouterEvent
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.transfer.rooms.room_messages import HandoverMetadata
from twinpool.transfer.rooms.room_states import HandoverFailed, PromptArrived, RoomGranted, RoomReleased
from twinpool.transfer.rooms.sender.kv_sender import KVSender

ROOM = RoomId("prefix")
TOKENS = tuple(range(4 * PAGE))


class Exchange:
    """A worker's pushes and pulls, and what it has when nothing is under way."""

    def __init__(self, pages: int = 32, **sections: Any) -> None:
        self.parts = parts = DecodeParts(pages, **sections)
        self.sender = SenderByHand()
        self.pushes = PrefixPushes(parts.requests, parts.pages, cast(KVSender, self.sender), parts.config, parts.clock)
        self.pulls = PrefixPulls(parts.requests, parts.pages, cast(KVReceiver, parts.receiver))

    def cached(self) -> None:
        """The tree gets all pages of `TOKENS`, by a pull."""
        assert self.pull() == []
        assert self.arrives() == [done(4 * 10)]

    def pull(self, **changes: object) -> list[RouterEvent]:
        command = PullPrefix(RequestId("x"), 0, ROOM, PEER, TOKENS)
        return self.pulls.begin(SESSION, replace(command, **changes))

    def arrives(self, room: RoomId = ROOM) -> list[RouterEvent]:
        leases = self.parts.receiver.granted.pop(room)
        digests = {"full": dict.fromkeys(range(4), 9)}
        metadata = HandoverMetadata(room, 0, 0, None, 0, 0)
        return self.pulls.on_room(PromptArrived(room, leases, metadata, {"full": 4 * 10}, digests))

    def push(self, **changes: object) -> list[RouterEvent]:
        command = PushPrefix(RequestId("x"), 0, ROOM, PEER, TOKENS)
        return self.pushes.begin(SESSION, replace(command, **changes))

    @property
    def at_rest(self) -> bool:
        """Whether nothing is held but what the tree has."""
        manager = self.parts.manager
        held = (len(manager.allocations), len(manager.tree.locks), self.pushes.allocations, self.pulls.allocations)
        return held == (0, 0, 0, 0) and manager.check() == []


def done(nbytes: int) -> RouterEvent:
    return RouterEvent(SESSION, PullDone(RequestId("x"), 0, nbytes))


def ready(positions: int) -> RouterEvent:
    return RouterEvent(SESSION, PushReady(RequestId("x"), 0, positions))


def test_what_was_pulled_is_the_trees_and_is_not_pulled_again() -> None:
    exchange = Exchange()
    exchange.cached()
    assert exchange.at_rest
    assert exchange.parts.manager.supply.free_pages("full") == 31, "nobody locks them"
    assert exchange.pull(room=RoomId("again")) == [done(0)]
    assert "nothing of it is wanted here" in exchange.parts.receiver.aborted.get(RoomId("again"), "")
    assert exchange.at_rest


@pytest.mark.parametrize("why", ["no slot", "no room", "no spare room", "draining", "no whole page", "used before"])
def test_a_pull_that_cannot_begin_takes_nothing_and_gives_its_room_up_at_once(why: str) -> None:
    """The other worker holds its pages for the room until it hears of its end."""
    exchange = Exchange(pages=5 if why == "no room" else 32)
    parts, changes = exchange.parts, dict[str, object]()
    taken = parts.manager.pools.allocators["full"].lease(2 if why == "no room" else 0, "others")
    if why == "no slot":
        parts.receiver.slots = False
    elif why == "no spare room":
        changes["spare"] = True
        taken = parts.manager.pools.allocators["full"].lease(29, "others")
    elif why == "draining":
        parts.requests.draining = True
    elif why == "no whole page":
        changes["tokens"] = TOKENS[:3]
    else:
        parts.receiver.opened[ROOM] = parts.receiver.opened.get(ROOM)  # type: ignore[assignment]
        if why != "used before":
            del parts.receiver.opened[ROOM]
    assert exchange.pull(**changes) == [done(0)]
    assert (ROOM in parts.receiver.aborted) is (why != "used before")
    assert parts.receiver.granted == {}
    taken.release()
    assert exchange.at_rest
    assert parts.manager.supply.free_pages("full") == parts.manager.pools.allocators["full"].total


def test_a_pull_that_fails_or_whose_worker_closes_gives_everything_back() -> None:
    exchange = Exchange()
    free = exchange.parts.manager.supply.free_pages("full")
    assert exchange.pull() == []
    for lease in exchange.parts.receiver.granted.pop(ROOM).values():
        lease.release()
    failed = HandoverFailed(ROOM, ErrorKind.ROOM, "it died", PEER.name)
    assert exchange.pulls.on_room(failed) == [done(0)]
    assert exchange.pulls.on_room(failed) == [], "it is told once"
    assert exchange.at_rest
    assert exchange.pull(room=RoomId("next")) == []
    exchange.pulls.close()
    assert exchange.parts.receiver.aborted[RoomId("next")] == "the worker closes"
    assert exchange.at_rest
    assert exchange.parts.manager.supply.free_pages("full") == free


def test_pages_that_arrive_for_a_pull_that_is_over_are_given_back() -> None:
    exchange = Exchange()
    free = exchange.parts.manager.supply.free_pages("full")
    lease = exchange.parts.manager.pools.allocators["full"].lease(4, "a room")
    metadata = HandoverMetadata(ROOM, 0, 0, None, 0, 0)
    assert exchange.pulls.on_room(PromptArrived(ROOM, {"full": lease}, metadata, {}, {})) == []
    assert exchange.parts.manager.supply.free_pages("full") == free


@pytest.mark.parametrize("why", ["the peer is gone", "the tree has nothing", "it isn't worth it"])
def test_a_push_that_cannot_begin_says_so_and_holds_nothing(why: str) -> None:
    exchange = Exchange()
    changes: dict[str, object] = {}
    if why != "the tree has nothing":
        exchange.cached()
    if why == "the peer is gone":
        exchange.sender.refuses = True
    elif why == "it isn't worth it":
        changes = {"tokens": ()}
    assert exchange.push(**changes) == [ready(0)]
    assert exchange.at_rest


@pytest.mark.parametrize("ending", ["all written", "nobody fetches it", "damaged", "its room fails", "closing"])
def test_a_push_holds_its_pages_until_its_end_whatever_that_is(ending: str) -> None:
    exchange = Exchange()
    exchange.cached()
    loading = False
    allocations = exchange.parts.manager.allocations
    allocations.ready = lambda allocation: not loading  # type: ignore[method-assign]
    exchange.sender.left = {"full": range(4)}
    assert exchange.push() == [ready(4 * PAGE)]
    (push,) = exchange.pushes._pushes.values()
    if ending == "nobody fetches it":
        assert exchange.pushes.next_deadline is not None
        exchange.parts.clock.advance(exchange.pushes.next_deadline)
    else:
        exchange.pushes.on_room(RoomGranted(ROOM))
        loading = True
        exchange.pushes.round()
        assert exchange.sender.left == {"full": range(4)}, "some of it is still on its way from the host"
        assert exchange.pushes.writing
        loading = False
    assert len(exchange.parts.manager.allocations) == 1
    if ending == "damaged":
        push.allocation.invalid = True
    elif ending == "its room fails":
        exchange.pushes.on_room(RoomReleased(ROOM, False, "the link was cut"))
    elif ending == "closing":
        exchange.pushes.close()
    exchange.pushes.round()
    if ending == "all written":
        assert (exchange.sender.left, len(exchange.sender.sealed)) == ({"full": range(4, 4)}, 1)
        assert not exchange.pushes.writing
        assert len(exchange.parts.manager.allocations) == 1, "decode hasn't confirmed it yet"
        exchange.pushes.on_room(RoomReleased(ROOM, True))
    told = {"nobody fetches it": ["nobody fetched it"], "damaged": ["a page of it turned out damaged"],
            "closing": ["the worker closes"]}  # fmt: skip
    assert exchange.sender.failed == told.get(ending, [])
    exchange.pushes.on_room(RoomReleased(ROOM, False, "late"))
    assert exchange.at_rest


def test_a_push_whose_reader_wants_more_than_there_is_ends_and_says_why() -> None:
    exchange = Exchange()
    exchange.cached()
    exchange.sender.left = {"full": range(6)}
    exchange.push()
    exchange.pushes.on_room(RoomGranted(ROOM))
    for _ in range(3):
        exchange.pushes.round()
    (reason,) = exchange.sender.failed
    assert "can't be sealed" in reason
    assert exchange.at_rest


def test_a_pull_is_granted_what_the_tree_lacks_and_nothing_of_what_it_has() -> None:
    exchange = Exchange()
    assert exchange.pull(tokens=TOKENS[: 2 * PAGE]) == []
    leases = exchange.parts.receiver.granted.pop(ROOM)
    metadata = HandoverMetadata(ROOM, 0, 0, None, 0, 0)
    exchange.pulls.on_room(PromptArrived(ROOM, leases, metadata, {"full": 20}, {"full": {0: 9, 1: 9}}))
    longer = RoomId("longer")
    assert exchange.pull(room=longer) == []
    assert len(exchange.parts.receiver.granted[longer]["full"]) == 2
    assert exchange.parts.receiver.held[longer] == {"full": {0, 1}}, "the others are what the writer is to send"
    leases = exchange.parts.receiver.granted.pop(longer)
    assert exchange.pulls.on_room(PromptArrived(longer, leases, metadata, {"full": 20}, {"full": {2: 9, 3: 9}})) == [
        done(20)
    ]
    assert exchange.at_rest
    prefix = TokenPrefix.of(TOKENS, PAGE)
    assert exchange.parts.manager.tree.match(prefix).depth == 4


@pytest.mark.parametrize("salt", ["", "a tenant"])
def test_a_running_requests_pages_are_pushed_under_its_own_salt(salt: str) -> None:
    exchange = Exchange(decode={"migration_precopy_bytes": 1})
    parts = exchange.parts
    submit = replace(parts.submit("a", prompt=9, most=20), salt=salt)
    request = parts.transfers.open(SESSION, submit)
    assert isinstance(request, DecodeRequest)
    parts.requests.add(request)
    parts.scheduler.add(request)
    assert list(parts.scheduler.admit()) == []
    parts.receiver.outcomes.append(parts.arrived(request))
    assert len(list(parts.transfers.poll())) == 1
    parts.scheduler.start(request)
    told = exchange.push(request_id=RequestId("a"), tokens=())
    assert told == [RouterEvent(SESSION, PushReady(RequestId("a"), 0, 2 * PAGE))]
    (push,) = exchange.pushes._pushes.values()
    assert push.allocation.prefix.salt == salt
    exchange.pushes.close()
