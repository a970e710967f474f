"""A whole cluster in virtual time: production's routers, index, controller and autoscaler over modelled workers.

What decides is real: `RouterCore` with its policies, its predictions and its books, the table of the KV index, the
controller with its leases and drains, the autoscaler, fair shares and the estimate of answers' lengths. What computes
is a model (`sim/scale/prefill_model.py`, `sim/scale/decode_model.py`) whose steps between two events are one jump. So a
request costs a few dozen events, however many tokens it has.

Not modelled, beside what the models leave out: faults, migrations, audits, storage, prompts that decode computes, what
decode keeps of prefixes, and how long a router takes to think. `twinpool sim --seed` runs all of these in full.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import inf

from msgspec.structs import replace

from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.router_config import AuditConfig
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.router_commands import Submit
from twinpool.contracts.messages.router_report import LatencyCounts
from twinpool.contracts.messages.worker_events import Done, LegReport, Tokens
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.core.router_actions import EndRequest, SendCommand
from twinpool.router.core.router_core import RouterCore
from twinpool.router.kv_indexer.holder_table import KVIndexReader
from twinpool.router.service.router_service import TICK_S
from twinpool.router.state.prefix_hashes import PrefixHashes
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.state.ttft_prediction import TenantWeight
from twinpool.router.state.worker_table import WorkerKey
from twinpool.sim.scale.cluster_plan import ClusterPlan
from twinpool.sim.scale.decode_model import DecodeModel, DecodeRow
from twinpool.sim.scale.prefill_model import PULSE_S, PrefillModel, PromptJob, SimIndex
from twinpool.sim.scale.scale_figures import (
    ANSWERED,
    FAILED,
    REFUSED,
    EndedRequest,
    RunFigures,
    RunReport,
    RunWatcher,
    summary,
)
from twinpool.sim.scale.sim_pools import ModelWorker, SimPools
from twinpool.sim.scale.traffic import SimRequest

VIEW_S = 1.0
"""Seconds between two tables of the controller that routers get."""
TURN_S = 0.25
"""Seconds between two turns of the controller."""
STOP_TOKEN = 2
_FIRST = (0,)
"""The first token of an answer that goes on."""


@lru_cache(maxsize=512)
def _prompt(tokens: int) -> tuple[int, ...]:
    """A prompt of so many tokens; which, nobody looks at."""
    return (0,) * tokens


@lru_cache(maxsize=512)
def _sampling(most: int) -> SamplingParams:
    return SamplingParams(most, stop_token_ids=(STOP_TOKEN,))


@lru_cache(maxsize=4096)
def _answer(tokens: int) -> tuple[int, ...]:
    """Tokens of which the last ends the answer."""
    return (0,) * (tokens - 1) + (STOP_TOKEN,)


class _Flight:
    """A request from its arrival until it has ended, at the router and in the models."""

    __slots__ = ("core", "decode", "first_at", "number", "over", "prefill", "request", "routed", "row")

    def __init__(self, number: int, routed: RoutedRequest, request: SimRequest, core: RouterCore) -> None:
        self.number, self.routed, self.request, self.core = number, routed, request, core
        self.first_at = 0.0
        """When its first token came to the router; 0 before."""
        self.prefill: ModelWorker | None = None
        self.decode: ModelWorker | None = None
        self.row: DecodeRow | None = None
        self.over = False
        """Whether it has ended at the router or in the models, and not yet in both."""

    @property
    def id(self) -> RequestId:
        return self.routed.id


class ClusterModel:
    """One run. Whoever drives it may look at it between two steps."""

    def __init__(self, plan: ClusterPlan, requests: Iterator[SimRequest], seed: int = 0, *, index: bool = True) -> None:
        """`requests`: in the order of their times. `index`: whether there is an index of KV events."""
        self.plan, self.figures = plan, RunFigures()
        self.clock = ManualClock(0.0)
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._entered = itertools.count()
        self._requests, self._rng = requests, random.Random(f"routers {seed}")
        config = plan.config
        bounds = config.autoscaling
        self._index: SimIndex | None = None
        if index:
            most = max(plan.prefill.workers, bounds.prefill.max_workers if bounds.enabled else 0)
            blocks = most * ((plan.prefill.device_tokens + plan.prefill.host_tokens) // plan.block_tokens)
            self._index = SimIndex(most + plan.decode.workers, blocks, plan.block_tokens)
        rooms = (f"room-{n}" for n in itertools.count())
        self.cores = [
            RouterCore(
                config.router,
                self.clock,
                lambda: next(rooms),
                AuditConfig(fraction=0.0),
                short_share=plan.prefill.short_share,
                cache=config.cache,
                kv_index=KVIndexReader(self._index.path) if self._index is not None else None,
                rng=random.Random(f"policy {seed} {number}"),
            )
            for number in range(plan.routers)
        ]
        self.pools = SimPools(plan, self.clock, self.figures)
        self.pools.on_join, self.pools.on_leave = self._joined, self._left
        self._flights: dict[int, _Flight] = {}
        """By number."""
        self._firsts = self._late = 0
        self._last_end = 0.0
        self._arriving = True
        self.watcher: RunWatcher | None = None
        """Whom to tell of requests. While there is one, workers report the times of their parts, as real ones do."""

    # ------------------------------------------------------------ the agenda

    def _after(self, delay_s: float, run: Callable[..., None], *given: object) -> None:
        heapq.heappush(self._agenda, (self.clock.now() + delay_s, next(self._entered), run, given))

    def run(self, until_s: float = inf) -> None:
        """Go on until all requests have ended, or until this time of the virtual clock."""
        if not self.figures.sizes:
            self._begin()
        agenda, clock = self._agenda, self.clock
        while agenda and agenda[0][0] <= until_s and (self._arriving or self._flights):
            at, _, run, given = heapq.heappop(agenda)
            clock.advance(at - clock.now())
            self.figures.events += 1
            run(*given)

    @property
    def over(self) -> bool:
        """Whether all requests have come and ended."""
        return not (self._arriving or self._flights)

    def close(self) -> None:
        if self._index is not None:
            self._index.close()

    def report(self, since_s: float = 0.0) -> RunReport:
        """What it came to. `since_s`: requests that came earlier aren't in quantiles and shares."""
        return summary(self.figures, self.plan.target, self._last_end, since_s)

    @property
    def decode_peak(self) -> int:
        """The most positions that a decode worker has held so far, of those that are there now."""
        return max((one.decode.peak for one in self.pools.workers.values() if one.decode is not None), default=0)

    def check(self) -> list[str]:
        """What doesn't add up: lines, none where all is well."""
        found = [line for core in self.cores for line in core.check()]
        routed = sum(core.requests.in_flight for core in self.cores)
        if routed != len(self._flights):
            found.append(f"routers have {routed} requests, {len(self._flights)} are under way")
        if not self._flights and not self._arriving:
            found += [f"{one.key[0]} still has requests" for one in self.pools.workers.values() if not one.idle]
        return found

    def _begin(self) -> None:
        self._pulse()
        self.pools.begin()
        self._view()
        self._turn()
        self._tick()
        self._next_request()

    # ------------------------------------------------------------ what comes again and again

    def _pulse(self) -> None:
        if self._index is not None:
            self._index.pulse(self.clock.now())
            self._after(PULSE_S, self._pulse)

    def _turn(self) -> None:
        gaps = self.figures.gaps
        late = gaps.total * (1 - gaps.share_within(self.plan.config.autoscaling.itl_target_s))
        self.pools.turn(LatencyCounts(self.figures.sent, self._firsts, self._late, int(gaps.total), int(late)))
        self._after(TURN_S, self._turn)

    def _view(self) -> None:
        self._show()
        self._after(VIEW_S, self._view)

    def _show(self) -> None:
        """Show the controller's table to the routers."""
        views = self.pools.core.views()
        for core in self.cores:
            core.on_view(views)
            for entry in core.workers:
                if not entry.linked and entry.key in self.pools.workers:
                    core.on_linked(entry.key)
            self._act(core)

    def _tick(self) -> None:
        for core in self.cores:
            core.tick()
            self._act(core)
        self._after(TICK_S, self._tick)

    def _joined(self, worker: ModelWorker) -> None:
        if self._index is not None and worker.role is Role.PREFILL:
            self._index.join(worker.key)

    def _left(self, worker: ModelWorker) -> None:
        if self._index is not None:
            self._index.leave(worker.key)
        self._show()  # Connections end with the worker: routers hear of that at once.

    # ------------------------------------------------------------ requests come

    def _next_request(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._arriving = False
        else:
            self._after(max(0.0, request.at_s - self.clock.now()), self._arrive, request)

    def _arrive(self, request: SimRequest) -> None:
        now, plan = self.clock.now(), self.plan
        number = self.figures.began(now)
        core = self.cores[0] if len(self.cores) == 1 else self._rng.choice(self.cores)
        if self.watcher is not None:
            self.watcher.came(self.cores.index(core))
        router = plan.config.router
        due = now + plan.target.ttft_s if plan.refuse_late else None
        rid = RequestId(f"r{number}")
        routed = RoutedRequest(
            rid,
            _prompt(request.prompt),
            _sampling(request.most),
            now=now,
            deadline=now + router.request_timeout_s,
            hashes=PrefixHashes(request.raw, plan.block_tokens),
            session=request.session,
            first_token_by=due,
            share=TenantWeight(request.tenant),
        )
        if core.requests.in_flight >= router.max_queue or core.predict_slo_miss([routed]) is not None:
            self.figures.state[number] = REFUSED
            if self.watcher is not None:
                self.watcher.refused(self.cores.index(core))
        else:
            self._flights[number] = _Flight(number, routed, request, core)
            core.submit(routed)
            self._act(core)
        self._next_request()

    def _act(self, core: RouterCore) -> None:
        """Carry out what a router has decided."""
        message_s = self.plan.costs.message_s
        for action in core.take_actions():
            if isinstance(action, SendCommand):
                if isinstance(action.command, Submit):
                    self._send(action.worker, action.command, message_s)
            elif isinstance(action, EndRequest):
                self._end(self._flights[_number(action.request_id)], action.done)

    def _send(self, key: WorkerKey, submit: Submit, message_s: float) -> None:
        worker, flight = self.pools.workers[key], self._flights[_number(submit.request_id)]
        worker.open += 1
        request = flight.request
        assert not submit.attempt, "modelled workers fail no attempt"
        if worker.prefill is not None:
            flight.prefill = worker
            self._after(message_s, self._prompt_came, worker, flight)
        else:
            flight.decode = worker
            flight.row = DecodeRow(flight.number, request.prompt, request.answer, request.most, self.clock.now())
            self._after(message_s, self._row_came, worker, flight)

    def _end(self, flight: _Flight, done: Done) -> None:
        """Enter what a request came to."""
        number, now, figures = flight.number, self.clock.now(), self.figures
        self._last_end = now
        figures.state[number] = ANSWERED if done.error is None else FAILED
        figures.answer_s[number] = now - figures.arrived_s[number]
        if flight.request.answer > 1 and done.error is None:
            figures.tpot_s[number] = (now - flight.first_at) / (flight.request.answer - 1)
        if self.watcher is not None:
            router = self.cores.index(flight.core)
            self.watcher.ended(EndedRequest(router, flight.routed, flight.request, flight.first_at, now, done))
        self._over(flight)

    def _over(self, flight: _Flight) -> None:
        """Note that a request has ended, at the router or in the models; forget it with the second."""
        if flight.over:
            del self._flights[flight.number]
        flight.over = True

    # ------------------------------------------------------------ workers

    def _follow(self, worker: ModelWorker) -> None:
        """Enter a worker's next turn in the agenda, where that is earlier than what is entered."""
        model = worker.prefill or worker.decode
        assert model is not None, "a worker has a model"
        if worker.decode is not None and worker.decode.came:
            came, worker.decode.came = worker.decode.came, []
            for row in came:
                self._after(self.plan.costs.message_s, self._decode_spoke, self._flights[row.number])
        if model.due < worker.due:
            worker.due = model.due
            self._after(model.due - self.clock.now(), self._worker_turn, worker, model.due)

    def _worker_turn(self, worker: ModelWorker, due: float) -> None:
        if due != worker.due:
            return  # An earlier turn was entered since.
        worker.due = inf
        model = worker.prefill or worker.decode
        assert model is not None, "a worker has a model"
        if model.due <= due:
            if isinstance(model, PrefillModel):
                self._prefill_turn(worker, model)
            else:
                self._decode_turn(worker, model)
        self._follow(worker)

    def _prompt_came(self, worker: ModelWorker, flight: _Flight) -> None:
        assert worker.prefill is not None, "prompts go to prefill workers"
        worker.open -= 1
        request = flight.request
        worker.prefill.submit(PromptJob(flight.number, request.prompt, request.keys, request.tenant), self.clock.now())
        self._follow(worker)

    def _row_came(self, worker: ModelWorker, flight: _Flight) -> None:
        assert worker.decode is not None, "rows go to decode workers"
        assert flight.row is not None, "it was sent"
        worker.open -= 1
        worker.decode.ask(flight.row, self.clock.now())
        self._follow(worker)

    def _prefill_turn(self, worker: ModelWorker, model: PrefillModel) -> None:
        costs, figures = self.plan.costs, self.figures
        for job in model.turn(self.clock.now()):
            flight = self._flights[job.number]
            figures.prompt_tokens += job.tokens
            figures.held_tokens += job.held
            figures.loaded_tokens += job.loaded
            self._after(costs.message_s, self._first_came, flight, job)
            row, decode = flight.row, flight.decode
            assert row is not None, "a prompt has a decode worker"
            assert decode is not None, "a prompt has a decode worker"
            row.first_at = self.clock.now()
            alone = flight.request.answer == 1
            delay_s = costs.message_s if alone else costs.handover_s(job.tokens)
            decode.open += 1
            worker.open += 1
            if not alone and self.plan.position_bytes:
                to = decode.key[0]
                worker.sent[to] = worker.sent.get(to, 0) + job.tokens * self.plan.position_bytes
            self._after(delay_s, self._dropped if alone else self._handed_over, decode, flight)
        if model.changes and not worker.told:
            worker.told = True
            self._after(costs.event_s, self._tell_index, worker, model)

    def _tell_index(self, worker: ModelWorker, model: PrefillModel) -> None:
        worker.told = False
        changes, model.changes = model.changes, []
        if self._index is not None:
            self._index.apply(worker.key, changes)

    def _handed_over(self, worker: ModelWorker, flight: _Flight) -> None:
        assert worker.decode is not None, "rows go to decode workers"
        assert flight.row is not None, "it was sent"
        worker.open -= 1
        worker.decode.ready(flight.row, self.clock.now())
        self._follow(worker)

    def _dropped(self, worker: ModelWorker, flight: _Flight) -> None:
        """Have decode forget a request whose answer prefill has ended."""
        assert worker.decode is not None, "rows go to decode workers"
        assert flight.row is not None, "it was sent"
        worker.open -= 1
        worker.decode.drop(flight.row)
        if flight.prefill is not None:
            flight.prefill.open -= 1
        self._follow(worker)
        self._over(flight)

    def _decode_turn(self, worker: ModelWorker, model: DecodeModel) -> None:
        for row in model.turn(self.clock.now()):
            worker.open += 1
            self._after(self.plan.costs.message_s, self._rest_came, self._flights[row.number])

    # ------------------------------------------------------------ what workers say

    def _first_came(self, flight: _Flight, job: PromptJob) -> None:
        """Take prefill's events to the router."""
        key = flight.prefill.key if flight.prefill is not None else None
        assert key is not None, "it was sent"
        number, now, request = flight.number, self.clock.now(), flight.request
        flight.first_at = now
        took = now - self.figures.arrived_s[number]
        self.figures.ttft_s[number] = took
        self._firsts += 1
        self._late += took > self.plan.config.autoscaling.ttft_target_s
        alone = request.answer == 1
        tokens, core = _answer(1) if alone else _FIRST, flight.core
        core.on_event(key, Tokens(flight.id, 0, request.prompt, tokens))
        report = LegReport(
            flight.id,
            0,
            Role.PREFILL,
            key[0],
            cached_tokens=job.held,
            computed_tokens=request.prompt - job.held,
        )
        if self.watcher is not None:
            tiers = {"device": job.held - job.loaded, "host": job.loaded}
            marks = {"queue": job.begun - job.came, "prefill": now - self.plan.costs.message_s - job.came}
            report = replace(report, marks=marks, cached_by_tier=tiers)
            self.watcher.first_token(self.cores.index(core), took, job.held)
        core.on_event(key, report)
        if alone:
            core.on_event(key, Done(flight.id, 0, "stop", stop_token=STOP_TOKEN))
            self.figures.answer_tokens += 1
        self._act(core)

    def _decode_spoke(self, flight: _Flight) -> None:
        """Take decode's first token to the router, which knows by it that prefill's part is done. It comes here as soon
        as the state is over, a step earlier than it would: the figures are the models'."""
        assert flight.decode is not None, "it was sent"
        assert flight.prefill is not None, "it was sent"
        if self.watcher is not None:
            self._report_decode(flight, over=False)
        if flight.request.answer > 2:
            flight.prefill.open -= 1
            flight.core.on_event(flight.decode.key, Tokens(flight.id, 0, flight.request.prompt + 1, _FIRST))

    def _report_decode(self, flight: _Flight, *, over: bool) -> None:
        """Take decode's report to the router: of the state that has come, or of the end. What of a transfer ran beside
        the computation isn't modelled: only what came after it takes time."""
        row, decode, sent = flight.row, flight.decode, 0
        assert row is not None, "it was sent"
        assert decode is not None, "it was sent"
        if over:
            marks = {"done": self.clock.now() - self.plan.costs.message_s - row.came}
        else:
            exposed_s = self.plan.costs.handover_s(row.prompt)
            marks = {"grant": row.granted_at - row.came, "arrived": row.here_at - row.came, "exposed": exposed_s}
            sent = row.prompt * self.plan.position_bytes
        report = LegReport(flight.id, 0, Role.DECODE, decode.key[0], marks, transfer_bytes=sent)
        flight.core.on_event(decode.key, report)

    def _rest_came(self, flight: _Flight) -> None:
        """Take decode's events to the router: its other tokens, and the end."""
        assert flight.decode is not None, "it was sent"
        request, core, key = flight.request, flight.core, flight.decode.key
        flight.decode.open -= 1
        if request.answer == 2 and flight.prefill is not None:
            flight.prefill.open -= 1
        self.figures.answer_tokens += request.answer
        if self.watcher is not None:
            self._report_decode(flight, over=True)
        told = 2 if request.answer > 2 else 1
        core.on_event(key, Tokens(flight.id, 0, request.prompt + told, _answer(request.answer - told)))
        core.on_event(key, Done(flight.id, 0, "stop", stop_token=STOP_TOKEN))
        self._act(core)
        self._over(flight)


def _number(rid: RequestId) -> int:
    return int(rid[1:])
