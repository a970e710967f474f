"""The claims of one router's clients on answers with a key: who has which, and what was found of it on the workers.

A claim exists from the moment that a client asks until its answer ends or is given up. The last connection wins: a
client that comes with the same key and the same body takes the claim over, and the one before ends with an error,
whichever of the two was read first; with another body it is refused. While a claim is asked for, the question goes on
whoever waits for it, so that what a worker hands over always reaches the one who waits then, or is given up again.

**Identity** (`AnswerIdentity`) is what every router makes of the same key, tenant and body. Everything is a keyed hash
(HMAC-SHA-256, RFC 2104) with the cluster's secret, or a fixed key without one. So all routers of a cluster agree
without speaking to each other: on the name under which workers keep the answer, on its id, and on the seed where the
client gave none. An answer of which nothing is kept any more is drawn again, token for token the same (``numerics:
invariant``, in one class). Without the secret nobody can make the name of another's answer.

**Choices** of a request with a key (`KeyedRequest`) are made anew, or restored from what a decode worker has kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from twinpool.contracts.errors import RequestError
from twinpool.contracts.ids import RequestId
from twinpool.contracts.messages.cluster_view import ServedWeights
from twinpool.contracts.messages.kept_answers import AnswerName
from twinpool.router.core.answer_lookups import FoundAnswer, LookupEnded
from twinpool.router.core.router_core import RouterCore
from twinpool.router.openai.api_errors import ClientGone, KeyReused, Superseded
from twinpool.router.openai.parse_request import GenerateRequest
from twinpool.router.openai.request_headers import MAX_RESUMED_CHOICES, SEEN_HEADER, ResumeHeaders
from twinpool.router.openai.response_stream import ResponseStream
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.tokenizer_pool.prepare_request import PreparedPrompt

WITHOUT_SECRET = b"twinpool answers"
ID_DIGITS = 24


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """Who asks for what, in hex but for the seed."""

    key: str
    """Of the tenant and its key."""
    body: str
    """Of the endpoint and the body."""
    answer_id: str
    """The id that the client is told, without its prefix."""
    seed: int
    """64 bits."""


def identity_of(secret: str, tenant: str, key: str, endpoint: str, raw: bytes) -> AnswerIdentity:
    """Return the identity of a request. `secret`: the cluster's, in hex; empty where there is none."""
    made_with = bytes.fromhex(secret) or WITHOUT_SECRET

    def of(what: str, *parts: str) -> str:
        # JSON-like framing by lengths: no two lists of parts have the same bytes.
        message = b"".join(len(p.encode()).to_bytes(4) + p.encode() for p in (what, *parts))
        return hmac.new(made_with, message, hashlib.sha256).hexdigest()

    body = of("body", endpoint, hashlib.sha256(raw).hexdigest())[:32]
    name = of("key", tenant, key)[:32]
    answer_id, seed = of("id", name, body)[:ID_DIGITS], int(of("seed", name, body)[:16], 16)
    return AnswerIdentity(name, body, answer_id, seed)


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
            ask = self._core.lookups.begin(identity.key, identity.body, choices)
            claim = self._claims[identity.key] = self._asks[ask] = AnswerClaim(identity, ask, turn)
        elif claim.waiter is not None and not claim.waiter.done():
            claim.waiter.set_exception(Superseded(SUPERSEDED))
        if claim.other_body:  # As below, but the one who waited has yet to hear of it.
            raise KeyReused(REUSED)
        if claim.ask not in self._asks:  # It was found, and the one who waited has yet to hear of it.
            waiter.set_result(None)
        claim.waiter, claim.turn = waiter, turn
        self._core.lookups.wants(claim.ask, True)
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
            self._core.lookups.give_up(found.worker, (found.answer,))
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
        if self._core.lookups.held and all(claim.stream is not None for claim in self._claims.values()):
            found.append(f"events of {self._core.lookups.held} requests are held for nobody")
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
        self._core.lookups.wants(claim.ask, False)
        if claim.ask not in self._asks:
            self.give_up(claim)

    def _drop(self, claim: AnswerClaim) -> None:
        if self._claims.get(claim.identity.key) is claim:
            del self._claims[claim.identity.key]


HASHED_INLINE_BYTES = 1024**2
"""Bodies up to this size are hashed on the loop."""


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request with a key, once it is known what workers have kept of it."""

    identity: AnswerIdentity
    headers: ResumeHeaders
    claim: AnswerClaim
    created: int
    """When the answer was created, in seconds since 1970: as the worker or the client says, or now."""
    weights_number: int = 0
    """The number of the weights that the cluster served when it was looked for."""

    def new(self, routed: Sequence[RoutedRequest]) -> list[RoutedRequest]:
        """Return the choices of which nothing was found."""
        return [one for index, one in enumerate(routed) if index not in self.claim.found]

    def named(self, index: int, choice: RoutedRequest) -> RoutedRequest:
        """Return a choice as workers are to keep it: under a name and, where it was found, an id that they know."""
        name = None
        # What prefill says of a prompt's log-probabilities is nowhere kept: such an answer is computed again.
        if choice.sampling.prompt_logprobs is None:
            name = AnswerName(self.identity.key, self.identity.body, index, self.created)
        found, sampling, request_id = self.claim.found.get(index), choice.sampling, choice.id
        seen = self.headers.seen is not None and self.headers.seen.counts[index] > 0
        if found is not None:
            request_id, sampling = found.answer.request_id, replace(sampling, max_tokens=found.answer.max_tokens)
        made = RoutedRequest(
            request_id,
            choice.prompt,
            sampling,
            now=choice.arrived,
            deadline=choice.deadline if found is None else choice.arrived + found.answer.left_s,
            hashes=choice.hashes,
            salt=choice.salt,
            priority=choice.priority,
            first_token_by=choice.first_token_by if found is None else None,
            share=choice.share,
            session=choice.session,
            name=name,
            pictures=choice.pictures,
        )
        if found is not None:
            made.arrived -= max(0.0, time.time() - self.created)
            made.restore(found.answer, found.last_attempt, told=seen)
        elif seen:
            made.draw_again(self.weights_number)
        return made


def check_headers(request: GenerateRequest, headers: ResumeHeaders) -> None:
    """Raise `RequestError` where the headers don't fit the request."""
    if headers.seen is not None and not request.stream:
        raise RequestError(f"{SEEN_HEADER} is for streams; without it the whole answer comes")
    if request.stream and request.choices > MAX_RESUMED_CHOICES:
        raise RequestError(
            f"a stream with an Idempotency-Key may have {MAX_RESUMED_CHOICES} choices; this has {request.choices}"
        )
    if headers.seen is not None and len(headers.seen.counts) != request.choices:
        raise RequestError(f"{SEEN_HEADER} must be the id of an event of this answer")


ALIKE_S = 30.0
"""Seconds by which clocks of a router and a controller may differ, where it counts which weights an answer had."""


def check_drawn_alike(created: int, served: ServedWeights) -> None:
    """Refuse to draw an answer again, created at that time, of which the client has a part, where it may be of other
    weights than the cluster's. Raises `RequestError`."""
    if served.weights.number and (served.behind or created <= served.since + ALIKE_S):
        raise RequestError(
            "the weights were changed since this answer began, so its rest can't be drawn again: send the request "
            f"anew, with another Idempotency-Key and without {SEEN_HEADER}"
        )


def usable(claim: AnswerClaim, request: GenerateRequest, prompts: Sequence[PreparedPrompt]) -> dict[int, FoundAnswer]:
    """Return what was found that fits the request; what doesn't is of another build, or of an adapter whose files have
    changed, and of no use."""
    digest = "" if request.sampling.adapter is None else request.sampling.adapter.digest
    return {
        index: found
        for index, found in claim.found.items()
        if index < request.choices
        and found.answer.prompt_len == len(prompts[index // request.n].tokens)
        and found.answer.adapter == digest
    }


def request_ids(answer_id: str, nonce: str, index: int) -> RequestId:
    """The id of a choice among workers, which no other request has, whoever asks for the same answer elsewhere."""
    return RequestId(f"{answer_id}.{nonce}-{index}")
