"""The answers that a router is giving: what workers send becomes text for clients, and each choice ends once.

Of a request that was read (`OpenedRequest`) the router core takes the choices and the client gets the answer: each
`ChoiceOutput` turns tokens into text, and each `ResponseStream` holds events that its client has not read yet.

**A large request is placed in shares.** To place a choice takes up to a millisecond, and a request may have as many as
`router.max_queue`: placed at once, they would hold up every stream of the router. So `SHARE` of one request's choices
are placed in each turn of the loop. All are booked from the beginning on, so that each has its place whenever its share
comes; those whose client leaves meanwhile are never placed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twinpool.contracts.clock import Clock
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId
from twinpool.contracts.json_logs import log
from twinpool.contracts.messages.worker_events import Done
from twinpool.router.anthropic.messages_writer import MessagesWriter
from twinpool.router.core.answer_lookups import FoundAnswer
from twinpool.router.core.router_actions import DeliverScores, DeliverTokens, EndRequest, PromptAction
from twinpool.router.core.router_core import RouterCore
from twinpool.router.metrics.prometheus_metrics import PrometheusMetrics
from twinpool.router.openai.api_errors import NoWorkers, SloUnreachable
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.parse_request import GenerateRequest
from twinpool.router.openai.pooled_answers import EmbeddingWriter, pooled_writer
from twinpool.router.openai.request_headers import NO_HEADERS, NO_TRACE, RequestHeaders, TraceContext
from twinpool.router.openai.response_stream import AnswerWriter, NumberedEvents, ResponseStream
from twinpool.router.openai.response_writer import ResponseWriter
from twinpool.router.openai.token_answers import TokenWriter
from twinpool.router.openai_responses.responses_writer import ResponsesWriter
from twinpool.router.service.admission import Admission
from twinpool.router.service.idempotency_keys import AnswerClaims, KeyedRequest, request_ids
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.state.ttft_prediction import TenantWeight
from twinpool.router.text.tokenizer import ModelTokenizer
from twinpool.router.tokenizer_pool.prepare_request import PreparedPrompt
from twinpool.router.tokenizer_pool.tokenizer_process import FrameKind
from twinpool.router.verification.stream_watch import StreamWatch, log_flag

if TYPE_CHECKING:
    from twinpool.router.service.router_service import RouterService


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request for text as it came: its body, whose it is, and its headers."""

    kind: FrameKind
    """One of `REQUESTS`."""
    raw: bytes
    client_id: str
    tenant: str = ""
    headers: RequestHeaders = NO_HEADERS
    on_gone: Callable[[Callable[[], object]], None] | None = None
    """Called with functions that the caller must call when the client leaves, so that a waiting body isn't read."""
    background: int | None = None
    """The seed, where it names none, of a request of a batch: it takes what others leave, and nothing of its tenant's
    limits. None: it is a client's own."""


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a request came and until when it is of use, in seconds of the router's clock."""

    began: float
    timeout_s: float
    first_token_by: float | None
    """After which its prompt isn't begun any more; None: it may always be."""


@dataclass(frozen=True, slots=True)
class OpenedRequest:
    """A client request that was read, and that its tenant may ask."""

    id: str
    """Of its answer."""
    request: GenerateRequest
    prompts: Sequence[PreparedPrompt]
    limits: Sequence[int]
    """The most tokens of an answer, by prompt."""
    times: RequestTimes
    share: TenantWeight
    client_id: str
    keyed: KeyedRequest | None
    """What is known of its answer, where its client may come back; else None."""
    trace: TraceContext = NO_TRACE
    metered: bool = True
    """Whether it counts in its tenant's limits."""

    def routed(self, now: float, nonce: str) -> list[RoutedRequest]:
        """The choices, of which nothing is booked yet, as far as workers have kept those of a request with a key.
        `nonce`: what makes the ids of these unlike those at other routers."""
        choices, request = [], self.request
        for index in range(request.choices):
            prompt, limit = self.prompts[index // request.n], self.limits[index // request.n]
            sampling, number = request.sampling, index % request.n
            if (sampling.max_tokens, sampling.choice) != (limit, number):
                sampling = replace(sampling, max_tokens=limit, choice=number)
            if sampling.prompt_logprobs is not None and (len(prompt.tokens) < 2 or (number and not request.echo)):
                # A prompt's first token has no log-probability; one choice tells those of the others.
                sampling = replace(sampling, prompt_logprobs=None)
            routed = RoutedRequest(
                RequestId(f"{self.id}-{index}") if self.keyed is None else request_ids(self.id, nonce, index),
                prompt.tokens,
                sampling,
                now=now,
                deadline=self.times.began + self.times.timeout_s,
                hashes=prompt.hashes,
                salt=request.salt,
                priority=request.priority,
                first_token_by=self.times.first_token_by,
                share=self.share,
                session=request.session,
                pictures=prompt.pictures,
            )
            choices.append(routed if self.keyed is None else self.keyed.named(index, routed))
        if len(choices) > 1:
            for routed in choices:
                routed.siblings = choices
        return choices

    def stream(
        self, routed: Sequence[RoutedRequest], model: str, tokenizer: ModelTokenizer, buffered_events: int
    ) -> ResponseStream:
        """The answer to the client, and of each choice what turns its tokens into text."""
        request, keyed = self.request, self.keyed
        created = int(time.time()) if keyed is None else keyed.created
        numbered, key = None, ""
        if keyed is not None:
            numbered, key = NumberedEvents(created, request.choices, keyed.headers.seen), keyed.identity.key
        stream = ResponseStream(
            self.id,
            request,
            self._writer(created, model, tokenizer),
            buffered_events,
            self.client_id,
            self.times.timeout_s,
            self.share.tenant if self.metered else "",
            numbered,
            key,
            self.trace,
        )
        choices = []
        for index, one in enumerate(routed):
            choice = ChoiceOutput(index, one, request, tokenizer, self.prompts[index // request.n].text)
            choice.tokenise_s = one.arrived - self.times.began
            choices.append(choice)
        stream.bind(choices)
        return stream

    def _writer(self, created: int, model: str, tokenizer: ModelTokenizer) -> AnswerWriter:
        if self.request.embedding is not None:
            return pooled_writer(self.request.embedding, self.id, created, model)
        match self.request.shape:
            case "anthropic":
                return MessagesWriter(self.id, model)
            case "responses":
                return ResponsesWriter(self.request, self.id, created, model)
            case "tokens":
                return TokenWriter(self.request, self.id, created, model)
            case _:
                return ResponseWriter(self.request, self.id, created, model, tokenizer)


SHARE = 8
"""Choices that are placed in one turn. A request that has no more is placed at once."""
Owners = dict[RequestId, tuple[ResponseStream, ChoiceOutput]]
"""Choices by id, each with the answer that it is of."""


class OpenAnswers:
    """The choices of one router that have not ended, on its event loop. After `deliver`, `note` and `end` the caller
    carries out the router core's actions."""

    def __init__(
        self,
        core: RouterCore,
        clock: Clock,
        admission: Admission,
        metrics: PrometheusMetrics,
        claims: AnswerClaims,
        watch: StreamWatch | None,
        ended: Callable[[ResponseStream, ChoiceOutput], object],
        act: Callable[[], object],
    ) -> None:
        """`ended` is told each choice that is over. `act` carries out the router core's actions."""
        self._core, self._clock, self._admission, self._metrics = core, clock, admission, metrics
        self._claims, self._watch, self._ended, self._act = claims, watch, ended, act
        self.owners: Owners = {}
        """Changed here alone."""
        self._waiting: deque[tuple[ResponseStream, deque[ChoiceOutput]]] = deque()
        """Choices that wait for their share of a turn, by answer."""
        self._turn_due = False

    # ------------------------------------------------------------ an answer begins

    def begin(self, stream: ResponseStream, prompt_tokens: int) -> None:
        """Book an answer that begins: its choices, their images, and what it takes of its tenant's limits, with so many
        tokens of prompts. Places are given back as each choice ends, or all by `abandon`. Raises `ImagesFull` and
        `TenantLimited`, having booked nothing."""
        assert not any(choice.request.id in self.owners for choice in stream.choices), "a choice belongs to one client"
        pixels = sum(choice.request.pixels for choice in stream.choices)
        self._admission.book(stream.tenant, len(stream.choices), prompt_tokens, pixels)
        for choice in stream.choices:
            self.owners[choice.request.id] = (stream, choice)

    def admit(self, stream: ResponseStream, keyed: KeyedRequest | None) -> None:
        """Hand an answer that is booked to the router core, and go on with what workers have kept of it. Where that
        fails, everything is given back."""
        found = dict(keyed.claim.found) if keyed is not None else {}
        try:
            if keyed is not None:
                self._claims.begun(keyed.claim, stream)
            new = [choice for choice in stream.choices if choice.index not in found] if found else stream.choices
            for choice in stream.choices:
                if choice.index in found:
                    self.catch_up(stream, choice, found[choice.index])
                    del found[choice.index]
            self._place(new[:SHARE])
            if len(new) > SHARE:
                self._waiting.append((stream, deque(new[SHARE:])))
                self._place_later()
        except BaseException:
            for left in found.values():
                self._core.lookups.give_up(left.worker, (left.answer,))
            self._abandon(stream)
            raise

    def waiting(self) -> Iterator[RequestId]:
        """The choices that wait for their share and have not ended."""
        for _, choices in self._waiting:
            yield from (choice.request.id for choice in choices if choice.request.id in self.owners)

    def _place(self, choices: Sequence[ChoiceOutput]) -> None:
        for choice in choices:
            self._core.submit(choice.request)
        self._act()

    def _place_later(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            asyncio.get_running_loop().call_soon(self._place_share)

    def _place_share(self) -> None:
        self._turn_due = False
        stream, choices = self._waiting.popleft()
        share: list[ChoiceOutput] = []
        while choices and len(share) < SHARE:
            choice = choices.popleft()
            if choice.request.id in self.owners:
                share.append(choice)
        if choices:
            self._waiting.append((stream, choices))
        if self._waiting:
            self._place_later()
        try:
            self._place(share)
        except Exception:  # Our own bug: this answer ends, others go on.
            log("answer failed", level=logging.ERROR, trace=True, request_id=stream.id)
            self.abandon(stream)
            stream.fail("the router failed to place a choice", ErrorKind.WORKER)

    def catch_up(self, stream: ResponseStream, choice: ChoiceOutput, found: FoundAnswer) -> None:
        """Tell the client what a worker has kept of a choice, and go on from there."""
        kept, routed = found.answer, choice.request
        routed.go_on_in(found.numerics, found.weights, found.weights_number)
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

    # ------------------------------------------------------------ an answer goes on, and ends

    def abandon(self, stream: ResponseStream, *, slow: bool = False) -> None:
        """End an answer whose client has left or (`slow`) reads too slowly, and carry out the router core's actions.
        Idempotent."""
        self._abandon(stream, slow=slow)
        self._act()

    def _abandon(self, stream: ResponseStream, *, slow: bool = False) -> None:
        """Cancel all choices that have not ended, because the client left or (`slow`) reads too slowly. Idempotent.

        Those with a key are left to their workers for a while, as their client may come back.
        """
        took = False
        give_up = self._core.detach if stream.answer_key else self._core.cancel
        for choice in stream.choices:
            if choice.request.id in self.owners:
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

    def deliver(self, action: DeliverTokens) -> bool:
        """Give tokens to the client of their choice. Returns whether the router core was told something by it."""
        if (owner := self.owners.get(action.request_id)) is None:
            return False
        stream, choice = owner
        told = False
        self._metrics.tally.tokens(choice, len(action.tokens), self._clock.now())
        if stream.tenant:
            self._admission.tenants.spend(stream.tenant, len(action.tokens))
        if self._watch is not None:
            for flag in self._watch.feed(action.request_id, action.tokens):
                told = True
                self._core.audits.flag(action.request_id)
                log_flag(flag, choice.request)
        try:
            if stream.answer_key:
                stream.push_each(choice.take_each(action.tokens, action.logprobs))
            else:
                stream.push(choice.take(action.tokens, action.logprobs))
        except Exception:  # A fault in one answer's text must not end the others.
            self._fail(stream, choice, "the router failed to turn tokens into text")
            return True
        if choice.finish is not None:
            self._core.cancel(action.request_id, finished=True)
            self._close(stream, choice)
            return True
        if stream.overflowed:
            self._abandon(stream, slow=True)
            stream.fail("the client took the answer too slowly")
            return True
        return told

    def note(self, action: PromptAction) -> None:
        """Note the scores of a choice's prompt, or give its embedding to what writes the answer."""
        if (owner := self.owners.get(action.request_id)) is None:
            return
        stream, choice = owner
        if isinstance(action, DeliverScores):
            choice.scores = action.scores
        elif isinstance(stream.answer, EmbeddingWriter):
            try:
                stream.answer.take(choice.index, action.vector)
            except Exception:
                self._fail(stream, choice, f"the worker sent {len(action.vector)} numbers, which are no such answer")

    def end(self, action: EndRequest) -> None:
        """End a choice as its worker or the router core has."""
        if (owner := self.owners.get(action.request_id)) is None:
            return
        stream, choice = owner
        try:
            piece = choice.end(action.done)
            if piece is not None and stream.answer_key:
                stream.push_each((piece,))
            elif piece is not None:
                stream.push(piece)
        except Exception:
            return self._fail(stream, choice, "the router failed to turn tokens into text")
        self._close(stream, choice)

    def check(self) -> Iterator[str]:
        """Recount: a sentence for each disagreement."""
        waiting = set(self.waiting())
        owned, held = set(self.owners), set(self._core.requests.ids())
        yield from (f"request {rid} runs and belongs to no client" for rid in sorted(held - owned))
        yield from (f"request {rid} has a client and runs nowhere" for rid in sorted(owned - held - waiting))
        yield from (f"request {rid} runs and waits to be placed" for rid in sorted(held & waiting))
        if self._admission.choices != len(owned):
            yield f"{len(owned)} choices are in flight, {self._admission.choices} are booked"
        if (pixels := sum(choice.request.pixels for _, choice in self.owners.values())) != self._admission.pixels:
            yield f"images of {pixels} bytes are in flight, {self._admission.pixels} are booked"
        if lost := self._admission.ended_holders():
            yield f"{lost} requests have ended and still hold places"
        of_tenants = Counter(stream.tenant for stream, _ in self.owners.values() if stream.tenant)
        booked = self._admission.tenants.places
        for tenant in sorted(of_tenants.keys() | booked.keys()):
            if of_tenants[tenant] != booked[tenant]:
                yield f"{of_tenants[tenant]} choices of {tenant} are in flight, {booked[tenant]} are booked"
        for stream in {id(stream): stream for stream, _ in self.owners.values() if stream.answer_key}.values():
            if not stream.over and self._claims.stream_of(stream.answer_key) is not stream:
                yield f"the answer {stream.id} goes on and its claim is another's"

    def _fail(self, stream: ResponseStream, choice: ChoiceOutput, message: str) -> None:
        """End a choice of which the answer can't be made, for the exception that is being handled."""
        log("answer failed", trace=True, request_id=stream.id)
        choice.fail(message)
        self._core.cancel(choice.request.id)
        self._close(stream, choice)

    def _close(self, stream: ResponseStream, choice: ChoiceOutput) -> None:
        choice.ended_at = self._clock.now()
        self._metrics.tally.ended(choice)
        self._release(choice)
        if choice.error is not None:
            log("request failed", error=choice.error.error, reason=choice.error.message, **stream.facts())
            for other in stream.choices:  # The client gets one error, so the other choices are of no use.
                if other.request.id in self.owners:
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
        owner = self.owners.pop(choice.request.id, None)
        if owner is not None:
            self._admission.give_back(owner[0].tenant, choice.request.pixels)
            if self._watch is not None:
                self._watch.end(choice.request.id)
            if not choice.first_at:
                self._metrics.tally.unanswered(choice)
            self._ended(*owner)


# ---------------------------------------------------------------- previews


@dataclass(frozen=True, slots=True)
class RequestPreview:
    """What would become of a request, were it sent now; of several prompts, of the first. Whole tokens."""

    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, held by the worker that would compute it."""
    queued_tokens: int
    """Of other prompts, in flight there; each sequence that a colocated worker decodes counts as some."""
    first_token_s: float | None
    """Seconds until its first token is expected; None: too little was seen of that worker, or nothing that would tell
    a long prompt from a short one."""
    waiting: int
    """Requests that wait for workers at this router."""


async def preview(service: RouterService, asked: ClientRequest) -> RequestPreview:
    """Look what would become of a request, for whoever chooses among several routers: it is read, tokenised, checked by
    the limits of its own tenant, and placed as any other, but nothing is booked or begun. Raises as
    `RouterService.open` does, and `NoWorkers`."""
    admission, tenant, core = service.admission, asked.tenant, service.core
    began, slo_ms = service.clock.now(), admission.first_token_ms(asked.headers.slo, tenant)
    with admission.hold():
        prepared = await service.readers.prepare(service.intake, asked.kind, asked.raw, tenant, asked.on_gone)
    request, prompts = prepared.request, prepared.prompts
    admission.check_model(tenant, request)
    admission.check_room(request.choices)
    admission.check_tenant(tenant, request.choices, sum(len(prompt.tokens) for prompt in prompts))
    limits = admission.answer_limits(request, [len(prompt.tokens) for prompt in prompts])
    times = RequestTimes(began, admission.timeout_s(request), began + slo_ms / 1000 if slo_ms else None)
    share = TenantWeight(tenant, admission.allowed(tenant).weight)
    routed = OpenedRequest("preview", request, prompts, limits, times, share, asked.client_id, None).routed(began, "")
    now, first = service.clock.now(), routed[0]
    late = core.placement.predict_ttft(routed, now) if slo_ms else None
    if late is not None and (now - began + late.prediction.seconds) * 1000 > slo_ms:
        raise SloUnreachable((now - began + late.prediction.seconds) * 1000, slo_ms)
    pair = core.placement.pick(first, now)
    if pair is None:
        raise NoWorkers(core.placement.missing(first, now))
    worker, hits = pair.prefill, pair.considered[0].ask.hits
    cached = min(hits.held.get(worker.key, 0), first.next_position)
    cost = worker.prompts.cost
    tells = cost is not None and cost[1] > 0
    lacking = first.next_position - cached
    expected = worker.prompts.expect(lacking, first.priority, now, share) if tells else None
    return RequestPreview(first.next_position, cached, worker.whole_load, expected, core.requests.waiting)
