"""Traces on their way to a collector: a bounded queue and a thread, which alone waits for it.

A collector that hangs, refuses or is away costs nobody anything: what the queue can't hold is dropped, a call ends
after `tracing.timeout_s`, and both are counted. OpenTelemetry's exporter writes the bytes and makes the calls.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.build_id import package_version
from twinpool.contracts.config.tracing_config import TracingConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.messages.request_record import RequestRecord
from twinpool.router.records.make_record import make_record
from twinpool.router.records.record_draft import RecordDraft
from twinpool.router.records.refusals import Refusal
from twinpool.router.state.router_log import log
from twinpool.router.tracing.trace_spans import TraceSource, TraceSpan, TraceSpanKind, trace_spans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

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
