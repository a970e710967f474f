"""The router and the controller as processes that `serve` starts, watches and restarts.

They are its children and end with it. Those of a detached cluster outlive it: the next such process adopts them.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from twinpool.cluster.processes.process_ids import TIED, kill_process, same_process, start_time, terminate_process
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.python_command import module_command

STOP_S = 1.5
"""Seconds that a service has to end in order."""
KILL_S = 5.0
ROUTER = tuple(module_command("twinpool.router.main"))
CONTROLLER = tuple(module_command("twinpool.cluster.controller.controller_process"))


class ServiceFailed(TwinpoolError):
    """Raised when a service ends before it listens."""


class ChildService:
    """One service's process, across its restarts. Use it from the main thread only: the kernel kills a tied child when
    the thread that started it ends."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        arguments: Sequence[str],
        logs: Path,
        environment: Mapping[str, str],
        *,
        tied: bool = True,
    ) -> None:
        """`command` takes `arguments`, and ``--ready-fd N``: a descriptor that it writes to once it listens. `name`: of
        the service, to people and in its log's file name. `tied`: whether its process ends with this one."""
        self.name = name
        self._command = (*(TIED if tied else ()), *command, *arguments)
        self._adopted: tuple[int, int] | None = None
        """Pid and start time of a process that another one has started."""
        self._log = logs / f"{name}.log"
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0
        self._ready_fd: int | None = None

    def start(self) -> tuple[int, int]:
        """Start the process; returns its pid and start time (`process_ids.start_time`)."""
        self._close_ready()
        self._adopted = None
        self._ready_fd, writing = os.pipe()
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [*self._command, "--ready-fd", str(writing)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    pass_fds=[writing],
                    start_new_session=True,
                )
        finally:
            os.close(writing)
        self._began = start_time(self._process.pid) or 0
        return self._process.pid, self._began

    def adopt(self, pid: int, started: int) -> None:
        """Take over a process that an earlier one like this has started."""
        self._adopted = (pid, started)

    def listening(self, timeout_s: float) -> bool:
        """Whether the service has said that it listens; waits up to `timeout_s`. Raises `ServiceFailed` when it
        ended."""
        if self._ready_fd is None:
            return True
        poller = select.poll()
        poller.register(self._ready_fd, select.POLLIN)
        if not poller.poll(1000 * timeout_s):
            return False
        said = os.read(self._ready_fd, 64)
        self._close_ready()
        if not said:
            raise ServiceFailed(f"the {self.name} ended before it listened")
        return True

    @property
    def process(self) -> tuple[int, int]:
        """Pid and start time of its latest process."""
        if self._adopted is not None:
            return self._adopted
        assert self._process is not None, "it was started"
        return self._process.pid, self._began

    def ended(self) -> str | None:
        """How the process ended, or None while it runs."""
        if self._adopted is not None:
            return None if same_process(*self._adopted) else "its process is gone"
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return None
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def terminate(self) -> None:
        """Ask the process to end, and don't wait for it. Nothing happens where it has ended."""
        if self._adopted is not None:
            terminate_process(*self._adopted)
        elif self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill a process that hangs; `ended` then says by which signal."""
        if self._adopted is not None:
            kill_process(*self._adopted)
        elif self._process is not None:
            _kill(self._process)

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, wait up to `timeout_s`, then kill the process. Idempotent."""
        process, self._process = self._process, None
        self._close_ready()
        adopted, self._adopted = self._adopted, None
        if adopted is not None:
            _stop_adopted(*adopted, timeout_s)
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


def _stop_adopted(pid: int, started: int, timeout_s: float) -> None:
    """Send SIGTERM to a process that isn't this one's child, and kill it where it doesn't end within `timeout_s`."""
    terminate_process(pid, started)
    pause, deadline = threading.Event(), time.monotonic() + timeout_s
    while same_process(pid, started) and time.monotonic() < deadline:
        pause.wait(0.02)
    kill_process(pid, started)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and wait for its end, up to `KILL_S`. A process that the kernel holds for longer, on a dead disk
    say, can do nothing any more."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_S)
