"""The arena agents of a cluster, as `serve` sees them: a child process on its own machine, an actor on other nodes."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from cluster.arena import arena_agent
from cluster.arena.arena_client import forget
from cluster.processes.process_ids import TIED, start_time
from cluster.processes.restart_policy import RestartHistory
from contracts.clock import Clock
from contracts.config.cluster_config import ClusterConfig, Config
from contracts.config.load_config import may_have_host_memory
from contracts.ids import Incarnation, WorkerName

log = logging.getLogger("twinpool.arena")


COMMAND = (*TIED, sys.executable, "-S", "-P", "-E", str(arena_agent.__file__))


STOP_S = 2.0


class ArenaAgents(Protocol):
    """One agent a node."""

    def poll(self) -> list[str]:
        """Start those that are missing; returns lines for the operator."""

    def forget(self, name: WorkerName, before: Incarnation | None = None) -> None:
        """This worker won't come back; with `before`, what is older than this incarnation of it is of no use."""

    def close(self) -> None:
        """End them, and with them what only they have. Idempotent."""


class NoArenaAgents:
    """Where host memory ends with its worker."""

    def poll(self) -> list[str]:
        return []

    def forget(self, name: WorkerName, before: Incarnation | None = None) -> None: ...

    def close(self) -> None: ...


class LocalArenaAgent:
    """The agent of this machine. Used from the main thread: the kernel ties the child's life to that thread."""

    def __init__(self, token: str, logs: Path, config: ClusterConfig, clock: Clock) -> None:
        self._token, self._log, self._clock = token, logs / "arena.log", clock
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts = RestartHistory(config)
        self._since = clock.now()
        self._restart_at: float | None = None

    def start(self) -> tuple[int, int]:
        """Start the process; returns its pid and start time."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd="/", start_new_session=True
            )
        assert self._process.stdin is not None
        # Not on the command line, which everybody can read. The open end is also what it lives by.
        self._process.stdin.write(f"{self._token}\n".encode())
        self._process.stdin.flush()
        self._since, self._restart_at = self._clock.now(), None
        return self._process.pid, start_time(self._process.pid) or 0

    def poll(self) -> list[str]:
        if self._restart_at is not None and self._clock.now() >= self._restart_at:
            self.start()
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return []
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._let_go()
        wait_s = self._restarts.died(self._clock.now(), self._since)
        if self._restarts.too_many:
            return [f"the arena agent died ({how}) too often: from now on host memory ends with its worker"]
        self._restart_at = self._clock.now() + wait_s
        if not wait_s:
            self.start()
        return [f"the arena agent died ({how}); restarted, and workers that live keep their memory"]

    def forget(self, name: WorkerName, before: Incarnation | None = None) -> None:
        try:
            forget(self._token, name, before)
        except OSError as error:
            log.warning("the arena agent could not be told", extra={"worker": name, "reason": str(error)})

    def close(self) -> None:
        process, self._restart_at = self._process, None
        if process is None:
            return
        self._let_go()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)

    def _let_go(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()


def wanted(config: Config) -> bool:
    """Whether any worker has host memory that is to outlive it."""
    return config.cache.arena == "auto" and may_have_host_memory(config)
