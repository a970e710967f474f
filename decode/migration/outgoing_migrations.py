"""Outgoing migrations: requests that leave for another decode worker, with their state, in the middle of their answer.

The other worker receives from this one as from a prefill worker, in a room: pages are granted, written and sealed by
the same code. What a migration has of its own are the stages of the request at the source.

    stopping   told to migrate: its launched step is committed, no other is launched
    offered    all its tokens are with the router, its state is sealed and stays as it is; the other worker may grant
    sending    granted: pages are written, a few between two steps of the requests that stay
    sent       everything is written, the last token with it; the other worker has still to confirm it
    gone       the other worker has confirmed: what is left here is freed
    back       the migration came to nothing: the request goes on here, from where it stopped

Until `gone` this worker has all of the request, so nothing is ever computed again because a migration failed. Nor has
anything to be decided when both workers go on: they draw the same tokens, and the router listens to the one whose token
came first and cancels the other.

A stream stands still from `offered` on. After `decode.migration_pause_s` seconds without an end the request goes on
here.

State that arrived damaged may have been damaged here. So before a request goes on after something was sent, all of its
state is checked against its tags once more; where it doesn't match, the request ends as damaged and is computed again.

The router decides which request migrates where, by itself or because a worker that drains offers its requests
(`decode.migration.drain_offers`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.cache.device.device_port import DONE
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.worker_config import DecodeConfig
from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import RoomId
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import PauseForMigration, PeerRef, ResumeHere
from twinpool.contracts.messages.worker_events import Done, MigrationDone, MigrationPaused, MigrationUndone
from twinpool.contracts.state_table import StateTable
from twinpool.decode.migration.drain_offers import DrainAdvisor
from twinpool.decode.request import DecodePages, DecodePhase, DecodeRequest, RequestFailed, RequestLeft, RouterEvent
from twinpool.decode.scheduler import DecodeScheduler
from twinpool.transfer.rooms.room_messages import HandoverMetadata
from twinpool.transfer.rooms.room_states import RoomGranted, RoomReleased
from twinpool.transfer.rooms.sender.kv_sender import KVSender
from twinpool.transfer.rooms.sender.sender_rooms import SenderOutcome
from twinpool.worker.request_table import RequestTable, pages_within, sendable_pages


class MigrationStage(StrEnum):
    STOPPING = "stopping"
    OFFERED = "offered"
    SENDING = "sending"
    SENT = "sent"
    GONE = "gone"
    BACK = "back"


class MigrationStageEvent(StrEnum):
    LANDED = "landed"
    """Its last launched step is committed."""
    GRANT = "grant"
    SENT = "sent"
    RECEIVED = "received"
    BACK = "back"
    """It goes on here."""
    END = "end"
    """It ends here: cancelled, failed, or out of time."""


STAGES = StateTable[MigrationStage, MigrationStageEvent](
    "outgoing migration",
    {
        MigrationStage.STOPPING: {
            MigrationStageEvent.LANDED: MigrationStage.OFFERED,
            MigrationStageEvent.BACK: MigrationStage.BACK,
            MigrationStageEvent.END: MigrationStage.GONE,
        },
        MigrationStage.OFFERED: {
            MigrationStageEvent.GRANT: MigrationStage.SENDING,
            MigrationStageEvent.BACK: MigrationStage.BACK,
            MigrationStageEvent.END: MigrationStage.GONE,
        },
        MigrationStage.SENDING: {
            MigrationStageEvent.SENT: MigrationStage.SENT,
            MigrationStageEvent.BACK: MigrationStage.BACK,
            MigrationStageEvent.END: MigrationStage.GONE,
        },
        MigrationStage.SENT: {
            MigrationStageEvent.RECEIVED: MigrationStage.GONE,
            MigrationStageEvent.BACK: MigrationStage.BACK,
            MigrationStageEvent.END: MigrationStage.GONE,
        },
    },
)


@dataclass(eq=False)
class OutgoingMigration:
    """The migration of one request to another worker, at the source."""

    request: DecodeRequest
    room: RoomId
    peer: PeerRef
    stage: MigrationStage = MigrationStage.STOPPING
    paused_at: float = 0.0
    """When its stream stopped, in seconds of the clock."""
    chain: list[bytes] = field(default_factory=list)
    """Block hashes of all pages of its committed positions."""
    ends: dict[str, int] = field(default_factory=dict)
    """Digests at its end, by pool: of the last page where it is partly filled, and of the state."""
    began: float = 0.0
    """When it was granted and the first bytes went out, in seconds of the clock."""
    bytes: int = 0
    """Bytes of state posted so far."""

    def step(self, event: MigrationStageEvent) -> None:
        self.stage = STAGES.next(self.stage, event)


log = logging.getLogger("twinpool.decode")


class OutgoingMigrations:
    """The migrations of one worker's requests, by room; see the module's prose. Called by its thread, between steps."""

    def __init__(
        self,
        requests: RequestTable[DecodeRequest],
        pages: DecodePages,
        sender: KVSender,
        scheduler: DecodeScheduler,
        advisor: DrainAdvisor,
        config: DecodeConfig,
        clock: Clock,
    ) -> None:
        self._requests, self._pages, self._sender, self._scheduler = requests, pages, sender, scheduler
        self._advisor, self._config, self._clock = advisor, config, clock
        self._manager = pages.manager
        self._by_room: dict[RoomId, OutgoingMigration] = {}
        self._most = pages_within(self._manager.spec, config.migration_chunk_bytes)
        self._counters = {"migrated_out": 0.0, "migrated_out_bytes": 0.0, "migrations_undone": 0.0}

    def __len__(self) -> int:
        return len(self._by_room)

    @property
    def counters(self) -> dict[str, float]:
        return {**self._counters, "leaving": len(self._by_room)}

    @property
    def sending(self) -> bool:
        """Whether a migration has pages to write, so that the worker shouldn't sleep."""
        return any(d.stage is MigrationStage.SENDING for d in self._by_room.values())

    @property
    def next_deadline(self) -> float | None:
        """When the first paused migration is given up, in seconds of the clock; None while none is paused."""
        return min((d.paused_at + self._config.migration_pause_s for d in self._paused()), default=None)

    # ------------------------------------------------------------ what routers say

    def begin(self, session: SessionId, command: PauseForMigration) -> list[RouterEvent]:
        """Stop this request at its next token, to migrate it; returns `MigrationUndone` where that can't be."""
        request = self._requests.get(session, command.request_id, command.attempt)
        if request is None:
            return []  # It has ended, and its router was told.
        if request.phase is not DecodePhase.RUNNING or request.stopping:
            undone = MigrationUndone(command.request_id, command.attempt, f"it is {request.phase}")
            return [RouterEvent(session, undone)]
        request.stopping = True
        self._by_room[command.room] = OutgoingMigration(request, command.room, command.peer)
        return []

    def undo(self, session: SessionId, command: ResumeHere) -> Iterator[RouterEvent | RequestFailed]:
        """Take this request's migration back, so that it goes on here; yields an error where it has left."""
        request = self._requests.get(session, command.request_id, command.attempt)
        if request is None:
            key, message = (command.request_id, command.attempt), "it has left for elsewhere"
            yield RouterEvent(session, Done(*key, "error", error=ErrorKind.ROOM, message=message))
        elif (migration := self._of(request)) is not None:
            yield from self._back(migration, "the router took it back", tell=False)

    def recall(self, request: DecodeRequest) -> Iterator[RouterEvent | RequestFailed]:
        """Take a request's migration back, as another router has the request now and knows of none. Idempotent."""
        migration = self._of(request)
        if migration is not None:
            yield from self._back(migration, "another router has it", tell=False)

    def drop(self, request: DecodeRequest, reason: str) -> None:
        """End the migration of a request that ends here, at any stage. Idempotent."""
        migration = self._of(request)
        if migration is not None:
            migration.step(MigrationStageEvent.END)
            self._close(migration, ErrorKind.CANCELLED, reason)

    # ------------------------------------------------------------ the round

    def poll(self) -> Iterator[RouterEvent | RequestFailed | RequestLeft | SenderOutcome]:
        """Take in what became of rooms, give up migrations that take too long, and write pages.

        Outcomes of rooms without a migration (those of prefix pushes) are yielded as they are.
        """
        for outcome in self._sender.poll():
            migration = self._by_room.get(outcome.room)
            if migration is None:
                yield outcome
            elif isinstance(outcome, RoomGranted):
                migration.step(MigrationStageEvent.GRANT)
                migration.began = self._clock.now()
            else:
                yield from self._released(migration, outcome)
        now, pause_s = self._clock.now(), self._config.migration_pause_s
        for migration in self._paused():
            if now >= migration.paused_at + pause_s:
                yield from self._back(migration, f"{migration.peer.name} did not take it within {pause_s:g} s")
        for migration in list(self._by_room.values()):
            if migration.stage is MigrationStage.SENDING:
                yield from self._send(migration)

    def settle(self) -> Iterator[RouterEvent | RequestFailed]:
        """Offer the stopping requests whose last launched step is committed. To be called after each commit."""
        for migration in list(self._by_room.values()):
            request = migration.request
            if migration.stage is not MigrationStage.STOPPING:
                continue
            if request.phase is not DecodePhase.RUNNING:
                yield from self._back(migration, f"it is {request.phase}")
            elif not request.under_way and self._pages.settled(request):
                yield from self._offer(migration)

    def _offer(self, migration: OutgoingMigration) -> Iterator[RouterEvent | RequestFailed]:
        request, submit = migration.request, migration.request.submit
        try:
            self._sender.open(migration.room, migration.peer)
        except WireError as error:
            yield from self._back(migration, str(error))
            return
        self._scheduler.pause(request)
        migration.chain, migration.ends = self._pages.seal(request)
        migration.paused_at = self._clock.now()
        migration.step(MigrationStageEvent.LANDED)
        yield RouterEvent(request.session, MigrationPaused(submit.request_id, submit.attempt, request.committed))

    def _send(self, migration: OutgoingMigration) -> Iterator[RouterEvent | RequestFailed]:
        """Write a part of the pages that are wanted; behind the last of them, the metadata."""
        request, room = migration.request, migration.room
        wanted = self._sender.wanted(room)
        part = sendable_pages(wanted, request.held, migration.chain, migration.ends, self._most)
        self._sender.write(room, part, (DONE,))
        unit_bytes = self._manager.spec.whole.unit_bytes
        migration.bytes += sum(len(pages.indices) * unit_bytes(pool) for pool, pages in part.items())
        if part and any(self._sender.wanted(room).values()):
            return
        cached = request.held.cached.total
        metadata = HandoverMetadata(room, 0, request.tokens[-1], None, cached, request.computed)
        try:
            self._sender.seal(room, metadata)
        except WireError as error:
            yield from self._back(migration, str(error))
            return
        migration.step(MigrationStageEvent.SENT)

    def _released(
        self, migration: OutgoingMigration, outcome: RoomReleased
    ) -> Iterator[RouterEvent | RequestFailed | RequestLeft]:
        request, submit = migration.request, migration.request.submit
        if not outcome.received:
            yield from self._back(migration, outcome.reason)
            return
        migration.step(MigrationStageEvent.RECEIVED)
        del self._by_room[migration.room]
        self._advisor.migrated(migration.bytes, self._clock.now() - migration.began)
        self._counters["migrated_out"] += 1
        self._counters["migrated_out_bytes"] += migration.bytes
        facts = {"request_id": submit.request_id, "attempt": submit.attempt, "room": migration.room}
        log.info("request moved", extra={**facts, "to": migration.peer.name, "bytes": migration.bytes})
        yield RouterEvent(request.session, MigrationDone(submit.request_id, submit.attempt, migration.bytes))
        yield RequestLeft(request, f"{migration.peer.name} has it")

    def _back(
        self, migration: OutgoingMigration, reason: str, *, tell: bool = True
    ) -> Iterator[RouterEvent | RequestFailed]:
        """Let the request go on here, if its state is intact, and end the room; else fail the request.

        It may migrate later. `tell`: report `MigrationUndone` to the router.
        """
        request, submit = migration.request, migration.request.submit
        paused = migration.stage is not MigrationStage.STOPPING
        sent = migration.stage in (MigrationStage.SENDING, MigrationStage.SENT)
        # That what arrived was damaged may be known to the router before it is here; and it may have been damaged here.
        if sent and not self._pages.intact(request, migration.chain, migration.ends):
            request.held.invalid = True
            yield RequestFailed(request, ErrorKind.DAMAGED, f"its state was damaged here: {reason}")
            return
        migration.step(MigrationStageEvent.BACK)
        self._close(migration, ErrorKind.ROOM, reason)
        request.stopping = False
        self._advisor.stays(request)
        self._counters["migrations_undone"] += 1
        if paused:
            self._scheduler.resume(request)
        if tell:
            yield RouterEvent(request.session, MigrationUndone(submit.request_id, submit.attempt, reason))

    def _close(self, migration: OutgoingMigration, kind: ErrorKind, reason: str) -> None:
        del self._by_room[migration.room]
        self._sender.fail(migration.room, kind, reason)

    # ------------------------------------------------------------ accounts

    def _of(self, request: DecodeRequest) -> OutgoingMigration | None:
        return next((d for d in self._by_room.values() if d.request is request), None)

    def _paused(self) -> list[OutgoingMigration]:
        return [d for d in self._by_room.values() if d.stage is not MigrationStage.STOPPING]

    def check(self) -> list[str]:
        found = []
        for migration in self._by_room.values():
            request, paused = migration.request, migration.stage is not MigrationStage.STOPPING
            name = request.submit.request_id
            if not self._requests.holds(request) or not request.stopping:
                found.append(f"request {name} is {migration.stage} and not in the request table, or doesn't know")
            if (request.phase is DecodePhase.LEAVING) != paused:
                found.append(f"request {name} is {migration.stage} and {request.phase}")
        out = [r for r in self._requests if r.stopping]
        if len(out) != len(self._by_room):
            found.append(f"{len(out)} requests are leaving, {len(self._by_room)} migrations are booked")
        return found
