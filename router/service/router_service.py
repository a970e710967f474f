"""The service behind the HTTP endpoints: admits, tokenises, places and ends requests, and drives the router core.

`RouterService` joins the parts: the router core decides, the worker links send commands and receive events, each
`ChoiceOutput` turns tokens into text, and each `ResponseStream` holds events that its client has not read yet. It runs
on one event loop. After every event the router core's actions are carried out at once; all commands to one worker leave
as one batch.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

from contracts.checkpoint.model_spec import ModelSpec, served_as
from contracts.clock import Clock, SystemClock
from contracts.cluster_secret import cluster_secret
from contracts.config.cluster_config import Config
from contracts.errors import ErrorKind, RequestError
from contracts.ids import RequestId, Role
from contracts.interfaces.discovery import WorkerDirectory
from contracts.key_file import TenantLimits
from contracts.messages.router_commands import Command
from contracts.messages.worker_events import Done, Event, LegReport
from router.core.answer_asks import AskEnded, FoundAnswer
from router.core.local_prefill import local_prefill
from router.core.router_actions import DeliverScores, DeliverTokens, EndRequest, NoteReplay, SendCommand
from router.core.router_core import RouterCore
from router.kv_indexer.told_prefixes import ToldPrefixes
from router.links.worker_links import WorkerLinks
from router.metrics.index_metrics import index_metrics
from router.metrics.prometheus_metrics import PrometheusMetrics
from router.openai.api_errors import ApiError, ClientGone, QueueFull, SloUnreachable
from router.openai.choice_output import ChoiceOutput
from router.openai.generate_request import GenerateRequest
from router.openai.response_stream import ResponseStream
from router.openai.resume_headers import ResumeHeaders
from router.openai.structured_output import may_need_grammar
from router.openai_responses.responses_request import renamed
from router.records.refusals import RefusedRequest
from router.security.answer_identity import AnswerIdentity, identity_of
from router.security.api_keys import ApiKeys
from router.security.tenant_accounts import TenantAccounts
from router.service.answer_claims import SUPERSEDED, AnswerClaims
from router.service.body_buffer import BodyBuffer
from router.service.controller_calls import ControllerCalls
from router.service.controller_ports import NO_CONTROLLER, ControllerPorts
from router.service.record_keeping import RecordKeeping
from router.service.request_limits import RequestLimits
from router.service.restored_choice import HASHED_INLINE_BYTES, KeyedRequest, check_headers, usable
from router.service.routed_choices import OpenedRequest, RequestTimes
from router.state.routed_request import RoutedRequest
from router.state.router_log import log
from router.state.tenant_share import TenantShare
from router.state.trace_context import NO_TRACE, TraceContext
from router.state.worker_table import WorkerKey
from router.text.tokenizer import ModelTokenizer, read_model_tokenizer
from router.tokenizer_pool.prepare_request import BodyReader, PreparedPrompt, body_limit
from router.tokenizer_pool.tokenizer_pool import TokenizerPool
from router.tokenizer_pool.tokenizer_process import REQUESTS, TEXTS, FrameKind, prepared_of, setup_frame
from router.tracing.otlp_exporter import SpanSender
from router.verification.audit_cases import AuditEnded, AuditFinding
from router.verification.stream_watch import StreamWatch
from router.verification.verification_log import log_finding, log_flag

TICK_S = 0.1
INLINE_BYTES = 2048
"""Bodies up to this size are read on the loop: that takes less time than a hop to a reader."""


async def _unless_gone(reply: asyncio.Future[tuple[FrameKind, bytes]]) -> tuple[FrameKind, bytes]:
    """Await a reader's reply. Raises `ClientGone` where the reply was cancelled because the client left."""
    try:
        return await reply
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not reply.cancelled() or task is None or task.cancelling():
            raise
        raise ClientGone("the client left while its body was read") from None


class RouterService:
    """The router's service. Call `start` on the event loop, `close` at the end.

    The class has more than twenty methods: it stands between the endpoints, the router core and the links, and each of
    the three calls it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: Config,
        directory: WorkerDirectory,
        *,
        model_tokenizer: ModelTokenizer | None = None,
        clock: Clock | None = None,
        ports: ControllerPorts = NO_CONTROLLER,
        mint: Callable[[], str] = lambda: secrets.token_hex(12),
        kv_index: Path | None = None,
        name: str = "router",
        span_sender: SpanSender | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`ports`: what it has of the controller. `mint` makes the ids of requests and rooms. `kv_index`: where the
        table of this host's KV index is; None: there is none. `name`: this router's, in its records. `span_sender`:
        takes traces in place of OpenTelemetry's exporter. `wall`: seconds since 1970."""
        spec = self.spec = served_as(spec, config.router.served_model_name)
        self.config, self.security = config.router, config.security
        self.started = int(time.time())
        self.body_limit = body_limit(config.router, spec)
        max_chars = 4 * self.body_limit
        self.model_tokenizer = (
            model_tokenizer if model_tokenizer is not None else read_model_tokenizer(spec.path, max_chars)
        )
        cache = config.cache_for(Role.PREFILL)
        self.intake = BodyReader(spec, self.model_tokenizer, config.router, cache.page_tokens)
        self.buffer = BodyBuffer(max(config.router.body_buffer_bytes, self.body_limit))
        self.readers = TokenizerPool(
            setup_frame(spec, config.router, max_chars, cache.page_tokens),
            config.router.reader_processes,
            config.router.reader_timeout_s,
        )
        self.keys = ApiKeys(Path(config.security.keys_file)) if config.security.keys_file else None
        """None: nobody needs a key."""
        admins = config.security.admin_keys_file
        self.admin_keys = ApiKeys(Path(admins)) if admins else None
        self.clock = clock if clock is not None else SystemClock()
        self.tenants = TenantAccounts(leased=ports.lessor is not None)
        told = ToldPrefixes(kv_index) if kv_index is not None else None
        self.core = RouterCore(
            config.router,
            self.clock,
            mint,
            config.audit,
            short_share=config.prefill.short_share,
            cache=cache,
            local=local_prefill(config),
            told=told,
            rng=random.Random(),
        )
        self.limits = RequestLimits(spec, config.router, self.core.workers)
        watch = StreamWatch(config.watch, spec.vocab_size)
        self.watch = watch if watch.on else None
        self.metrics = PrometheusMetrics(self.core, config.transfer.plane, self.watch, spec.name, config.router)
        self.metrics.sources += [self._of_bodies, self.tenants.metrics]
        self.controller = ControllerCalls(
            ports, config, self.core, self.tenants, self.metrics, self.watch, spec.name, mint, self.clock
        )
        if told is not None:
            self.metrics.sources.append(lambda: index_metrics(told, self.clock))
        self.worker_links = WorkerLinks(
            directory,
            on_view=self._on_view,
            on_linked=self._on_linked,
            on_unlinked=self._on_unlinked,
            on_events=self._on_events,
        )
        self.claims = AnswerClaims(self.core)
        self._owners: dict[RequestId, tuple[ResponseStream, ChoiceOutput]] = {}
        router = f"{name}-{mint()[:8]}" if ports.recorder is not None else name
        self.records = RecordKeeping(
            router, spec.name, config, self.clock, wall, self._owners.values, ports.recorder, span_sender
        )
        self.metrics.sources.append(self.records.families)
        self._mint = mint
        self._reserved = 0
        """Choices that are admitted and have not ended; a body at the reader processes counts as one."""
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.worker_links.start()
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        """End all answers with an error, cancel them on the workers, and close readers and links. Idempotent."""
        for stream in {id(stream): stream for stream, _ in self._owners.values()}.values():
            self.abandon(stream)
            stream.fail("the server is shutting down")
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        self.controller.close()
        await self.readers.close()
        await self.worker_links.close()
        await self.records.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                for keys in (self.keys, self.admin_keys):
                    if keys is not None:
                        keys.refresh()
                self.controller.tick()
                self.records.tick()
                self.core.tick()
                self._act()
            except Exception:  # Our own bug; without further ticks no deadline would be kept.
                log("tick failed", level=logging.ERROR, trace=True)

    # ------------------------------------------------------------ admission

    def check_room(self, choices: int = 1) -> None:
        """Raise `QueueFull` where so many more choices would be above `router.max_queue`. Books nothing."""
        limit = self.config.max_queue
        if self._reserved + choices > limit:
            self.metrics.refused_full += 1
            text = f"the queue is full: {self._reserved} of {limit} answers are in flight; try again later"
            raise QueueFull(text, choices)

    def refused(self, request: RefusedRequest, failure: ApiError, numbers: Mapping[str, float]) -> None:
        """Keep why a request was refused before it was placed; `numbers`: those that decided."""
        counts = self.core.workers.serving_counts(self.clock.now())
        ready = {f"{role}_workers_ready": count for role, count in counts.items()}
        here = {"answers_in_flight": self._reserved, "max_queue": self.config.max_queue, **ready}
        self.records.refused(request, failure, {**numbers, **here})

    async def check_tenant(self, tenant: str) -> None:
        """Raise `TenantLimited` where a tenant may not even ask for the least request. Books nothing."""
        if self.keys is not None:
            await self._leased(tenant, 1, 1)
            self.tenants.check(tenant, self._allowed(tenant), 1, 1, self.clock.now())

    async def _leased(self, tenant: str, choices: int, tokens: int) -> None:
        """Have slices of a tenant's limits for so much, where they hold for several routers together."""
        if self.controller.quotas is not None:
            await self.controller.quotas.ensure(tenant, self._allowed(tenant), choices, tokens)

    def _allowed(self, tenant: str) -> TenantLimits:
        return self.keys.limits(tenant) if self.keys is not None else TenantLimits()

    async def open(
        self,
        kind: FrameKind,
        raw: bytes,
        client_id: str,
        on_gone: Callable[[Callable[[], object]], None] | None = None,
        tenant: str = "",
        slo: str = "",
        session: str = "",
        resume: ResumeHeaders | None = None,
        trace: TraceContext = NO_TRACE,
    ) -> ResponseStream:
        """Read and tokenise a request's body, admit the request, and submit its choices to the router core.

        `resume`: the key of a request whose client may come back, and what it has already; then what workers have kept
        of the answer goes on, and the rest is begun.

        `kind` is one of `REQUESTS`. `on_gone` is called with a function that the caller must call when the client
        leaves, so that a waiting body isn't read. `slo`: the header that tightens the time to first token. `session`:
        the header that names a session. Raises `QueueFull`, `RequestError` where the body is wrong or doesn't fit,
        `TenantLimited`, `SloUnreachable`, `ReaderFailed`, `ClientGone`, `KeyReused` and `Superseded`.
        """
        self.check_room()
        identity = await self._identity(kind, raw, tenant, resume) if resume is not None else None
        began, slo_ms = self.clock.now(), self.limits.first_token_ms(slo, self._allowed(tenant).ttft_slo_ms)
        # Compiling a grammar may take a second, and as much memory as a reader may have.
        if len(raw) <= INLINE_BYTES and not may_need_grammar(raw):
            prepared = REQUESTS[kind](self.intake, raw, tenant)
        else:
            self._reserved += 1
            try:
                reply = self.readers.submit(kind, raw, tenant)
                if on_gone is not None:
                    on_gone(reply.cancel)
                _, frame = await _unless_gone(reply)
                prepared = prepared_of(frame)
            finally:
                self._reserved -= 1
        request = replace(prepared.request, session=session) if session else prepared.request
        timeout_s, allowed = self.limits.timeout_s(request), self._allowed(tenant)
        prompt_tokens = sum(len(prompt.tokens) for prompt in prepared.prompts)
        if self.keys is not None:
            await self._leased(tenant, request.choices, prompt_tokens)
        self.check_room(request.choices)
        try:
            limits = [self.limits.answer_tokens(request, len(p.tokens)) for p in prepared.prompts]
        except RequestError as error:
            raise (renamed(error) if request.shape == "responses" else error) from None
        if self.keys is not None:
            request = replace(request, priority=min(request.priority, allowed.priority))
            self.tenants.check(tenant, allowed, request.choices, prompt_tokens, self.clock.now())
        first_token_by = began + slo_ms / 1000 if slo_ms else None
        keyed: KeyedRequest | None = None
        if identity is not None and resume is not None:
            if not request.seeded:
                request = replace(request, sampling=replace(request.sampling, seed=identity.seed))
            keyed = await self._claim(identity, resume, request, prepared.prompts, on_gone)
        try:
            opened = OpenedRequest(
                identity.answer_id if identity is not None else self._mint(),
                request,
                prepared.prompts,
                limits,
                RequestTimes(began, timeout_s, first_token_by),
                TenantShare(tenant, allowed.weight),
                client_id,
                keyed,
                self.records.traced(trace),
            )
            routed = opened.routed(self.clock.now(), self._mint() if keyed is not None else "")
            new = routed if keyed is None else keyed.new(routed)
            if new and (late := self.core.late_if_taken(new)) is not None:
                raise SloUnreachable((self.clock.now() - began + late.prediction.seconds) * 1000, slo_ms)
            if self.keys is not None:
                asked = prompt_tokens if len(new) == len(routed) else 0
                self.tenants.admit(tenant, allowed, request.choices, asked, self.clock.now())
            return self._admit(opened, routed)
        except BaseException:
            if keyed is not None:
                self.claims.give_up(keyed.claim)
                self._act()
            raise

    async def _identity(self, kind: FrameKind, raw: bytes, tenant: str, resume: ResumeHeaders) -> AnswerIdentity:
        """Return the identity of a request with a key, and take its answer from the connection that has it here. Raises
        `KeyReused`."""
        given = cluster_secret(), tenant, resume.key, kind.name, raw
        inline = len(raw) <= HASHED_INLINE_BYTES
        identity = identity_of(*given) if inline else await asyncio.to_thread(identity_of, *given)
        held = self.claims.held(identity)
        if held is not None and not held.over:
            self.abandon(held)
            held.fail(SUPERSEDED, ErrorKind.SUPERSEDED)
        return identity

    async def _claim(
        self,
        identity: AnswerIdentity,
        headers: ResumeHeaders,
        request: GenerateRequest,
        prompts: Sequence[PreparedPrompt],
        on_gone: Callable[[Callable[[], object]], None] | None,
    ) -> KeyedRequest:
        """Find out what workers have kept of an answer. Raises as `AnswerClaims.claim` does, and `RequestError`."""
        check_headers(request, headers)
        self.check_room(self.claims.asking + 1)
        self._reserved += 1
        try:
            claim = await self.claims.claim(identity, request.choices, self._act, on_gone)
        finally:
            self._reserved -= 1
        fit = usable(claim, request, prompts)
        for index, found in claim.found.items():
            if index not in fit:
                self.core.asks.give_up(found.worker, (found.answer,))
        claim.found = fit
        said = [found.answer.created for found in fit.values()] + ([headers.seen.created] if headers.seen else [])
        return KeyedRequest(identity, headers, claim, said[0] if said else int(time.time()))

    async def text(self, kind: FrameKind, raw: bytes) -> bytes:
        """Return the JSON answer of an endpoint that counts or makes tokens. Raises `RequestError`, `ReaderFailed`."""
        if len(raw) <= INLINE_BYTES and not may_need_grammar(raw):
            return TEXTS[kind](self.intake, raw)
        return (await self.readers.submit(kind, raw))[1]

    def _admit(self, opened: OpenedRequest, routed: Sequence[RoutedRequest]) -> ResponseStream:
        keyed = opened.keyed
        stream = opened.stream(routed, self.spec.name, self.model_tokenizer, self.config.client_buffer_events)
        choices = stream.choices
        if self.security.log_prompts:
            client_id, tenant = opened.client_id, opened.share.tenant
            for choice in choices[:: opened.request.n]:
                log(
                    "prompt",
                    request_id=stream.id,
                    client_id=client_id,
                    tenant=tenant,
                    tokens=list(choice.request.prompt),
                )
        self._reserved += len(choices)
        for choice in choices:
            self._owners[choice.request.id] = (stream, choice)
        found = keyed.claim.found if keyed is not None else {}
        if keyed is not None:
            self.claims.begun(keyed.claim, stream)
        for choice in choices:
            if choice.index in found:
                self._catch_up(stream, choice, found[choice.index])
            else:
                self.core.submit(choice.request)
        self._act()
        return stream

    def _catch_up(self, stream: ResponseStream, choice: ChoiceOutput, found: FoundAnswer) -> None:
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
            choice.first_at = choice.last_at = self.clock.now()
        stream.push_each(choice.take_each(kept.tokens, kept.logprobs))
        done = Done(routed.id, routed.attempt, kept.reason, kept.stop_token) if kept.reason else routed.ending
        if choice.finish is not None:
            if kept.running:
                self.core.adopt(routed, found)
                self.core.cancel(routed.id, finished=True)
            self._close_choice(stream, choice)
        elif done is not None and not kept.running:
            if (piece := choice.end(done)) is not None:
                stream.push_each((piece,))
            self._close_choice(stream, choice)
        else:
            self.core.adopt(routed, found)

    def abandon(self, stream: ResponseStream, *, slow: bool = False) -> None:
        """Cancel all choices that have not ended, because the client left or (`slow`) reads too slowly. Idempotent.

        Those with a key are left to their workers for a while, as their client may come back.
        """
        took = False
        give_up = self.core.detach if stream.answer_key else self.core.cancel
        for choice in stream.choices:
            if choice.request.id in self._owners:
                took = True
                give_up(choice.request.id)
                choice.ended_at = self.clock.now()
                self._release(choice)
        self.claims.ended(stream)
        if took:
            if slow:
                self.metrics.slow_clients += 1
            else:
                self.metrics.disconnects += 1
            log("request abandoned", slow=slow, **stream.facts())
        self._act()

    def fail_over(self, key: WorkerKey) -> int:
        """Start the worker's requests over on other workers, as far as others can take them; returns how many."""
        taken = self.core.fail_over(key)
        self._act()
        return taken

    # ------------------------------------------------------------ events in, actions out

    def _on_view(self, views: tuple[object, ...]) -> None:
        self.core.on_view(self.worker_links.views)
        self._act()

    def _on_linked(self, key: WorkerKey) -> None:
        self.core.on_linked(key)
        self._act()

    def _on_unlinked(self, key: WorkerKey, reason: str) -> None:
        self.core.on_unlinked(key, reason)
        self._act()

    def _on_events(self, key: WorkerKey, events: Sequence[Event]) -> None:
        for event in events:
            if type(event) is LegReport:
                self.metrics.tally.report(event)
            self.core.on_event(key, event)
        self._act()

    def _act(self) -> None:
        """Carry out the router core's actions until it has none."""
        sends: dict[WorkerKey, list[Command]] = {}
        while actions := self.core.take_actions():
            for action in actions:
                if type(action) is DeliverTokens:
                    self._deliver(action)
                elif type(action) is SendCommand:
                    sends.setdefault(action.worker, []).append(action.command)
                elif type(action) is DeliverScores:
                    owner = self._owners.get(action.request_id)
                    if owner:
                        owner[1].scores = action.scores
                elif type(action) is EndRequest:
                    self._end(action)
                elif type(action) is NoteReplay:
                    log(
                        "request replayed",
                        request_id=action.request_id,
                        attempt=action.attempt,
                        reason=action.reason,
                    )
                elif type(action) is AuditFinding:
                    log_finding(action)
                elif type(action) is AuditEnded:
                    self.records.kept.audited(action)
                elif type(action) is AskEnded:
                    self.claims.on_ended(action)
        for key, commands in sends.items():
            self.worker_links.send(key, commands)

    def _deliver(self, action: DeliverTokens) -> None:
        owner = self._owners.get(action.request_id)
        if owner is None:
            return
        stream, choice = owner
        now = self.clock.now()
        self.metrics.tally.tokens(choice, len(action.tokens), now)
        if stream.tenant:
            self.tenants.spend(stream.tenant, len(action.tokens))
        if self.watch is not None:
            for flag in self.watch.feed(action.request_id, action.tokens):
                self.core.audits.flag(action.request_id)
                log_flag(flag, choice.request)
        try:
            if stream.answer_key:
                stream.push_each(choice.take_each(action.tokens, action.logprobs))
            else:
                stream.push(choice.take(action.tokens, action.logprobs))
        except Exception:  # A fault in one answer's text must not end the others.
            log("answer failed", trace=True, request_id=stream.id)
            choice.fail("the router failed to turn tokens into text")
            self.core.cancel(action.request_id)
            self._close_choice(stream, choice)
            return
        if choice.finish is not None:
            self.core.cancel(action.request_id, finished=True)
            self._close_choice(stream, choice)
        elif stream.overflowed:
            self.abandon(stream, slow=True)
            stream.fail("the client took the answer too slowly")

    def _end(self, action: EndRequest) -> None:
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
        self._close_choice(stream, choice)

    def _close_choice(self, stream: ResponseStream, choice: ChoiceOutput) -> None:
        choice.ended_at = self.clock.now()
        self.metrics.tally.ended(choice)
        self._release(choice)
        if choice.error is not None:
            log("request failed", error=choice.error.error, reason=choice.error.message, **stream.facts())
            for other in stream.choices:  # The client gets one error, so the other choices are of no use.
                if other.request.id in self._owners:
                    gone = choice.error.error is ErrorKind.SUPERSEDED
                    (self.core.detach if gone else self.core.cancel)(other.request.id)
                    self._release(other)
        stream.close_one(choice)
        if stream.over:
            self.claims.ended(stream)
        if stream.open == 0 and stream.failed is None:
            log("request ended", seconds=round(choice.ended_at - choice.request.arrived, 6), **stream.facts())

    def _release(self, choice: ChoiceOutput) -> None:
        """Give back what a choice holds in this service; every choice ends through this method. Idempotent."""
        owner = self._owners.pop(choice.request.id, None)
        if owner is not None:
            self._reserved -= 1
            if owner[0].tenant:
                self.tenants.ended(owner[0].tenant)
            if self.watch is not None:
                self.watch.end(choice.request.id)
            self.records.ended(*owner)

    def _of_bodies(self) -> Iterator[Metric]:
        text = "Memory of bodies that are being received, their first 64 KiB left out"
        yield GaugeMetricFamily("twinpool_body_buffer_bytes", text, value=self.buffer.held)
        yield GaugeMetricFamily("twinpool_reader_processes", "Readers that run", value=len(self.readers.pids))
        yield GaugeMetricFamily("twinpool_bodies_waiting", "Bodies that wait for a reader", value=self.readers.waiting)

    def check(self) -> list[str]:
        """Recount the router's books; returns a sentence for each disagreement."""
        found = self.core.check() + self.claims.check()
        owned, held = set(self._owners), set(self.core.requests.ids())
        found += [f"request {rid} runs and belongs to no client" for rid in sorted(held - owned)]
        found += [f"request {rid} has a client and runs nowhere" for rid in sorted(owned - held)]
        if self._reserved < len(owned):
            found.append(f"{len(owned)} choices are in flight, {self._reserved} are booked")
        of_tenants = sum(bool(stream.tenant) for stream, _ in self._owners.values())
        if of_tenants != self.tenants.in_flight:
            found.append(f"{of_tenants} choices of tenants are in flight, {self.tenants.in_flight} are booked")
        return found
