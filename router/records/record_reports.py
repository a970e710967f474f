"""What the controller is told of requests: a bounded part of their records, and answers to what it looks for.

One report is under way at a time, a second after the last, with `most` records: first those in which something went
otherwise than usual, then the slowest, then the newest. What isn't reported stays in this router's ring, and the
controller asks for it by its id where somebody looks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Protocol, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.clock import Clock
from twinpool.contracts.messages.request_record import FoundRecords, RequestRecord
from twinpool.router.records.kept_records import KeptRecords
from twinpool.router.records.make_record import RecordDraft, make_record
from twinpool.router.state.report_calls import ReportCalls

R = TypeVar("R", RecordDraft, RequestRecord)

REPORT_S = 1.0
"""Seconds between two reports."""
WAITING_REPORTS = 10
"""Reports' worth of records that may wait; the oldest of the usual ones go first."""
REPORT_BYTES = 512 * 1024
"""About so many bytes a report has at most."""
MAX_ANSWERS = 32
"""Questions that are being answered at once; more are left to the controller's deadline."""
SLOWEST = 4
"""One of so many records of a report is of the slowest requests, where none of them is notable."""


class RecordListener(Protocol):
    """The controller, as it hears of requests and is asked for them. Its calls raise `ConnectionError` where it doesn't
    answer."""

    async def report_records(
        self, router: str, records: Sequence[RequestRecord], answers: Sequence[tuple[int, Sequence[RequestRecord]]]
    ) -> None: ...

    async def find_records(self, request_id: str, recent: int = 0) -> FoundRecords:
        """The records of a request; with an empty id the latest `recent` ones."""

    def on_record_ask(self, answer: Callable[[int, str], None]) -> None:
        """Have `answer` called with the number and the id of each request that the controller looks for."""


class RecordReports:
    """The reports of one router; on its event loop."""

    def __init__(self, kept: KeptRecords, listener: RecordListener, clock: Clock, most: int) -> None:
        """`most`: records of one report; 0: only questions are answered."""
        self._kept, self._listener, self._clock, self._most = kept, listener, clock, most
        self._waiting: dict[str, RecordDraft] = {}
        """By their requests' ids, the oldest first."""
        self._calls = ReportCalls("records not reported")
        self._answers: set[asyncio.Task[None]] = set()
        self._next = clock.now()
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

    def tick(self) -> None:
        """Report if it is time; to be called every 100 ms or so."""
        now = self._clock.now()
        if self._waiting and not self._calls.busy and now >= self._next:
            self._next = now + REPORT_S
            self._calls.begin(partial(self._report, self._take()))

    def close(self) -> None:
        self._calls.close()
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
