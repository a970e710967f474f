"""Requests that leave for another decode worker, with their state, in the middle of their answer.

The other worker receives from this one as from a prefill worker, in a room: it is granted, written and sealed by the
same code. What is special is only where the request stands meanwhile.

    stopping   told to go: its launched step is committed, no other is launched
    offered    its tokens are all told, its state is sealed and stays as it is; the other worker may grant
    sending    granted: pages go out, a few between two steps of those that stay
    sent       everything is written, the last token with it; the other has still to say that it has it
    gone       it has: what is left here is given back
    back       something came to nothing: the request goes on here, from where it stopped

Until `gone` this worker has all of the request, so nothing is ever computed again because a move failed, and nobody
has to decide who is right when both go on: they draw the same tokens, and the router listens to the one that spoke
first and cancels the other.

A stream stands still from `offered` on. After `decode.migration_pause_s` without an end the request goes on here.

What arrived damaged may have been damaged here. So before a request goes on after something was sent, all of its state
is checked against its tags once more; where it doesn't match, the request ends as damaged and is computed again.

A worker that drains offers its requests to the router (`MigrationWanted`), those that haven't begun at once, and those
that run if handing them on is quicker than finishing them. The router picks who takes them, and when. One that is
retracted can come back when others have left, with less work than it would take to compute its state elsewhere; then it
is offered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cache.device.device_port import DONE
from cache.manager.kv_cache_manager import KVCacheManager
from cache.memory.required_pages import due, extents
from contracts.block_hash import block_hashes
from contracts.clock import Clock
from contracts.config.cluster_config import Config
from contracts.errors import ErrorKind, WireError
from contracts.ids import RoomId
from contracts.interfaces.worker_interface import SessionId
from contracts.messages.router_commands import PauseForMigration, PushPrefix, ResumeHere
from contracts.messages.worker_events import Done, MigrationDone, MigrationPaused, MigrationUndone, MigrationWanted
from decode.migration.migration_cost import MigrationCosts
from decode.migration.migration_state import MigrationStage, MigrationStageEvent, OutgoingMigration
from decode.migration.prefix_offers import PrefixOffers
from decode.migration.prefix_push import PrefixPushes
from decode.request.request import OFF_DEVICE, DecodePhase, DecodeRequest
from transfer.rooms.kv_sender import KVSender
from transfer.rooms.metadata_slots import HandoverMetadata
from transfer.rooms.room_outcomes import RoomGranted, RoomReleased
from worker.request_table import RequestTable
from worker.sendable_pages import finished

JUDGE_EVERY_S = 1.0
"""How often a draining worker thinks again about a request that it let finish."""
STEPS_TO_TELL = 4
"""A request's own pace is known after so many steps."""


@dataclass(slots=True)
class _DrainVerdict:
    """What a draining worker wants of a request."""

    request: DecodeRequest
    running: bool
    goes: bool
    """The router was told that it is to go; else it may finish here."""
    again_at: float
    """When to think again."""


@dataclass(frozen=True, slots=True)
class Books:
    """What the worker does with a request that departs; it alone keeps the queues."""

    depart: Callable[[DecodeRequest], None]
    """Take it out of the batch for good."""
    come_back: Callable[[DecodeRequest], None]
    settled: Callable[[DecodeRequest], bool]
    """Whether all that was loaded for it has come."""
    leave: Callable[[DecodeRequest, str], None]
    fail: Callable[[DecodeRequest, ErrorKind, str], None]
    share: Callable[[DecodeRequest], None]
    """Give the tree what it has finished."""


class OutgoingMigrations:
    """See the module's prose. Called between steps, by the worker's thread."""

    def __init__(
        self,
        name: str,
        manager: KVCacheManager,
        sender: KVSender,
        request_table: RequestTable[DecodeRequest],
        config: Config,
        clock: Clock,
        books: Books,
    ) -> None:
        self._manager, self._sender, self._request_table = manager, sender, request_table
        self._config, self._clock, self._books = config.decode, clock, books
        self.costs = MigrationCosts()
        self.prefix_pushes = PrefixPushes(manager, sender, request_table, config, clock, books.share)
        self.offers = PrefixOffers(name, manager, self.prefix_pushes, request_table, config, clock)
        self._by_room: dict[RoomId, OutgoingMigration] = {}
        self._verdicts: dict[int, _DrainVerdict] = {}
        """Of a draining worker's requests, by identity."""
        spec = manager.spec
        self._most = {p: max(1, config.decode.migration_chunk_bytes // spec.whole.unit_bytes(p)) for p in spec.by_name}
        self.counters = {"moved_out": 0.0, "moved_out_bytes": 0.0, "moves_undone": 0.0, "left_to_finish": 0.0}

    # ------------------------------------------------------------ what the router and the worker say

    def __len__(self) -> int:
        return len(self._by_room)

    @property
    def control(self) -> str:
        return self._sender.control

    @property
    def rooms(self) -> int:
        """Rooms in which this worker is the writer."""
        return self._sender.rooms

    @property
    def quiet(self) -> bool:
        """Whether this worker writes into no room, and of rooms that have ended nothing is being written or waits to be
        said."""
        return self._sender.quiet

    @property
    def stats(self) -> dict[str, float]:
        """Counters for the worker's status."""
        here = {"leaving": len(self._by_room), "given_bytes": self.prefix_pushes.bytes}
        return {**self.counters, **here, **self._sender.outgoing}

    @property
    def sending(self) -> bool:
        """Whether there is something to write as soon as the worker comes to it."""
        return self.prefix_pushes.writing or any(d.stage is MigrationStage.SENDING for d in self._by_room.values())

    @property
    def next_deadline(self) -> float | None:
        due_at = [
            d.paused_at + self._config.migration_pause_s
            for d in self._by_room.values()
            if d.stage is not MigrationStage.STOPPING
        ]
        others = (self._sender.next_deadline, self.prefix_pushes.next_deadline, self.offers.next_deadline)
        due_at += [at for at in others if at is not None]
        if self._request_table.draining:
            # Who goes all the same, as somebody asked for it, isn't judged meanwhile.
            due_at += [v.again_at for v in self._verdicts.values() if not v.goes and not v.request.stopping]
        return min(due_at, default=None)

    def handle(self, session: SessionId, command: PauseForMigration | ResumeHere | PushPrefix) -> None:
        request = self._request_table.get(session, command.request_id, command.attempt)
        if isinstance(command, PushPrefix):
            self.prefix_pushes.handle(session, command, request)
            if command.tokens:
                self.offers.asked_for()
            return
        if isinstance(command, ResumeHere):
            self._resume(session, command, request)
            return
        if request is None:
            return  # It has ended, and said so.
        if request.phase is not DecodePhase.RUNNING or request.stopping:
            self._request_table.emit(
                session, MigrationUndone(command.request_id, command.attempt, f"it is {request.phase}")
            )
            return
        request.stopping = True
        self._by_room[command.room] = OutgoingMigration(request, command.room, command.peer)

    def _resume(self, session: SessionId, command: ResumeHere, request: DecodeRequest | None) -> None:
        if request is None:
            done = Done(
                command.request_id, command.attempt, "error", error=ErrorKind.ROOM, message="it has left for elsewhere"
            )
            self._request_table.emit(session, done)
        elif (migration := self._of(request)) is not None:
            self._back(migration, "the router took it back", tell=False)

    def ended(self, request: DecodeRequest) -> None:
        """Its answer is whole."""
        self.costs.ended(request.generated)

    def drop(self, request: DecodeRequest, reason: str) -> None:
        """It ends here, whatever it is doing. Idempotent."""
        self._verdicts.pop(id(request), None)
        migration = self._of(request)
        if migration is not None:
            migration.step(MigrationStageEvent.END)
            self._close(migration, ErrorKind.CANCELLED, reason)

    def undrain(self) -> None:
        """Nobody has to leave any more; those that have begun to, go."""
        for verdict in self._verdicts.values():
            if verdict.goes and not verdict.request.stopping:
                self._tell_leaving(verdict.request, withdrawn=True)
        self._verdicts.clear()
        self.offers.withdraw()

    # ------------------------------------------------------------ the round

    def poll(self) -> None:
        """Take in what rooms came to; let time pass."""
        for outcome in self._sender.poll():
            migration = self._by_room.get(outcome.room)
            if migration is None:
                self.prefix_pushes.on_room(outcome)
                continue
            if isinstance(outcome, RoomGranted):
                migration.step(MigrationStageEvent.GRANT)
                migration.began = self._clock.now()
            else:
                self._released(migration, outcome)
        now = self._clock.now()
        for migration in self._paused():
            if now >= migration.paused_at + self._config.migration_pause_s:
                self._back(
                    migration, f"{migration.peer.name} did not take it within {self._config.migration_pause_s:g} s"
                )
        for migration in list(self._by_room.values()):
            if migration.stage is MigrationStage.SENDING:
                self._send(migration)
        self.prefix_pushes.round()
        if self._request_table.draining:
            self._ask()
            self.offers.round()

    def settle(self) -> None:
        """A step was committed: who was waiting for that is offered now."""
        for migration in list(self._by_room.values()):
            request = migration.request
            if migration.stage is not MigrationStage.STOPPING:
                continue
            if request.phase is not DecodePhase.RUNNING:
                self._back(migration, f"it is {request.phase}")
            elif not request.under_way and self._books.settled(request):
                self._offer(migration)

    def _offer(self, migration: OutgoingMigration) -> None:
        request, submit = migration.request, migration.request.submit
        allocation = request.allocation
        assert allocation is not None
        try:
            self._sender.open(migration.room, migration.peer)
        except WireError as error:
            self._back(migration, str(error))
            return
        self._books.depart(request)
        self._manager.seal([(allocation, request.committed)])
        migration.ends = self._manager.tail(allocation, request.committed) | self._manager.states(
            allocation, request.committed
        )
        tokens = request.tokens[: request.committed]
        migration.chain = block_hashes(tokens, self._manager.spec.page_tokens, submit.salt)
        migration.paused_at = self._clock.now()
        migration.step(MigrationStageEvent.LANDED)
        self._request_table.emit(request.session, MigrationPaused(submit.request_id, submit.attempt, request.committed))

    def _send(self, migration: OutgoingMigration) -> None:
        """Write some of what is wanted; behind the last of it, the metadata."""
        request, room = migration.request, migration.room
        assert request.allocation is not None
        wanted = self._sender.wanted(room)
        part = finished(wanted, request.allocation, migration.chain, migration.ends, self._most)
        self._sender.write(room, part, (DONE,))
        unit_bytes = self._manager.spec.whole.unit_bytes
        migration.bytes += sum(len(pages.indices) * unit_bytes(pool) for pool, pages in part.items())
        if part and any(self._sender.wanted(room).values()):
            return
        draft = request.metadata.draft if request.metadata is not None else None
        cached = request.allocation.cached.total
        metadata = HandoverMetadata(room, 0, request.tokens[-1], None, cached, request.computed, draft)
        try:
            self._sender.seal(room, metadata)
        except WireError as error:
            self._back(migration, str(error))
            return
        migration.step(MigrationStageEvent.SENT)

    def _released(self, migration: OutgoingMigration, outcome: RoomReleased) -> None:
        request, submit = migration.request, migration.request.submit
        if outcome.received:
            migration.step(MigrationStageEvent.RECEIVED)
            del self._by_room[migration.room]
            self.costs.moved(migration.bytes, self._clock.now() - migration.began)
            self.counters["moved_out"] += 1
            self.counters["moved_out_bytes"] += migration.bytes
            self._request_table.emit(request.session, MigrationDone(submit.request_id, submit.attempt, migration.bytes))
            self._books.leave(request, f"{migration.peer.name} has it")
        else:
            self._back(migration, outcome.reason)

    def _back(self, migration: OutgoingMigration, reason: str, *, tell: bool = True) -> None:
        """The request goes on here, if its state is what it was; the room is over. The next move may be luckier."""
        request, submit = migration.request, migration.request.submit
        paused = migration.stage is not MigrationStage.STOPPING
        # Why it came to nothing may be told elsewhere first. If it was damage, this may be where it was done.
        if migration.stage in (MigrationStage.SENDING, MigrationStage.SENT) and not self._intact(migration):
            assert request.allocation is not None
            request.allocation.invalid = True
            self._books.fail(request, ErrorKind.DAMAGED, f"its state was damaged here: {reason}")
            return
        migration.step(MigrationStageEvent.BACK)
        self._close(migration, ErrorKind.ROOM, reason)
        request.stopping = False
        self._verdicts[id(request)] = _DrainVerdict(request, True, False, self._clock.now() + JUDGE_EVERY_S)
        self.counters["moves_undone"] += 1
        if paused:
            self._books.come_back(request)
        if tell:
            self._request_table.emit(request.session, MigrationUndone(submit.request_id, submit.attempt, reason))

    def _close(self, migration: OutgoingMigration, kind: ErrorKind, reason: str) -> None:
        del self._by_room[migration.room]
        self._sender.fail(migration.room, kind, reason)

    def _intact(self, migration: OutgoingMigration) -> bool:
        """Whether everything that the request would go on from still matches its tags."""
        allocation, committed = migration.request.allocation, migration.request.committed
        assert allocation is not None
        wanted = due(self._manager.spec, committed)
        held = finished(wanted, allocation, migration.chain, migration.ends)
        for pool, pages in held.items():
            firsts, stops = extents(self._manager.spec, pool, wanted[pool], committed)
            now = self._manager.pools.digest(pool, pages.indices, firsts, stops)
            if now != [tag.digest for tag in pages.tags]:
                return False
        return True

    # ------------------------------------------------------------ draining

    def _ask(self) -> None:
        """Tell the router who should go; who was left to finish may turn out to take long, and is judged again."""
        now = self._clock.now()
        for request in self._request_table:
            running = request.phase is DecodePhase.RUNNING
            if request.phase in OFF_DEVICE:
                self._take_back(request)
            if request.stopping or request.phase not in (DecodePhase.RUNNING, DecodePhase.WAITING):
                continue  # Its state is on its way here, or will be: with that it goes.
            known = self._verdicts.get(id(request))
            if known is not None and known.running == running and (known.goes or now < known.again_at):
                continue
            goes = not running or self._worth_moving(request, now)
            self._verdicts[id(request)] = _DrainVerdict(request, running, goes, now + JUDGE_EVERY_S)
            if goes:
                self._tell_leaving(request)
        self.counters["left_to_finish"] = sum(not v.goes for v in self._verdicts.values())

    def _take_back(self, request: DecodeRequest) -> None:
        """It was retracted: nobody can take it before it is back, and then it is judged again."""
        verdict = self._verdicts.pop(id(request), None)
        if verdict is not None and verdict.goes:
            self._tell_leaving(request, withdrawn=True)

    def _tell_leaving(self, request: DecodeRequest, *, withdrawn: bool = False) -> None:
        submit, started = request.submit, request.phase is DecodePhase.RUNNING
        self._request_table.emit(
            request.session, MigrationWanted(submit.request_id, submit.attempt, started, withdrawn)
        )

    def _worth_moving(self, request: DecodeRequest, now: float) -> bool:
        most = request.submit.sampling.max_tokens - request.generated
        steps = request.committed - len(request.submit.tokens)
        first = request.marks.get("first_step")
        if first is None or steps < STEPS_TO_TELL:
            return most > 1
        step_s = (now - request.arrived - first) / (steps - 1)
        return self.costs.worth_moving(self._bytes(request), most, step_s)

    def _bytes(self, request: DecodeRequest) -> int:
        """Of all state that it would take along."""
        numbers: Mapping[str, range] = due(self._manager.spec, request.committed)
        return sum(len(wanted) * self._manager.spec.whole.unit_bytes(pool) for pool, wanted in numbers.items())

    # ------------------------------------------------------------ accounts

    def _of(self, request: DecodeRequest) -> OutgoingMigration | None:
        return next((d for d in self._by_room.values() if d.request is request), None)

    def _paused(self) -> list[OutgoingMigration]:
        return [d for d in self._by_room.values() if d.stage is not MigrationStage.STOPPING]

    def check(self) -> list[str]:
        found = self._sender.check()
        for migration in self._by_room.values():
            request, paused = migration.request, migration.stage is not MigrationStage.STOPPING
            name = request.submit.request_id
            if not self._request_table.holds(request) or not request.stopping:
                found.append(f"request {name} is {migration.stage} and not in the house, or doesn't know")
            if (request.phase is DecodePhase.LEAVING) != paused:
                found.append(f"request {name} is {migration.stage} and {request.phase}")
        out = [r for r in self._request_table if r.stopping]
        if len(out) != len(self._by_room):
            found.append(f"{len(out)} requests are leaving, {len(self._by_room)} migrations are booked")
        return found

    def close(self) -> None:
        self.prefix_pushes.close()
        self._sender.close()
