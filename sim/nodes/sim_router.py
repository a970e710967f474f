"""The router's process: for each model the production `RouterCore`, with its links and its service as events.

Which of the models a request is for is decided by production's table of names, and who waits for a cluster that sleeps
until there are requests by its `DemandWake`, on an event loop in virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast

from msgspec.structs import replace

from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import RequestId, Role, WorkerName
from twinpool.contracts.messages.cluster_view import ClusterView
from twinpool.contracts.messages.kept_answers import AnswerName, KeptAnswer
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Event, LegReport
from twinpool.contracts.messages.worker_status import WorkerStatus
from twinpool.contracts.sampling_params import AdapterRef, TokenLogprob
from twinpool.router.core.answer_lookups import LookupEnded
from twinpool.router.core.router_actions import DeliverScores, DeliverTokens, EndRequest, NoteReplay, SendCommand
from twinpool.router.core.router_core import RouterCore
from twinpool.router.core.routing_policies import local_prefill
from twinpool.router.links.controller_port import WorkerDirectory
from twinpool.router.links.worker_links import REACHABLE
from twinpool.router.models_app import ModelSwitch
from twinpool.router.service.admission import BodyBuffer
from twinpool.router.service.demand_wake import DemandWake
from twinpool.router.service.router_service import TICK_S, RouterService
from twinpool.router.state.prefix_hashes import prefix_hashes
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.state.ttft_prediction import TenantWeight
from twinpool.router.state.worker_table import WorkerEntry, WorkerKey
from twinpool.router.verification.audits import AuditFinding, AuditResult
from twinpool.sim.fabric.sim_network import there
from twinpool.sim.fabric.virtual_time import SimProcess
from twinpool.sim.nodes.build_sim_worker import SimWorld, spec_of
from twinpool.sim.nodes.sim_claims import (
    OpenAnswer,
    SimClaim,
    SimClaims,
    SimDirectory,
    SimSleeper,
    drawn_alike,
    name_of,
)
from twinpool.sim.nodes.sim_controller import SimControl
from twinpool.sim.nodes.sim_link import SimLink
from twinpool.sim.scenario.scenario import ScenarioRequest, adapter_of


class RouterClients(Protocol):
    """The clients of the routers, which receive their answers. `router` is the one that speaks: a client may have asked
    another one since."""

    def on_tokens(
        self, router: SimRouter, answer: OpenAnswer, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> None: ...

    def on_scores(self, router: SimRouter, answer: OpenAnswer, scores: tuple[TokenLogprob, ...]) -> None: ...

    def on_end(self, router: SimRouter, answer: OpenAnswer, end: EndRequest) -> None: ...

    def on_refusal(self, ask: ScenarioRequest) -> None:
        """The request is not taken, as its first token would be late."""

    def on_sleep(self, ask: ScenarioRequest, waited_s: float = 0.0) -> None:
        """The request is not taken, as the cluster sleeps, or has not woken in `waited_s`."""

    def on_redraw(self, ask: ScenarioRequest) -> None:
        """The rest of an answer can't be drawn again, as it may be of other weights."""

    def on_resumed(self, router: SimRouter, ask: ScenarioRequest, request_id: RequestId) -> None:
        """A worker had kept the answer: it goes on as this request."""

    def on_progress(self, ask: ScenarioRequest, worker: WorkerKey, progress: LegReport) -> None:
        """A worker reports on its leg of a request; clients see the counts in their usage."""


@dataclass(slots=True)
class SimIntake:
    """The adapters over a model, by the names that requests give."""

    adapters: dict[str, AdapterRef] = field(default_factory=dict)


class SimRouter:
    """One start of a router, as far as it is one model's service. Answers to all its requests go to `client`."""

    def __init__(
        self,
        world: SimWorld,
        control: SimControl,
        process: SimProcess,
        number: int,
        client: RouterClients,
    ) -> None:
        """`process`: the router's; `number`: of this start among those of all routers and models."""
        self.world, self.control, self.process = world, control, process
        self.spec, self.intake, self.body_limit, self.buffer = spec_of(world.model), SimIntake(), 0, BodyBuffer(0)
        config = world.config
        self.intake.adapters = {name: adapter_of(name, path) for name, path in config.adapters.configured.items()}
        self._cache = config.cache_for(Role.PREFILL)
        self.core = RouterCore(
            config.router,
            world.agenda,
            self._mint,
            config.audit,
            short_share=config.prefill.short_share,
            cache=self._cache,
            local=local_prefill(config),
        )
        directory = cast(WorkerDirectory, SimDirectory(control, process))
        self.demand = DemandWake(self.core, directory, config.router, world.agenda)
        self._sleeper = SimSleeper(self.demand, world)
        self.links: dict[WorkerKey, SimLink] = {}
        self._client = client
        self._open: dict[RequestId, OpenAnswer] = {}
        self._claims = SimClaims(self.core, self._routed)
        self._number, self._rooms = number, 0
        watched = world.exchange.network.pipe(control.process, self.process)

        def watch(view: ClusterView) -> None:
            told = there(view)
            watched.send(lambda: self.process.do(lambda: self._viewed(told)))

        control.watchers.append(watch)
        self.process.on_death(lambda: control.watchers.remove(watch))
        self.process.on_death(lambda: self.demand.close("the router is dead"))
        watch(control.view())
        self._tick()

    def _mint(self) -> str:
        self._rooms += 1
        return f"room-{self._number}.{self._rooms}"

    # ------------------------------------------------------------ clients

    def submit(self, ask: ScenarioRequest, request_id: RequestId, seen: int = 0, began: float = 0.0) -> None:
        """Take a request. One with a key is looked for at the workers first; of it the client has `seen` tokens, and
        `began` to ask for it then. An answer to it that is under way here is left to its workers before, as its client
        has another connection now."""
        if not self.demand.needed:
            self._take(ask, request_id, seen, began)
            return
        self._sleeper.wait(
            ask, request_id, lambda: self._take(ask, request_id, seen, began), partial(self._client.on_sleep, ask)
        )

    def _take(self, ask: ScenarioRequest, request_id: RequestId, seen: int, began: float) -> None:
        if ask.keyed:
            for before in [rid for rid, other in self._open.items() if other.ask.number == ask.number]:
                del self._open[before]
                self.core.detach(before)
            self._claims.claim(SimClaim(ask, request_id, seen, began))
        else:
            self._submit(ask, request_id)
        self._act()

    def _routed(
        self, ask: ScenarioRequest, request_id: RequestId, name: AnswerName | None, kept: KeptAnswer | None = None
    ) -> RoutedRequest:
        now, new = self.world.agenda.now(), kept is None
        return RoutedRequest(
            request_id,
            ask.prompt,
            ask.sampling if kept is None else replace(ask.sampling, max_tokens=kept.max_tokens),
            now=now,
            deadline=now + (ask.deadline_s if kept is None else kept.left_s),
            hashes=prefix_hashes(ask.prompt, ask.salt, self._cache.page_tokens),
            salt=ask.salt,
            priority=ask.priority,
            first_token_by=now + ask.first_token_s if new and ask.first_token_s is not None else None,
            share=TenantWeight(ask.tenant, ask.weight),
            name=name,
        )

    def _submit(self, ask: ScenarioRequest, request_id: RequestId, *, seen: bool = False) -> None:
        """Begin an answer. `seen`: whether its client has a part of it."""
        request = self._routed(ask, request_id, name_of(ask) if ask.keyed else None)
        if seen:
            request.draw_again(self.core.workers.served.weights.number)
        self._open[request_id] = OpenAnswer(ask, request)
        if self.core.predict_slo_miss([request]) is not None:
            del self._open[request_id]
            self._client.on_refusal(ask)
            return
        self.core.submit(request)

    def cancel(self, request_id: RequestId, *, finished: bool = False) -> None:
        """Cancel a request: the client has left or, with `finished`, has all that it wanted. One with a key is left to
        its workers."""
        if self._sleeper.leave(request_id) or self._claims.leave(request_id):
            return
        answer = self._open.pop(request_id, None)
        if answer is not None and answer.ask.keyed:
            self.core.detach(request_id)
        else:
            self.core.cancel(request_id, finished=finished)
        self._act()

    def _found(self, action: LookupEnded) -> None:
        """Go on with what workers have kept of an answer, or begin it."""
        found = self._claims.ended(action)
        if isinstance(found, SimClaim):
            if found.seen and not drawn_alike(found.began, self.core.workers.served):
                self._client.on_redraw(found.ask)
            else:
                self._submit(found.ask, found.request_id, seen=found.seen > 0)
        elif found is not None:
            ask, request = found.claim.ask, found.request
            self.world.say(self.process.label, f"goes on with {request.id} after {len(request.emitted)} tokens")
            self._client.on_resumed(self, ask, request.id)
            answer = self._open[request.id] = OpenAnswer(ask, request)
            self._tell(request.id, request.emitted, request.logprobs)
            if found.done is not None:
                del self._open[request.id]
                self._client.on_end(self, answer, EndRequest(request.id, found.done))
            else:
                self._claims.adopt(action, request)

    def _tell(self, request_id: RequestId, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        answer = self._open.get(request_id)
        tokens, logprobs = self._claims.rest(request_id, tokens, logprobs)
        if answer is not None and tokens:
            self._client.on_tokens(self, answer, tokens, logprobs)

    def drain(self, name: WorkerName, *, undo: bool = False) -> bool:
        """Drain a worker, or undo that, as the operators' endpoints do; False where they would refuse."""
        entry = self.core.workers.named(name)
        link = self.links.get(entry.key) if entry is not None else None
        if entry is None or link is None or not link.linked:
            return False
        if not undo and not self.may_leave(entry):
            return False
        pools, heard = self.control.core.pools, self.control.reaches(self.process)
        try:  # Without the controller the worker hears of it all the same.
            if heard:
                pools.undrain(name) if undo else pools.drain(name, self.core.workers.needed)
        except ConfigError:
            return False
        if undo:
            entry.cancel_drain()
        else:
            entry.request_drain(self.world.agenda.now())
            self.control.returning.discard(name)
        host, pipe = link.host, self.world.exchange.network.pipe(self.process, link.host.process)
        back = self.world.exchange.network.pipe(link.host.process, self.process)

        def told(status: WorkerStatus) -> None:
            self.core.on_status(status)
            self._act()

        def answer() -> None:
            status = there(host.worker.status())
            back.send(lambda: self.process.do(lambda: told(status)))

        def tell() -> None:
            host.call(lambda worker: worker.undrain() if undo else worker.drain())
            host.call(lambda worker: answer())

        pipe.send(tell)
        return True

    def may_leave(self, entry: WorkerEntry) -> bool:
        """Whether a worker may be drained, as `router.api.admin_changes` decides: another of its role must stay."""
        staying = self.core.workers.staying(entry.record.role, self.world.agenda.now())
        return entry.status.state == "ready" and staying != [entry] and bool(staying)

    def change_role(self, name: WorkerName, role: Role) -> bool:
        """Change a worker's role, as the operators' endpoint does; False where it would refuse."""
        entry = self.core.workers.named(name)
        if entry is None or entry.record.role is role or not self.may_leave(entry):
            return False
        entry.request_drain(self.world.agenda.now())
        try:
            if not self.control.reaches(self.process):
                raise ConfigError("the controller can't be reached")
            self.control.core.pools.change_role(name, role)
        except ConfigError:
            entry.cancel_drain()
            return False
        self.control.returning.discard(name)
        return True

    def restart(self, name: WorkerName) -> bool:
        """Have a worker drain and start again, as the operators' endpoint does; False where it would refuse."""
        entry = self.core.workers.named(name)
        if entry is None or not self.control.reaches(self.process):
            return False
        ready = entry.status.state == "ready"
        if ready and not self.may_leave(entry):
            return False
        if ready:
            entry.request_drain(self.world.agenda.now())
        self.control.core.pools.restart(name)
        self.control.wants([name])
        return True

    # ------------------------------------------------------------ events in, actions out

    def _tick(self) -> None:
        self.core.tick()
        self._act()
        self.process.later(TICK_S, self._tick)

    def _viewed(self, view: ClusterView) -> None:
        views = view.workers
        wanted = {(v.record.name, v.record.incarnation): v.record for v in views if v.status.state in REACHABLE}
        left = {(v.record.name, v.record.incarnation) for v in views if v.status.state == "left"}
        for key in [k for k in self.links if k not in wanted]:
            self.links.pop(key).close(left=key in left)
        self.core.workers.served = view.served or self.core.workers.served
        self.core.on_view(views)
        self._sleeper.observe()
        self._act()
        for key in wanted:
            if key not in self.links:
                self.links[key] = SimLink(self, key, self.control.host(key))

    def linked(self, key: WorkerKey) -> None:
        self.core.on_linked(key)
        self._sleeper.observe()
        self._act()

    def unlinked(self, key: WorkerKey, end: StreamEnd) -> None:
        self.world.say(self.process.label, f"lost {key[0]}#{key[1]}: {end.reason}")
        self.core.on_unlinked(key, end.reason, left=end.left)
        self._act()

    def events(self, key: WorkerKey, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, LegReport):
                answer = self._open.get(event.request_id)
                if answer is not None:
                    self._client.on_progress(answer.ask, key, event)
            else:
                self.world.say(f"{key[0]}#{key[1]}", f"says {event}")
            self.core.on_event(key, event)
        self._act()

    def _act(self) -> None:
        sends: dict[WorkerKey, list[Command]] = {}
        while actions := self.core.take_actions():
            for action in actions:
                match action:
                    case DeliverTokens():
                        self._tell(action.request_id, action.tokens, action.logprobs)
                    case LookupEnded():
                        self._found(action)
                    case DeliverScores():
                        answer = self._open.get(action.request_id)
                        if answer is not None:
                            self._client.on_scores(self, answer, action.scores)
                    case SendCommand():
                        self.world.say(self.process.label, f"tells {action.worker[0]} {_short(action.command)}")
                        sends.setdefault(action.worker, []).append(action.command)
                    case EndRequest():
                        answer = self._open.pop(action.request_id, None)
                        if answer is not None:
                            self._client.on_end(self, answer, action)
                    case AuditFinding() if action.result in (
                        AuditResult.DAMAGED,
                        AuditResult.UNCLEAR,
                        AuditResult.DISPUTED,
                    ):
                        self.world.violated(f"the audit of {action.request_id} finds {action}")
                    case NoteReplay():
                        reason = f"{action.request_id} goes on as attempt {action.attempt}: {action.reason}"
                        self.world.say(self.process.label, reason)
        for key, commands in sends.items():
            link = self.links.get(key)
            if link is not None:
                link.send(commands)

    def check(self) -> list[str]:
        found = self.core.check() + self._claims.check() + self._sleeper.check()
        held = set(self.core.requests.ids())
        found += [f"request {rid} has a client and runs nowhere" for rid in sorted(set(self._open) - held)]
        return found + [f"request {rid} runs and has no client" for rid in sorted(held - set(self._open))]


class SimRouterProcess:
    """One start of a router: a service for each model that it knows."""

    def __init__(self, process: SimProcess, index: int, services: Mapping[str, SimRouter]) -> None:
        """`index`: which of the routers it is. `services`: by model."""
        self.process, self.index, self.services = process, index, dict(services)
        self._switch = ModelSwitch([cast(RouterService, one) for one in services.values()])

    def named(self, name: str) -> SimRouter:
        """The service of the model that a request names, or of the adapter. Raises `UnknownModel`."""
        return cast(SimRouter, self._switch.named(name))

    def check(self) -> list[str]:
        return [line for service in self.services.values() for line in service.check()]


def _short(command: Command) -> str:
    name = type(command).__name__
    attempt, room = getattr(command, "attempt", None), getattr(command, "room", "")
    return f"{name} {command.request_id}{'' if attempt is None else f' attempt {attempt}'}{' ' + room if room else ''}"
