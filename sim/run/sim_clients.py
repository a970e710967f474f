"""The clients of a run: what they ask, what they are told, and whether that is right.

An answer is of the one version of the weights that its router names, and what it must be is worked out for that
version. Where an operator's change of what is served ends one that was begun, its client hears so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.pool_changes import FlushCaches, ServingChange, SleepCluster, UpdateWeights
from twinpool.contracts.messages.worker_events import Done, LegReport
from twinpool.contracts.sampling_params import TokenLogprob
from twinpool.router.core.router_actions import EndRequest
from twinpool.router.state.worker_table import WorkerKey
from twinpool.sim.fabric.hash_answers import ExpectedAnswer, recite
from twinpool.sim.fabric.virtual_time import VirtualTime
from twinpool.sim.nodes.build_sim_worker import MODEL, content_of, versions_of
from twinpool.sim.nodes.sim_claims import OpenAnswer
from twinpool.sim.nodes.sim_controller import SimControl
from twinpool.sim.nodes.sim_router import SimRouter, SimRouterProcess
from twinpool.sim.nodes.sim_worker import SimHost
from twinpool.sim.run.faults import kinds_of
from twinpool.sim.scenario.scenario import Scenario, ScenarioRequest, pool_set

RECONNECT_S = 0.02
"""Seconds after which the first client whose router is gone asks another one."""
_RETRY_S = 0.5
"""Seconds after which a client asks again whose router is gone, or whose cluster sleeps."""
WAKE_S = 20.0
"""Seconds in which a cluster that sleeps until there are requests wakes, where nothing else happens to it."""
_OPERATORS = ("weights", "flush", "pause", "sleep")
"""Faults that are operators' changes of what is served."""


class ClientRun(Protocol):
    """The run, as its clients see it."""

    plan: Scenario
    agenda: VirtualTime
    counts: Counter[str]
    clusters: dict[str, SimControl]
    """By model."""
    routers: list[SimRouterProcess]

    @property
    def router(self) -> SimRouterProcess: ...
    def say(self, who: str, what: str) -> None: ...
    def violated(self, what: str) -> None: ...


@dataclass
class SimClient:
    """One request as its client sees it."""

    ask: ScenarioRequest
    expected: ExpectedAnswer
    """Of the weights that its answer is of; before there is any of it, of the checkpoint's."""
    version: str = ""
    """The version of the weights that its answer is of, as its router named it; empty before there is any."""
    request_id: RequestId | None = None
    router: SimRouterProcess | None = None
    """The one that it has asked last."""
    tries: int = 0
    began: float = 0.0
    """When it asked first."""
    asked: float = 0.0
    """When it asked last."""
    got: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scores: tuple[TokenLogprob, ...] | None = None
    over_at: float | None = None

    @property
    def over(self) -> bool:
        return self.over_at is not None

    @property
    def model(self) -> str:
        """The model that its request names: by an adapter over it, where it has one."""
        adapter = self.ask.sampling.adapter
        return adapter.name if adapter is not None else self.ask.model or MODEL.name

    def hears(self, router: SimRouter) -> bool:
        """Whether it listens to what this router says: it may have asked another one since."""
        return self.router is not None and self.router.process is router.process


class SimClients:
    """Implements `sim.nodes.sim_router.RouterClients`. It has more than twenty methods: one for each thing that clients
    do or hear."""

    def __init__(self, run: ClientRun) -> None:
        self._run, shapes = run, run.plan.shapes
        self._specs = {name: pool_set(shape.pools, shape.page_tokens) for name, shape in shapes.items()}
        self._contents = {name: versions_of(name) for name in shapes}
        self._clients = [SimClient(ask, self._answer(ask, "")) for ask in run.plan.asks]
        self._by_number = {client.ask.number: client for client in self._clients}
        self.on_told: Callable[[ScenarioRequest, int], None] = lambda ask, count: None
        """Called with each request of which tokens have come, and how many."""

    def _answer(self, ask: ScenarioRequest, weights: str) -> ExpectedAnswer:
        """The answer of its model with the weights of this digest; empty: the checkpoint's."""
        return recite(self._specs[ask.model], ask.prompt, ask.sampling, content_of(ask.model, weights))

    def model_of(self, number: int) -> str:
        """The model that a request of this number asks."""
        return self._by_number[number].ask.model

    @property
    def over(self) -> bool:
        return all(client.over for client in self._clients)

    def unended(self) -> list[str]:
        return [f"{client.request_id} has not ended" for client in self._clients if not client.over]

    def _end(self, client: SimClient) -> None:
        client.over_at = self._run.agenda.now()

    # ------------------------------------------------------------ what they do

    def begin(self) -> None:
        """Enter what clients do into the run's agenda."""
        for client in self._clients:
            self._run.agenda.after(client.ask.at, partial(self._ask, client))
            for again in client.ask.reconnects:
                self._run.agenda.after(again.at, partial(self._reconnect, client, again.noticed_s))
            if client.ask.leaves_at is not None:
                self._run.agenda.after(client.ask.leaves_at, partial(self._leave, client))

    def restarted(self, before: SimRouterProcess) -> None:
        """A router was started again: clients whose connections ended with it, and who found no other, ask again."""
        for client in self._clients:
            if not client.over and client.router is before:
                self._ask(client)

    def lost(self, router: SimRouterProcess) -> None:
        """Have clients whose connections ended with a router ask another one, where there is one."""
        for client in self._clients:
            if client.router is router and self._run.router.process.alive:
                delay_s = RECONNECT_S * (1 + client.ask.number % 5)
                self._run.agenda.after(delay_s, partial(self._ask_elsewhere, client, router))

    def _ask_elsewhere(self, client: SimClient, router: SimRouterProcess) -> None:
        if client.router is router and self._run.router.process.alive:
            self._ask(client)

    def _alive(self) -> list[SimRouterProcess]:
        return [router for router in self._run.routers if router.process.alive]

    def _ask(self, client: SimClient) -> None:
        if client.over:
            return
        alive = self._alive()
        if not alive:
            self._run.agenda.after(_RETRY_S, partial(self._ask_again, client, client.tries))
            return
        client.router = alive[client.ask.number % len(alive)]
        self._ask_it(client)

    def _ask_again(self, client: SimClient, tries: int) -> None:
        """Ask once more, unless the client has since: its router may have died meanwhile."""
        if client.tries == tries:
            self._ask(client)

    def _ask_it(self, client: SimClient) -> None:
        """Ask the router that the client has a connection to."""
        client.tries, client.asked = client.tries + 1, self._run.agenda.now()
        client.began = client.began or client.asked
        if client.ask.keyed:
            self._run.counts["came_back"] += client.tries > 1
        else:
            client.got.clear()
            client.logprobs.clear()
        client.scores = None
        if not client.got:
            client.version = ""
        client.request_id = RequestId(f"r{client.ask.number}.{client.tries}")
        wanted = client.ask.sampling.max_tokens
        of = f" of {client.ask.model}" if client.ask.model else ""
        self._run.say("client", f"asks {client.request_id}{of}: {len(client.ask.prompt)} tokens, {wanted} wanted")
        assert client.router is not None
        self._run.counts["asked_of_another_model"] += bool(client.ask.model)
        client.router.named(client.model).submit(client.ask, client.request_id, len(client.got), client.began)

    def _reconnect(self, client: SimClient, noticed_s: float) -> None:
        """A client asks again on a connection to the next router that lives, which may be the same."""
        before, request_id = client.router, client.request_id
        alive = self._alive()
        if client.over or before not in alive or request_id is None:
            return
        self._run.counts["reconnects"] += 1
        client.router = alive[(alive.index(before) + 1) % len(alive)]
        self._ask_it(client)
        if client.router is not before:
            self._run.agenda.after(noticed_s, partial(self._notice, client, before, request_id))

    def _notice(self, client: SimClient, before: SimRouterProcess, request_id: RequestId) -> None:
        """A router sees that nobody reads a connection any more. One that the client came back to knew it then."""
        if client.router is not before:
            before.process.do(lambda: before.named(client.model).cancel(request_id))

    def _leave(self, client: SimClient) -> None:
        if client.over:
            return
        self._end(client)
        self._run.counts["left"] += 1
        if client.request_id is not None and self._router_of(client).process.alive:
            self._router_of(client).cancel(client.request_id)

    def _router_of(self, client: SimClient) -> SimRouter:
        """The service that has the client's request."""
        assert client.router is not None
        return client.router.named(client.model)

    def _id(self, client: SimClient) -> RequestId:
        assert client.request_id is not None
        return client.request_id

    # ------------------------------------------------------------ what they hear

    def _heard(self, router: SimRouter, answer: OpenAnswer) -> SimClient | None:
        """The client of an answer of which something has come; None where it has gone to another router since. Its
        first part says which weights it is of, and no other part may say otherwise."""
        client, version = self._by_number[answer.ask.number], answer.request.weights
        if not client.hears(router):
            return None
        if not client.version:
            ask, contents = client.ask, self._contents[client.ask.model]
            if version not in contents:
                self._run.violated(f"{client.request_id} is of weights that nobody has: {version!r}")
            content = contents.get(version, "")
            client.version, client.expected = version, recite(self._specs[ask.model], ask.prompt, ask.sampling, content)
            self._run.counts["of_other_weights"] += content != content_of(ask.model, "")
        elif version != client.version:
            self._run.violated(f"{client.request_id} is of the weights {client.version}, and of {version}")
        return client

    def on_resumed(self, router: SimRouter, ask: ScenarioRequest, request_id: RequestId) -> None:
        client = self._by_number[ask.number]
        if client.hears(router):
            client.request_id = request_id
            self._run.counts["resumed_elsewhere"] += 1

    def on_tokens(
        self, router: SimRouter, answer: OpenAnswer, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> None:
        if (client := self._heard(router, answer)) is None:
            return
        if client.over:
            self._run.violated(f"{client.request_id} got tokens after its end")
        at = len(client.got)
        client.got += tokens
        client.logprobs += logprobs
        self._run.counts["tokens"] += len(tokens)
        self.on_told(client.ask, len(tokens))
        wanted, enough = client.expected, client.ask.enough
        if client.expected.scores is not None and client.scores is None:
            self._wrong(client, "tokens came before the prompt's log-probabilities")
        elif tuple(client.got) != wanted.tokens[: len(client.got)]:
            meant = wanted.tokens[at : at + len(tokens)]
            self._wrong(client, f"tokens {at}.. are {tuple(tokens)}, not {meant}")
        elif tuple(client.logprobs) != wanted.logprobs[: len(client.got)]:
            meant_too = wanted.logprobs[at : at + len(tokens)]
            self._wrong(client, f"log-probabilities {at}.. are {tuple(logprobs)}, not {meant_too}")
        elif enough is not None and enough <= len(client.got) < len(wanted.tokens):
            self._end(client)
            self._run.counts["stopped"] += 1
            self._router_of(client).cancel(self._id(client), finished=True)

    def _wrong(self, client: SimClient, what: str) -> None:
        self._run.violated(f"{client.request_id}: {what}")
        self._end(client)
        self._router_of(client).cancel(self._id(client))

    def on_scores(self, router: SimRouter, answer: OpenAnswer, scores: tuple[TokenLogprob, ...]) -> None:
        if (client := self._heard(router, answer)) is None:
            return
        if client.scores is not None:
            self._wrong(client, "the prompt's log-probabilities came twice")
        client.scores = scores
        if scores != client.expected.scores:
            self._wrong(client, f"the prompt's log-probabilities are {scores}, not {client.expected.scores}")

    def on_end(self, router: SimRouter, answer: OpenAnswer, end: EndRequest) -> None:
        ask, run = answer.ask, self._run
        client = self._by_number[ask.number]
        if not client.hears(router):
            return
        if end.done.error is ErrorKind.SUPERSEDED and ask.reconnects:
            # The router of its connection before took the answer back for it: that one has not noticed yet.
            run.counts["superseded"] += 1
            run.agenda.after(_RETRY_S, partial(self._ask, client))
            return
        if self._sleeps(client, end.done):
            self.on_sleep(ask)
            return
        self._end(client)
        if end.done.error is None:
            run.counts["answered"] += 1
            run.counts.update(kinds_of(client.ask, self._specs[ask.model]))
            run.counts["answered_by_another_model"] += bool(ask.model)
            if tuple(client.got) != client.expected.tokens:
                wanted = len(client.expected.tokens)
                run.violated(f"{client.request_id} ended after {len(client.got)} of {wanted} tokens")
            if client.scores != client.expected.scores:
                run.violated(f"{client.request_id} ended without its prompt's log-probabilities")
        elif end.done.error is ErrorKind.DEADLINE and ask.deadline_s < 600.0:
            run.counts["late"] += 1
        elif end.done.error is ErrorKind.LATE and not client.got and self._is_late(client):
            run.counts["shed"] += 1
        elif self._ended_by_change(client, end.done):
            run.counts["ended_by_change"] += 1
        else:
            run.violated(f"{client.request_id} failed: {end.done.error}: {end.done.message}")

    def _sleeps(self, client: SimClient, done: Done) -> bool:
        """Whether nothing of an answer was told when the cluster was put to sleep: it can be asked for again."""
        changes = self._changes(client.ask)
        slept = any(isinstance(change, SleepCluster) and change.level for _, change in changes)
        told = client.got or client.scores is not None
        return slept and not told and done.error is ErrorKind.OVERLOADED and "sleeps" in done.message

    def _ended_by_change(self, client: SimClient, done: Done) -> bool:
        """Whether an answer that was begun has ended because no worker has its weights any more: an operator has
        changed what is served, and what runs was given no more time, or its worker was lost otherwise."""
        if done.error is not ErrorKind.OVERLOADED or not (client.got or client.scores is not None):
            return False
        if "no worker has those any more" not in done.message and "sleeps" not in done.message:
            return False
        now, lost = (
            self._run.agenda.now(),
            any(n for kind, n in self._run.counts.items() if kind in self._faults and kind not in _OPERATORS),
        )
        ending = [
            at + change.wait_s
            for at, change in self._changes(client.ask)
            if isinstance(change, UpdateWeights | FlushCaches) or (isinstance(change, SleepCluster) and change.level)
        ]
        return any(lost or now >= over for over in ending)

    def _changes(self, ask: ScenarioRequest) -> list[tuple[float, ServingChange]]:
        """What operators have changed of what its model serves, and when."""
        return self._run.clusters[ask.model].changes

    @property
    def _faults(self) -> set[str]:
        return {fault.kind for fault in self._run.plan.faults}

    def on_refusal(self, ask: ScenarioRequest) -> None:
        client = self._by_number[ask.number]
        self._end(client)
        self._run.counts["refused_early"] += 1
        if ask.first_token_s is None:
            self._run.violated(f"{client.request_id} was refused as late and is patient")

    def on_sleep(self, ask: ScenarioRequest, waited_s: float = 0.0) -> None:
        self._run.counts["asked_of_a_sleeper"] += 1
        if waited_s > WAKE_S and not any(self._run.counts[kind] for kind in self._faults):
            self._run.violated(f"request {ask.number} has waited {waited_s:.1f} s for a cluster to wake")
        client = self._by_number[ask.number]
        self._run.agenda.after(_RETRY_S, partial(self._ask_again, client, client.tries))

    def on_redraw(self, ask: ScenarioRequest) -> None:
        client = self._by_number[ask.number]
        self._end(client)
        self._run.counts["not_drawn_again"] += 1
        if not any(isinstance(change, UpdateWeights | FlushCaches) for _, change in self._changes(ask)):
            self._run.violated(f"{client.request_id} isn't drawn again, and no weights were changed")

    def _is_late(self, client: SimClient) -> bool:
        """Whether the first token of a client's request is of no use any more."""
        wanted = client.ask.first_token_s
        return wanted is not None and self._run.agenda.now() - client.asked >= wanted

    def on_progress(self, ask: ScenarioRequest, worker: WorkerKey, progress: LegReport) -> None:
        """Check that cached tokens of a prompt were in an earlier request under the same salt, which may have been
        computed with the worker's weights: it had not ended when the first worker had them."""
        found = progress.cached_tokens
        if not found:
            return
        if ask.sampling.prompt_logprobs is not None and progress.role is Role.PREFILL and not self._shown(ask):
            self._run.violated(f"request {ask.number} wants its prompt scored, and {found} tokens were not computed")
        control = self._run.clusters[ask.model]
        host = control.host(worker)
        weights, number = (host.weights.digest, host.weights.number) if host.weights is not None else ("", 0)
        whole = (*ask.prompt, *self._answer(ask, weights).tokens)
        again = progress.attempt > 0 or self._by_number[ask.number].tries > 1 or self._restarts(host)
        now, since = self._run.agenda.now(), control.since[number]
        known = [
            _common(whole, (*other.ask.prompt, *self._answer(other.ask, weights).tokens))
            for other in self._clients
            if (other.ask.model, other.ask.salt) == (ask.model, ask.salt)
            if other.ask.at <= now and (again or other.ask.number != ask.number)
            if other.over_at is None or other.over_at >= since
        ]
        if found > max(known, default=0):
            self._run.violated(
                f"request {ask.number} found {found} tokens of its prompt, which nobody of its salt has said"
            )

    @staticmethod
    def _restarts(host: SimHost) -> bool:
        """Whether this worker has started requests over, which then find their own pages in the tree."""
        counters = host.worker.status().counters
        return any(counters.get(counter, 0) for counter in ("preemptions", "pages_invalidated", "stale_pages"))

    def _shown(self, ask: ScenarioRequest) -> bool:
        return self._by_number[ask.number].scores is not None


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common prefix of two sequences."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
