"""The answers that a router is giving: what workers send becomes text for clients, and each choice ends once.

Each `ChoiceOutput` turns tokens into text, and each `ResponseStream` holds events that its client has not read yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Set

from twinpool.contracts.clock import Clock
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId
from twinpool.contracts.key_file import TenantLimits
from twinpool.contracts.messages.worker_events import Done
from twinpool.router.core.answer_lookups import FoundAnswer
from twinpool.router.core.router_actions import DeliverScores, DeliverTokens, EndRequest
from twinpool.router.core.router_core import RouterCore
from twinpool.router.metrics.prometheus_metrics import PrometheusMetrics
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.response_stream import ResponseStream
from twinpool.router.security.tenant_accounts import TenantAccounts
from twinpool.router.service.answer_claims import AnswerClaims
from twinpool.router.service.answer_room import AnswerRoom
from twinpool.router.state.router_log import log
from twinpool.router.verification.stream_watch import StreamWatch
from twinpool.router.verification.verification_log import log_flag

Owners = dict[RequestId, tuple[ResponseStream, ChoiceOutput]]
"""Choices by id, each with the answer that it is of."""


class OpenAnswers:
    """The choices of one router that have not ended. Whoever calls carries out the router core's actions afterwards."""

    def __init__(
        self,
        owners: Owners,
        core: RouterCore,
        clock: Clock,
        room: AnswerRoom,
        metrics: PrometheusMetrics,
        tenants: TenantAccounts,
        claims: AnswerClaims,
        watch: StreamWatch | None,
        ended: Callable[[ResponseStream, ChoiceOutput], object],
    ) -> None:
        """`owners`: empty, and others may read it. `ended` is told each choice that is over."""
        self._owners = owners
        self._core, self._clock, self._room, self._metrics = core, clock, room, metrics
        self._tenants, self._claims, self._watch, self._ended = tenants, claims, watch, ended

    def begin(self, stream: ResponseStream, limits: TenantLimits | None, prompt_tokens: int) -> None:
        """Book an answer that begins: its choices, and what it takes of its tenant's `limits`, with so many tokens of
        prompts; None: nobody needs a key. Places are given back as each choice ends, or all by `abandon`. Raises
        `TenantLimited`, having booked nothing."""
        assert not any(choice.request.id in self._owners for choice in stream.choices), "a choice belongs to one client"
        if limits is not None:
            self._tenants.admit(stream.tenant, limits, len(stream.choices), prompt_tokens, self._clock.now())
        self._room.choices += len(stream.choices)
        for choice in stream.choices:
            self._owners[choice.request.id] = (stream, choice)

    def catch_up(self, stream: ResponseStream, choice: ChoiceOutput, found: FoundAnswer) -> None:
        """Tell the client what a worker has kept of a choice, and go on from there."""
        kept, routed = found.answer, choice.request
        log(
            "answer resumed",
            request_id=stream.id,
            worker=found.worker[0],
            tokens=len(kept.tokens),
            running=kept.running,
        )
        if kept.tokens:
            choice.first_at = choice.last_at = self._clock.now()
        stream.push_each(choice.take_each(kept.tokens, kept.logprobs))
        done = Done(routed.id, routed.attempt, kept.reason, kept.stop_token) if kept.reason else routed.ending
        if choice.finish is not None:
            if kept.running:
                self._core.adopt(routed, found)
                self._core.cancel(routed.id, finished=True)
            self._close(stream, choice)
        elif done is not None and not kept.running:
            if (piece := choice.end(done)) is not None:
                stream.push_each((piece,))
            self._close(stream, choice)
        else:
            self._core.adopt(routed, found)

    def abandon(self, stream: ResponseStream, *, slow: bool = False) -> None:
        """Cancel all choices that have not ended, because the client left or (`slow`) reads too slowly. Idempotent.

        Those with a key are left to their workers for a while, as their client may come back.
        """
        took = False
        give_up = self._core.detach if stream.answer_key else self._core.cancel
        for choice in stream.choices:
            if choice.request.id in self._owners:
                took = True
                give_up(choice.request.id)
                choice.ended_at = self._clock.now()
                self._release(choice)
        self._claims.ended(stream)
        if took:
            if slow:
                self._metrics.slow_clients += 1
            else:
                self._metrics.disconnects += 1
            log("request abandoned", slow=slow, **stream.facts())

    def deliver(self, action: DeliverTokens) -> None:
        """Give tokens to the client of their choice."""
        owner = self._owners.get(action.request_id)
        if owner is None:
            return
        stream, choice = owner
        now = self._clock.now()
        self._metrics.tally.tokens(choice, len(action.tokens), now)
        if stream.tenant:
            self._tenants.spend(stream.tenant, len(action.tokens))
        if self._watch is not None:
            for flag in self._watch.feed(action.request_id, action.tokens):
                self._core.audits.flag(action.request_id)
                log_flag(flag, choice.request)
        try:
            if stream.answer_key:
                stream.push_each(choice.take_each(action.tokens, action.logprobs))
            else:
                stream.push(choice.take(action.tokens, action.logprobs))
        except Exception:  # A fault in one answer's text must not end the others.
            log("answer failed", trace=True, request_id=stream.id)
            choice.fail("the router failed to turn tokens into text")
            self._core.cancel(action.request_id)
            self._close(stream, choice)
            return
        if choice.finish is not None:
            self._core.cancel(action.request_id, finished=True)
            self._close(stream, choice)
        elif stream.overflowed:
            self.abandon(stream, slow=True)
            stream.fail("the client took the answer too slowly")

    def score(self, action: DeliverScores) -> None:
        """Note the scores of a choice's prompt."""
        if owner := self._owners.get(action.request_id):
            owner[1].scores = action.scores

    def end(self, action: EndRequest) -> None:
        """End a choice as its worker or the router core has."""
        owner = self._owners.get(action.request_id)
        if owner is None:
            return
        stream, choice = owner
        try:
            piece = choice.end(action.done)
            if piece is not None and stream.answer_key:
                stream.push_each((piece,))
            elif piece is not None:
                stream.push(piece)
        except Exception:
            log("answer failed", trace=True, request_id=stream.id)
            choice.fail("the router failed to turn tokens into text")
        self._close(stream, choice)

    def check(self, waiting: Set[RequestId]) -> Iterator[str]:
        """Recount: a sentence for each disagreement. `waiting`: choices that the router core is still to be given."""
        owned, held = set(self._owners), set(self._core.requests.ids())
        yield from (f"request {rid} runs and belongs to no client" for rid in sorted(held - owned))
        yield from (f"request {rid} has a client and runs nowhere" for rid in sorted(owned - held - waiting))
        yield from (f"request {rid} runs and waits to be placed" for rid in sorted(held & waiting))
        if self._room.choices != len(owned):
            yield f"{len(owned)} choices are in flight, {self._room.choices} are booked"
        if lost := self._room.ended_holders():
            yield f"{lost} requests have ended and still hold places"
        of_tenants = Counter(stream.tenant for stream, _ in self._owners.values() if stream.tenant)
        booked = self._tenants.places
        for tenant in sorted(of_tenants.keys() | booked.keys()):
            if of_tenants[tenant] != booked[tenant]:
                yield f"{of_tenants[tenant]} choices of {tenant} are in flight, {booked[tenant]} are booked"
        for stream in {id(stream): stream for stream, _ in self._owners.values() if stream.answer_key}.values():
            if not stream.over and self._claims.stream_of(stream.answer_key) is not stream:
                yield f"the answer {stream.id} goes on and its claim is another's"

    def _close(self, stream: ResponseStream, choice: ChoiceOutput) -> None:
        choice.ended_at = self._clock.now()
        self._metrics.tally.ended(choice)
        self._release(choice)
        if choice.error is not None:
            log("request failed", error=choice.error.error, reason=choice.error.message, **stream.facts())
            for other in stream.choices:  # The client gets one error, so the other choices are of no use.
                if other.request.id in self._owners:
                    gone = choice.error.error is ErrorKind.SUPERSEDED
                    (self._core.detach if gone else self._core.cancel)(other.request.id)
                    other.ended_at = choice.ended_at
                    other.fail(f"choice {choice.index} failed: {choice.error.message}", choice.error.error)
                    self._release(other)
        stream.close_one(choice)
        if stream.over:
            self._claims.ended(stream)
        if stream.open == 0 and stream.failed is None:
            log("request ended", seconds=round(choice.ended_at - choice.request.arrived, 6), **stream.facts())

    def _release(self, choice: ChoiceOutput) -> None:
        """Give back what a choice holds in this service; every choice ends through this method. Idempotent."""
        owner = self._owners.pop(choice.request.id, None)
        if owner is not None:
            self._room.choices -= 1
            if owner[0].tenant:
                self._tenants.ended(owner[0].tenant)
            if self._watch is not None:
                self._watch.end(choice.request.id)
            if not choice.first_at:
                self._metrics.tally.unanswered(choice)
            self._ended(*owner)
