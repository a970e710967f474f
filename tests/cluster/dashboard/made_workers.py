"""Workers as the controller would have them, for tests of what is shown of them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView


def worker(name: str, state: str = "ready", incarnation: int = 1, **changes: Any) -> WorkerView:
    role = Role(name.partition("-")[0])
    record = WorkerRecord(WorkerName(name), role, Incarnation(incarnation), 1, "node", "", "", WorkerLimits(0, 0))
    status = WorkerStatus(WorkerName(name), role, state, 1, "node", Incarnation(incarnation), 0, 0, 100, 100)
    return WorkerView(record, replace(status, **changes))
