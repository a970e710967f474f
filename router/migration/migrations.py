"""Requests that go from one decode worker to another in the middle of their answer, as the router drives it.

A worker that drains says who should leave (`MigrationWanted`). The router picks who takes each, a few at a time:

    ahead      its finished pages go to the target's tree while it runs on, if they are many (`PushPrefix`,
               `PullPrefix`)
    asked      the source was told to stop it (`PauseForMigration`)
    offered    it stands still at the source; the target was sent it as the next attempt, with the source as its peer
    given      the source says that the target has everything
    moved      the target spoke: from now on it is the request's worker
    stayed     the target failed or refused, or nothing happened in time: the source goes on with it. A target without
               room for it now refuses at once: nobody stands still in a queue

Whoever speaks first after the pause has the request, and the other is sent a cancel when it speaks, too: both would go
on with the same tokens, so it can't be wrong. A move costs no replay; but if both are lost, the request is replayed
from its tokens like any other. One that stayed is offered again, to another worker first, and ever more rarely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from contracts.clock import Clock
from contracts.config.router_config import RouterConfig
from contracts.errors import ErrorKind
from contracts.ids import RequestId, Role, RoomId
from contracts.messages.router_commands import (
    Cancel,
    Command,
    PauseForMigration,
    PullPrefix,
    PushPrefix,
    ResumeHere,
    Submit,
)
from contracts.messages.worker_events import (
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
from router.migration.migration_table import (
    MOVES,
    DrainWish,
    Migration,
    MigrationCounts,
    MigrationEvent,
    MigrationState,
)
from router.migration.prefix_transfers import PrefixTransfers
from router.state.routed_request import RoutedRequest, RoutingPhase
from router.state.worker_table import WorkerKey, WorkerTable

PATIENCE_S = 15.0
"""A move that nobody spoke of for this long is taken back; the workers' own deadlines are shorter."""


_NO_FAULT = (
    ErrorKind.OVERLOADED, ErrorKind.DRAINING, ErrorKind.RETRACTED, ErrorKind.DEADLINE, ErrorKind.CANCELLED
)  # fmt: skip


class Migrations:
    """All moves of one router; the router core asks it about each event, loss and end. No I/O."""

    def __init__(
        self,
        config: RouterConfig,
        clock: Clock,
        workers: WorkerTable,
        mint_room: Callable[[], str],
        send: Callable[[WorkerKey, Command], None],
        replay: Callable[[RoutedRequest, str, WorkerKey], None],
    ) -> None:
        """`replay` starts a request over, at no cost to its limit; what is named last is the worker that refuses it."""
        self._config, self._clock, self._workers = config, clock, workers
        self._mint_room, self._send, self._replay = mint_room, send, replay
        self._wishes: dict[RequestId, tuple[RoutedRequest, DrainWish]] = {}
        self._under_way: dict[RequestId, tuple[RoutedRequest, Migration]] = {}
        self.offers = PrefixTransfers(clock, workers, mint_room, send)
        self.counts = MigrationCounts()

    def of(self, request: RoutedRequest) -> Migration | None:
        found = self._under_way.get(request.id)
        return found[1] if found is not None else None

    def waiting(self, worker: WorkerKey) -> int:
        """Requests that this worker would be rid of and that haven't begun to move."""
        wished = (r for r, wish in self._wishes.values() if wish.worker == worker)
        return sum(r.id not in self._under_way for r in wished)

    # ------------------------------------------------------------ what workers say

    def on_event(self, r: RoutedRequest | None, worker: WorkerKey, event: Event) -> bool:
        """Take an event in; True when it is about a move and nothing else. May change who the request's worker is."""
        if isinstance(
            event,
            MigrationWanted | MigrationPaused | MigrationUndone | MigrationDone | PushReady | PullDone | PrefixOffered,
        ):
            if isinstance(event, PrefixOffered | PushReady | PullDone) and self.offers.on_event(worker, event):
                return True
            if isinstance(event, MigrationDone | PullDone):
                self.counts.moved_bytes += event.bytes
            if isinstance(event, PullDone):
                self._fetched(r, worker, event)
                return True
            if r is not None and worker == r.decode and event.attempt == r.attempt:
                self._of_source(r, worker, event)
            elif isinstance(event, MigrationPaused | MigrationUndone):
                # The request has ended or is somewhere else: who would go on with it needn't.
                self._send(worker, Cancel(event.request_id, event.attempt))
            return True
        if r is None:
            return False
        move = self.of(r)
        if move is None or worker != move.target or event.attempt != move.attempt:
            return False
        if isinstance(event, Done) and event.error is not None:
            self._blame(r, move, event)
            self._give_up(r, move, f"{worker[0]}: {event.error}: {event.message}", over=True, kind=event.error)
            return True
        if isinstance(event, LegReport | Tokens | Done) and move.state in (
            MigrationState.OFFERED,
            MigrationState.GIVEN,
        ):
            self._arrive(r, move)
        return False

    def _blame(self, r: RoutedRequest, move: Migration, done: Done) -> None:
        """The target could not take it: who is at fault will get fewer requests. Lack of room is no fault."""
        if done.error not in _NO_FAULT:
            guilty = move.source if done.blame == move.source[0] else move.target
            self._workers.failed(guilty, r.id, self._clock.now(), move.target)

    def _fetched(self, r: RoutedRequest | None, worker: WorkerKey, event: PullDone) -> None:
        move = self.of(r) if r is not None else None
        if r is None or move is None or (worker, event.attempt) != (move.target, move.attempt):
            return
        if move.state is MigrationState.AHEAD:
            self._ask(r, move)

    def _of_source(self, r: RoutedRequest, worker: WorkerKey, event: Event) -> None:
        move = self.of(r)
        match event:
            case MigrationWanted():
                self._wish(r, worker, event)
            case MigrationPaused() if move is not None and move.state is MigrationState.ASKED:
                self._offer(r, move, event.position)
            case MigrationPaused():
                self._send(worker, ResumeHere(r.id, r.attempt))
            case PushReady() if move is not None and move.state is MigrationState.AHEAD:
                self._copy(r, move, event.positions)
            case MigrationUndone() if move is not None and move.state is not MigrationState.GIVEN:
                self._give_up(r, move, event.reason, tell_source=False)
            case MigrationDone() if move is not None and move.state is MigrationState.OFFERED:
                move.step(MigrationEvent.GIVEN, self._clock.now())

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

    # ------------------------------------------------------------ one move

    def begin(self, r: RoutedRequest) -> bool:
        """Hand a running request to another worker, if there is one and the request is at a point where that can be."""
        now = self._clock.now()
        source = self._workers.get(r.decode) if r.decode is not None else None
        if source is None or r.decode is None or r.id in self._under_way or not _movable(r):
            return False
        refusals = self._wishes[r.id][1].avoid if r.id in self._wishes else {}
        avoid = {**r.avoid, **refusals, r.decode: float("inf")}
        target = self._workers.pick_decode(r.max_len, avoid, now, classes={source.numerics})
        if target is None:
            return False
        rooms = RoomId(self._mint_room()), RoomId(self._mint_room())
        move = Migration(r.decode, target.key, r.next_attempt(), *rooms, now)
        self._under_way[r.id] = r, move
        target.load += 1
        target.requests.add(r.id)
        target.breaker.sent(r.id)
        self.counts.begun += 1
        self._send(r.decode, PushPrefix(r.id, r.attempt, move.ahead, target.peer))
        return True

    def _copy(self, r: RoutedRequest, move: Migration, positions: int) -> None:
        """The source keeps pages of so many positions for the target."""
        source = self._workers.get(move.source)
        if source is None or not positions:
            self._ask(r, move)
            return
        move.heard = self._clock.now()
        self._send(move.target, PullPrefix(r.id, move.attempt, move.ahead, source.peer, r.tokens[:positions], r.salt))

    def _ask(self, r: RoutedRequest, move: Migration) -> None:
        """The source is to stop it."""
        target = self._workers.get(move.target)
        if target is None or not _movable(r):
            self._give_up(r, move, "it is about to end")
            return
        move.step(MigrationEvent.COPIED, self._clock.now())
        self._send(move.source, PauseForMigration(r.id, r.attempt, move.room, target.peer))

    def _offer(self, r: RoutedRequest, move: Migration, position: int) -> None:
        now, source = self._clock.now(), self._workers.get(move.source)
        if source is None or position + 1 != r.next_position or r.early or r.done is not None:
            self._give_up(r, move, f"it stopped at {position}, with {r.next_position} tokens told")
            return
        move.step(MigrationEvent.PAUSED, now)
        move.paused_at = now
        submit = Submit(
            r.id, move.attempt, move.room, r.tokens[:position], len(r.prompt),
            replace(r.sampling, prompt_logprobs=None), source.peer, r.salt, max(r.deadline - now, 0.001), r.priority,
            migrating=True,
        )  # fmt: skip
        self._send(move.target, submit)

    def _arrive(self, r: RoutedRequest, move: Migration) -> None:
        """The target has it. The source will hear so, or go on with it in vain, say so and be told."""
        now = self._clock.now()
        paused_s = now - move.paused_at
        self.counts.moved += 1
        self.counts.paused_s += paused_s
        self.counts.longest_pause_s = max(self.counts.longest_pause_s, paused_s)
        move.step(MigrationEvent.SPOKE, now)
        del self._under_way[r.id]
        self._wishes.pop(r.id, None)
        source = self._workers.get(move.source)
        if source is not None:
            source.load -= 1
            source.requests.discard(r.id)
            source.breaker.left(r.id)
        target = self._workers.get(move.target)
        assert target is not None, "who speaks has an entry"
        self._workers.succeeded((move.target,), r.id, now)
        r.hand_over(move.target, target.record.name, move.attempt, move.room)

    def _give_up(
        self, r: RoutedRequest, move: Migration, reason: str, *, over: bool = False, tell_source: bool = True,
        kind: ErrorKind = ErrorKind.ROOM,
    ) -> None:  # fmt: skip
        """The request stays where it is. `over`: the target has ended its attempt itself."""
        given, ahead = move.state is MigrationState.GIVEN, move.state is MigrationState.AHEAD
        self._end(r, move, over=over, event=MigrationEvent.END if given else MigrationEvent.BACK)
        self.counts.stayed += 1
        if r.id in self._wishes:
            self._wishes[r.id][1].refused(move.target, self._clock.now())
        if given:
            # The source has nothing of it any more, and what the target had is lost.
            self._replay(r, f"it was lost on its way to {move.target[0]}: {reason}", move.target)
        elif tell_source and not ahead:
            self._send(move.source, ResumeHere(r.id, r.attempt))

    def _end(self, r: RoutedRequest, move: Migration, *, over: bool, event: MigrationEvent) -> None:
        target = self._workers.get(move.target)
        offered = move.state in (MigrationState.OFFERED, MigrationState.GIVEN)
        move.step(event, self._clock.now())
        del self._under_way[r.id]
        if target is not None:
            target.load -= 1
            target.requests.discard(r.id)
            target.breaker.left(r.id)
            if offered and not over and target.linked:
                self._send(move.target, Cancel(r.id, move.attempt))

    # ------------------------------------------------------------ what the router core says

    def lost(self, r: RoutedRequest, worker: WorkerKey, reason: str, *, over: bool = True) -> bool:
        """A worker is lost, or (not `over`) to leave; True when that was only where the request was going to."""
        move = self.of(r)
        if move is None or worker != move.target or worker == r.decode:
            return False
        self._give_up(r, move, f"lost {worker[0]}: {reason}", over=over)
        return True

    def leave(self, r: RoutedRequest) -> None:
        """The request ends or starts over: so does its move. Idempotent."""
        move = self.of(r)
        if move is not None:
            self._end(r, move, over=False, event=MigrationEvent.END)
        self._wishes.pop(r.id, None)

    def tick(self) -> None:
        """Take back what nobody speaks of, and fulfil what can be fulfilled now."""
        self.offers.tick()
        now = self._clock.now()
        for r, move in list(self._under_way.values()):
            if now - move.heard >= PATIENCE_S:
                self._give_up(r, move, f"nothing was heard for {PATIENCE_S:g} s")
        for r, wish in list(self._wishes.values()):
            self._fulfil(r, wish)

    def _fulfil(self, r: RoutedRequest, wish: DrainWish) -> None:
        if wish.worker != r.decode or r.phase is not RoutingPhase.RUNNING:
            self._wishes.pop(r.id, None)
            return
        if not wish.started:
            self.restart(r, wish.worker)
            return
        busy = sum(move.source == wish.worker for _, move in self._under_way.values())
        if busy < self._config.concurrent_migrations:
            self.begin(r)

    def restart(self, r: RoutedRequest, worker: WorkerKey) -> bool:
        """Start a request over without this worker, if there is another of its role."""
        role = Role.DECODE if worker == r.decode else Role.PREFILL
        others = [e for e in self._workers.able(role, r.max_len, r.avoid, self._clock.now()) if e.key != worker]
        if not others or r.done is not None:
            return False
        self.counts.restarted += 1
        self._replay(r, f"{worker[0]} drains", worker)
        return True

    def check(self) -> list[str]:
        """What of the books doesn't agree."""
        found = [f"request {rid} is {move.state} and still booked" for rid, (_, move) in self._under_way.items()
                 if MOVES.terminal(move.state)]  # fmt: skip
        found += [f"request {rid} moves from {move.source[0]}, which isn't its worker"
                  for rid, (r, move) in self._under_way.items() if move.source != r.decode]  # fmt: skip
        return found


def _movable(r: RoutedRequest) -> bool:
    """Everything before it is told, and more of it is to come: prefill's part is over, and nothing waits for order."""
    begun = r.scores_in and r.next_position > r.base and r.decode_spoke and (r.reported or r.prefill_lost)
    return begun and not r.early and r.done is None and r.phase is RoutingPhase.RUNNING and r.next_position < r.max_len
