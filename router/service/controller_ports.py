"""What a router has of the controller besides its workers: one port for each thing, each of which it can do without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twinpool.contracts.messages.cluster_view import ControlPlane
from twinpool.contracts.messages.router_report import UNNAMED, RouterIdentity
from twinpool.router.records.record_reports import RecordListener
from twinpool.router.service.dashboard_source import DashboardSource
from twinpool.router.service.latency_reports import LatencyListener
from twinpool.router.service.quota_leases import QuotaLessor


@dataclass(frozen=True, slots=True)
class ControllerPorts:
    """What is there of them."""

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
