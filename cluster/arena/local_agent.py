"""The arena agents of a cluster as `serve` starts them: here the child process on its own machine (actors on the nodes
of a Ray cluster are in `cluster.ray_nodes.ray_arena_agents`)."""

from __future__ import annotations

import contextlib
import logging
import subprocess
from pathlib import Path
from typing import Protocol

from twinpool.cluster.arena import arena_agent
from twinpool.cluster.arena.arena_client import forget
from twinpool.cluster.processes.process_ids import TIED, start_time
from twinpool.cluster.processes.restart_policy import RestartHistory
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import ClusterConfig, Config
from twinpool.contracts.config.load_config import may_have_host_memory
from twinpool.contracts.config.plane_choice import on_gpus
from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.python_command import script_command

log = logging.getLogger("twinpool.arena")


COMMAND = (*TIED, *script_command(str(arena_agent.__file__)))


STOP_S = 2.0


class ArenaAgents(Protocol):
    """The arena agents of all nodes, one a node."""

    def poll(self) -> list[str]:
        """Start agents that are missing; returns lines for the operator. To be called again and again."""

    def forget(self, name: WorkerName, before: Incarnation | None = None) -> None:
        """Have all agents drop the segments of a worker, all or only those of incarnations below `before`."""

    def close(self) -> None:
        """End the agents; segments that no live worker has mapped are lost. Idempotent."""


class NoArenaAgents:
    """The `ArenaAgents` of a cluster without agents, where host memory ends with its worker."""

    def poll(self) -> list[str]:
        return []

    def forget(self, name: WorkerName, before: Incarnation | None = None) -> None: ...

    def close(self) -> None: ...


class LocalArenaAgent:
    """The agent of this machine, as a child process. Use it from the main thread only: the kernel kills the child when
    the thread that started it ends."""

    def __init__(self, token: str, logs: Path, config: ClusterConfig, clock: Clock) -> None:
        self._token, self._log, self._clock = token, logs / "arena.log", clock
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts = RestartHistory(config)
        self._since = clock.now()
        self._restart_at: float | None = None

    def start(self) -> tuple[int, int]:
        """Start the process; returns its pid and start time (`process_ids.start_time`)."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd="/", start_new_session=True
            )
        assert self._process.stdin is not None
        # Not on the command line, which every user can read. The agent ends when this pipe closes.
        self._process.stdin.write(f"{self._token}\n".encode())
        self._process.stdin.flush()
        self._since, self._restart_at = self._clock.now(), None
        return self._process.pid, start_time(self._process.pid) or 0

    @property
    def pid(self) -> int | None:
        """The process of the agent that runs; None where none does."""
        return self._process.pid if self._process is not None else None

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
    """Whether nodes need agents: for host memory that is to outlive its worker, or for weights that workers share."""
    return lends_host_memory(config) or (config.engine.share_weights != "off" and not on_gpus(config))


def lends_host_memory(config: Config) -> bool:
    """Whether the configuration lets any worker have host memory that is to outlive it."""
    return config.cache.arena == "auto" and may_have_host_memory(config)
