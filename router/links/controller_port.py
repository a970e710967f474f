"""What a router has of the controller besides its workers: ports, each of which it can do without, and its reports.

Of each kind of report (`ReportCalls`) one call is under way at a time; the next is due a second after the last began,
or when its owner sets `ReportCalls.next` (the dashboard, by the pause that the controller returns). Those that count
tell what was counted since the router's start, so that one whose answer was lost costs nothing; records that were in a
lost one are counted as left out. While the controller is away the log says so once.

The interfaces by which a router finds and reaches workers are here as well. A `WorkerClient` reaches a worker over gRPC
between processes, directly in one process; a directory says which workers there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from twinpool.contracts.clock import Clock
from twinpool.contracts.json_logs import log
from twinpool.contracts.messages.cluster_view import ControlPlane, ServedWeights
from twinpool.contracts.messages.leases import QuotaClaim, QuotaSlice
from twinpool.contracts.messages.pool_changes import ChangedWorkers, OperatorChange, SettingsAnswer, SettingsChange
from twinpool.contracts.messages.request_record import FoundRecords, RequestRecord
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.router_report import (
    UNNAMED,
    AutoscalerView,
    LatencyCounts,
    RouterIdentity,
    RouterReport,
)
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import CheckReport, WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.sampling_params import AdapterRef

REPORT_S = 1.0
"""Seconds between two reports."""


class QuotaLessor(Protocol):
    """The controller, as it leases quotas."""

    async def lease_quota(self, router: str, claims: Sequence[QuotaClaim]) -> Sequence[QuotaSlice]:
        """Return a slice for each claim, in order. Raises `ConnectionError` where the controller doesn't answer."""


class LatencyListener(Protocol):
    """The controller, as it hears for its autoscaler what requests meet."""

    async def report_latency(self, router: str, counts: LatencyCounts) -> AutoscalerView:
        """Raises `ConnectionError` where the controller doesn't answer."""


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


class DashboardSource(Protocol):
    """The dashboard of the whole cluster, of the controller or of this process. All four raise `ConnectionError` where
    the controller doesn't answer."""

    def frames(self) -> AsyncIterator[bytes]:
        """Frames as JSON, about one a second, from now on; the latest alone where they aren't awaited in time."""

    async def past(self) -> bytes:
        """The last minutes as JSON."""

    async def routers(self) -> list[RouterReport]:
        """The routers that are there, without their counts."""

    async def report(self, report: RouterReport) -> float:
        """Tell what a router has counted; returns the seconds until it is to tell again."""


@dataclass(frozen=True, slots=True)
class ControllerPorts:
    """The ports that one router has."""

    lessor: QuotaLessor | None = None
    """Leases tenants' limits; None: they are this router's alone."""
    reporter: LatencyListener | None = None
    """Is told what requests meet, for the autoscaler."""
    recorder: RecordListener | None = None
    """Is told of requests, and asks for them."""
    dashboard: DashboardSource | None = None
    """Has the dashboard's numbers."""
    control_plane: Callable[[], ControlPlane | None] = lambda: None
    """Returns what is known of the controllers; None where there is one that nobody replaces."""
    reachable: Callable[[], bool] | None = None
    """Returns whether a controller answers."""
    identity: RouterIdentity = UNNAMED
    """Who this router is, as the controller is told."""


NO_CONTROLLER = ControllerPorts()


class ReportCalls:
    """The calls of one kind of report, on an event loop."""

    def __init__(self, clock: Clock, away: str, begin: Callable[[], Coroutine[Any, Any, None] | None]) -> None:
        """`away`: what the log says when a report isn't taken. `begin` makes a report's call, which raises
        `ConnectionError` where the controller doesn't answer; None: there is nothing to report."""
        self._clock, self._words, self._begin, self._away = clock, away, begin, False
        self._call: asyncio.Task[None] | None = None
        self.next = clock.now()
        """When the next report is due, in seconds of the clock."""

    @property
    def busy(self) -> bool:
        return self._call is not None

    def tick(self) -> None:
        """Report if it is time; to be called every 100 ms or so."""
        now, due = self._clock.now(), self.next
        if self.busy or now < due:
            return
        self.next = now + REPORT_S
        report = self._begin()
        if report is None:
            self.next = due
            return
        self._call = asyncio.get_running_loop().create_task(report)
        self._call.add_done_callback(self._done)

    def close(self) -> None:
        """Give up the call that is under way."""
        if self._call is not None:
            self._call.cancel()

    def _done(self, call: asyncio.Task[None]) -> None:
        self._call = None
        if call.cancelled():
            return
        error = call.exception()
        if error is not None and not isinstance(error, ConnectionError):
            raise error  # The event loop logs it.
        if error is not None and not self._away:
            log(self._words, reason=str(error))
        self._away = error is not None


class WorkerSession(Protocol):
    """A router's open stream to one worker."""

    def send(self, commands: Sequence[Command]) -> None:
        """Queue commands, in order; never blocks. Does nothing once the session is closed."""

    def close(self) -> None: ...


class WorkerClient(Protocol):
    """A router's access to one incarnation of one worker. Used from one event loop; callbacks run on it."""

    async def connect(
        self, on_events: Callable[[Sequence[Event]], None], on_closed: Callable[[StreamEnd], None]
    ) -> WorkerSession:
        """Open the stream. `on_closed` is called once, when the stream ends other than by `close`.

        Raises `ConnectionError` when the worker can't be reached or is another incarnation.
        """

    async def status(self) -> WorkerStatus: ...

    async def check(self) -> CheckReport: ...

    async def drain(self) -> WorkerStatus: ...

    async def undrain(self) -> WorkerStatus: ...

    async def aclose(self) -> None: ...


class WorkerDirectory(Protocol):
    """The controller's table of workers as a router watches it, and the router's calls of the controller."""

    @property
    def adapters(self) -> tuple[AdapterRef, ...]:
        """The adapters that are served, as they were told last."""

    @property
    def serving(self) -> ServedWeights:
        """The weights that the cluster serves, and whether it does, as it was told last."""

    def watch(self, on_change: Callable[[tuple[WorkerView, ...]], None]) -> Callable[[], None]:
        """Call `on_change` with the whole table now and at each change, on the event loop; returns the unsubscriber."""

    def port(self, record: WorkerRecord) -> WorkerClient: ...

    async def change_pools(self, change: OperatorChange) -> ChangedWorkers:
        """Have the controller make an operator's change of workers, pools or nodes; returns the workers that are
        started or told to leave.

        Raises `RequestError`, with the reason, where the controller refuses, and `ConnectionError` where it doesn't
        answer.
        """

    async def change_settings(self, change: SettingsChange) -> SettingsAnswer:
        """Have the supervisor change the cluster's settings, or say what that would do. Raises as `change_pools`
        does."""
