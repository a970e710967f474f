"""What becomes of the records of one router's requests: kept, told to the controller, exported as traces."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.json_logs import log
from twinpool.contracts.messages.request_record import RecordRing, RequestRecord
from twinpool.router.links.controller_port import RecordListener, ReportCalls
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.request_headers import TraceContext
from twinpool.router.openai.response_stream import ResponseStream
from twinpool.router.records.kept_records import KeptRecords, RefusedRequest
from twinpool.router.records.make_record import RecordDraft, make_record
from twinpool.router.tracing.otlp_exporter import OtlpSender, SpanSender, TraceExporter, TraceSampling

R = TypeVar("R", RecordDraft, RequestRecord)

CLOSE_S = 1.0
"""Seconds that traces which wait may take to leave when the router ends."""
WAITING_REPORTS = 10
"""Reports' worth of records that may wait; the oldest of the usual ones go first."""
REPORT_BYTES = 512 * 1024
"""About so many bytes a report has at most."""
MAX_ANSWERS = 32
"""Questions that are being answered at once; more are left to the controller's deadline."""
SLOWEST = 4
"""One of so many records of a report is of the slowest requests, where none of them is notable."""


class RecordReports:
    """What the controller is told of requests: a bounded part of their records, and answers to what it looks for.

    A report has `most` records: first those in which something went otherwise than usual, then the slowest, then the
    newest. What isn't reported stays in this router's ring, and the controller asks for it by its id where somebody
    looks for it.
    """

    def __init__(self, kept: KeptRecords, listener: RecordListener, clock: Clock, most: int) -> None:
        """`most`: records of one report; 0: only questions are answered."""
        self._kept, self._listener, self._most = kept, listener, most
        self._waiting: dict[str, RecordDraft] = {}
        """By their requests' ids, the oldest first."""
        self.calls = ReportCalls(clock, "records not reported", self._begin)
        self._answers: set[asyncio.Task[None]] = set()
        self.reported = self.left_out = self.unanswered = 0
        if most:
            kept.listeners.append(self._add)
        listener.on_record_ask(self._asked)

    def _add(self, draft: RecordDraft) -> None:
        self._waiting.pop(draft.request_id, None)
        self._waiting[draft.request_id] = draft
        if len(self._waiting) > self._most * WAITING_REPORTS:
            first = next(iter(self._waiting))
            del self._waiting[next((key for key, one in self._waiting.items() if not one.notable), first)]
            self.left_out += 1

    def _begin(self) -> Coroutine[Any, Any, None] | None:
        return self._report(self._take()) if self._waiting else None

    def close(self) -> None:
        self.calls.close()
        for task in self._answers:
            task.cancel()

    def _take(self) -> list[RecordDraft]:
        """Take what the next report says. What is usual and not taken is left out; what is notable waits."""
        notable = [record for record in self._waiting.values() if record.notable]
        usual = [record for record in self._waiting.values() if not record.notable]
        taken = notable[: self._most]
        room = self._most - len(taken)
        slow = sorted(usual, key=lambda one: -one.first_s)[: -(-room // SLOWEST)]
        newest = [record for record in reversed(usual) if not any(record is one for one in slow)][: room - len(slow)]
        self._waiting = {record.request_id: record for record in notable[self._most :]}
        fitting = _fitting(taken + slow + newest)
        self.left_out += len(taken) + len(usual) - len(fitting)
        return fitting

    async def _report(self, records: list[RecordDraft]) -> None:
        try:
            await self._listener.report_records(self._kept.router, list(map(make_record, records)), ())
        except ConnectionError:
            self.left_out += len(records)
            raise
        self.reported += len(records)

    # ------------------------------------------------------------ what the controller asks

    def _asked(self, number: int, request_id: str) -> None:
        if len(self._answers) >= MAX_ANSWERS:
            self.unanswered += 1
            return
        task = asyncio.get_running_loop().create_task(self._answer(number, request_id))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, number: int, request_id: str) -> None:
        found = _fitting(self._kept.find(request_id))
        try:
            await self._listener.report_records(self._kept.router, (), ((number, found),))
        except ConnectionError:
            self.unanswered += 1  # Who asks is told that a router did not answer.

    def families(self) -> Iterator[Metric]:
        """The metrics of records."""
        records = CounterMetricFamily(
            "twinpool_request_records", "Records of requests, by what became of them", labels=["outcome"]
        )
        for outcome, value in (("reported", self.reported), ("left_out", self.left_out)):
            records.add_metric([outcome], value)
        yield records
        text = "Questions of the controller about a request that this router did not answer"
        yield CounterMetricFamily("twinpool_record_asks_unanswered", text, value=self.unanswered)
        yield GaugeMetricFamily("twinpool_records_kept", "Records that this router keeps", value=len(self._kept.ring))


def _fitting(records: Sequence[R]) -> list[R]:
    """The first of the records, as many as have `REPORT_BYTES` together."""
    sizes = accumulate(record.nbytes for record in records)
    return [record for record, size in zip(records, sizes, strict=True) if size <= REPORT_BYTES]


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
            self._reports.calls.tick()

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
