"""Migrations: running requests go with their state from one decode worker to another, as the router drives it.

A worker that drains says which requests should leave (`MigrationWanted`). The router picks a target for each, and moves
a few at a time:

    ahead      the request's finished pages are copied to the target's tree while the request runs on, if they are many
               (`PushPrefix`, `PullPrefix`)
    asked      the source was told to pause the request (`PauseForMigration`)
    offered    the request is paused at the source, and was submitted to the target as a new attempt, with the source as
               its peer
    given      the source says that the target has all state
    migrated   the target has sent an event of the request: from now on it is the request's decode worker
    stayed     the target failed or refused, or nothing happened in time: the request goes on at the source. A target
               without room now refuses at once, so that no paused request waits in a queue

The worker that sends an event first after the pause has the request, and the other is sent a cancel when it sends one,
too: both would draw the same tokens, so neither choice is wrong. A migration costs no replay; but if both workers are
lost, the request is replayed from its tokens like any other. A request that stayed is offered again, to another worker
first, and ever more rarely.

**Prefixes** that a draining decode worker has offered are transferred to other decode workers (`PrefixTransfers`). Each
prefix goes to one worker: of those to which the fewest tokens are under way, the one with the most free pages. The
target takes only what fits beside what it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from twinpool.contracts.clock import Clock
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role, RoomId, room_of
from twinpool.contracts.messages.router_commands import (
    Cancel,
    Command,
    PauseForMigration,
    PullPrefix,
    PushPrefix,
    ResumeHere,
    Submit,
    without_pixels,
)
from twinpool.contracts.messages.worker_events import (
    Done,
    Event,
    LegReport,
    MigrationDone,
    MigrationPaused,
    MigrationUndone,
    MigrationWanted,
    PrefixOffered,
    PullDone,
    PushReady,
    Tokens,
)
from twinpool.router.migration.migration_table import (
    MIGRATION,
    DrainWish,
    Migration,
    MigrationCounts,
    MigrationEvent,
    MigrationState,
)
from twinpool.router.state.request_journal import JournalKind
from twinpool.router.state.routed_request import RoutedRequest, RoutingPhase
from twinpool.router.state.worker_table import WorkerEntry, WorkerKey, WorkerTable

OFFER_PATIENCE_S = 30.0
"""Seconds after which an offer that hasn't ended is forgotten."""


@dataclass(frozen=True, slots=True)
class _PrefixTransfer:
    source: WorkerKey
    target: WorkerKey
    room: RoomId
    offered: PrefixOffered
    until: float


class PrefixTransfers:
    """All prefix transfers of one router."""

    def __init__(
        self,
        clock: Clock,
        workers: WorkerTable,
        mint_room: Callable[[], str],
        send: Callable[[WorkerKey, Command], None],
    ) -> None:
        self._clock, self._workers, self._mint_room, self._send = clock, workers, mint_room, send
        self._offers: dict[RequestId, _PrefixTransfer] = {}
        self._promised: Counter[WorkerKey] = Counter()
        """For each worker the tokens of prefixes under way to it; its status doesn't count them yet."""
        self.bytes = 0
        """Bytes of state that targets have taken over."""

    def __len__(self) -> int:
        return len(self._offers)

    def on_event(self, worker: WorkerKey, event: PrefixOffered | PushReady | PullDone) -> bool:
        """Take in an event; returns False where it isn't about an offer."""
        if isinstance(event, PrefixOffered):
            self._place(worker, event)
            return True
        offer = self._offers.get(event.request_id)
        if offer is None:
            return False
        if isinstance(event, PullDone):
            self.bytes += event.bytes
            self._drop(offer)
        elif not event.positions:
            self._drop(offer)
        else:
            source, offered = self._workers.get(offer.source), offer.offered
            if source is not None:
                tokens = offered.tokens[: event.positions]
                fetch = PullPrefix(offered.request_id, 0, offer.room, source.peer, tokens, offered.salt, True)
                self._send(offer.target, fetch)
        return True

    def _place(self, worker: WorkerKey, offered: PrefixOffered) -> None:
        now = self._clock.now()
        able = self._workers.able(self._workers.roles[-1], len(offered.tokens), {worker: float("inf")}, now)
        source = self._workers.get(worker)
        if source is not None:
            able = able.of_class({source.handover})
        if not able or offered.request_id in self._offers:
            return
        # Pages are of one size on all workers, so their numbers can be compared: fewest promised, then most free.
        target = min(able, key=lambda e: (self._promised[e.key], -e.status.pages_free, e.turn))
        offer = _PrefixTransfer(worker, target.key, RoomId(self._mint_room()), offered, now + OFFER_PATIENCE_S)
        self._offers[offered.request_id] = offer
        self._promised[target.key] += len(offered.tokens)
        self._send(worker, PushPrefix(offered.request_id, 0, offer.room, target.peer, offered.tokens, offered.salt))

    def _drop(self, offer: _PrefixTransfer) -> None:
        del self._offers[offer.offered.request_id]
        self._promised[offer.target] -= len(offer.offered.tokens)
        if self._promised[offer.target] <= 0:
            del self._promised[offer.target]

    def tick(self) -> None:
        """Forget offers that haven't ended in time."""
        now = self._clock.now()
        for offer in [o for o in self._offers.values() if now >= o.until]:
            self._drop(offer)


PATIENCE_S = 15.0
"""Seconds without progress after which a migration is given up; the workers' own deadlines are shorter."""


_NO_FAULT = (ErrorKind.OVERLOADED, ErrorKind.DRAINING, ErrorKind.RETRACTED, ErrorKind.DEADLINE, ErrorKind.CANCELLED)
"""Errors of a target that count against no worker's breaker."""


class DecodePlacement(Protocol):
    """The choice of the decode worker that a request migrates to; `router.core.placement` makes it."""

    def pick_decode(
        self, r: RoutedRequest, avoid: Mapping[WorkerKey, float], now: float, classes: Container[str]
    ) -> WorkerEntry | None: ...


class Migrations:
    """All migrations of one router; the router core passes each event, loss and end to it. No I/O.

    It has more than twenty methods, one for each step of a migration and each way out of it.
    """

    def __init__(
        self,
        config: RouterConfig,
        clock: Clock,
        workers: WorkerTable,
        placement: DecodePlacement,
        mint_room: Callable[[], str],
        send: Callable[[WorkerKey, Command], None],
        replay: Callable[[RoutedRequest, str], None],
    ) -> None:
        """`replay` starts a request over for a reason, at the cost of a refusal and no replay."""
        self._config, self._clock, self._workers, self._placement = config, clock, workers, placement
        self._mint_room, self._send, self._replay = mint_room, send, replay
        self._wishes: dict[RequestId, tuple[RoutedRequest, DrainWish]] = {}
        self.under_way: dict[RequestId, tuple[RoutedRequest, Migration]] = {}
        """Requests that migrate; changed here alone, and looked into for each event."""
        self.offers = PrefixTransfers(clock, workers, mint_room, send)
        self.counts = MigrationCounts()

    def of(self, request: RoutedRequest) -> Migration | None:
        found = self.under_way.get(request.id)
        return found[1] if found is not None else None

    def waiting(self, worker: WorkerKey) -> int:
        """How many requests that a draining worker would hand to others haven't begun to migrate."""
        wished = (r for r, wish in self._wishes.values() if wish.worker == worker)
        return sum(r.id not in self.under_way for r in wished)

    # ------------------------------------------------------------ what workers say

    def on_event(self, r: RoutedRequest | None, worker: WorkerKey, event: Event) -> bool:
        """Take in an event; returns True where it is about a migration and nothing else, so that the caller ignores it.

        May change the request's decode worker and attempt.
        """
        if isinstance(
            event,
            MigrationWanted | MigrationPaused | MigrationUndone | MigrationDone | PushReady | PullDone | PrefixOffered,
        ):
            if isinstance(event, PrefixOffered | PushReady | PullDone) and self.offers.on_event(worker, event):
                return True
            if isinstance(event, MigrationDone | PullDone):
                self.counts.migrated_bytes += event.bytes
            if isinstance(event, PullDone):
                self._fetched(r, worker, event)
                return True
            if r is not None and worker == r.decode and event.attempt == r.attempt:
                self._of_source(r, worker, event)
            elif isinstance(event, MigrationPaused | MigrationUndone):
                # The request has ended or is somewhere else: a worker that would go on with it needn't.
                self._send(worker, Cancel(event.request_id, event.attempt))
            return True
        if r is None:
            return False
        migration = self.of(r)
        if migration is None or worker != migration.target or event.attempt != migration.attempt:
            return False
        if isinstance(event, Done) and event.error is not None:
            self._blame(r, migration, event)
            self._give_up(r, migration, f"{worker[0]}: {event.error}: {event.message}", over=True)
            return True
        if isinstance(event, LegReport | Tokens | Done) and migration.state in (
            MigrationState.OFFERED,
            MigrationState.GIVEN,
        ):
            self._arrive(r, migration)
        return False

    def _blame(self, r: RoutedRequest, migration: Migration, done: Done) -> None:
        """Count a target's error against the breaker of the worker at fault. Lack of room is no worker's fault."""
        if done.error not in _NO_FAULT:
            guilty = migration.source if done.blame == migration.source[0] else migration.target
            self._workers.failed(guilty, r.id, self._clock.now(), migration.target)

    def _fetched(self, r: RoutedRequest | None, worker: WorkerKey, event: PullDone) -> None:
        migration = self.of(r) if r is not None else None
        if r is None or migration is None or (worker, event.attempt) != (migration.target, migration.attempt):
            return
        if migration.state is MigrationState.AHEAD:
            self._pause(r, migration)

    def _of_source(self, r: RoutedRequest, worker: WorkerKey, event: Event) -> None:
        migration = self.of(r)
        match event:
            case MigrationWanted():
                self._wish(r, worker, event)
            case MigrationPaused() if migration is not None and migration.state is MigrationState.ASKED:
                self._offer(r, migration, event.position)
            case MigrationPaused():
                self._send(worker, ResumeHere(r.id, r.attempt))
            case PushReady() if migration is not None and migration.state is MigrationState.AHEAD:
                self._copy(r, migration, event.positions)
            case MigrationUndone() if migration is not None and migration.state is not MigrationState.GIVEN:
                self._give_up(r, migration, event.reason, tell_source=False)
            case MigrationDone() if migration is not None and migration.state is MigrationState.OFFERED:
                migration.step(MigrationEvent.GIVEN, self._clock.now())

    def _wish(self, r: RoutedRequest, worker: WorkerKey, event: MigrationWanted) -> None:
        if event.withdrawn:
            self._wishes.pop(r.id, None)
            return
        known = self._wishes.get(r.id)
        if known is not None and known[1].worker == worker:
            known[1].started = event.started
        else:
            self._wishes[r.id] = r, DrainWish(worker, event.started)
        self._fulfil(r, self._wishes[r.id][1])

    # ------------------------------------------------------------ one migration

    def begin(self, r: RoutedRequest) -> bool:
        """Begin to migrate a running request; returns False where it can't be now or there is no worker to take it."""
        now = self._clock.now()
        source = self._workers.get(r.decode) if r.decode is not None else None
        if source is None or r.decode is None or r.id in self.under_way or not _can_migrate(r):
            return False
        refusals = self._wishes[r.id][1].avoid if r.id in self._wishes else {}
        avoid = {**r.avoid, **refusals, r.decode: float("inf")}
        target = self._placement.pick_decode(r, avoid, now, {source.handover})
        if target is None:
            return False
        rooms = room_of(r.id, self._mint_room()), room_of(r.id, self._mint_room())
        migration = Migration(r.decode, target.key, r.next_attempt(), *rooms, now)
        self.under_way[r.id] = r, migration
        target.book(r.id, target.sequence_load, r.max_len)
        self.counts.begun += 1
        r.journal.note(now, JournalKind.MOVE_BEGUN, r.attempt, source.record.name, f"to {target.record.name}")
        self._send(r.decode, PushPrefix(r.id, r.attempt, migration.ahead, target.peer))
        return True

    def _copy(self, r: RoutedRequest, migration: Migration, positions: int) -> None:
        """Have the target pull the pages of the first `positions` positions, which the source keeps for it."""
        source = self._workers.get(migration.source)
        if source is None or not positions:
            self._pause(r, migration)
            return
        migration.heard = self._clock.now()
        self._send(
            migration.target,
            PullPrefix(r.id, migration.attempt, migration.ahead, source.peer, r.tokens[:positions], r.salt),
        )

    def _pause(self, r: RoutedRequest, migration: Migration) -> None:
        """Have the source pause the request, or give up where it is about to end or the target is gone."""
        target = self._workers.get(migration.target)
        if target is None or not _can_migrate(r):
            self._give_up(r, migration, "it is about to end")
            return
        migration.step(MigrationEvent.COPIED, self._clock.now())
        self._send(migration.source, PauseForMigration(r.id, r.attempt, migration.room, target.peer))

    def _offer(self, r: RoutedRequest, migration: Migration, position: int) -> None:
        now, source = self._clock.now(), self._workers.get(migration.source)
        if source is None or position + 1 != r.next_position or r.early or r.done is not None:
            self._give_up(r, migration, f"it stopped at {position}, with {r.next_position} tokens told")
            return
        migration.step(MigrationEvent.PAUSED, now)
        migration.paused_at = now
        r.journal.note(now, JournalKind.MOVE_PAUSED, migration.attempt, source.record.name)
        submit = Submit(
            request_id=r.id,
            attempt=migration.attempt,
            room=migration.room,
            tokens=r.tokens[:position],
            prompt_len=len(r.prompt),
            sampling=replace(r.sampling, prompt_logprobs=None),
            peer=source.peer,
            salt=r.salt,
            deadline_s=max(r.deadline - now, 0.001),
            priority=r.priority,
            migrating=True,
            tenant=r.share.tenant,
            weight=r.share.weight,
            name=r.full_name,
            pictures=r.pictures,
        )
        self._send(migration.target, without_pixels(submit))

    def _arrive(self, r: RoutedRequest, migration: Migration) -> None:
        """Make the target the request's decode worker. The source learns that from the hand-over; a source that goes on
        as well says so (`MigrationUndone`) and is sent a cancel."""
        now = self._clock.now()
        paused_s = now - migration.paused_at
        self.counts.migrated += 1
        self.counts.paused_s += paused_s
        self.counts.longest_pause_s = max(self.counts.longest_pause_s, paused_s)
        migration.step(MigrationEvent.SPOKE, now)
        del self.under_way[r.id]
        self._wishes.pop(r.id, None)
        source = self._workers.get(migration.source)
        if source is not None:
            source.unbook(r.id, source.sequence_load)
        target = self._workers.get(migration.target)
        assert target is not None, "who speaks has an entry"
        self._workers.succeeded((migration.target,), r.id, now)
        r.hand_over(migration.target, target.record.name, migration.attempt, migration.room)
        text = f"from {migration.source[0]}, after it stood still for {paused_s:.3f} s"
        r.journal.note(now, JournalKind.MOVED, migration.attempt, target.record.name, text)

    def _give_up(
        self, r: RoutedRequest, migration: Migration, reason: str, *, over: bool = False, tell_source: bool = True
    ) -> None:
        """End a migration: the request stays at its source, or is replayed where the source has given all of it away.

        `over`: the target has ended its attempt itself. `tell_source`: whether the source is to be told.
        """
        given, ahead = migration.state is MigrationState.GIVEN, migration.state is MigrationState.AHEAD
        r.journal.note(self._clock.now(), JournalKind.MOVE_UNDONE, r.attempt, migration.source[0], reason)
        self._end(r, migration, over=over, event=MigrationEvent.END if given else MigrationEvent.BACK)
        self.counts.stayed += 1
        if r.id in self._wishes:
            self._wishes[r.id][1].refused(migration.target, self._clock.now())
        if given:
            # The source has no state of the request any more, and the target's is lost.
            self._replay(r, f"it was lost on its way to {migration.target[0]}: {reason}")
        elif tell_source and not ahead:
            self._send(migration.source, ResumeHere(r.id, r.attempt))

    def _end(self, r: RoutedRequest, migration: Migration, *, over: bool, event: MigrationEvent) -> None:
        target = self._workers.get(migration.target)
        offered = migration.state in (MigrationState.OFFERED, MigrationState.GIVEN)
        migration.step(event, self._clock.now())
        del self.under_way[r.id]
        if target is not None:
            target.unbook(r.id, target.sequence_load)
            if offered and not over and target.linked:
                self._send(migration.target, Cancel(r.id, migration.attempt))

    # ------------------------------------------------------------ what the router core says

    def lost(self, r: RoutedRequest, worker: WorkerKey, reason: str, *, over: bool = True) -> bool:
        """Take in that a worker is lost or, not `over`, to be left by its requests.

        Returns True where it was only the target of the request's migration, which is given up: no more is to be done.
        """
        migration = self.of(r)
        if migration is None or worker != migration.target or worker == r.decode:
            return False
        self._give_up(r, migration, f"lost {worker[0]}: {reason}", over=over)
        return True

    def leave(self, r: RoutedRequest) -> None:
        """End the migration of a request that ends or starts over, and forget the wish for it. Idempotent."""
        migration = self.of(r)
        if migration is not None:
            self._end(r, migration, over=False, event=MigrationEvent.END)
        self._wishes.pop(r.id, None)

    def tick(self) -> None:
        """Give up migrations and offers that stand still, and fulfil the wishes that can be fulfilled now."""
        self.offers.tick()
        now = self._clock.now()
        for r, migration in list(self.under_way.values()):
            if now - migration.heard >= PATIENCE_S:
                self._give_up(r, migration, f"nothing was heard for {PATIENCE_S:g} s")
        for r, wish in list(self._wishes.values()):
            self._fulfil(r, wish)

    def _fulfil(self, r: RoutedRequest, wish: DrainWish) -> None:
        if wish.worker != r.decode or r.phase is not RoutingPhase.RUNNING:
            self._wishes.pop(r.id, None)
            return
        if not wish.started:
            self.restart(r, wish.worker)
            return
        busy = sum(migration.source == wish.worker for _, migration in self.under_way.values())
        if busy < self._config.concurrent_migrations:
            self.begin(r)

    def restart(self, r: RoutedRequest, worker: WorkerKey) -> bool:
        """Start a request over, if there is another worker of this one's role to take it; returns whether it did."""
        entry = self._workers.get(worker)
        role = entry.record.role if entry is not None else Role.DECODE if worker == r.decode else Role.PREFILL
        others = [e for e in self._workers.able(role, r.max_len, r.avoid, self._clock.now()) if e.key != worker]
        if not others or r.done is not None:
            return False
        self.counts.restarted += 1
        self._replay(r, f"{worker[0]} drains")
        return True

    def check(self) -> list[str]:
        """Compare the books with the requests; returns a line for each disagreement."""
        found = []
        for rid, (r, migration) in self.under_way.items():
            if MIGRATION.terminal(migration.state):
                found.append(f"request {rid} is {migration.state} and still booked")
            if migration.source != r.decode:
                found.append(f"request {rid} migrates from {migration.source[0]}, which isn't its worker")
        return found


def _can_migrate(r: RoutedRequest) -> bool:
    """Whether prefill's part is over, all tokens so far have been delivered in order, and more are to come."""
    begun = r.begun and r.decode_spoke and (r.reported or r.prefill_lost)
    return begun and not r.early and r.done is None and r.phase is RoutingPhase.RUNNING and r.next_position < r.max_len
