"""What services have in common, as `serve` gives it to them; their processes end with a test."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from twinpool.cluster.serve.detached_state import DetachedState
from twinpool.cluster.serve.service import ServiceContext
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import ClusterConfig


def service_context(
    folder: Path,
    clock: Clock,
    report: Callable[[str], None],
    stack: ExitStack,
    state: DetachedState | None = None,
    owns: Callable[[int, int], None] = lambda pid, started: None,
    config: ClusterConfig | None = None,
) -> ServiceContext:
    """Services with their logs in `folder`, of the detached cluster of `state`, or tied to this process."""
    return ServiceContext(folder, config or ClusterConfig(), clock, report, lambda name: "", owns, state, stack)
