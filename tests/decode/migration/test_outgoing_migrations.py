"""Requests that leave, by themselves: what routers are told, and where a request stands when nobody takes it."""

from __future__ import annotations

from typing import cast

from cache.device.device_port import Completion
from contracts.errors import ErrorKind, WireError
from contracts.ids import Incarnation, RequestId, RoomId, WorkerName
from contracts.messages.router_commands import PauseForMigration, PeerRef, ResumeHere
from contracts.messages.worker_events import Done, MigrationDone, MigrationPaused, MigrationUndone
from decode.migration.drain_advisor import DrainAdvisor
from decode.migration.migration_cost import MigrationCosts
from decode.migration.outgoing_migrations import OutgoingMigrations
from decode.request.request import DecodePhase
from decode.request.request_outcomes import RequestFailed, RequestLeft, RouterEvent
from tests.decode_parts import SESSION, DecodeParts
from transfer.rooms.metadata_slots import HandoverMetadata
from transfer.rooms.room_outcomes import RoomGranted, RoomReleased, SendablePages
from transfer.rooms.sender.kv_sender import KVSender
from transfer.rooms.sender.sender_rooms import SenderOutcome

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
        self.sealed.append(metadata)

    def fail(self, room: RoomId, kind: ErrorKind, reason: str) -> None:
        self.failed.append(reason)

    def poll(self) -> list[SenderOutcome]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes


class Leaving:
    """One request that runs, its worker's migrations, and a sender."""

    def __init__(self) -> None:
        self.parts = parts = DecodeParts(decode={"migration_pause_s": PAUSE_S})
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


def test_who_runs_no_step_can_not_be_handed_on() -> None:
    leaving = Leaving()
    leaving.parts.scheduler.retract(leaving.request)
    assert leaving.begin() == [undone("it is retracting")]
    assert leaving.migrations.begin(SESSION, PauseForMigration(RequestId("b"), 0, ROOM, PEER)) == [], "it has ended"


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
    planner = leaving.parts.manager.planner
    loading = True
    planner.ready = lambda allocation: not loading  # type: ignore[method-assign]
    assert leaving.begin() == []
    assert list(leaving.migrations.settle()) == []
    loading = False
    assert [type(told.event) for told in leaving.migrations.settle() if isinstance(told, RouterEvent)] == [
        MigrationPaused
    ]
