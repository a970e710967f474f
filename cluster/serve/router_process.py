"""The router as a child process of `serve`, which starts it, watches it and restarts it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from cluster.processes.process_ids import TIED, start_time
from cluster.serve.preflight import ServePlan
from contracts.clock import Clock
from contracts.errors import TwinpoolError

KILL_S = 5.0
COMMAND = (sys.executable, "-m", "router.main")


class RouterFailed(TwinpoolError):
    """Raised when the router ends before it listens."""


class RouterProcess:
    """The router's process, across its restarts. Use it from the main thread only: the kernel kills the child when the
    thread that started it ends."""

    def __init__(
        self,
        prepared: ServePlan,
        controller: str,
        logs: Path,
        environment: Mapping[str, str],
        clock: Clock,
        command: tuple[str, ...] = COMMAND,
        kv_index: Path | None = None,
    ) -> None:
        """`kv_index`: where the KV index's table is; None: there is none."""
        self._prepared = prepared
        self._controller = controller
        self._log = logs / "router.log"
        self._config = logs / ".router-config.json"
        self._environment = dict(environment)
        self._clock = clock
        self._command = command
        self._kv_index = kv_index
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_fd: int | None = None

    def start(self) -> tuple[int, int]:
        """Start the process; returns its pid and start time (`process_ids.start_time`)."""
        self._config.write_text(json.dumps(self._prepared.config.to_dict()))
        self._close_ready()
        self._ready_fd, writing = os.pipe()
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [*TIED, *self._command, *self._arguments(writing)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    pass_fds=[writing],
                    start_new_session=True,
                )
        finally:
            os.close(writing)
        return self._process.pid, start_time(self._process.pid) or 0

    def _arguments(self, ready_fd: int) -> list[str]:
        options = self._prepared.options
        return [
            *("--model", str(self._prepared.spec.folder), "--controller", self._controller),
            *("--host", options.host, "--port", str(self._prepared.port)),
            *("--config-json", str(self._config), "--ready-fd", str(ready_fd)),
            *(("--kv-index", str(self._kv_index)) if self._kv_index is not None else ()),
        ]

    def listening(self, timeout_s: float) -> bool:
        """Whether the router has said that it listens; waits up to `timeout_s`. Raises `RouterFailed` when it ended."""
        if self._ready_fd is None:
            return True
        poller = select.poll()
        poller.register(self._ready_fd, select.POLLIN)
        if not poller.poll(1000 * timeout_s):
            return False
        said = os.read(self._ready_fd, 64)
        self._close_ready()
        if not said:
            raise RouterFailed("the router ended before it listened")
        return True

    def ended(self) -> str | None:
        """How the process ended, or None while it runs."""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return None
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Kill a process that hangs; `ended` then says by which signal."""
        if self._process is not None:
            _kill(self._process)

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, wait up to `timeout_s`, then kill the process. Idempotent."""
        process, self._process = self._process, None
        self._close_ready()
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)

    def _close_ready(self) -> None:
        if self._ready_fd is not None:
            os.close(self._ready_fd)
            self._ready_fd = None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and wait for its end, up to `KILL_S`. A process that the kernel holds for longer, on a dead disk
    say, can do nothing any more."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_S)
