"""The service behind the HTTP endpoints: admits, tokenises, places and ends requests, and drives the router core.

`RouterService` joins the parts: the router core decides, the worker links send commands and receive events, and the
open answers give what comes to clients. It runs on one event loop. After every event the router core's actions are
carried out at once; all commands to one worker leave as one batch.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import structs
from prometheus_client.core import GaugeMetricFamily, Metric

from twinpool.contracts.checkpoint.model_spec import ModelSpec, served_as
from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.cluster_secret import cluster_secret
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.router_config import read_sampling_defaults
from twinpool.contracts.errors import ErrorKind, RequestError
from twinpool.contracts.ids import Role
from twinpool.contracts.json_logs import log
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Event, LegReport
from twinpool.contracts.sampling_params import AdapterRef
from twinpool.router.core.answer_lookups import LookupEnded
from twinpool.router.core.router_actions import DeliverTokens, EndRequest, NoteReplay, PromptAction, SendCommand
from twinpool.router.core.router_core import RouterCore
from twinpool.router.core.routing_policies import local_prefill
from twinpool.router.kv_indexer.holder_table import KVIndexReader
from twinpool.router.links.controller_port import NO_CONTROLLER, ControllerPorts, WorkerDirectory
from twinpool.router.links.worker_links import WorkerLinks
from twinpool.router.metrics.prometheus_metrics import PrometheusMetrics
from twinpool.router.metrics.worker_metrics import index_metrics
from twinpool.router.openai.api_errors import ApiError, ReaderFailed, SloUnreachable
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.parse_request import GenerateRequest
from twinpool.router.openai.request_headers import ResumeHeaders
from twinpool.router.openai.response_stream import ResponseStream
from twinpool.router.openai_responses.responses_request import renamed
from twinpool.router.records.kept_records import RefusedRequest
from twinpool.router.security.tenant_accounts import ApiKeys, TenantAccounts
from twinpool.router.service.admission import Admission, BodyBuffer
from twinpool.router.service.controller_calls import ControllerCalls
from twinpool.router.service.demand_wake import DemandWake
from twinpool.router.service.idempotency_keys import (
    HASHED_INLINE_BYTES,
    SUPERSEDED,
    AnswerClaims,
    AnswerIdentity,
    KeyedRequest,
    check_drawn_alike,
    check_headers,
    identity_of,
    usable,
)
from twinpool.router.service.open_answers import ClientRequest, OpenAnswers, OpenedRequest, RequestTimes
from twinpool.router.service.record_keeping import RecordKeeping
from twinpool.router.state.ttft_prediction import TenantWeight
from twinpool.router.state.worker_table import WorkerKey
from twinpool.router.text.tokenizer import ModelTokenizer, read_model_tokenizer
from twinpool.router.tokenizer_pool.prepare_request import BodyReader, PreparedPrompt, TextAnswer, body_limit
from twinpool.router.tokenizer_pool.tokenizer_pool import TokenizerPool
from twinpool.router.tokenizer_pool.tokenizer_process import FrameKind, adapters_frame, setup_frame
from twinpool.router.tracing.otlp_exporter import SpanSender
from twinpool.router.verification.audits import AuditEnded, AuditFinding
from twinpool.router.verification.stream_watch import StreamWatch, log_finding

TICK_S = 0.1
KEPT_NOWHERE = frozenset({FrameKind.EMBEDDINGS, FrameKind.CLASSIFY, FrameKind.SCORE, FrameKind.RERANK})  # Made alike.
SHUTTING_DOWN = "the server is shutting down"


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
        defaults = read_sampling_defaults(config.router.sampling_defaults, spec.generation_defaults)
        if spec.pictures is not None and config.no_images(spec.pictures.whole_positions):
            spec = replace(spec, pictures=None)  # Whoever computes prompts would refuse them.
        self.spec = served_as(replace(spec, generation_defaults=defaults), config.router.served_model_name)
        self.config, self.security, self.adapter_settings = config.router, config.security, config.adapters
        self.batch, self.weight_roots = config.batch, config.engine.weight_roots
        self.started = int(time.time())
        self.stop_timeout_s = config.cluster.stop_timeout_s
        self.draining = False
        """Whether new requests are refused, because this router is to end."""
        self.leaving = False
        """Whether another process has the port, so that this one finishes what it has and ends."""
        self.background_rows = config.decode.background_rows
        self.answering = 0
        """Requests for text that are read, run or written."""
        self.clock = clock if clock is not None else SystemClock()
        self._mint, self._closed = mint, False
        self.adapters: tuple[AdapterRef, ...] = ()
        """The adapters that are served."""
        self._ticker: asyncio.Task[None] | None = None
        self.orders = asyncio.Lock()
        """Held by whoever looks at the workers, orders something of the controller and tells the workers: two orders
        about one worker would reach the two in other turns."""
        admins = config.security.admin_keys_file
        self.admin_keys = ApiKeys(Path(admins)) if admins else None
        self.worker_links = WorkerLinks(
            directory,
            on_view=self._on_view,
            on_linked=self._on_linked,
            on_unlinked=self._on_unlinked,
            on_events=self._on_events,
        )
        self._read_bodies(config, model_tokenizer)
        index = KVIndexReader(kv_index) if kv_index is not None else None
        self.core = RouterCore(
            config.router,
            self.clock,
            mint,
            config.audit,
            short_share=config.prefill.short_share,
            cache=config.cache_for(Role.PREFILL),
            local=local_prefill(config),
            kv_index=index,
            rng=random.Random(),
        )
        self.demand = DemandWake(self.core, directory, config.router, self.clock)
        self._count(config, ports, index)
        self._answer(config, ports, name, span_sender, wall)

    def _read_bodies(self, config: Config, model_tokenizer: ModelTokenizer | None) -> None:
        """Make the parts that read bodies."""
        self.body_limit = body_limit(config.router, self.spec)
        max_chars, page_tokens = 4 * self.body_limit, config.cache_for(Role.PREFILL).page_tokens
        self.model_tokenizer = (
            model_tokenizer if model_tokenizer is not None else read_model_tokenizer(self.spec.path, max_chars)
        )
        self.intake = BodyReader(self.spec, self.model_tokenizer, config.router, page_tokens)
        self.buffer = BodyBuffer(max(config.router.body_buffer_bytes, self.body_limit))
        setup = setup_frame(self.spec, config.router, max_chars, page_tokens)
        self.readers = TokenizerPool.of(setup, config.router)

    def _count(self, config: Config, ports: ControllerPorts, index: KVIndexReader | None) -> None:
        """Make the parts that count what the router does, and tell it to operators and the controller."""
        watch = StreamWatch(config.watch, self.spec.vocab_size)
        self.watch = watch if watch.on else None
        tenants = TenantAccounts(leased=ports.lessor is not None)
        self.metrics = PrometheusMetrics(self.core, config.transfer.plane, self.watch, self.spec.name, config.router)
        self.metrics.sources += [self._of_bodies, tenants.metrics]
        self.controller = ControllerCalls(
            ports, config, self.core, tenants, self.metrics, self.watch, self.spec.name, self._mint, self.clock
        )
        if index is not None:
            self.metrics.sources.append(lambda: index_metrics(index, self.clock))
        keys_file = config.security.keys_file
        self.admission = Admission(
            self.spec,
            config.router,
            keys_file,
            self.core.workers,
            tenants,
            self.metrics,
            self.clock,
            self.controller.quotas,
        )

    def _answer(
        self,
        config: Config,
        ports: ControllerPorts,
        name: str,
        span_sender: SpanSender | None,
        wall: Callable[[], float],
    ) -> None:
        """Make the parts that have answers, and records of them."""
        router = f"{name}-{self._mint()[:8]}" if ports.recorder is not None else name
        self.records = RecordKeeping(
            router,
            self.spec.name,
            config,
            self.clock,
            wall,
            self._in_flight,
            ports.recorder,
            span_sender,
        )
        self.metrics.sources += [self.records.families, self.demand.families]
        self.claims = AnswerClaims(self.core, self._supersede)
        self.answers = OpenAnswers(
            self.core,
            self.clock,
            self.admission,
            self.metrics,
            self.claims,
            self.watch,
            self.records.ended,
            self._act,
        )

    def _in_flight(self) -> Iterable[tuple[ResponseStream, ChoiceOutput]]:
        return self.answers.owners.values()

    async def start(self) -> None:
        self.worker_links.start()
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        """End all answers with an error, cancel them on the workers, and close readers and links. Idempotent.

        Requests that are read or looked for meanwhile are refused where they would begin."""
        self._closed = True
        self.demand.close(SHUTTING_DOWN)
        self.claims.close(ReaderFailed(SHUTTING_DOWN))
        for stream in {id(stream): stream for stream, _ in self.answers.owners.values()}.values():
            self.abandon(stream)
            stream.fail(SHUTTING_DOWN)
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
            for tick in (self._tick_core, self.controller.tick, self.records.tick, self._refresh_keys):
                try:
                    tick()
                except Exception:  # Our own bug; what else is due, deadlines above all, is kept all the same.
                    log("tick failed", level=logging.ERROR, trace=True)

    def _tick_core(self) -> None:
        self.core.tick()
        self._act()

    def _refresh_keys(self) -> None:
        for keys in (self.admission.keys, self.admin_keys):
            if keys is not None:
                keys.refresh()

    # ------------------------------------------------------------ admission

    def refused(self, request: RefusedRequest, failure: ApiError, numbers: Mapping[str, float]) -> None:
        """Keep why a request was refused before it was placed; `numbers`: those that decided."""
        counts = self.core.workers.serving_counts(self.clock.now())
        ready = {f"{role}_workers_ready": count for role, count in counts.items()}
        here = {"answers_in_flight": self.admission.booked, "max_queue": self.admission.max_choices, **ready}
        self.records.refused(request, failure, {**numbers, **here})

    async def check_tenant(self, tenant: str) -> None:
        """Raise `TenantLimited` where a tenant may not even ask for the least request. Books nothing."""
        await self.admission.lease(tenant, 1, 1)
        self.admission.check_tenant(tenant)

    async def open(self, asked: ClientRequest) -> ResponseStream:
        """Read and tokenise a request's body, admit the request, and submit its choices to the router core.

        Where the client may come back, what workers have kept of the answer goes on, and the rest is begun. Raises
        `QueueFull`, `RequestError` where the body is wrong or doesn't fit, `TenantLimited`, `SloUnreachable`,
        `ReaderFailed`, `ClientGone`, `KeyReused` and `Superseded`.
        """
        admission, tenant, headers = self.admission, asked.tenant, asked.headers
        if asked.kind in KEPT_NOWHERE:
            headers = replace(headers, resume=None)
        self._check_open()
        await self.demand.awake(asked.on_gone)
        admission.check_room()
        turn = self.claims.next_turn()
        with admission.hold():
            identity = await self._identity(asked, headers.resume, turn) if headers.resume is not None else None
            metered = asked.background is None
            began, slo_ms = self.clock.now(), admission.first_token_ms(headers.slo, tenant) if metered else 0
            prepared = await self.readers.prepare(self.intake, asked.kind, asked.raw, tenant, asked.on_gone)
            request, prompts = prepared.request, prepared.prompts
            admission.check_model(tenant, request)
            prompt_tokens = sum([len(prompt.tokens) for prompt in prompts])
            if asked.background is None:
                await admission.lease(tenant, request.choices, prompt_tokens)
            else:
                request = admission.as_background(request, asked.background)
        self._check_open()
        # From here on what was looked at holds until it is booked: only `_claim` waits, holding the places.
        if identity is not None:  # Another connection may have begun this answer while this one waited.
            self.claims.take_over(identity, turn)
        timeout_s, allowed = admission.timeout_s(request), admission.allowed(tenant)
        admission.check_room(request.choices)
        try:
            limits = admission.answer_limits(request, [len(prompt.tokens) for prompt in prompts])
        except RequestError as error:
            raise (renamed(error) if request.shape == "responses" else error) from None
        if metered:
            admission.check_tenant(tenant, request.choices, prompt_tokens)
        if headers.session:
            request = replace(request, session=headers.session)
        if request.priority > allowed.priority and admission.keys is not None:
            request = replace(request, priority=allowed.priority)
        keyed: KeyedRequest | None = None
        if identity is not None and headers.resume is not None:
            if not request.seeded:
                request = replace(request, sampling=structs.replace(request.sampling, seed=identity.seed))
            keyed = await self._claim(identity, turn, headers.resume, request, prompts, asked.on_gone)
        try:
            opened = OpenedRequest(
                identity.answer_id if identity is not None else self._mint(),
                request,
                prompts,
                limits,
                RequestTimes(began, timeout_s, began + slo_ms / 1000 if slo_ms else None),
                TenantWeight(tenant, allowed.weight),
                asked.client_id,
                keyed,
                self.records.traced(headers.trace),
                metered,
            )
            return self._begin(opened, slo_ms, prompt_tokens)
        except BaseException:
            if keyed is not None:
                self.claims.give_up(keyed.claim)
                self._act()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise ReaderFailed(SHUTTING_DOWN)

    def _begin(self, opened: OpenedRequest, slo_ms: int, prompt_tokens: int) -> ResponseStream:
        """Book an answer and hand it to the router core. Raises `SloUnreachable`, `TenantLimited`."""
        keyed, began = opened.keyed, opened.times.began
        routed = opened.routed(self.clock.now(), self._mint() if keyed is not None else "")
        stream = opened.stream(
            routed, opened.request.model_name or self.spec.name, self.model_tokenizer, self.config.client_buffer_events
        )
        new = routed if keyed is None else keyed.new(routed)
        if new and (late := self.core.predict_slo_miss(new)) is not None:
            raise SloUnreachable((self.clock.now() - began + late.prediction.seconds) * 1000, slo_ms)
        self.answers.begin(stream, prompt_tokens if len(new) == len(routed) else 0)
        self.answers.admit(stream, keyed)
        self.metrics.tally.ignore(opened.request.ignored)
        if self.security.log_prompts:
            client, tenant = opened.client_id, opened.share.tenant
            for prompt in opened.prompts:
                log("prompt", request_id=stream.id, client_id=client, tenant=tenant, tokens=list(prompt.tokens))
        return stream

    async def _identity(self, asked: ClientRequest, resume: ResumeHeaders, turn: int) -> AnswerIdentity:
        """Return the identity of a request with a key, and take its answer from the connection that has it here: what
        that holds of the limits is free for this one. Raises `KeyReused`, `Superseded`."""
        given = cluster_secret(), asked.tenant, resume.key, asked.kind.name, asked.raw
        inline = len(asked.raw) <= HASHED_INLINE_BYTES
        identity = identity_of(*given) if inline else await asyncio.to_thread(identity_of, *given)
        self.claims.take_over(identity, turn)
        return identity

    def _supersede(self, stream: ResponseStream) -> None:
        """End an answer whose client has come back for it on another connection."""
        self.abandon(stream)
        stream.fail(SUPERSEDED, ErrorKind.SUPERSEDED)

    async def _claim(
        self,
        identity: AnswerIdentity,
        turn: int,
        headers: ResumeHeaders,
        request: GenerateRequest,
        prompts: Sequence[PreparedPrompt],
        on_gone: Callable[[Callable[[], object]], None] | None,
    ) -> KeyedRequest:
        """Find out what workers have kept of an answer. Raises as `AnswerClaims.claim` does, and `RequestError`."""
        check_headers(request, headers)
        with self.admission.hold(request.choices):
            claim = await self.claims.claim(identity, turn, request.choices, self._act, on_gone)
        fit = usable(claim, request, prompts)
        for index, found in claim.found.items():
            if index not in fit:
                self.core.lookups.give_up(found.worker, (found.answer,))
        claim.found = fit
        served = self.core.workers.served
        if headers.seen is not None and len(fit) < request.choices:
            check_drawn_alike(headers.seen.created, served)
        said = [found.answer.created for found in fit.values()] + ([headers.seen.created] if headers.seen else [])
        return KeyedRequest(identity, headers, claim, said[0] if said else int(time.time()), served.weights.number)

    async def text(self, kind: FrameKind, raw: bytes, tenant: str) -> TextAnswer:
        """Return the answer of an endpoint that counts or makes tokens. Raises as `TokenizerPool.text`."""
        answer = await self.readers.text(self.intake, kind, raw, tenant)
        self.metrics.tally.ignore(answer.ignored)
        return answer

    def abandon(self, stream: ResponseStream) -> None:
        """End an answer whose client has left. Idempotent."""
        self.answers.abandon(stream)

    def fail_over(self, key: WorkerKey) -> int:
        """Start the worker's requests over on other workers, as far as others can take them; returns how many."""
        taken = self.core.fail_over(key)
        self._act()
        return taken

    # ------------------------------------------------------------ events in, actions out

    def _on_view(self, views: tuple[object, ...]) -> None:
        self._follow_adapters(self.worker_links.directory.adapters)
        self.core.workers.served = self.worker_links.directory.serving
        self.core.on_view(self.worker_links.views)
        self.demand.observe()
        self._act()

    def _follow_adapters(self, adapters: tuple[AdapterRef, ...]) -> None:
        """Take in which adapters are served. Requests that were read before keep theirs."""
        if adapters != self.adapters:
            self.adapters = adapters
            self.intake.adapters = {one.name: one for one in adapters if one.name not in self.spec.names}
            self.readers.adapters = adapters_frame(self.intake.adapters.values())

    def _on_linked(self, key: WorkerKey) -> None:
        self.core.on_linked(key)
        self.demand.observe()
        self._act()

    def _on_unlinked(self, key: WorkerKey, end: StreamEnd) -> None:
        self.core.on_unlinked(key, end.reason, left=end.left)
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
        more = True
        while more:
            more = False
            for action in self.core.take_actions():
                if type(action) is DeliverTokens:  # Nearly all of them, and few of them call the core.
                    more |= self.answers.deliver(action)
                    continue
                more = True
                if type(action) is SendCommand:
                    sends.setdefault(action.worker, []).append(action.command)
                elif isinstance(action, PromptAction):
                    self.answers.note(action)
                elif type(action) is EndRequest:
                    self.answers.end(action)
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
                elif type(action) is LookupEnded:
                    self.claims.on_ended(action)
        for key, commands in sends.items():
            self.worker_links.send(key, commands)

    def _of_bodies(self) -> Iterator[Metric]:
        text = "Memory of bodies that are being received, their first 64 KiB left out"
        yield GaugeMetricFamily("twinpool_body_buffer_bytes", text, value=self.buffer.held)
        yield from self.readers.families()

    def check(self) -> list[str]:
        """Recount the router's books; returns a sentence for each disagreement."""
        quotas = self.controller.quotas
        leases = quotas.check() if quotas is not None else []
        return [*self.core.check(), *self.claims.check(), *self.answers.check(), *leases]
