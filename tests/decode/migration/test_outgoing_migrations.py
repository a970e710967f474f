"""Requests that leave, by themselves: what routers are told, and where a request stands when nobody takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from tests.support.decode_parts import SESSION, DecodeParts
from twinpool.cache.device.device_port import Completion
from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import Incarnation, RequestId, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import PauseForMigration, PeerRef, ResumeHere
from twinpool.contracts.messages.worker_events import Done, MigrationDone, MigrationPaused, MigrationUndone
from twinpool.decode.migration.drain_offers import DrainAdvisor, MigrationCosts
from twinpool.decode.migration.outgoing_migrations import OutgoingMigrations
from twinpool.decode.request import DecodePhase, RequestFailed, RequestLeft, RouterEvent
from twinpool.transfer.rooms.room_messages import HandoverMetadata
from twinpool.transfer.rooms.room_states import RoomGranted, RoomReleased, SendablePages
from twinpool.transfer.rooms.sender.kv_sender import KVSender
from twinpool.transfer.rooms.sender.sender_rooms import SenderOutcome

PEER = PeerRef(WorkerName("decode-1"), Incarnation(1), "")
ROOM = RoomId("out")
PAUSE_S = 5.0


class SenderByHand:
    """Stands in for `KVSender`: a reader that wants every page, and says what a test has it say."""

    def __init__(self) -> None:
        self.refuses = False
        self.left = {"full": range(2)}
        self.sealed: list[HandoverMetadata] = []
        self.failed: list[str] = []
        self.outcomes: list[SenderOutcome] = []

    def open(self, room: RoomId, peer: PeerRef) -> None:
        if self.refuses:
            raise WireError("the peer is gone")

    def wanted(self, room: RoomId) -> dict[str, range]:
        return self.left

    def write(self, room: RoomId, finished: dict[str, SendablePages], after: tuple[Completion, ...]) -> None:
        done = sum(len(pages.indices) for pages in finished.values())
        self.left = {"full": self.left["full"][done:]}

    def seal(self, room: RoomId, metadata: HandoverMetadata) -> None:
        if self.left["full"]:
            raise WireError(f"room {room} can't be sealed: {self.left} not written")
        self.sealed.append(metadata)

    def fail(self, room: RoomId, kind: ErrorKind, reason: str) -> None:
        self.failed.append(reason)

    def poll(self) -> list[SenderOutcome]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes


class Leaving:
    """One request that runs, its worker's migrations, and a sender."""

    def __init__(self, **decode: Any) -> None:
        self.parts = parts = DecodeParts(decode={"migration_pause_s": PAUSE_S, **decode})
        self.sender = SenderByHand()
        self.advisor = DrainAdvisor(parts.requests, parts.manager.spec, MigrationCosts(parts.lengths), parts.clock)
        self.migrations = OutgoingMigrations(
            parts.requests, parts.pages, cast(KVSender, self.sender), parts.scheduler, self.advisor,
            parts.config.decode, parts.clock,
        )  # fmt: skip
        (self.request,) = parts.run("a", prompt=6, most=50)

    def begin(self) -> list[RouterEvent]:
        return self.migrations.begin(SESSION, PauseForMigration(RequestId("a"), 0, ROOM, PEER))

    def offered(self) -> None:
        assert self.begin() == []
        assert [told.event for told in self.migrations.settle() if isinstance(told, RouterEvent)] == [
            MigrationPaused(RequestId("a"), 0, 6)
        ]

    def says(self, outcome: SenderOutcome) -> list[object]:
        self.sender.outcomes.append(outcome)
        return list(self.migrations.poll())


def undone(reason: str) -> RouterEvent:
    return RouterEvent(SESSION, MigrationUndone(RequestId("a"), 0, reason))


def test_a_request_is_offered_sent_and_gone_when_the_other_worker_has_it() -> None:
    leaving = Leaving()
    leaving.offered()
    assert leaving.request.phase is DecodePhase.LEAVING
    assert leaving.says(RoomGranted(ROOM)) == []
    (metadata,) = leaving.sender.sealed
    assert metadata.token == leaving.request.tokens[-1]
    unit = leaving.parts.manager.spec.unit_bytes("full")
    assert leaving.says(RoomReleased(ROOM, received=True)) == [
        RouterEvent(SESSION, MigrationDone(RequestId("a"), 0, 2 * unit)),
        RequestLeft(leaving.request, "decode-1 has it"),
    ]
    assert len(leaving.migrations) == 0
    assert leaving.migrations.counters == {
        "migrated_out": 1, "migrated_out_bytes": 2 * unit, "migrations_undone": 0, "leaving": 0,
    }  # fmt: skip


def test_what_a_migration_takes_is_measured_from_its_grant_on() -> None:
    """How long another worker lets an offer wait says nothing of how quickly bytes go."""
    leaving = Leaving()
    leaving.parts.clock.advance(10.0)
    leaving.offered()
    leaving.parts.clock.advance(3.0)
    leaving.says(RoomGranted(ROOM))
    leaving.parts.clock.advance(1.0)
    leaving.says(RoomReleased(ROOM, received=True))
    expected = MigrationCosts(leaving.parts.lengths)
    expected.migrated(2 * leaving.parts.manager.spec.unit_bytes("full"), 1.0)
    assert leaving.advisor.costs.bytes_per_s == expected.bytes_per_s


def test_who_is_offered_and_not_taken_in_time_goes_on_here() -> None:
    leaving = Leaving()
    leaving.offered()
    assert leaving.migrations.next_deadline == PAUSE_S
    leaving.parts.clock.advance(PAUSE_S)
    assert list(leaving.migrations.poll()) == [undone("decode-1 did not take it within 5 s")]
    assert leaving.request.phase is DecodePhase.RUNNING
    assert not leaving.request.stopping
    assert leaving.migrations.next_deadline is None
    assert list(leaving.advisor.advise()) == [], "it is left alone for a while"


def test_who_can_not_be_offered_never_stops() -> None:
    leaving = Leaving()
    leaving.sender.refuses = True
    leaving.begin()
    assert list(leaving.migrations.settle()) == [undone("the peer is gone")]
    assert list(leaving.parts.scheduler.running) == [leaving.request]


def test_what_is_damaged_here_does_not_go_on_when_it_comes_back() -> None:
    leaving = Leaving()
    leaving.offered()
    leaving.says(RoomGranted(ROOM))
    allocation = leaving.request.allocation
    assert allocation is not None
    buffer = leaving.parts.manager.pools.gates["full"].layer(0)["k"]
    buffer[allocation.tables["full"].pages[1]].fill_(3.0)
    (told,) = leaving.says(RoomReleased(ROOM, received=False, reason="it was damaged"))
    assert isinstance(told, RequestFailed)
    assert told.kind is ErrorKind.DAMAGED
    leaving.migrations.drop(leaving.request, told.message)
    leaving.migrations.drop(leaving.request, told.message)
    assert leaving.sender.failed == [told.message]


@pytest.mark.parametrize(
    ("kind", "pool", "buffer"),
    [("full", "full", "v"), ("full+window", "window", "window_k"), ("full+state", "state", "recurrent")],
)
def test_state_of_every_pool_is_compared_with_its_tags(kind: str, pool: str, buffer: str) -> None:
    parts = DecodeParts(kind=kind)
    (request,) = parts.run("a", prompt=3, most=50)
    tags = parts.pages.seal(request)
    assert parts.pages.intact(request, *tags)
    held = request.held
    last = held.slots[pool].indices[0] if pool == "state" else held.tables[pool].pages[0]
    parts.manager.pools.gates[pool].layer(0)[buffer][last].fill_(3.0)
    assert not parts.pages.intact(request, *tags)


def test_who_runs_no_step_can_not_be_handed_on() -> None:
    leaving = Leaving()
    leaving.parts.scheduler.retract(leaving.request)
    assert leaving.begin() == [undone("it is retracting")]
    assert leaving.migrations.begin(SESSION, PauseForMigration(RequestId("b"), 0, ROOM, PEER)) == [], "it has ended"


def test_who_is_told_to_leave_a_second_time_leaves_once() -> None:
    leaving = Leaving()
    leaving.begin()
    again = PauseForMigration(RequestId("a"), 0, RoomId("another"), PEER)
    assert leaving.migrations.begin(SESSION, again) == [undone("it is running")]
    assert len(leaving.migrations) == 1
    assert leaving.request.stopping


def test_a_router_takes_it_back_without_a_word_or_hears_that_it_is_gone() -> None:
    leaving = Leaving()
    leaving.offered()
    assert list(leaving.migrations.undo(SESSION, ResumeHere(RequestId("a"), 0))) == []
    assert leaving.request.phase is DecodePhase.RUNNING
    (told,) = leaving.migrations.undo(SESSION, ResumeHere(RequestId("b"), 0))
    assert isinstance(told, RouterEvent)
    assert isinstance(told.event, Done)
    assert told.event.error is ErrorKind.ROOM


def test_what_a_room_of_a_push_comes_to_is_told_as_it_is() -> None:
    leaving = Leaving()
    assert leaving.says(RoomGranted(RoomId("of a push"))) == [RoomGranted(RoomId("of a push"))]


def test_a_request_is_offered_when_all_that_is_loaded_for_it_has_come_and_not_before() -> None:
    leaving = Leaving()
    allocations = leaving.parts.manager.allocations
    loading = True
    allocations.ready = lambda allocation: not loading  # type: ignore[method-assign]
    assert leaving.begin() == []
    assert list(leaving.migrations.settle()) == []
    loading = False
    assert [type(told.event) for told in leaving.migrations.settle() if isinstance(told, RouterEvent)] == [
        MigrationPaused
    ]


@pytest.mark.parametrize("ending", ["its room fails", "the router takes it back", "it takes too long"])
def test_state_that_was_sent_in_part_is_looked_at_before_the_request_goes_on_here(ending: str) -> None:
    """A migration that came to nothing half way: what arrived may have been found damaged, and may be so here."""
    leaving = Leaving(migration_chunk_bytes=1)
    leaving.offered()
    assert leaving.says(RoomGranted(ROOM)) == []
    assert leaving.sender.sealed == []
    assert leaving.migrations.sending, "some of it is still to be written"
    allocation = leaving.request.allocation
    assert allocation is not None
    buffer = leaving.parts.manager.pools.gates["full"].layer(0)["k"]
    buffer[allocation.tables["full"].pages[0]].fill_(3.0)
    told: Sequence[object]
    if ending == "its room fails":
        told = leaving.says(RoomReleased(ROOM, received=False, reason="it was damaged"))
    elif ending == "the router takes it back":
        told = list(leaving.migrations.undo(SESSION, ResumeHere(RequestId("a"), 0)))
    else:
        leaving.sender.left = {"full": range(0)}
        leaving.parts.clock.advance(PAUSE_S)
        told = list(leaving.migrations.poll())[:1]
    (failed,) = told
    assert isinstance(failed, RequestFailed)
    assert failed.kind is ErrorKind.DAMAGED
    assert allocation.invalid, "nothing of it is shared"


def test_a_request_that_comes_back_half_way_goes_on_and_may_migrate_again() -> None:
    leaving = Leaving(migration_chunk_bytes=1)
    for _ in range(2):
        leaving.sender.left = {"full": range(2)}
        leaving.offered()
        assert leaving.says(RoomGranted(ROOM)) == []
        assert leaving.says(RoomReleased(ROOM, received=False, reason="the link was cut")) == [
            undone("the link was cut")
        ]
        assert list(leaving.parts.scheduler.running) == [leaving.request]
        assert leaving.migrations.check() == leaving.parts.scheduler.check() == []
    leaving.sender.left = {"full": range(2)}
    leaving.offered()
    assert leaving.says(RoomGranted(ROOM)) == []
    leaving.says(RoomGranted(RoomId("of a push")))
    (metadata,) = leaving.sender.sealed
    assert metadata.token == leaving.request.tokens[-1]
    assert isinstance(leaving.says(RoomReleased(ROOM, received=True))[-1], RequestLeft)


def test_a_reader_that_wants_more_than_there_is_ends_the_migration_and_not_the_request() -> None:
    """Nothing more can be written, and it will never be satisfied: the pause isn't waited out."""
    leaving = Leaving()
    leaving.offered()
    leaving.sender.left = {"full": range(5)}
    assert leaving.says(RoomGranted(ROOM)) == []
    (reason,) = [
        told.event.reason
        for told in [*leaving.migrations.poll(), undone("nothing came of it")]
        if isinstance(told, RouterEvent) and isinstance(told.event, MigrationUndone)
    ][:1]
    assert "can't be sealed" in reason
    assert leaving.sender.failed == [reason]
    assert list(leaving.parts.scheduler.running) == [leaving.request]


def test_the_worker_wakes_for_the_first_of_several_pauses_and_ends_each_at_its_own_time() -> None:
    leaving = Leaving()
    (second,) = leaving.parts.run("b", prompt=6, most=50)
    leaving.offered()
    leaving.parts.clock.advance(2.0)
    assert leaving.migrations.begin(SESSION, PauseForMigration(RequestId("b"), 0, RoomId("other"), PEER)) == []
    assert len(list(leaving.migrations.settle())) == 1
    assert leaving.migrations.next_deadline == PAUSE_S
    leaving.parts.clock.advance(PAUSE_S - 2.0)
    assert list(leaving.migrations.poll()) == [undone("decode-1 did not take it within 5 s")]
    assert (leaving.request.phase, second.phase) == (DecodePhase.RUNNING, DecodePhase.LEAVING)
    assert leaving.migrations.next_deadline == PAUSE_S + 2.0
    leaving.parts.clock.advance(2.0)
    assert len(list(leaving.migrations.poll())) == 1
    assert leaving.migrations.next_deadline is None
    assert leaving.migrations.check() == leaving.parts.scheduler.check() == []
