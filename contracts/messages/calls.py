"""The calls between the processes of a cluster: what each asks with, and what it is answered with.

Calls go over gRPC (`contracts.wire.grpc_calls`), which carries the messages as bytes of their own definitions. The
path names the version of the calls, so that a process of an older or a newer version is refused as such, instead of
being misread. Fields and kinds that are new change no version; a call that older builds must understand is new.

Version 1 was protobuf, 2 is msgpack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from twinpool.contracts.message_types import Message
from twinpool.contracts.messages.cluster_view import ClusterView, WatchRequest
from twinpool.contracts.messages.leases import Departure, DepartureAnswer, LeaseGrant, QuotaClaims, QuotaSlices, Renewal
from twinpool.contracts.messages.pool_changes import ChangedWorkers, OperatorChange, SettingsAnswer, SettingsChange
from twinpool.contracts.messages.request_record import FoundRecords, RecordQuery, RecordReport
from twinpool.contracts.messages.router_report import (
    AutoscalerView,
    DashboardFrame,
    LatencyReport,
    RouterReport,
    RouterReportAnswer,
    RouterReportList,
)
from twinpool.contracts.messages.worker_status import CheckReport, WorkerRecord, WorkerStatus

CALLS_VERSION = 2
PREFIX = "/twinpool."
"""How the paths of all calls of all versions begin."""

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


class Empty(Message, frozen=True):
    """A request, or an answer, that says nothing more."""


@dataclass(frozen=True)
class Method(Generic[RequestT, AnswerT]):
    """One method of a service, by its path; `request` and `answer` are types of messages, or unions of them."""

    service: str
    name: str
    request: Any
    answer: Any

    @property
    def path(self) -> str:
        return f"{PREFIX}v{CALLS_VERSION}.{self.service}/{self.name}"


class Call(Method[RequestT, AnswerT]):
    """One request, one answer."""


class Subscription(Method[RequestT, AnswerT]):
    """One request, and answers until one side ends it."""


class Exchange(Method[RequestT, AnswerT]):
    """Requests one way and answers the other, each in its own time, until one side ends it."""


# ---------------------------------------------------------------- a worker's

WORKER_STATUS = Call[Empty, WorkerStatus]("Worker", "Status", Empty, WorkerStatus)
CHECK_WORKER = Call[Empty, CheckReport]("Worker", "Check", Empty, CheckReport)
DRAIN_WORKER = Call[Empty, WorkerStatus]("Worker", "Drain", Empty, WorkerStatus)
"""Stop admission; the worker leaves when nothing runs and nothing is outgoing."""
UNDRAIN_WORKER = Call[Empty, WorkerStatus]("Worker", "Undrain", Empty, WorkerStatus)

# ---------------------------------------------------------------- the controller's, for workers

REGISTER = Call[WorkerRecord, LeaseGrant]("Controller", "Register", WorkerRecord, LeaseGrant)
RENEW = Call[Renewal, LeaseGrant]("Controller", "Renew", Renewal, LeaseGrant)
LEAVE = Call[Departure, DepartureAnswer]("Controller", "Leave", Departure, DepartureAnswer)

# ---------------------------------------------------------------- the controller's, for operators

CHANGE_POOLS = Call[OperatorChange, ChangedWorkers]("Controller", "ChangePools", OperatorChange, ChangedWorkers)
"""Make an operator's change; answers the workers that it concerns."""
CHANGE_SETTINGS = Call[SettingsChange, SettingsAnswer]("Controller", "ChangeSettings", SettingsChange, SettingsAnswer)
"""Change the cluster's settings, or say what that would do; the supervisor has them and answers."""
SHUT_DOWN = Call[Empty, Empty]("Controller", "ShutDown", Empty, Empty)
"""Start no worker any more: the cluster ends."""

# ---------------------------------------------------------------- the controller's, for routers

WATCH = Subscription[WatchRequest, ClusterView]("Controller", "Watch", WatchRequest, ClusterView)
LEASE_QUOTA = Call[QuotaClaims, QuotaSlices]("Controller", "LeaseQuota", QuotaClaims, QuotaSlices)
"""Lease a router slices of tenants' limits, in place of those that it has."""
REPORT_LATENCY = Call[LatencyReport, AutoscalerView]("Controller", "ReportLatency", LatencyReport, AutoscalerView)
"""Tell the autoscaler what a router has counted; answers what the autoscaler does."""
REPORT_RECORDS = Call[RecordReport, Empty]("Controller", "ReportRecords", RecordReport, Empty)
FIND_RECORDS = Call[RecordQuery, FoundRecords]("Controller", "FindRecords", RecordQuery, FoundRecords)
"""Look for a request by its id, at all routers where need be; or give the latest records."""
REPORT_ROUTER = Call[RouterReport, RouterReportAnswer]("Controller", "ReportRouter", RouterReport, RouterReportAnswer)
"""Tell the dashboard what a router has counted; answers when it is to tell again."""
LIST_ROUTERS = Call[Empty, RouterReportList]("Controller", "Routers", Empty, RouterReportList)
WATCH_DASHBOARD = Subscription[Empty, DashboardFrame]("Controller", "WatchDashboard", Empty, DashboardFrame)
"""What the dashboard shows now, about once a second: the same frame for all who watch."""
DASHBOARD_PAST = Call[Empty, DashboardFrame]("Controller", "DashboardPast", Empty, DashboardFrame)
"""What the dashboard shows of the last minutes."""
