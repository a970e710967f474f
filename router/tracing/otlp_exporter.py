"""Traces on their way to a collector: a bounded queue and a thread, which alone waits for it.

A collector that hangs, refuses or is away costs nobody anything: what the queue can't hold is dropped, a call ends
after `tracing.timeout_s`, and both are counted. OpenTelemetry's exporter writes the bytes and makes the calls.

Requests are traced as their clients say, else a share of them (`TraceSampling`).

The spans of a trace are plain values, made of a request's record. The root is the request at its router. Each span of
the record is a child of it, in the name of the process that it tells of; what happened is an event of the root.
Attributes have the names of OpenTelemetry's conventions for generative AI (``gen_ai.``) where these mean the same, and
else ``twinpool.``.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.build_id import package_version
from twinpool.contracts.config.cluster_config import TracingConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.json_logs import log
from twinpool.contracts.messages.request_record import USUAL, RequestRecord
from twinpool.router.openai.request_headers import TraceContext
from twinpool.router.records.kept_records import Refusal
from twinpool.router.records.make_record import RecordDraft, make_record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_WHOLE = 1 << 64


class TraceSampling:
    """Decides once, when a request comes. `ratio`: the share of those whose clients say nothing that is traced."""

    def __init__(self, ratio: float, rng: random.Random) -> None:
        self._ratio, self._rng = ratio, rng

    def decided(self, context: TraceContext) -> TraceContext:
        """The context by which a request is traced: the client's, or one of a new trace."""
        if context.trace_id:
            return context
        low = self._rng.getrandbits(64)
        number = self._rng.getrandbits(64) << 64 | low
        # As OpenTelemetry's TraceIdRatioBased has it, so that others who sample by the same ratio decide alike.
        return replace(context, trace_id=f"{number or 1:032x}", sampled=low < self._ratio * _WHOLE)


NS = 1_000_000_000


class TraceSpanKind(Enum):
    SERVER = "server"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    name: str
    at_ns: int
    """Since 1970."""
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One span; times are nanoseconds since 1970."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    """0: it has no parent."""
    start_ns: int
    end_ns: int
    process: str
    """The worker or the router that it tells of."""
    kind: TraceSpanKind
    attributes: Mapping[str, Any]
    events: Sequence[TraceEvent] = ()
    error: str | None = None
    """What went wrong; None where nothing did."""


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A record that is to be a trace. `parent_id`: the client's span, 16 hex digits, or empty."""

    record: RequestRecord
    parent_id: str
    rng: random.Random = field(compare=False)


def trace_spans(source: TraceSource) -> list[TraceSpan]:
    """The spans of a record's trace, the root first."""
    record = source.record
    trace_id, start = int(record.trace_id, 16), round(record.arrived * NS)

    def at(seconds: float) -> int:
        return start + round(seconds * NS)

    def new_id() -> int:
        return source.rng.getrandbits(64) or 1

    root = TraceSpan(
        f"request {record.model}",
        trace_id,
        new_id(),
        int(source.parent_id, 16) if source.parent_id else 0,
        start,
        at(record.total_s),
        record.router,
        TraceSpanKind.SERVER,
        _attributes(record),
        [
            TraceEvent(event.kind, at(event.at_s), _without_empty(worker=event.worker, text=event.text))
            for event in record.events
        ],
        None if record.outcome in USUAL else f"{record.outcome}: {record.message}",
    )
    return [root] + [
        TraceSpan(
            span.name,
            trace_id,
            new_id(),
            root.span_id,
            at(span.start_s),
            at(span.end_s),
            span.worker or record.router,
            TraceSpanKind.INTERNAL,
            # By the request's id a span leads to the log lines of its process, and a log line to its trace.
            _without_empty(request_id=record.request_id, worker=span.worker, detail=span.detail)
            | {"twinpool.hidden": span.hidden},
        )
        for span in record.spans
    ]


def _attributes(record: RequestRecord) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.provider.name": "twinpool",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.answer_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.generated,
        "twinpool.request_id": record.request_id,
        "twinpool.outcome": record.outcome,
        "twinpool.attempts": record.attempts,
        "twinpool.migrations": record.migrations,
        "twinpool.retractions": record.retractions,
        "twinpool.transfer_bytes": record.transfer_bytes,
        "twinpool.uncertainty_s": record.uncertainty_s,
        **_without_empty(client_id=record.client_id, tenant=record.tenant),
        **{f"twinpool.cached_tokens.{tier}": count for tier, count in record.cached_tokens.items() if count},
    }
    if record.refused_status:
        found["http.response.status_code"] = record.refused_status
        found.update({f"twinpool.{name}": number for name, number in record.numbers.items()})
    if record.outcome in USUAL:
        found["gen_ai.response.finish_reasons"] = (record.outcome,)
    if record.first_token_s is not None:
        found["twinpool.first_token_s"] = record.first_token_s
    return found


def _without_empty(**texts: str) -> dict[str, Any]:
    return {f"twinpool.{name}": text for name, text in texts.items() if text}


MAX_AT_ONCE = 64
"""Requests whose traces go in one call."""
REFUSED_SHARE = 4
"""Refused requests' traces wait in so much of the queue at most: in one part of so many."""
SERVICE = "twinpool"


class SpanSender(Protocol):
    """What sends spans to a collector; may wait."""

    def send(self, spans: Sequence[TraceSpan]) -> bool:
        """Return whether the collector has taken them."""

    def close(self) -> None: ...


def check_tracing(config: TracingConfig) -> None:
    """Raise `ConfigError` where traces are wanted and OpenTelemetry's packages aren't installed."""
    if config.endpoint:
        try:
            import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
            import opentelemetry.sdk.trace  # noqa: F401
        except ImportError:
            raise ConfigError("tracing.endpoint needs OpenTelemetry's packages: pip install 'twinpool[otel]'") from None


class OtlpSender:
    """Sends by OpenTelemetry's exporter. Raises `ConfigError` where its packages aren't installed."""

    def __init__(self, config: TracingConfig) -> None:
        check_tracing(config)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self._exporter = OTLPSpanExporter(endpoint=config.endpoint, timeout=config.timeout_s)
        # What fails is counted and said here; the exporter would say it again for each call.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def send(self, spans: Sequence[TraceSpan]) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        return self._exporter.export([readable(span) for span in spans]) is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()


def readable(span: TraceSpan) -> ReadableSpan:
    """A span as OpenTelemetry's exporters take it."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    flags = TraceFlags(TraceFlags.SAMPLED)
    parent = SpanContext(span.trace_id, span.parent_id, is_remote=True, trace_flags=flags) if span.parent_id else None
    return ReadableSpan(
        span.name,
        context=SpanContext(span.trace_id, span.span_id, is_remote=False, trace_flags=flags),
        parent=parent,
        resource=Resource({"service.name": SERVICE, "service.instance.id": span.process}),
        attributes=dict(span.attributes),
        events=[Event(event.name, dict(event.attributes), event.at_ns) for event in span.events],
        kind=SpanKind.SERVER if span.kind is TraceSpanKind.SERVER else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, span.error) if span.error is not None else Status(),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope("twinpool", package_version()),
    )


@dataclass(frozen=True, slots=True)
class PendingTrace:
    """A request whose trace waits to be sent. Its record is made when it is."""

    record: Callable[[], RequestRecord]
    parent_id: str
    """The client's span, of its trace; empty where it named none."""


class TraceExporter:
    """The traces of one router's requests. `add` may be called from its event loop, and never waits."""

    def __init__(self, sender: SpanSender, config: TracingConfig, rng: Callable[[], random.Random]) -> None:
        """`rng`: makes the source of span ids, for the thread."""
        self._sender, self._most, self._rng = sender, config.queue, rng()
        self._waiting: deque[PendingTrace] = deque()
        self._change = threading.Condition()
        self._closed = self._away = self._told_drops = False
        self.exported = self.failed = self.dropped = 0
        """Requests whose traces the collector has taken, did not take, and that there was no room for."""
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def add(self, draft: RecordDraft) -> None:
        """Export the trace of a request that has ended, if it is one that is traced."""
        if not draft.sampled or draft.audits:  # An audit comes after the trace has gone.
            return
        self._put(PendingTrace(partial(make_record, draft), draft.parent_id), self._most)

    def add_refusal(self, refusal: Refusal) -> None:
        """Export the trace of a request that was refused, if it is one that is traced. A flood of them leaves room."""
        trace = refusal.request.trace
        if trace.sampled:
            self._put(PendingTrace(refusal.record, trace.parent_id), self._most // REFUSED_SHARE)

    def _put(self, pending: PendingTrace, most: int) -> None:
        with self._change:
            if not self._closed and len(self._waiting) < most:
                self._waiting.append(pending)
                self._change.notify()
                return
            self.dropped += 1
            told, self._told_drops = self._told_drops, True
        if not told:  # Once, until the collector takes traces again.
            log("traces dropped: as many as may wait do (tracing.queue)", level=logging.WARNING, queue=self._most)

    def close(self, within_s: float) -> None:
        """End, and send what waits for `within_s` seconds at most; what is left then is dropped. Idempotent."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join(within_s)

    def _run(self) -> None:
        try:
            while pending := self._next():
                self._send(pending)
        finally:
            self._sender.close()

    def _next(self) -> list[PendingTrace]:
        """Those to be sent next, once there are some; none at the end."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._closed)
            return [self._waiting.popleft() for _ in range(min(MAX_AT_ONCE, len(self._waiting)))]

    def _send(self, pending: Sequence[PendingTrace]) -> None:
        try:
            sources = [TraceSource(one.record(), one.parent_id, self._rng) for one in pending]
            taken = self._sender.send([span for source in sources for span in trace_spans(source)])
        except Exception:  # Our own bug, or the exporter's: requests go on without traces.
            log("traces failed", level=logging.ERROR, trace=True)
            taken = False
        if taken:
            self.exported += len(pending)
        else:
            self.failed += len(pending)
        if taken and (self._away or self._told_drops):
            log("traces exported again", failed=self.failed, dropped=self.dropped)
        elif not taken and not self._away:
            log("traces not taken by the collector", level=logging.WARNING)
        self._away = not taken
        self._told_drops = self._told_drops and not taken

    def families(self) -> Iterator[Metric]:
        """The metrics of traces."""
        traces = CounterMetricFamily(
            "twinpool_traces", "Traces of requests, by what became of them", labels=["outcome"]
        )
        for outcome, value in (("exported", self.exported), ("failed", self.failed), ("dropped", self.dropped)):
            traces.add_metric([outcome], value)
        yield traces
        yield GaugeMetricFamily(
            "twinpool_traces_waiting", "Traces that wait for the collector", value=len(self._waiting)
        )
