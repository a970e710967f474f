"""The router's decisions, without I/O: what happened goes in, actions come out, the clock is injected.

A request is in exactly one phase (`router.state.routed_request`). The router core places it on a prefill and a decode
worker, turns both legs' events into one ordered stream, and replays it from its tokens when a leg is lost: next
attempt, new room, the prompt and everything emitted as tokens. Three kinds of trouble, three prices:

- A worker is lost or reports a retryable error: one replay of `router.replay_limit`. The worker at fault is avoided
  for a while that doubles, so that a request neither burns its replays on a dead worker nor gives up a live one.
- A worker refuses because it drains: no replay is spent, but refusals are bounded too.
- A worker's logits for it are no finite numbers: it is computed once more, on other workers where there are any, from
  its tokens alone (nothing cached is taken), and ends with an error if that comes to the same.
- Decode has no memory for it any more (retracted): nobody is avoided, and where the attempt has brought a token nothing
  is spent; else it counts as a refusal.
- Prefill is lost after decode has sent tokens and the first one is here: nothing is missing, nothing happens.

Every wait ends: for a worker after `router.worker_wait_s`, for the whole request after `router.request_timeout_s`.
`tick` drives both and must be called every 100 ms or so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from contracts.clock import Clock
from contracts.config.router_config import AuditConfig, RouterConfig
from contracts.errors import ErrorKind
from contracts.ids import RequestId, Role, RoomId
from contracts.messages.router_commands import Cancel, Submit
from contracts.messages.worker_events import Audited, Done, Event, LegReport, PromptScores, Tokens
from contracts.messages.worker_status import WorkerStatus, WorkerView
from contracts.sampling_params import TokenLogprob
from router.core.router_actions import (
    DeliverScores,
    DeliverTokens,
    EndRequest,
    NoteReplay,
    RouterAction,
    RouterCounts,
    SendCommand,
)
from router.migration.migrations import Migrations
from router.state.routed_request import AttemptLeg, RoutedRequest, RoutingPhase
from router.state.worker_table import WorkerEntry, WorkerKey, WorkerTable
from router.verification.audits import Audits
from router.verification.damage_totals import DamageTotals

REFUSAL_LIMIT = 64
NONFINITE_REPLAYS = 1
"""How often a request is computed once more because its logits were no finite numbers."""
REFUSAL_PAUSE_S = 0.5
"""How long a worker that refused as draining is not asked again."""
REPORT_GRACE_S = 0.25
"""How long an end waits for prefill's report once every token is in."""


class RouterCore:
    """Placement, ordering and failover of all requests of one router."""

    def __init__(
        self,
        config: RouterConfig,
        clock: Clock,
        mint_room: Callable[[], str],
        audit: AuditConfig = AuditConfig(),  # noqa: B008 (frozen)
    ) -> None:
        self.workers = WorkerTable(config)
        self.counts = RouterCounts()
        self.damage = DamageTotals()
        self._config = config
        self._clock = clock
        self._mint_room = mint_room
        self._requests: dict[RequestId, RoutedRequest] = {}
        self._waiting: dict[RequestId, RoutedRequest] = {}
        self._held: dict[RequestId, RoutedRequest] = {}
        """Complete but for prefill's report."""
        self.audits = Audits(audit, clock, self.workers, self._requests, self._waiting)
        self._actions: list[RouterAction] = []
        self._advanced = clock.now()
        self._steps: dict[WorkerKey, int] = {}
        """That workers had made in the latest table."""
        self.moves = Migrations(
            config, clock, self.workers, mint_room,
            send=lambda worker, command: self._actions.append(SendCommand(worker, command)),
            replay=lambda r, reason, worker: self._replay(r, reason, blame=worker, refused=True),
        )  # fmt: skip

    # ------------------------------------------------------------ questions

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def stalled_s(self) -> float:
        """Seconds since anything advanced while there is work; 0 without work."""
        return self._clock.now() - self._advanced if self._requests else 0.0

    def serving(self, role: Role) -> list[WorkerEntry]:
        return self.workers.serving(role, self._clock.now())

    def take_actions(self) -> list[RouterAction]:
        actions, self._actions = self._actions, []
        actions += [SendCommand(worker, command) for worker, command in self.audits.take_commands()]
        actions += self.audits.take_findings()
        return actions

    def request_ids(self) -> Iterable[RequestId]:
        return self._requests.keys()

    def check(self) -> list[str]:
        """Recount the books from the requests themselves; returns what doesn't agree."""
        found = self.moves.check()
        prefill_load: dict[WorkerKey, int] = {}
        decode_load: dict[WorkerKey, int] = {}
        members: dict[WorkerKey, set[RequestId]] = {}
        for rid, r in self._requests.items():
            if (r.phase is RoutingPhase.WAITING) != (rid in self._waiting):
                found.append(f"request {rid} is {r.phase} but {'in' if rid in self._waiting else 'not in'} the queue")
            if r.phase is RoutingPhase.ENDED:
                found.append(f"request {rid} has ended and is still held")
            if r.prefill:
                prefill_load[r.prefill] = prefill_load.get(r.prefill, 0) + r.prefill_loaded
                members.setdefault(r.prefill, set()).add(rid)
            move = self.moves.of(r)
            for key in [k for k in (r.decode, move.target if move else None) if k]:
                decode_load[key] = decode_load.get(key, 0) + 1
                members.setdefault(key, set()).add(rid)
        for entry in self.workers:
            if entry.breaker.probe is not None and entry.breaker.probe not in entry.requests:
                found.append(f"{entry.record.name}: its breaker waits for a request that it doesn't have")
            want = (prefill_load if entry.record.role is Role.PREFILL else decode_load).get(entry.key, 0)
            if entry.load != want:
                found.append(f"{entry.record.name}: load is booked as {entry.load}, requests add up to {want}")
            if entry.requests != members.pop(entry.key, set()):
                found.append(f"{entry.record.name}: booked requests differ from the requests that name it")
        found += [f"requests name {name} #{inc}, which is not in the table" for name, inc in members]
        found += [f"{rid} is queued but not in the house" for rid in self._waiting if rid not in self._requests]
        found += [f"{rid} is held but not in the house" for rid in self._held if rid not in self._requests]
        return found + self.audits.check()

    # ------------------------------------------------------------ workers come and go

    def on_view(self, views: Iterable[WorkerView]) -> None:
        views = tuple(views)
        # A long prompt takes many steps before its first event. Only workers that have requests from here count: what
        # others compute for somebody else is no progress, nor is a start, from which they count anew.
        steps = {(view.record.name, view.record.incarnation): view.status.steps for view in views}
        busy = [e.key for e in self.workers if e.requests]
        if any(steps.get(key, 0) > self._steps.get(key, steps.get(key, 0)) for key in busy):
            self._advanced = self._clock.now()
        self._steps = steps
        self.damage.on_statuses(view.status for view in views)
        for entry in self.workers.update(views):
            self._lose(entry, "the controller no longer sees it")
            self.workers.gone(entry)
        self._place_waiting()

    def on_linked(self, key: WorkerKey) -> None:
        entry = self.workers.get(key)
        if entry is not None:
            entry.linked = True
            self._place_waiting()

    def on_unlinked(self, key: WorkerKey, reason: str) -> None:
        entry = self.workers.get(key)
        if entry is not None and entry.linked:
            if entry.requests:  # One failure, however many requests it struck.
                entry.breaker.failed(entry.breaker.probe or min(entry.requests), self._clock.now())
            self._lose(entry, reason)

    def on_status(self, status: WorkerStatus) -> None:
        """A worker answered for itself (a drain, say), before the view did."""
        entry = self.workers.get((status.name, status.incarnation))
        if entry is not None:
            entry.status = status
            self.damage.on_statuses([status])
            self._place_waiting()

    def _lose(self, entry: WorkerEntry, reason: str) -> None:
        entry.linked = False
        self.audits.lost(entry.key)
        for rid in sorted(entry.requests):
            request = self._requests[rid]
            if self.moves.lost(request, entry.key, reason):
                continue
            if request.prefill == entry.key and self._survives_prefill(request):
                self._leave_prefill(request)
                request.prefill_lost = True
                self._finish_if_complete(request)
                continue
            self._replay(request, f"lost {entry.record.name}: {reason}", blame=entry.key)
        # An entry that a newer incarnation has replaced can't be found by its key any more: clear its own books here.
        entry.requests.clear()
        entry.load = 0

    @staticmethod
    def _survives_prefill(r: RoutedRequest) -> bool:
        """Prefill's work is done: its token and scores are here, and decode runs on what it sent."""
        return r.scores_in and r.next_position > r.base and r.decode_spoke

    def fail_over(self, key: WorkerKey) -> int:
        """Start over elsewhere what this worker has, at no cost to any request; what nobody else can take stays.

        Returns how many.
        """
        entry, taken = self.workers.get(key), 0
        requests = [self._requests[rid] for rid in sorted(entry.requests)] if entry is not None else []
        for request in requests:
            if self.moves.lost(request, key, "it leaves", over=False):
                continue
            if request.prefill == key and self._survives_prefill(request):
                self._leave_prefill(request)
                request.prefill_lost = True
            else:
                taken += self.moves.restart(request, key)
        return taken

    # ------------------------------------------------------------ requests come and go

    def submit(self, request: RoutedRequest) -> None:
        assert request.id not in self._requests, "request ids are minted once"
        if not self._requests:
            self._advanced = self._clock.now()
        self.counts.submitted += 1
        self._requests[request.id] = request
        self._waiting[request.id] = request
        self._place(request)

    def cancel(self, request_id: RequestId, *, finished: bool = False) -> None:
        """Take a request back on both legs; idempotent. `finished`: its answer is whole (a stop string matched)."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if finished:
            self.counts.ended += 1
            self.audits.consider(request)
        else:
            self.counts.cancelled += 1
        self._close(request)

    def tick(self) -> None:
        """Let time pass: deadlines, waits, back-offs, and ends that wait for a report."""
        now = self._clock.now()
        for request in list(self._requests.values()):
            if now >= request.deadline:
                limit = request.deadline - request.arrived
                self._fail(request, ErrorKind.DEADLINE, f"the request took longer than {round(limit, 2):g} s")
        self._place_waiting()
        for request in list(self._waiting.values()):
            if now - request.waiting_since >= self._config.worker_wait_s:
                self._fail(request, ErrorKind.OVERLOADED, self._missing(request))
        for request in list(self._held.values()):
            self._finish_if_complete(request)
        self.moves.tick()
        self.audits.tick()

    def _missing(self, r: RoutedRequest) -> str:
        roles = [role for role in Role if not self.serving(role)]
        if not roles and (unlike := self.workers.unlike(self._clock.now())):
            return unlike
        what = " and no ".join(f"{role} worker" for role in roles) or "free pair of workers"
        if left_alone := self.workers.left_alone(self._clock.now()):
            what += f" (left alone after failures: {', '.join(left_alone)})"
        if r.told and r.numerics:
            what += f" of the numerics class {r.numerics}, in which its answer began,"
        return f"no {what} could serve the request within {self._config.worker_wait_s:g} s"

    # ------------------------------------------------------------ placing

    def _place_waiting(self) -> None:
        for request in list(self._waiting.values()):
            self._place(request)

    def _place(self, r: RoutedRequest) -> None:
        now = self._clock.now()
        if now < r.not_before:
            return
        tokens = r.tokens
        to_decode = r.max_len - len(tokens) > 1
        classes = {r.numerics} if r.told else None
        if to_decode:
            # Only where somebody computes alike can it go on.
            there = self.workers.classes(Role.DECODE, r.max_len, r.avoid, now)
            classes = there if classes is None else classes & there
            if not classes:
                return  # before what prefill holds of it is counted: many may wait
        prefill = self.workers.pick_prefill(len(tokens), r.max_len, r.hashes, r.avoid, now, classes)
        if prefill is None:
            return
        decode = None
        if to_decode:
            spoiled = {d for p, d in r.spoiled if p == prefill.key}
            decode = self.workers.pick_decode(r.max_len, r.avoid, now, spoiled, {prefill.numerics})
            if decode is None:
                return
        del self._waiting[r.id]
        r.move("place")
        r.first_placed = now if r.first_placed is None else r.first_placed
        r.computed_by(prefill.numerics)
        r.room = RoomId(self._mint_room())
        r.prefill, r.prefill_loaded = prefill.key, len(tokens) - prefill.cached_tokens(r.hashes)
        prefill.load += r.prefill_loaded
        prefill.requests.add(r.id)
        prefill.breaker.sent(r.id)
        prefill.remember(r.hashes)
        r.workers = {Role.PREFILL: prefill.record.name}
        sampling = r.sampling
        if r.attempt and r.scores_in and sampling.prompt_logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=None)  # delivered by an earlier attempt
        submit = Submit(
            r.id, r.attempt, r.room, tokens, len(r.prompt), sampling, None, r.salt,
            max(r.deadline - now, 0.001), r.priority,
        )  # fmt: skip
        if decode is not None:
            r.decode = decode.key
            decode.load += 1
            decode.requests.add(r.id)
            decode.breaker.sent(r.id)
            r.workers[Role.DECODE] = decode.record.name
            self._actions.append(SendCommand(decode.key, replace(submit, peer=prefill.peer)))
            submit = replace(submit, peer=decode.peer)
        self._actions.append(SendCommand(prefill.key, submit))
        r.legs.append(AttemptLeg(r.attempt, len(tokens), dict(r.workers)))

    def _unload_prefill(self, r: RoutedRequest) -> None:
        entry = self.workers.get(r.prefill) if r.prefill else None
        if entry is not None:
            entry.load -= r.prefill_loaded
        r.prefill_loaded = 0

    def _leave_prefill(self, r: RoutedRequest) -> None:
        self._unload_prefill(r)
        entry = self.workers.get(r.prefill) if r.prefill else None
        if entry is not None:
            entry.requests.discard(r.id)
            entry.breaker.left(r.id)
        r.prefill = None

    def _leave_decode(self, r: RoutedRequest) -> None:
        entry = self.workers.get(r.decode) if r.decode else None
        if entry is not None:
            entry.load -= 1
            entry.requests.discard(r.id)
            entry.breaker.left(r.id)
        r.decode = None

    def _leave(self, r: RoutedRequest, over: tuple[Role, ...] = ()) -> None:
        """Leave both legs; those whose work isn't over are told."""
        self.moves.leave(r)
        for role, key in ((Role.PREFILL, r.prefill), (Role.DECODE, r.decode)):
            entry = self.workers.get(key) if key else None
            if key and entry is not None and entry.linked and role not in over:
                self._actions.append(SendCommand(key, Cancel(r.id, r.attempt)))
        self._leave_prefill(r)
        self._leave_decode(r)
        self._held.pop(r.id, None)

    # ------------------------------------------------------------ events

    def on_event(self, worker: WorkerKey, event: Event) -> None:
        if isinstance(event, Audited):
            self.counts.late_events += not self.audits.on_event(worker, event)
            return
        r = self._requests.get(event.request_id)
        if self.moves.on_event(r, worker, event):
            self._advanced = self._clock.now()
            return
        if r is None or event.attempt != r.attempt or worker not in (r.prefill, r.decode):
            self.counts.late_events += 1
            return
        role = Role.PREFILL if worker == r.prefill else Role.DECODE
        if not (isinstance(event, Done) and (event.error is not None or event.reason == "error")):
            self._advanced = self._clock.now()  # An attempt that failed has brought nobody on.
        match event:
            case Tokens():
                if role is Role.DECODE and not r.decode_spoke:
                    self.workers.succeeded((r.prefill, r.decode), r.id, self._advanced)
                self._deliver(r, *r.accept(event, role))
            case LegReport():
                r.progress.append(event)
                if role is Role.PREFILL:
                    r.reported = True
                    self._unload_prefill(r)
                elif event.computed_tokens:
                    self.counts.fallbacks += 1
            case PromptScores():
                if not r.scores_in:
                    r.scores_in = True
                    self._actions.append(DeliverScores(r.id, event.scores))
                    self._deliver(r, *r.release_early())
            case Done():
                if event.error is not None or event.reason == "error":
                    self._on_error(r, worker, event)
                    return
                if r.done is None:
                    if not r.decode:
                        self.workers.succeeded((r.prefill,), r.id, self._advanced)
                    r.done, r.done_at = (role, event), self._advanced
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
            blame = r.prefill if role is Role.PREFILL else r.decode
            if blame is not None:
                self.workers.failed(blame, r.id, self._clock.now(), blame)
            self._replay(r, f"{r.workers[role]} {wrong}", blame=blame, over=(role,))
            return
        if not (r.reported or r.prefill_lost) and self._clock.now() < r.done_at + REPORT_GRACE_S:
            self._held[r.id] = r
            return
        self._end(r, done, over=(Role.PREFILL, Role.DECODE) if role is Role.DECODE and r.reported else (role,))

    def _on_error(self, r: RoutedRequest, worker: WorkerKey, done: Done) -> None:
        kind = done.error or ErrorKind.WORKER
        if kind is ErrorKind.DAMAGED:
            self.counts.damaged += 1
        # What one worker took can't be the client's fault at the next: it may still hold an attempt that was lost here.
        if not kind.retryable and not (kind is ErrorKind.INVALID and r.attempt):
            self._fail(r, kind, done.message or f"{worker[0]} failed the request: {kind}")
            return
        over = (Role.PREFILL,) if worker == r.prefill else (Role.DECODE,)
        blame = next((k for k in (r.prefill, r.decode) if k and k[0] == done.blame), worker)
        reason = f"{worker[0]}: {kind}: {done.message}"
        if kind is ErrorKind.DRAINING:
            entry = self.workers.get(blame)
            if entry is not None:
                entry.refuses_until = self._clock.now() + REFUSAL_PAUSE_S
            self._replay(r, reason, blame=blame, over=over, refused=True)
            return
        if kind is ErrorKind.RETRACTED:
            gained = r.next_position > r.base
            self._replay(r, reason, blame=None, over=over, free=gained, refused=not gained)
            return
        self.workers.failed(blame, r.id, self._clock.now(), worker)
        if kind is ErrorKind.NONFINITE:
            r.distrust()
            if r.nonfinite > NONFINITE_REPLAYS:
                self._leave(r, over)
                self._fail(r, kind, f"{done.message}; it was computed twice; last: {worker[0]}")
                return
        if kind is ErrorKind.ROOM and r.prefill and r.decode:
            r.spoiled.add((r.prefill, r.decode))
        self._replay(r, reason, blame=blame, over=over, kind=kind)

    # ------------------------------------------------------------ replay and end

    def _replay(
        self,
        r: RoutedRequest,
        reason: str,
        *,
        blame: WorkerKey | None,
        over: tuple[Role, ...] = (),
        refused: bool = False,
        free: bool = False,
        kind: ErrorKind = ErrorKind.WORKER,
    ) -> None:
        """Start the next attempt; `over` are the legs that have already ended themselves."""
        now = self._clock.now()
        self._leave(r, over)
        if done := r.ending:
            self._finish(r, done)
            return
        if free:
            self.counts.recomputed += 1
        elif refused:
            r.refusals += 1
            self.counts.refusals += 1
        else:
            r.replays += 1
            self.counts.replays += 1
        if r.replays > self._config.replay_limit or r.refusals > REFUSAL_LIMIT:
            tries = r.replays + r.refusals
            self._fail(
                r,
                ErrorKind.WORKER if kind.retryable else kind,
                f"the request failed {tries} times on its workers; last: {reason}",
            )
            return
        if blame is not None and not refused:
            elsewhere = kind is ErrorKind.NONFINITE and self.workers.others_like(blame)
            r.avoid[blame] = r.deadline if elsewhere else now + min(0.25 * 2**r.replays, 5.0)
        r.not_before = now if refused or free or r.replays <= 1 else now + min(0.05 * 2 ** (r.replays - 2), 1.0)
        r.waiting_since = now
        r.move("replay")
        self._actions.append(NoteReplay(r.id, r.attempt, reason))
        self._waiting[r.id] = r
        self._place(r)

    def _fail(self, r: RoutedRequest, kind: ErrorKind, message: str) -> None:
        self._end(r, Done(r.id, r.attempt, "error", error=kind, message=message))

    def _end(self, r: RoutedRequest, done: Done, over: tuple[Role, ...] = ()) -> None:
        self._leave(r, over)
        self._finish(r, done)

    def _finish(self, r: RoutedRequest, done: Done) -> None:
        if done.error is None:
            self.counts.ended += 1
            self.audits.consider(r)
        else:
            self.counts.failed += 1
        self._actions.append(EndRequest(r.id, done))
        self._close(r)

    def _close(self, r: RoutedRequest) -> None:
        """The one exit: every path out of the house ends here."""
        self._leave(r)
        self._waiting.pop(r.id, None)
        del self._requests[r.id]
        self.audits.forget(r.id)
        r.move("end")
