"""The run of a plan: builds the cluster, runs its events, and reports violations.

What must hold, whatever the plan:

    ends        every request ends, within `GRACE_S` of virtual time after the last fault
    answers     every token and log-probability is the one that `recite` computes from the prompt alone, each
                delivered once; only a client that left, or whose own deadline was short, gets less
    prefixes    cached tokens that a worker reports of a request were in an earlier request under the same salt
    damage      no state is found damaged where no fault damages state, even if a check saved the answer
    audits      computing an answer again from its tokens never gives another answer
    rules       no worker, router or controller raises: an event outside its table, a broken assertion
    books       `check()` of every worker and the router finds nothing, from time to time and at the end
    rest        once all requests have ended, every page and slot of every pool is free or only cached, within `GRACE_S`
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role, WorkerName
from twinpool.contracts.messages.worker_events import LegReport
from twinpool.contracts.sampling_params import TokenLogprob
from twinpool.router.core.router_actions import EndRequest
from twinpool.sim.fabric.hash_answers import ExpectedAnswer, recite
from twinpool.sim.fabric.plane_faults import StoreFaults, WireDamage
from twinpool.sim.fabric.sim_network import SimNetwork, SimSwitch
from twinpool.sim.fabric.sim_storage import SimArenas, SimStore
from twinpool.sim.fabric.virtual_time import VirtualTime
from twinpool.sim.nodes.build_sim_worker import SimWorld
from twinpool.sim.nodes.sim_controller import SimControl
from twinpool.sim.nodes.sim_router import SimRouter
from twinpool.sim.run.faults import count, kinds_of, schedule
from twinpool.sim.scenario.scenario import Scenario, ScenarioRequest, pool_set


@dataclass
class SimClient:
    """One request as its client sees it."""

    ask: ScenarioRequest
    expected: ExpectedAnswer
    request_id: RequestId | None = None
    router: SimRouter | None = None
    """The one that it has asked last."""
    tries: int = 0
    asked: float = 0.0
    """When it was asked last."""
    got: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scores: tuple[TokenLogprob, ...] | None = None
    over: bool = False


GRACE_S = 180.0
_LINK_TIMEOUT_S = 3.0
_STORE_FAULTS = 0.04
"""Share of one-sided writes that a fault befalls."""
RECONNECT_S = 0.02
"""Seconds after which the first client whose router is gone asks another one."""
_RETRY_S = 0.5
"""Seconds after which a client whose router is gone asks again."""
_ENOUGH = 5
"""How many violations stop a run: later ones follow from the first."""
_SUSPECT = (
    "pages_damaged",
    "pages_invalidated",
    "stale_pages",
    "states_damaged_swapped",
    "pages_damaged_in_storage",
    "pages_damaged_on_host",
)
"""Counters of workers that count state found damaged."""
_DAMAGING = ("corrupt", "metadata", "notice", "flip", "rot")
"""Faults that damage state."""
_runs = itertools.count()


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The result of a run."""

    seed: int
    violations: tuple[str, ...]
    seconds: float
    """How many seconds of virtual time it took."""
    events: int
    counts: Counter[str]
    log: tuple[str, ...] = ()


class ScenarioRun:
    """One run of one plan. It has more than twenty methods: one for each kind of event."""

    def __init__(self, plan: Scenario, keep_log: bool = False) -> None:
        self.plan = plan
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.log: list[str] | None = [] if keep_log else None
        self.agenda = VirtualTime()
        shape, rng = plan.shape, random.Random(f"run {plan.seed}")
        self.network = SimNetwork(self.agenda, rng, shape.delay_s, _LINK_TIMEOUT_S)
        config = config_from_dict(_config(shape.config))
        storage = config.cache.storage
        has_store = storage.backend != "none"
        self.store = (
            SimStore(f"simulated {next(_runs)}", storage.max_bytes, rng, 5 * shape.delay_s) if has_store else None
        )
        self.world = SimWorld(
            self.agenda,
            rng,
            shape,
            config,
            SimSwitch(self.network),
            {},
            WireDamage(),
            StoreFaults(random.Random(f"stores {plan.seed}"), _STORE_FAULTS),
            SimArenas(),
            self.store,
            self.say,
            self.violated,
        )
        self.control = SimControl(self.world)
        self._spec = pool_set(shape.pools, shape.page_tokens)
        self.clients = [SimClient(ask, recite(self._spec, ask.prompt, ask.sampling)) for ask in plan.asks]
        self._by_number = {client.ask.number: client for client in self.clients}
        self._router_starts = 0
        self.routers = [self._new_router(index) for index in range(shape.routers)]

    # ------------------------------------------------------------ what is said

    def say(self, who: str, what: str) -> None:
        if self.log is not None:
            self.log.append(f"{self.agenda.now():10.4f}  {who:14}  {what}")

    def violated(self, what: str) -> None:
        self.violations.append(f"{self.agenda.now():.4f} {what}")
        self.say("VIOLATION", what)

    # ------------------------------------------------------------ clients

    @property
    def router(self) -> SimRouter:
        """The first router that lives, or the first."""
        return next((router for router in self.routers if router.process.alive), self.routers[0])

    def _new_router(self, index: int) -> SimRouter:
        self._router_starts += 1
        return SimRouter(self.world, self.control, self._router_starts, self, index)

    def restart_router(self, index: int) -> None:
        """Start a router again; clients whose connections ended with it, and who found no other, ask again."""
        before, self.routers[index] = self.routers[index], self._new_router(index)
        for client in self.clients:
            if not client.over and client.router is before:
                self._ask(client)

    def lost_router(self, router: SimRouter) -> None:
        """Have clients whose connections ended with a router ask another one, where there is one."""
        for client in self.clients:
            if client.router is router and self.router.process.alive:
                delay_s = RECONNECT_S * (1 + client.ask.number % 5)
                self.agenda.after(delay_s, partial(self._ask_elsewhere, client, router))

    def _ask_elsewhere(self, client: SimClient, router: SimRouter) -> None:
        if client.router is router and self.router.process.alive:
            self._ask(client)

    def _ask(self, client: SimClient) -> None:
        if client.over:
            return
        alive = [router for router in self.routers if router.process.alive]
        if not alive:
            self.agenda.after(_RETRY_S, lambda: self._ask(client))
            return
        client.router = alive[client.ask.number % len(alive)]
        self._ask_it(client)

    def _ask_it(self, client: SimClient) -> None:
        """Ask the router that the client has a connection to."""
        client.tries, client.asked = client.tries + 1, self.agenda.now()
        if client.ask.keyed:
            self.counts["came_back"] += client.tries > 1
        else:
            client.got.clear()
            client.logprobs.clear()
        client.scores = None
        client.request_id = RequestId(f"r{client.ask.number}.{client.tries}")
        wanted = client.ask.sampling.max_tokens
        self.say("client", f"asks {client.request_id}: {len(client.ask.prompt)} tokens, {wanted} wanted")
        self._router_of(client).submit(client.ask, client.request_id, len(client.got))

    def _reconnect(self, client: SimClient, noticed_s: float) -> None:
        """A client asks again on a connection to the next router that lives, which may be the same."""
        before, request_id = client.router, client.request_id
        alive = [router for router in self.routers if router.process.alive]
        if client.over or before not in alive or request_id is None:
            return
        self.counts["reconnects"] += 1
        client.router = alive[(alive.index(before) + 1) % len(alive)]
        self._ask_it(client)
        if client.router is not before:
            self.agenda.after(noticed_s, partial(self._notice, client, before, request_id))

    def _notice(self, client: SimClient, before: SimRouter, request_id: RequestId) -> None:
        """A router sees that nobody reads a connection any more. One that the client came back to knew it then."""
        if client.router is not before:
            before.process.do(lambda: before.cancel(request_id))

    def on_resumed(self, router: SimRouter, ask: ScenarioRequest, request_id: RequestId) -> None:
        client = self._by_number[ask.number]
        if client.router is router:
            client.request_id = request_id
            self.counts["resumed_elsewhere"] += 1

    def on_tokens(
        self, router: SimRouter, ask: ScenarioRequest, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> None:
        client = self._by_number[ask.number]
        if client.router is not router:
            return
        if client.over:
            self.violated(f"{client.request_id} got tokens after its end")
        at = len(client.got)
        client.got += tokens
        client.logprobs += logprobs
        self.counts["tokens"] += len(tokens)
        wanted, enough = client.expected, ask.enough
        if client.expected.scores is not None and client.scores is None:
            self._wrong(client, "tokens came before the prompt's log-probabilities")
        elif tuple(client.got) != wanted.tokens[: len(client.got)]:
            meant = wanted.tokens[at : at + len(tokens)]
            self._wrong(client, f"tokens {at}.. are {tuple(tokens)}, not {meant}")
        elif tuple(client.logprobs) != wanted.logprobs[: len(client.got)]:
            meant_too = wanted.logprobs[at : at + len(tokens)]
            self._wrong(client, f"log-probabilities {at}.. are {tuple(logprobs)}, not {meant_too}")
        elif enough is not None and enough <= len(client.got) < len(wanted.tokens):
            client.over = True
            self.counts["stopped"] += 1
            self._router_of(client).cancel(self._id(client), finished=True)

    def _wrong(self, client: SimClient, what: str) -> None:
        self.violated(f"{client.request_id}: {what}")
        client.over = True
        self._router_of(client).cancel(self._id(client))

    def on_scores(self, router: SimRouter, ask: ScenarioRequest, scores: tuple[TokenLogprob, ...]) -> None:
        client = self._by_number[ask.number]
        if client.router is not router:
            return
        if client.scores is not None:
            self._wrong(client, "the prompt's log-probabilities came twice")
        client.scores = scores
        if scores != client.expected.scores:
            self._wrong(client, f"the prompt's log-probabilities are {scores}, not {client.expected.scores}")

    def on_end(self, router: SimRouter, ask: ScenarioRequest, end: EndRequest) -> None:
        client = self._by_number[ask.number]
        if client.router is not router:
            return
        if end.done.error is ErrorKind.SUPERSEDED and ask.reconnects:
            # The router of its connection before took the answer back for it: that one has not noticed yet.
            self.counts["superseded"] += 1
            self.agenda.after(_RETRY_S, partial(self._ask, client))
            return
        client.over = True
        if end.done.error is None:
            self.counts["answered"] += 1
            self.counts.update(kinds_of(client.ask, self._spec))
            if tuple(client.got) != client.expected.tokens:
                wanted = len(client.expected.tokens)
                self.violated(f"{client.request_id} ended after {len(client.got)} of {wanted} tokens")
            if client.scores != client.expected.scores:
                self.violated(f"{client.request_id} ended without its prompt's log-probabilities")
        elif end.done.error is ErrorKind.DEADLINE and ask.deadline_s < 600.0:
            self.counts["late"] += 1
        elif end.done.error is ErrorKind.LATE and not client.got and self._is_late(client):
            self.counts["shed"] += 1
        else:
            self.violated(f"{client.request_id} failed: {end.done.error}: {end.done.message}")

    def on_refusal(self, ask: ScenarioRequest) -> None:
        client = self._by_number[ask.number]
        client.over = True
        self.counts["refused_early"] += 1
        if ask.first_token_s is None:
            self.violated(f"{client.request_id} was refused as late and is patient")

    def _is_late(self, client: SimClient) -> bool:
        """Whether the first token of a client's request is of no use any more."""
        wanted = client.ask.first_token_s
        return wanted is not None and self.agenda.now() - client.asked >= wanted

    def on_progress(self, ask: ScenarioRequest, progress: LegReport) -> None:
        """Check that cached tokens of a prompt were in an earlier request under the same salt."""
        found = progress.cached_tokens
        if not found:
            return
        if ask.sampling.prompt_logprobs is not None and progress.role is Role.PREFILL and not self._shown(ask):
            self.violated(f"request {ask.number} wants its prompt scored, and {found} tokens were not computed")
        whole = (*ask.prompt, *self._by_number[ask.number].expected.tokens)
        again = progress.attempt > 0 or self._by_number[ask.number].tries > 1 or self._restarts(progress.worker)
        now = self.agenda.now()
        known = [
            _common(whole, (*other.ask.prompt, *other.expected.tokens))
            for other in self.clients
            if other.ask.salt == ask.salt and other.ask.at <= now and (again or other.ask.number != ask.number)
        ]
        if found > max(known, default=0):
            self.violated(f"request {ask.number} found {found} tokens of its prompt, which nobody of its salt has said")

    def _restarts(self, name: WorkerName) -> bool:
        """Whether this worker has started requests over, which then find their own pages in the tree."""
        counters = self.control.hosts[name].worker.status().counters
        return any(counters.get(counter, 0) for counter in ("preemptions", "pages_invalidated", "stale_pages"))

    def _shown(self, ask: ScenarioRequest) -> bool:
        return self._by_number[ask.number].scores is not None

    def _leave(self, client: SimClient) -> None:
        if client.over:
            return
        client.over = True
        self.counts["left"] += 1
        if client.request_id is not None and self._router_of(client).process.alive:
            self._router_of(client).cancel(client.request_id)

    def _router_of(self, client: SimClient) -> SimRouter:
        assert client.router is not None
        return client.router

    def _id(self, client: SimClient) -> RequestId:
        assert client.request_id is not None
        return client.request_id

    # ------------------------------------------------------------ the run

    def run(self, until: Callable[[], bool] = lambda: False) -> ScenarioResult:
        """Run to the end, or until `until()`, which is called before each event, returns True."""
        for client in self.clients:
            self.agenda.after(client.ask.at, partial(self._ask, client))
            for again in client.ask.reconnects:
                self.agenda.after(again.at, partial(self._reconnect, client, again.noticed_s))
            if client.ask.leaves_at is not None:
                self.agenda.after(client.ask.leaves_at, partial(self._leave, client))
        calm = max([schedule(self, fault) for fault in self.plan.faults], default=0.0)
        calm = max(calm, max((client.ask.at for client in self.clients), default=0.0))
        events = 0
        try:
            events = self._until(lambda: until() or all(c.over for c in self.clients), calm + GRACE_S)
            if self.violations or until():
                return self._result(events)
            self.violations += [f"{c.request_id} has not ended" for c in self.clients if not c.over]
            if not self.violations:
                events += self._rest(calm)
            return self._result(events)
        finally:
            if self.store is not None:
                self.store.close()

    def _until(self, reached: Callable[[], bool], deadline: float) -> int:
        events = 0
        while not reached() and len(self.violations) < _ENOUGH and self.agenda.now() < deadline:
            try:
                if not self.agenda.next():
                    break
            except Exception as error:
                self.violated(f"{type(error).__name__}: {error}")
                self.say("", repr(error))
                break
            events += 1
        return events

    def _rest(self, calm: float) -> int:
        """Run until nothing is held any more, then check all parts; returns the number of events."""
        events = self._until(lambda: False, max(calm, self.agenda.now()) + 0.5)
        deadline, unrest = self.agenda.now() + GRACE_S, ["nothing was looked at"]
        while unrest and self.agenda.now() < deadline and not self.violations:
            events += self._until(lambda: False, self.agenda.now() + 1.0)
            unrest = self._unrest()
        self.violations += unrest
        hosts = [host for host in self.control.all_hosts if host.ended is None]
        for host in hosts:
            self.violations += [f"{host.process}: {line}" for line in host.worker.check().violations]
        self.violations += [f"{r.process.name}: {line}" for r in self.routers for line in r.check() if r.process.alive]
        self.violations += self._found_damaged()
        return events

    def _found_damaged(self) -> list[str]:
        if any(self.counts[kind] for kind in _DAMAGING):
            return []
        hosts = [(host, host.snapshot.counters) for host in self.control.all_hosts]
        found = [(host, name, counters.get(name, 0)) for host, counters in hosts for name in _SUSPECT]
        return [f"{host.process}: {name} is {n:g}, and nothing was damaged" for host, name, n in found if n]

    def _unrest(self) -> list[str]:
        found = [line for host in self.control.all_hosts if host.ended is None for line in host.unrest()]
        for view in self.control.core.views():
            host = self.control.hosts.get(WorkerName(view.record.name))
            given_up = view.record.name in self.control.given_up | self.control.sent_away
            if view.status.state in ("starting", "dead") and not given_up and (host is None or host.ended is not None):
                found.append(f"{view.record.name} is {view.status.state}")
            if view.status.state == "left" and view.record.name in self.control.returning - self.control.given_up:
                found.append(f"{view.record.name} has left, and was to start again")
        return found

    def _result(self, events: int) -> ScenarioResult:
        count(self)
        return ScenarioResult(
            self.plan.seed, tuple(self.violations), self.agenda.now(), events, self.counts, tuple(self.log or ())
        )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common prefix of two sequences."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _config(drawn: dict[str, object]) -> dict[str, object]:
    """The configuration, with leases and timeouts short enough to save virtual time, and long enough for all faults."""
    return {
        "cluster": {"heartbeat_s": 0.25, "lease_s": 2.0, "start_timeout_s": 6.0, "stall_s": 4.0, "restart_limit": 100},
        "router": {"replay_limit": 100, "worker_wait_s": 120.0},
        "transfer": {
            "plane": "local",
            "room_timeout_s": 5.0,
            "connect_timeout_s": 2.0,
            "link_timeout_s": _LINK_TIMEOUT_S,
            "layers": True,
            "layer_group_bytes": 1,
        },
        **drawn,
    }


class _IntoLog(logging.Handler):
    """Copies the log lines of router cores into the run's log."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.name, record.getMessage())


@contextmanager
def _logging(run: ScenarioRun) -> Iterator[None]:
    root, handler, before = logging.getLogger(), _IntoLog(run.say), logging.root.manager.disable
    root.addHandler(handler)
    if run.log is None:
        logging.disable()
    try:
        yield
    finally:
        logging.disable(before)
        root.removeHandler(handler)


def run_plan(plan: Scenario, *, keep_log: bool = False) -> ScenarioResult:
    """Run a plan from beginning to end. Deterministic: the same plan gives the same result."""
    run = ScenarioRun(plan, keep_log)
    with _logging(run):
        return run.run()
