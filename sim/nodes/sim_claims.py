"""Claims on answers with a key, as a router's service makes them: looked for at the workers, and gone on with there.

What `router.service.answer_claims`, `restored_choice` and `router_service` do about HTTP requests, for the plain ones
of a scenario. A client comes with the number of tokens that it has, as `Last-Event-ID` says it, and gets the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twinpool.contracts.ids import RequestId
from twinpool.contracts.messages.kept_answers import AnswerName, KeptAnswer
from twinpool.contracts.messages.worker_events import Done
from twinpool.contracts.sampling_params import TokenLogprob
from twinpool.router.core.answer_asks import AskEnded, FoundAnswer
from twinpool.router.core.router_core import RouterCore
from twinpool.router.state.routed_request import RoutedRequest
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
    left: bool = False


@dataclass(frozen=True, slots=True)
class RestoredAnswer:
    """What a worker has kept of an answer, as a request of this router."""

    claim: SimClaim
    request: RoutedRequest
    done: Done | None
    """Its end, where it has ended: nothing follows."""


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

    def claim(self, ask: ScenarioRequest, request_id: RequestId, seen: int) -> None:
        """Look for an answer. One that is looked for already is its client's who comes last."""
        for question, claim in self._claims.items():
            if claim.ask.number == ask.number:
                self._claims[question] = SimClaim(ask, request_id, seen)
                self._core.asks.wants(question, True)
                return
        name = name_of(ask)
        self._claims[self._core.asks.begin(name.key, name.body, 1)] = SimClaim(ask, request_id, seen)

    def leave(self, request_id: RequestId) -> bool:
        """The client leaves while its answer is looked for; returns whether it is."""
        mine = [name for name, claim in self._claims.items() if claim.request_id == request_id]
        for name in mine:
            self._claims[name].left = True
            self._core.asks.wants(name, False)
        return bool(mine)

    def ended(self, action: AskEnded) -> SimClaim | RestoredAnswer | None:
        """Take in what was found: an answer that goes on or is whole, or a claim of which nothing is kept, which needs
        a new request; None where the client has left."""
        claim, found = self._claims.pop(action.ask), action.found.get(0)
        if claim.left:
            if found is not None:
                self._core.asks.give_up(found.worker, (found.answer,))
            return None
        if found is None:
            self._seen[claim.request_id] = claim.seen
            return claim
        return self._restored(claim, found)

    def _restored(self, claim: SimClaim, found: FoundAnswer) -> RestoredAnswer:
        kept = found.answer
        request = self._make(claim.ask, kept.request_id, name_of(claim.ask), kept)
        request.restore(kept, found.last_attempt)
        self._seen[request.id] = claim.seen
        done = Done(request.id, request.attempt, kept.reason, kept.stop_token) if kept.reason else request.ending
        return RestoredAnswer(claim, request, None if kept.running else done)

    def adopt(self, action: AskEnded, request: RoutedRequest) -> None:
        """Go on with what was found."""
        self._core.adopt(request, action.found[0])

    def check(self) -> list[str]:
        if self._claims or not self._core.asks.held:
            return []
        return [f"events of {self._core.asks.held} requests are held for nobody"]

    def rest(
        self, request_id: RequestId, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> tuple[Sequence[int], Sequence[TokenLogprob]]:
        """Leave out of tokens that come what the client has."""
        seen = self._seen.get(request_id, 0)
        if seen:
            self._seen[request_id] = max(0, seen - len(tokens))
        return tokens[seen:], logprobs[seen:]
