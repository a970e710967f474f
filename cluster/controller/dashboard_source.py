"""The controller's table and autoscaler as the dashboard's state."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from twinpool.cluster.controller.autoscaler import Autoscaler
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.record_board import RecordBoard
from twinpool.cluster.controller.wanted_worker import WantedWorker
from twinpool.cluster.dashboard.cluster_frames import ClusterFrames, ClusterState, EventKind
from twinpool.cluster.dashboard.dashboard_feed import DashboardFeed
from twinpool.cluster.dashboard.frame_rows import SHOWN, WorkerSample
from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import Clock
from twinpool.contracts.messages.cluster_view import ControlPlane

SCALING = "autoscaler: "
"""How the autoscaler's lines for the operator begin."""


def dashboard_of(
    core: Controller,
    autoscaler: Autoscaler | None,
    plane: Callable[[], ControlPlane],
    records: RecordBoard,
    clock: Clock,
    wall: Callable[[], float] = time.time,
) -> DashboardFeed:
    """The feed of a controller; what the operator is told from now on is in its log, too. `plane` returns who leads the
    controllers; `records` has what routers tell of requests."""

    def state() -> ClusterState:
        rows = core.table.rows.values()
        return ClusterState(
            [WorkerSample(row.view(core.cordoned(row.node)), row.counters_said) for row in rows],
            autoscaler.view() if autoscaler is not None else None,
            plane(),
            supervised=core.can_start or core.shutting_down,
            shutting_down=core.shutting_down,
            deaths=core.deaths,
            requests=records.recent(SHOWN),
            targets=autoscaler.targets if autoscaler is not None else (),
        )

    def noted(text: str) -> None:
        kind = EventKind.SCALE if text.startswith(SCALING) else EventKind.WORKER
        frames.log.add(wall(), kind, text.removeprefix(SCALING))

    def changed(row: WantedWorker) -> None:
        frames.changed(row.name, row.incarnation, row.state, row.role, wall())

    frames = ClusterFrames(core.table.config.name, secrets.token_hex(8), build_id(), clock.now())
    frames.log.add(wall(), EventKind.CONTROL, "a controller has begun to lead; what was before is with the one before")
    core.table.on_note(noted)
    core.table.on_row(changed)
    return DashboardFeed(frames, state, clock, wall)
