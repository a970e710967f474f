"""A service of a cluster: a process that `serve` starts or adopts, watches, and starts again when it ends.

Services are children of this process and end with it. Those of a detached cluster outlive it: the next such process
adopts them. One that ends is started again by the rule of `cluster.processes.restart_policy`, unless it ends too often.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from twinpool.cluster.processes.process_ids import TIED, kill_process, same_process, start_time, terminate_process
from twinpool.cluster.processes.restart_policy import RestartHistory
from twinpool.cluster.serve.detached_state import ServiceProcess, ServicesState
from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.python_command import module_command

STOP_S = 1.5
"""Seconds that a service has to end in order."""
KILL_S = 5.0
ROUTER = tuple(module_command("twinpool.router.main"))
CONTROLLER = tuple(module_command("twinpool.cluster.controller.controller_process"))


class ServiceFailed(TwinpoolError):
    """Raised when a service ends before it listens."""


class PartFailed(TwinpoolError):
    """Raised when a part of the cluster did not come up, or is gone for good; the text names the part and why."""


@dataclass
class ServiceContext:
    """What the services of one run have in common."""

    logs: Path
    """The folder of their logs."""
    config: ClusterConfig
    """By which services are started again; those that are made later go by a later one."""
    clock: Clock
    report: Callable[[str], None]
    """Shows a line to the operator."""
    last_words: Callable[[str], str]
    """Returns the last lines of a service's log, ready to be appended to a line."""
    owns: Callable[[int, int], None]
    """Has a process, by pid and start time, ended with the run."""
    state: ServicesState | None
    """The detached cluster's; None where services end with this process."""
    stack: ExitStack
    """Ends the services."""


class Service:
    """One service, across the restarts of its process. Use it from the main thread only: the kernel kills a tied child
    when the thread that started it ends."""

    def __init__(
        self,
        context: ServiceContext,
        name: str,
        command: Sequence[str],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        mark: str = "",
        meanwhile: str = "",
    ) -> None:
        """Not started yet; it ends with the context's stack.

        `command` takes `arguments`, and ``--ready-fd N``: a descriptor that it writes to once it listens. `name`: of
        the service, to people and in its log's file name. `mark`: its build and settings, where that is noted in the
        cluster's state. `meanwhile`: what goes on without the service, in words that are added to the news of its
        death."""
        self.name, self.mark, self.build = name, mark, build_id()
        self._context = context
        self._command = (*(TIED if context.state is None else ()), *command, *arguments)
        self._environment = dict(environment)
        self._adopted: tuple[int, int] | None = None
        """Pid and start time of a process that another one has started."""
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0
        self._ready_fd: int | None = None
        self._meanwhile = meanwhile and f"; {meanwhile}"
        self._restarts, self._since = RestartHistory(context.config), context.clock.now()
        self._restart_at: float | None = None
        self._leaves_as = ""
        """The key of a process that another one is to replace, in the cluster's state; empty: none is to."""
        context.stack.callback(self.stop, STOP_S)

    # ------------------------------------------------------------ started, adopted, started again

    def start(self) -> None:
        """Start the process, and note it: the end of the run ends it, or the next supervisor finds it."""
        pid, began = self._spawn()
        self.build = build_id()
        self._context.owns(pid, began)
        self._note()
        self._since, self._restart_at = self._context.clock.now(), None

    def leave(self, key: str) -> None:
        """Note that another process is to take this one's place: until then the cluster's state has this one as `key`,
        even when it ends and is started again, and its successor under the service's name."""
        self._leaves_as = key
        self._note()

    def stay(self) -> None:
        """Take `leave` back: the service goes on with its latest process."""
        if (state := self._context.state) is not None:
            state.replaced.pop(self._leaves_as, None)
        self._leaves_as = ""
        self._note()

    def _note(self) -> None:
        """Write its latest process to the cluster's state."""
        if (state := self._context.state) is None:
            return
        if self._leaves_as:
            state.leaves(self._leaves_as, self.process)
            return
        if self.mark:
            state.marks[self.name] = self.mark
        state.started(self.name, self.process)

    def adopt(self, process: ServiceProcess, mark: str = "") -> None:
        """Take over a process that an earlier supervisor has started, of whatever build and mark."""
        self._adopted, self.build = (process.pid, process.started), process.build
        self.mark = mark or self.mark

    @property
    def down(self) -> bool:
        """Whether its process has ended and the next one hasn't been started."""
        return self._restart_at is not None

    def tend(self) -> str:
        """Start the service again where it has ended, once that is due; returns why it won't be started any more,
        empty otherwise."""
        now, context = self._context.clock.now, self._context
        if self._restart_at is None:
            if (how := self.ended()) is None:
                return ""
            wait_s = self._restarts.died(now(), self._since)
            if self._restarts.too_many:
                return f"the {self.name} died ({how}) too often{context.last_words(self.name)}"
            wait = f" in {wait_s:g} s" if wait_s else ""
            news = f"{self.name} died ({how}); restarting{wait}{self._meanwhile}"
            context.report(f"{news}{context.last_words(self.name)}")
            self._restart_at = now() + wait_s
        if now() >= self._restart_at:
            self.start()
        return ""

    # ------------------------------------------------------------ the process

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
    def process(self) -> ServiceProcess:
        """Its latest process."""
        if self._adopted is not None:
            return ServiceProcess(*self._adopted, self.build)
        assert self._process is not None, "it was started"
        return ServiceProcess(self._process.pid, self._began, self.build)

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

    def _spawn(self) -> tuple[int, int]:
        """Start the process; returns its pid and start time (`process_ids.start_time`)."""
        self._close_ready()
        self._adopted = None
        self._ready_fd, writing = os.pipe()
        try:
            with (self._context.logs / f"{self.name}.log").open("ab") as log:
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
