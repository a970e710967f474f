"""What a detached cluster is to the process that supervises it: kept in a file, so that the next such process goes on.

The file is its owner's alone: it has the cluster's secret and token, and is read by unpickling it.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path

from cluster.processes.process_ids import same_process
from cluster.serve.preflight import ServePlan

STATE_FILE = "cluster.state"
READY_FILE = "ready"
"""Made once the cluster serves: until then a supervisor that ends ends the cluster."""


@dataclass
class DetachedState:
    """One detached cluster. Fields after `prepared` are filled in as it starts."""

    folder: Path
    """The folder of its sockets, ledger and Ray's files, which goes with it."""
    logs: Path
    prepared: ServePlan
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """Secrets that the command's environment had, by variable."""
    secret: str = field(default="", repr=False)
    """The cluster's secret, in hex; empty where there is none."""
    arena: str = field(default="", repr=False)
    """The token of the arena agents, in hex; empty where there are none."""
    controller_port: int = 0
    ray: str = ""
    """Where a Ray of our own is reached, ``host:port``; empty while there is none."""
    services: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Pid and start time (`process_ids.start_time`) of the latest process of each service."""

    @classmethod
    def load(cls, folder: Path) -> DetachedState:
        """Read a cluster's state. Raises `OSError`."""
        state = pickle.loads((folder / STATE_FILE).read_bytes())
        assert isinstance(state, cls)
        return state

    def save(self) -> None:
        """Write the state, atomically: this process may be killed while it writes."""
        fresh = self.folder / f"{STATE_FILE}.new"
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            pickle.dump(self, file)
        fresh.replace(self.folder / STATE_FILE)

    @property
    def begun(self) -> bool:
        """Whether the cluster has served: this process takes over what runs of it."""
        return (self.folder / READY_FILE).exists()

    def mark_ready(self) -> None:
        (self.folder / READY_FILE).touch()

    def running(self, service: str) -> tuple[int, int] | None:
        """Pid and start time of a service's process, None where none runs."""
        mark = self.services.get(service)
        return mark if mark is not None and same_process(*mark) else None

    def started(self, service: str, pid: int, started: int) -> None:
        """Note the process of a service that was started."""
        self.services[service] = (pid, started)
        self.save()
