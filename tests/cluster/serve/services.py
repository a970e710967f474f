"""Services as `serve` makes them, whose processes end with a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from twinpool.cluster.serve.child_service import ChildService
from twinpool.cluster.serve.detached_state import DetachedState, ServiceProcess
from twinpool.cluster.serve.kept_service import KeptService
from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig


@dataclass
class Services:
    """Those of one supervisor. Implements `cluster.serve.kept_service.MakeService`."""

    folder: Path
    state: DetachedState
    clock: ManualClock = field(default_factory=ManualClock)
    said: list[str] = field(default_factory=list)

    def __call__(
        self,
        name: str,
        command: Sequence[str],
        arguments: list[str],
        environment: Mapping[str, str],
        stack: ExitStack,
        meanwhile: str = "",
    ) -> KeptService:
        service = ChildService(name, command, arguments, self.folder, environment, tied=True)
        stack.callback(service.stop, 0.0)

        def started(pid: int, began: int) -> None:
            self.state.started(name, ServiceProcess(pid, began, build_id()))

        return KeptService(service, ClusterConfig(), self.clock, self.said.append, started, lambda name: "", meanwhile)
