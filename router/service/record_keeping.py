"""What becomes of the records of one router's requests: kept, told to the controller, exported as traces."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric

from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.messages.request_record import RecordRing
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.request_headers import TraceContext
from twinpool.router.openai.response_stream import ResponseStream
from twinpool.router.records.kept_records import KeptRecords, RefusedRequest
from twinpool.router.records.record_reports import RecordListener, RecordReports
from twinpool.router.state.router_log import log
from twinpool.router.tracing.otlp_exporter import OtlpSender, SpanSender, TraceExporter, TraceSampling

CLOSE_S = 1.0
"""Seconds that traces which wait may take to leave when the router ends."""


class RecordKeeping:
    """The records of one router; on its event loop."""

    def __init__(
        self,
        router: str,
        model: str,
        config: Config,
        clock: Clock,
        wall: Callable[[], float],
        in_flight: Callable[[], Iterable[tuple[ResponseStream, ChoiceOutput]]],
        recorder: RecordListener | None,
        sender: SpanSender | None = None,
    ) -> None:
        """`recorder`: the controller; None: there is none. `sender`: sends traces in place of OpenTelemetry's exporter.
        The others are as of `KeptRecords`. Raises `ConfigError` where traces are wanted and its packages lack."""
        options = config.router
        self.kept = KeptRecords(
            router,
            model,
            RecordRing(options.kept_records, options.kept_record_bytes),
            clock,
            wall,
            in_flight,
            options.kept_refusals,
        )
        self.recorder = recorder
        self._reports: RecordReports | None = None
        if recorder is not None:
            self._reports = RecordReports(self.kept, recorder, clock, options.reported_records)
        self._traces: TraceExporter | None = None
        self._sampling = TraceSampling(config.tracing.ratio, random.Random())
        if config.tracing.endpoint:
            sender = sender if sender is not None else OtlpSender(config.tracing)
            self._traces = TraceExporter(sender, config.tracing, random.Random)
            self.kept.listeners.append(self._traces.add)
            self.kept.refusal_listeners.append(self._traces.add_refusal)

    def traced(self, context: TraceContext) -> TraceContext:
        """The trace of a request that comes with this context."""
        return self._sampling.decided(context) if self._traces is not None else context

    def ended(self, stream: ResponseStream, choice: ChoiceOutput) -> None:
        """Take in a choice that is over."""
        try:
            self.kept.ended(stream, choice)
        except Exception:  # Our own bug; the request has ended well, and others go on.
            log("no record", level=logging.ERROR, trace=True, request_id=choice.request.id)

    def refused(self, request: RefusedRequest, failure: ApiError, numbers: Mapping[str, float]) -> None:
        """Take in a request that was refused before it was placed; see `KeptRecords.refused`."""
        try:
            self.kept.refused(request, failure, numbers)
        except Exception:  # Our own bug; the client is told what it must be told.
            log("no record", level=logging.ERROR, trace=True, client_id=request.client_id)

    def tick(self) -> None:
        """Report if it is time; to be called every 100 ms or so."""
        if self._reports is not None:
            self._reports.tick()

    async def close(self) -> None:
        if self._reports is not None:
            self._reports.close()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close, CLOSE_S)

    def families(self) -> Iterator[Metric]:
        """The metrics of records and of traces."""
        for part in (self._reports, self._traces):
            if part is not None:
                yield from part.families()
