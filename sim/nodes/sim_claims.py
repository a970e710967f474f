"""What waits at a simulated router: answers with a key, and requests for a cluster that sleeps.

`SimClaims` does what `router.service.idempotency_keys` and `router_service` do about answers with a key, for the plain
requests of a scenario: they are looked for at the workers, and gone on with there. A client comes with the number of
tokens that it has, as `Last-Event-ID` says it, and gets the rest.

Requests for a cluster that sleeps wait as production's `DemandWake` has them, on an event loop in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from twinpool.contracts.errors import RequestError
from twinpool.contracts.ids import RequestId
from twinpool.contracts.messages.cluster_view import ServedWeights
from twinpool.contracts.messages.kept_answers import AnswerName, KeptAnswer
from twinpool.contracts.messages.pool_changes import SleepCluster
from twinpool.contracts.messages.worker_events import Done
from twinpool.contracts.sampling_params import TokenLogprob
from twinpool.router.core.answer_lookups import FoundAnswer, LookupEnded
from twinpool.router.core.router_core import RouterCore
from twinpool.router.openai.api_errors import Asleep, ClientGone, ReaderFailed
from twinpool.router.service.demand_wake import DemandWake
from twinpool.router.service.idempotency_keys import check_drawn_alike
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.sim.fabric.sim_network import there
from twinpool.sim.fabric.virtual_time import SimProcess
from twinpool.sim.nodes.build_sim_worker import SimWorld
from twinpool.sim.nodes.sim_controller import SimControl
from twinpool.sim.scenario.scenario import ScenarioRequest

Made = Callable[[ScenarioRequest, RequestId, AnswerName | None, KeptAnswer | None], RoutedRequest]


@dataclass(slots=True)
class SimClaim:
    """One client's claim, while its answer is looked for."""

    ask: ScenarioRequest
    request_id: RequestId
    """Of the request, should it have to be a new one."""
    seen: int
    """Tokens that the client has."""
    began: float
    """When its client asked for the answer first."""
    left: bool = False


@dataclass(frozen=True, slots=True)
class RestoredAnswer:
    """What a worker has kept of an answer, as a request of this router."""

    claim: SimClaim
    request: RoutedRequest
    done: Done | None
    """Its end, where it has ended: nothing follows."""


@dataclass(frozen=True, slots=True)
class OpenAnswer:
    """A client's request, and the router's, which knows the version of the weights that its answer is of."""

    ask: ScenarioRequest
    request: RoutedRequest


def name_of(ask: ScenarioRequest) -> AnswerName:
    return AnswerName(f"key of {ask.number}", "its body", 0, 0)


class SimClaims:
    """The claims of one router. `make` makes a router's request of a scenario's, or of what a worker has
    kept of it."""

    def __init__(self, core: RouterCore, make: Made) -> None:
        self._core, self._make = core, make
        self._claims: dict[RequestId, SimClaim] = {}
        self._seen: dict[RequestId, int] = {}
        """Tokens that clients have already, by request, and that are still to be left out."""

    def claim(self, made: SimClaim) -> None:
        """Look for an answer. One that is looked for already is its client's who comes last."""
        for question, claim in self._claims.items():
            if claim.ask.number == made.ask.number:
                self._claims[question] = made
                self._core.lookups.wants(question, True)
                return
        name = name_of(made.ask)
        self._claims[self._core.lookups.begin(name.key, name.body, 1)] = made

    def leave(self, request_id: RequestId) -> bool:
        """The client leaves while its answer is looked for; returns whether it is."""
        mine = [name for name, claim in self._claims.items() if claim.request_id == request_id]
        for name in mine:
            self._claims[name].left = True
            self._core.lookups.wants(name, False)
        return bool(mine)

    def ended(self, action: LookupEnded) -> SimClaim | RestoredAnswer | None:
        """Take in what was found: an answer that goes on or is whole, or a claim of which nothing is kept, which needs
        a new request; None where the client has left."""
        claim, found = self._claims.pop(action.ask), action.found.get(0)
        if claim.left:
            if found is not None:
                self._core.lookups.give_up(found.worker, (found.answer,))
            return None
        if found is None:
            self._seen[claim.request_id] = claim.seen
            return claim
        return self._restored(claim, found)

    def _restored(self, claim: SimClaim, found: FoundAnswer) -> RestoredAnswer:
        kept = found.answer
        request = self._make(claim.ask, kept.request_id, name_of(claim.ask), kept)
        request.restore(kept, found.last_attempt, told=claim.seen > 0)
        request.go_on_in(found.numerics, found.weights, found.weights_number)
        self._seen[request.id] = claim.seen
        done = Done(request.id, request.attempt, kept.reason, kept.stop_token) if kept.reason else request.ending
        return RestoredAnswer(claim, request, None if kept.running else done)

    def adopt(self, action: LookupEnded, request: RoutedRequest) -> None:
        """Go on with what was found."""
        self._core.adopt(request, action.found[0])

    def check(self) -> list[str]:
        if self._claims or not self._core.lookups.held:
            return []
        return [f"events of {self._core.lookups.held} requests are held for nobody"]

    def rest(
        self, request_id: RequestId, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> tuple[Sequence[int], Sequence[TokenLogprob]]:
        """Leave out of tokens that come what the client has."""
        seen = self._seen.get(request_id, 0)
        if seen:
            self._seen[request_id] = max(0, seen - len(tokens))
        return tokens[seen:], logprobs[seen:]


class SimDirectory:
    """Implements of `router.links.controller_port.WorkerDirectory` what a wake asks the controller for."""

    def __init__(self, control: SimControl, process: SimProcess) -> None:
        self._control, self._process = control, process

    async def change_pools(self, change: SleepCluster) -> None:
        """Raises `ConnectionError` where the controller can't be reached, and `TimeoutError` for an answer that is
        lost."""
        control, process = self._control, self._process
        if not control.reaches(process):
            raise ConnectionError("the controller can't be reached")
        network, answered = control.world.exchange.network, asyncio.get_running_loop().create_future()
        to, back = network.pipe(process, control.process), network.pipe(control.process, process)
        change = there(change)

        def heard(done: bool) -> None:
            if not answered.done():
                answered.set_result(done)

        def asked() -> None:
            done = not control.away and control.change(change)
            back.send(lambda: process.do(partial(heard, done)))

        to.send(asked)
        async with asyncio.timeout(network.timeout_s):
            if not await answered:
                raise ConnectionError("the controller doesn't answer")


class SimSleeper:
    """The requests that wait at one router for its cluster to wake."""

    def __init__(self, demand: DemandWake, world: SimWorld) -> None:
        self._demand, self._world = demand, world
        self._leave: dict[RequestId, Callable[[], object]] = {}
        """What to do when the client leaves."""
        self._latest: dict[int, RequestId] = {}
        """The latest request that has waited of each client with a key."""

    def wait(
        self, ask: ScenarioRequest, request_id: RequestId, take: Callable[[], None], refuse: Callable[[float], None]
    ) -> None:
        """`take` the request once the cluster is awake, unless its client leaves; `refuse` it where it can't wait, or
        has for so many seconds."""
        try:
            self._demand.check_room()
        except Asleep:
            refuse(0.0)
            return
        if ask.keyed:
            self.leave(self._latest.get(ask.number, request_id))  # Its client has another connection now.
            self._latest[ask.number] = request_id
        assert self._world.loop is not None
        task = self._world.loop.create_task(self._wait(request_id, take, refuse))
        self._leave[request_id] = task.cancel  # Until it has begun.
        task.add_done_callback(lambda _: self._leave.pop(request_id, None))

    async def _wait(self, request_id: RequestId, take: Callable[[], None], refuse: Callable[[float], None]) -> None:
        since = self._world.agenda.now()
        try:
            await self._demand.awake(partial(self._leave.__setitem__, request_id))
        except Asleep:
            refuse(self._world.agenda.now() - since)
        except (ClientGone, ReaderFailed):
            return
        else:
            take()
        finally:
            self._leave.pop(request_id, None)

    def leave(self, request_id: RequestId) -> bool:
        """The client leaves; returns whether its request waits here."""
        if (leave := self._leave.get(request_id)) is None:
            return False
        leave()
        return True

    def observe(self) -> None:
        if self._world.loop is None:
            self._demand.observe()
        else:
            self._world.loop.run(self._demand.observe)

    def check(self) -> list[str]:
        if not self._demand.waiting and not self._leave:
            return []
        return [f"{self._demand.waiting} requests wait for a wake, of {len(self._leave)} clients"]


def drawn_alike(began: float, served: ServedWeights) -> bool:
    """Whether an answer that was begun then would be drawn alike again."""
    try:
        check_drawn_alike(int(began), served)
    except RequestError:
        return False
    return True
