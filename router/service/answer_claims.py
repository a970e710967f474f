"""The claims of one router's clients on answers with a key: who has which, and what was found of it on the workers.

A claim exists from the moment that a client asks until its answer ends or is given up. The last connection wins: a
client that comes with the same key and the same body takes the claim over, and the one before ends with an error,
whichever of the two was read first; with another body it is refused. While a claim is asked for, the question goes on
whoever waits for it, so that what a worker hands over always reaches the one who waits then, or is given up again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from twinpool.contracts.ids import RequestId
from twinpool.router.core.answer_lookups import FoundAnswer, LookupEnded
from twinpool.router.core.router_core import RouterCore
from twinpool.router.openai.api_errors import ClientGone, KeyReused, Superseded
from twinpool.router.openai.response_stream import ResponseStream
from twinpool.router.security.answer_identity import AnswerIdentity

REUSED = (
    "this Idempotency-Key was sent with another body before; send the same bytes to the same endpoint to have the rest "
    "of that answer, or another key for another request"
)
SUPERSEDED = "the client came back on another connection, which goes on with this answer"


@dataclass(eq=False, slots=True)
class AnswerClaim:
    """A claim on one answer."""

    identity: AnswerIdentity
    ask: RequestId
    """The question to the workers."""
    turn: int
    """Of the connection that has it."""
    waiter: asyncio.Future[None] | None = None
    """Who waits for what workers have kept; None: nobody any more, or the answer has begun."""
    found: Mapping[int, FoundAnswer] = field(default_factory=dict)
    other_body: bool = False
    """Whether a worker has kept the answer to another body under this key."""
    stream: ResponseStream | None = None
    """The answer, once it has begun."""


class AnswerClaims:
    """All claims of one router; used on its event loop."""

    def __init__(self, core: RouterCore, supersede: Callable[[ResponseStream], object]) -> None:
        """`supersede` ends an answer under way at once, for a client that has come back for it."""
        self._core, self._supersede = core, supersede
        self._claims: dict[str, AnswerClaim] = {}
        self._asks: dict[RequestId, AnswerClaim] = {}
        """Claims that are asked for."""
        self._turns = itertools.count()

    def next_turn(self) -> int:
        """Return the turn of a connection that comes now: it wins over all before it, whose requests may still wait."""
        return next(self._turns)

    def __len__(self) -> int:
        return len(self._claims)

    @property
    def asking(self) -> int:
        """Answers that are looked for on workers."""
        return len(self._asks)

    def take_over(self, identity: AnswerIdentity, turn: int) -> AnswerClaim | None:
        """End the answer under way here that a client comes back for; returns the claim on one that is looked for,
        None where there is none. Raises `KeyReused`, and `Superseded` where a later connection has the claim."""
        held = self._claims.get(identity.key)
        if held is not None and held.identity.body != identity.body:
            raise KeyReused(REUSED)
        if held is not None and held.turn > turn:
            raise Superseded(SUPERSEDED)
        if held is not None and held.stream is not None:
            if not held.stream.over:
                self._supersede(held.stream)
            self._drop(held)
            return None
        return held

    def stream_of(self, key: str) -> ResponseStream | None:
        """Return the answer under way here that is claimed under a key."""
        claim = self._claims.get(key)
        return claim.stream if claim is not None else None

    async def claim(
        self,
        identity: AnswerIdentity,
        turn: int,
        choices: int,
        act: Callable[[], None],
        on_gone: Callable[[Callable[[], object]], None] | None,
    ) -> AnswerClaim:
        """Claim an answer, and wait for what workers have kept of it; `act` carries out the router core's actions.

        An answer under way here is taken over before anything is awaited: whoever was looked up before the caller's
        last wait may have gone, and another may have begun. Raises `KeyReused`, `Superseded`, and `ClientGone`.
        """
        waiter = asyncio.get_running_loop().create_future()
        claim = self.take_over(identity, turn)
        if claim is None:
            ask = self._core.asks.begin(identity.key, identity.body, choices)
            claim = self._claims[identity.key] = self._asks[ask] = AnswerClaim(identity, ask, turn)
        elif claim.waiter is not None and not claim.waiter.done():
            claim.waiter.set_exception(Superseded(SUPERSEDED))
        if claim.other_body:  # As below, but the one who waited has yet to hear of it.
            raise KeyReused(REUSED)
        if claim.ask not in self._asks:  # It was found, and the one who waited has yet to hear of it.
            waiter.set_result(None)
        claim.waiter, claim.turn = waiter, turn
        self._core.asks.wants(claim.ask, True)
        if on_gone is not None:
            on_gone(waiter.cancel)
        act()
        try:
            await waiter
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self._left(claim, waiter)
                raise
            self._left(claim, waiter)
            raise ClientGone("the client left while its answer was looked for") from None
        except KeyReused:
            self._drop(claim)
            raise
        if claim.waiter is not waiter:
            raise Superseded(SUPERSEDED)
        claim.waiter = None
        return claim

    def close(self, error: Exception) -> None:
        """The router ends: whoever waits has `error`, as no question is answered any more."""
        for claim in self._claims.values():
            if claim.waiter is not None and not claim.waiter.done():
                claim.waiter.set_exception(error)
                claim.waiter = None

    def on_ended(self, action: LookupEnded) -> None:
        """Take in the answer to a question."""
        claim = self._asks.pop(action.ask, None)
        if claim is None:
            return
        claim.found, claim.other_body = action.found, action.other_body
        if claim.waiter is None or claim.waiter.done():
            self.give_up(claim)
        elif action.other_body:
            claim.waiter.set_exception(KeyReused(REUSED))
        else:
            claim.waiter.set_result(None)

    def begun(self, claim: AnswerClaim, stream: ResponseStream) -> None:
        """The answer has begun: whoever comes for it takes it from `stream`."""
        claim.stream, claim.found = stream, {}

    def ended(self, stream: ResponseStream) -> None:
        """Drop the claim of an answer that has ended here, or was given up. Idempotent."""
        claim = self._claims.get(stream.answer_key)
        if claim is not None and claim.stream is stream:
            self._drop(claim)

    def give_up(self, claim: AnswerClaim) -> None:
        """Leave what was found to its workers: the answer doesn't begin here."""
        for found in claim.found.values():
            self._core.asks.give_up(found.worker, (found.answer,))
        claim.found = {}
        self._drop(claim)

    def check(self) -> list[str]:
        """Compare the claims with what they are about; returns a sentence for each disagreement."""
        found = [
            f"the answer {claim.identity.answer_id} has ended and is still claimed"
            for claim in self._claims.values()
            if claim.stream is not None and claim.stream.over
        ]
        asked = set(map(id, self._asks.values()))
        if self._core.asks.held and all(claim.stream is not None for claim in self._claims.values()):
            found.append(f"events of {self._core.asks.held} requests are held for nobody")
        return found + [
            f"the answer {claim.identity.answer_id} is claimed by nobody"
            for claim in self._claims.values()
            if claim.stream is None and claim.waiter is None and id(claim) not in asked
        ]

    def _left(self, claim: AnswerClaim, waiter: asyncio.Future[None]) -> None:
        """The one who waited is gone. A question that is still open goes on, for whoever comes next."""
        if claim.waiter is not waiter:
            return
        claim.waiter = None
        self._core.asks.wants(claim.ask, False)
        if claim.ask not in self._asks:
            self.give_up(claim)

    def _drop(self, claim: AnswerClaim) -> None:
        if self._claims.get(claim.identity.key) is claim:
            del self._claims[claim.identity.key]
