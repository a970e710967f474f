"""The router's decisions, without I/O: views, events and requests go in, actions come out, the clock is injected.

A request is in exactly one phase (`router.state.routed_request`). Placement picks a prefill and a decode worker for it
(`router.core.placement`); the router core sends it to both, turns their events into one ordered stream, and ends it.
When a leg is lost or fails, failover decides what follows (`router.core.failover`): the request ends, or is replayed
as its next attempt, in a new room, with the prompt and all emitted tokens as its tokens. One loss costs nothing: that
of the prefill worker once its token has arrived (and the prompt's scores, if asked for) and decode has its state.

Every wait is bounded: for workers by `router.worker_wait_s`, for the whole request by `router.request_timeout_s`.
`tick` enforces both and must be called every 100 ms or so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cache_config import CacheConfig
from twinpool.contracts.config.router_config import AuditConfig, RouterConfig
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role, RoomId, room_of
from twinpool.contracts.messages.kept_answers import Attached, Detach
from twinpool.contracts.messages.router_commands import Cancel, PeerRef, Submit, without_pixels
from twinpool.contracts.messages.worker_events import Audited, Done, Embedding, Event, LegReport, PromptScores, Tokens
from twinpool.contracts.messages.worker_status import DamageTotals, WorkerStatus, WorkerView
from twinpool.contracts.sampling_params import TokenLogprob
from twinpool.router.core.answer_lookups import AnswerLookups, FoundAnswer
from twinpool.router.core.failover import AttemptFailure, Fail, Failover, Finish, Retry
from twinpool.router.core.placement import Placement, PredictedTtft
from twinpool.router.core.routed_requests import ProgressWatch, RoutedRequests
from twinpool.router.core.router_actions import (
    DeliverEmbedding,
    DeliverScores,
    DeliverTokens,
    EndRequest,
    NoteReplay,
    RouterAction,
    RouterCounts,
    SendCommand,
)
from twinpool.router.core.routing_policies import LocalPrefill, PoolRates, make_policy
from twinpool.router.kv_indexer.holder_table import KVIndexReader
from twinpool.router.kv_indexer.prefix_indexes import PrefixIndexes
from twinpool.router.migration.migrations import Migrations
from twinpool.router.state.request_journal import JournalKind
from twinpool.router.state.routed_request import AttemptCost, AttemptLeg, RoutedRequest
from twinpool.router.state.worker_table import WorkerEntry, WorkerKey, WorkerTable
from twinpool.router.verification.audits import Audits

Leave = Cancel | Detach
"""What takes a request off a worker."""
REPORT_GRACE_S = 0.25
"""Seconds from `Done` on for which a request that lacks only prefill's report is held before it ends without it."""


class RouterCore:
    """The requests of one router, the order of their tokens, and their ends.

    After each call the caller takes the actions (`take_actions`) and carries them out, until there are none.
    """

    def __init__(
        self,
        config: RouterConfig,
        clock: Clock,
        mint_room: Callable[[], str],
        audit: AuditConfig = AuditConfig(),  # noqa: B008 (frozen)
        *,
        short_share: float = 0.0,
        cache: CacheConfig = CacheConfig(),  # noqa: B008 (frozen)
        local: LocalPrefill | None = None,
        kv_index: KVIndexReader | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`short_share`: `prefill.short_share`, of which predictions know. `cache`: of prefill workers. `local`: says
        when decode workers compute prompts; None: they can't. `kv_index`: the index of KV events; None: there is none.
        `rng`: the draws of policies; None: those of a set seed."""
        self._config, self._clock, self._mint_room = config, clock, mint_room
        self.workers = WorkerTable(config, short_share, cache.page_tokens, conditional=local is not None)
        self.indexes, self._rates = PrefixIndexes(kv_index, of_decode=local is not None), PoolRates()
        policy = make_policy(config.policy, self._rates, cache.prefetch, rng or random.Random(0))
        self.requests = RoutedRequests()
        self.progress = ProgressWatch(clock, self.requests)
        self.counts, self.damage = RouterCounts(), DamageTotals()
        self.placement, self._failover = Placement(self.workers, self.indexes, policy, local), Failover(config)
        self.audits = Audits(audit, clock, self.workers, self.requests, self.requests.queued)
        self.migrations = Migrations(
            config,
            clock,
            self.workers,
            self.placement,
            mint_room,
            send=lambda worker, command: self._actions.append(SendCommand(worker, command)),
            replay=lambda r, reason: self._retry(r, AttemptFailure(reason, cost=AttemptCost.REFUSAL)),
        )
        self.lookups = AnswerLookups(clock, self.workers, mint_room, config.resume_wait_s)
        self._actions: list[RouterAction] = []

    def serving(self, role: Role) -> list[WorkerEntry]:
        return self.workers.serving(role, self._clock.now())

    def take_actions(self) -> list[RouterAction]:
        actions, self._actions = self._actions, []
        audits, lookups = self.audits, self.lookups
        if audits.commands or audits.findings or audits.ended:  # Seldom, and this is called for each frame of events.
            actions += [SendCommand(worker, command) for worker, command in audits.take_commands()]
            actions += audits.take_findings()
            actions += audits.take_ended()
        if lookups.commands or lookups.ended:
            actions += [SendCommand(worker, command) for worker, command in lookups.take_commands()]
            actions += lookups.take_ended()
        return actions

    def check(self) -> list[str]:
        """Recount all books from the requests themselves; returns a line for each disagreement."""
        placed = [(r, move.target if (move := self.migrations.of(r)) else None) for r in self.requests]
        return self.migrations.check() + self.requests.check() + self.placement.check(placed) + self.audits.check()

    # ------------------------------------------------------------ workers come and go

    def on_view(self, views: Iterable[WorkerView]) -> None:
        views = tuple(views)
        self.progress.on_view(views, [e.key for e in self.workers if e.requests])
        self.damage.on_statuses(view.status for view in views)
        ended = self.workers.update(views)
        self.indexes.follow(self.workers)
        self._rates.follow(self.workers)
        for entry in ended:
            self._lose(entry, "the controller no longer sees it")
            self.workers.gone(entry)
        self.lookups.on_view()
        self._place(self.requests.queued.values())

    def on_linked(self, key: WorkerKey) -> None:
        entry = self.workers.get(key)
        if entry is not None:
            entry.linked = True
            self.lookups.on_linked()
            self._place(self.requests.queued.values())

    def on_unlinked(self, key: WorkerKey, reason: str, *, left: bool = False) -> None:
        """A worker's stream has ended. `left`: the worker has left in order."""
        entry = self.workers.get(key)
        if entry is not None and entry.linked:
            if entry.requests:  # One failure, however many requests it struck.
                entry.breaker.failed(entry.breaker.probe or min(entry.requests), self._clock.now())
            self._lose(entry, reason, left=left)

    def on_status(self, status: WorkerStatus) -> None:
        """Take in a status that a worker answered with (to a drain, say), before the controller's table shows it."""
        entry = self.workers.get((status.name, status.incarnation))
        if entry is not None:
            entry.status = status
            self.damage.on_statuses([status])
            self._place(self.requests.queued.values())

    def _lose(self, entry: WorkerEntry, reason: str, *, left: bool = False) -> None:
        entry.linked = False
        self.audits.lost(entry.key)
        self.lookups.lost(entry.key)
        left = left or entry.status.state == "left"
        for r in self.requests.those(entry.requests):
            if self.migrations.lost(r, entry.key, reason):
                continue
            if r.prefill == entry.key and r.outlives_prefill(left=left):
                self.placement.unbook_prefill(r, self._clock.now())
                r.prefill_lost = True
                self._finish_if_complete(r)
                continue
            self._retry(r, AttemptFailure(f"lost {entry.record.name}: {reason}", entry.key))
        # An entry that a newer incarnation has replaced can't be found by its key any more: clear its books here.
        entry.requests.clear()
        entry.load = entry.local_tokens = 0

    def fail_over(self, key: WorkerKey) -> int:
        """Start this worker's requests over on other workers, at the cost of a refusal each; returns how many.

        Requests that no other worker can take stay.
        """
        entry, taken = self.workers.get(key), 0
        for r in self.requests.those(entry.requests) if entry is not None else []:
            if self.migrations.lost(r, key, "it leaves", over=False):
                continue
            if r.prefill == key and r.outlives_prefill(left=False):
                self.placement.unbook_prefill(r, self._clock.now())
                r.prefill_lost = True
            else:
                taken += self.migrations.restart(r, key)
        return taken

    # ------------------------------------------------------------ requests come and go

    def predict_slo_miss(self, requests: Sequence[RoutedRequest]) -> PredictedTtft | None:
        """When the first tokens of new requests, which come together, are predicted to come, where that is too late:
        the caller refuses them, and doesn't submit them. None: they may be taken."""
        now, due = self._clock.now(), requests[0].first_token_by
        predicted = self.placement.predict_ttft(requests, now) if due is not None else None
        if due is None or predicted is None:
            return None
        seconds = predicted.prediction.seconds
        if now + seconds <= due:
            if seconds > (due - now) / 2:  # Where the worker is idle, nothing is learned of its queue.
                for r in requests:
                    r.expected = predicted.prediction
            return None
        predicted.worker.prompts.refused(predicted.tokens, requests[0].priority, now, due, requests[0].share)
        self.counts.refused_early += 1
        return predicted

    def submit(self, request: RoutedRequest) -> None:
        if not self.requests.in_flight:
            self.progress.advanced()
        self.counts.submitted += 1
        self.requests.add(request)
        self._place([request])

    def adopt(self, request: RoutedRequest, found: FoundAnswer) -> None:
        """Go on with a request that a decode worker has kept, and that was restored from it (`RoutedRequest.restore`).
        Where the worker has it no more, the next attempt goes on from its tokens."""
        since = self.lookups.release(found.worker, request.id)
        entry = self.workers.get(found.worker)
        request.go_on_in(found.numerics, found.weights, found.weights_number)
        if entry is None or not entry.linked or not found.answer.running:
            request.attempt = request.next_attempt()
            self.submit(request)
            return
        self.counts.adopted += 1
        self.requests.adopt(request)
        request.go_on_with(entry.key, entry.record.name, started=found.answer.started, now=self._clock.now())
        entry.book(request.id, entry.sequence_load)
        for event in since:
            self.on_event(entry.key, event)

    def detach(self, request_id: RequestId) -> None:
        """Leave a request with a name to its workers, as its client is gone and may come back. Idempotent. No
        `EndRequest` follows."""
        if (request := self.requests.get(request_id)) is not None:
            self.counts.detached += 1
            self._end(request, leave=Detach)

    def cancel(self, request_id: RequestId, *, finished: bool = False) -> None:
        """Cancel a request on both workers; idempotent. No `EndRequest` follows.

        `finished`: its answer is whole (a stop string matched).
        """
        request = self.requests.get(request_id)
        if request is None:
            return
        if finished:
            self.counts.ended += 1
            self.audits.consider(request)
        else:
            self.counts.cancelled += 1
        keep = finished and request.name is not None
        self._end(request, leave=partial(Cancel, keep=True) if keep else Cancel)

    def tick(self) -> None:
        """Act on the time: deadlines, waits for workers, back-offs, held requests, migrations and audits."""
        now = self._clock.now()
        for entry in self.workers:
            if entry.prompts.judges:
                self.counts.refused_falsely += entry.prompts.take_false_refusals(now)
        for r in self.requests.due(now):
            if r.id in self.requests.queued and r.late(now):
                self._end(r, _failed(r, ErrorKind.LATE, "no worker could begin it before its first token was due"))
            elif now >= r.deadline:
                took = f"the request took longer than {round(r.deadline - r.arrived, 2):g} s"
                self._end(r, _failed(r, ErrorKind.DEADLINE, took))
        self._place(self.requests.queued.values())
        for r in list(self.requests.queued.values()):
            if why := self.placement.hopeless(r, now, self._config.worker_wait_s):
                self._end(r, _failed(r, ErrorKind.OVERLOADED, why))
        for r in list(self.requests.held.values()):
            self._finish_if_complete(r)
        self.migrations.tick()
        self.audits.tick()
        self.lookups.tick()

    def _place(self, requests: Iterable[RoutedRequest]) -> None:
        """Send to workers the requests whose back-off is over and for which there is a pair of workers."""
        for r in sorted(requests, key=lambda r: -r.priority):
            now = self._clock.now()
            pair = self.placement.pick(r, now) if now >= r.not_before else None
            if pair is None:
                r.journal.waits(now, r.attempt, partial(self.placement.missing, r, now))
                continue
            del self.requests.queued[r.id]
            r.step("place")
            r.first_placed = now if r.first_placed is None else r.first_placed
            r.computed_by(*pair.prefill.weights)
            r.room = room_of(r.id, self._mint_room())
            choices = self.placement.explain(r, pair)
            self.placement.book(r, pair, now)
            self.counts.local_prompts.update([r.local] if r.local else ())
            self.counts.placements.update((name, str(role)) for role, name in r.workers.items())
            if pair.decode is not None and not pair.one:
                to_decode = without_pixels(_submit(r, r.room, now, pair.prefill.peer))
                self._actions.append(SendCommand(pair.decode.key, to_decode))
            peer = pair.decode.peer if pair.decode is not None and not pair.one else None
            # Nobody keeps what prefill answers alone.
            submit = _submit(r, r.room, now, peer, named=pair.decode is not None)
            self._actions.append(SendCommand(pair.prefill.key, submit))
            r.legs.append(AttemptLeg(r.attempt, r.next_position, dict(r.workers)))
            r.journal.note(now, JournalKind.PLACED, r.attempt, workers=dict(r.workers), text=r.local)
            r.journal.chose(now, choices)

    # ------------------------------------------------------------ events

    def on_event(self, worker: WorkerKey, event: Event) -> None:
        """Take in an event from a worker."""
        r = self.requests.get(event.request_id)
        # Nearly all events are the next tokens of a request that decodes.
        moving = self.migrations.under_way
        if type(event) is Tokens and r is not None and r.id not in moving and r.append_next(worker, event):
            self.progress.at = self._clock.now()
            self._actions.append(DeliverTokens(r.id, event.tokens, event.logprobs))
            return
        if isinstance(event, Audited):
            self.counts.late_events += not self.audits.on_event(worker, event)
            return
        if isinstance(event, Attached):
            self.counts.late_events += not self.lookups.on_event(worker, event)
            return
        if r is None and self.lookups.hold(worker, event):
            return
        if self.migrations.on_event(r, worker, event):
            self.progress.advanced()
        elif r is None or event.attempt != r.attempt or worker not in (r.prefill, r.decode):
            self.counts.late_events += 1
        elif isinstance(event, Done) and (event.error is not None or event.reason == "error"):
            self._retry(r, self._failover.of_error(r, worker, event))
        else:
            self.progress.advanced()  # A failed attempt is no progress.
            self._on_progress(r, r.role_of(worker, event), event)

    def _on_progress(self, r: RoutedRequest, role: Role, event: Event) -> None:
        """Take in an event of the current attempt from the worker of `role`; it is no error."""
        now = self._clock.now()
        match event:
            case Tokens():
                if role is Role.DECODE and not r.decode_spoke:
                    self.workers.succeeded({r.prefill, r.decode}, r.id, now)
                elif role is Role.PREFILL:
                    r.journal.note(now, JournalKind.FIRST_TOKEN, r.attempt, r.workers.get(role, ""))
                    self.placement.computed(r, now)
                self._deliver(r, *r.accept(event, role))
            case LegReport():
                again = any(p.role is event.role and p.attempt == event.attempt for p in r.progress)
                r.progress.append(event)
                r.journal.note(now, JournalKind.REPORT, r.attempt, event.worker, report=event)
                if role is Role.PREFILL:
                    r.reported = True
                    self.placement.prefilled(r, now)
                else:
                    r.prompt_arrived = True
                    self.counts.fallbacks += bool(event.computed_tokens)
                    if "exposed" in event.marks and not again:  # Later reports have the mark again.
                        self.placement.transferred(r, event.cached_tokens, event.marks["exposed"])
            case PromptScores() if not r.scores_in:
                r.scores_in = True
                self._actions.append(DeliverScores(r.id, event.scores))
                self._deliver(r, *r.release_early())
            case Embedding() if event.vector and not r.embedded:
                r.embedded = True
                self._actions.append(DeliverEmbedding(r.id, event.vector))
            case Done():
                if r.done is None:
                    if not r.decode or (r.on_one_worker and not r.decode_spoke):
                        self.workers.succeeded((r.prefill,), r.id, now)
                    r.done, r.done_at = (role, event), now
        if r.done is not None:
            self._finish_if_complete(r)

    def _deliver(self, r: RoutedRequest, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        if tokens:
            self._actions.append(DeliverTokens(r.id, tokens, logprobs))

    def _finish_if_complete(self, r: RoutedRequest) -> None:
        if not r.complete:
            return
        assert r.done is not None
        role, done = r.done
        if wrong := r.contradiction():
            liar = r.prefill if role is Role.PREFILL else r.decode
            self._retry(r, AttemptFailure(f"{r.workers[role]} {wrong}", liar, ended=(role,), reporter=liar))
        elif not (r.reported or r.prefill_lost) and self._clock.now() < r.done_at + REPORT_GRACE_S:
            self.requests.held[r.id] = r
        else:
            self._end(r, done, (Role.PREFILL, Role.DECODE) if role is Role.DECODE and r.reported else (role,))

    # ------------------------------------------------------------ retry and end

    def _retry(self, r: RoutedRequest, failure: AttemptFailure) -> None:
        """End a failed attempt: the request is queued for its next one, or ends."""
        now, at_fault = self._clock.now(), failure.at_fault
        self.counts.damaged += failure.kind is ErrorKind.DAMAGED
        if at_fault and failure.kind is ErrorKind.DRAINING:
            self.workers.refused(at_fault, now)
        if at_fault and failure.reporter:
            self.workers.failed(at_fault, r.id, now, failure.reporter)
        r.learn(failure.kind)
        replaceable = at_fault is not None and self.workers.others_like(at_fault)
        match self._failover.after(r, failure, now, replaceable=replaceable):
            case Finish(done):
                self._end(r, done, failure.ended)
            case Fail(kind, message, cost):
                if cost is not None:
                    r.charge(cost)
                    self.counts.charge(cost)
                self._end(r, _failed(r, kind, message), failure.ended, failure.leave)
            case Retry() as retry:
                r.charge(retry.cost)
                self.counts.charge(retry.cost)
                self._leave(r, failure.ended)
                if retry.avoid is not None:
                    r.avoid[retry.avoid] = retry.avoid_until
                r.not_before, r.waiting_since = retry.not_before, now
                r.journal.note(now, JournalKind.REPLAYED, r.attempt, _named(failure.reporter), failure.reason)
                r.step("replay")
                self._actions.append(NoteReplay(r.id, r.attempt, failure.reason))
                self.requests.queued[r.id] = r
                self._place([r])

    def _leave(
        self, r: RoutedRequest, ended: tuple[Role, ...], leave: Callable[[RequestId, int], Leave] = Cancel
    ) -> None:
        """Take the request off both workers; send a cancel, or what `leave` makes, to a linked worker whose role isn't
        in `ended`."""
        self.migrations.leave(r)
        if r.on_one_worker:
            legs = [] if ended else [r.prefill]
        else:
            legs = [key for role, key in ((Role.PREFILL, r.prefill), (Role.DECODE, r.decode)) if role not in ended]
        for key in legs:
            entry = self.workers.get(key) if key else None
            if key and entry is not None and entry.linked:
                self._actions.append(SendCommand(key, leave(r.id, r.attempt)))
        self.placement.unbook(r, self._clock.now())
        self.requests.held.pop(r.id, None)

    def _end(
        self,
        r: RoutedRequest,
        done: Done | None = None,
        ended: tuple[Role, ...] = (),
        leave: Callable[[RequestId, int], Leave] = Cancel,
    ) -> None:
        """End a request; every end goes through here. `done` None: no client waits, so no `EndRequest` follows."""
        self._leave(r, ended, leave)
        if done is not None:
            self.counts.shed += done.error is ErrorKind.LATE
            if done.error is None:
                self.counts.ended += 1
                self.audits.consider(r)
            else:
                self.counts.failed += 1
            self._actions.append(EndRequest(r.id, done))
        self.requests.remove(r)
        self.audits.forget(r.id)
        r.step("end")


def _submit(r: RoutedRequest, room: RoomId, now: float, peer: PeerRef | None, *, named: bool = True) -> Submit:
    """The command that begins an attempt on a worker. `peer`: the other worker of its pair. `named`: whether the worker
    is told the request's name."""
    sampling = r.sampling
    if r.attempt and r.scores_in and sampling.prompt_logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=None)  # delivered by an earlier attempt
    left_s = max(r.deadline - now, 0.001)
    first_s = max(r.first_token_by - now, 0.001) if r.first_token_by is not None and not r.attempt else 0.0
    return Submit(
        request_id=r.id,
        attempt=r.attempt,
        room=room,
        tokens=r.tokens,
        prompt_len=len(r.prompt),
        sampling=sampling,
        peer=peer,
        salt=r.salt,
        deadline_s=left_s,
        priority=r.priority,
        first_token_s=first_s,
        tenant=r.share.tenant,
        weight=r.share.weight,
        name=r.full_name if named else None,
        pictures=r.pictures,
    )


def _named(worker: WorkerKey | None) -> str:
    return worker[0] if worker is not None else ""


def _failed(r: RoutedRequest, kind: ErrorKind, message: str) -> Done:
    return Done(r.id, r.attempt, "error", error=kind, message=message)
