"""The signals that end a run of `twinpool serve`, and the deadline by which it is gone.

Python runs signal handlers between two instructions of its main thread, which may sit in native code for a minute
(joining a Ray that doesn't answer). So a thread listens instead: the interpreter writes every signal's number to a pipe
at once, whatever the main thread does, and from then on the deadline runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

from cluster.processes.service_manager import ServiceManager

START_DEADLINE_S = 1.5
"""The longest that an orderly end takes while the cluster is still starting: no client waits for an answer yet."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOBODY = ServiceManager()


class ShutdownSignal:
    """The first Ctrl-C or SIGTERM asks for an end within `timeout_s` (`cluster.stop_timeout_s`); a second one ends it
    at once. After the timeout this process kills itself, and the reaper takes the rest."""

    def __init__(self, timeout_s: float, manager: ServiceManager = NOBODY) -> None:
        """`manager` is told of an end that was asked for."""
        self._asked = threading.Event()
        self._timeout_s, self._manager = timeout_s, manager
        self.deadline_s = min(timeout_s, START_DEADLINE_S)
        self._listener: threading.Thread | None = None

    def install(self) -> None:
        """Handle SIGINT, SIGTERM and SIGHUP from now on. Main thread only; call it again after a library (Ray) has
        installed handlers of its own."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        if self._listener is None:
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            self._listener = threading.Thread(target=self._listen, args=(reading,), name="signals", daemon=True)
            self._listener.start()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a signal, up to `timeout_s`; returns whether one has come."""
        return self._asked.wait(timeout_s)

    def ready(self) -> None:
        """Use the whole `timeout_s` as the deadline from now on: the cluster serves, and answers may be under way."""
        self.deadline_s = self._timeout_s

    def promise(self) -> None:
        """Start the deadline: this process ends within `deadline_s`, or kills itself then."""
        timer = threading.Timer(self.deadline_s, _give_up, (self.deadline_s,))
        timer.daemon = True
        timer.start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Do nothing: the listener acts on signals, and this keeps them from raising in the main thread."""

    def _listen(self, reading: int) -> None:
        while numbers := os.read(reading, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._ask()

    def _ask(self) -> None:
        if self._asked.is_set():
            _die()
        self._asked.set()
        self.promise()
        self._manager.stopping()


def _give_up(deadline_s: float) -> None:
    """Kill this process, which did not end in time. The line is written past Python's buffers, whose locks may be held
    for ever."""
    line = f"not ended within {deadline_s:g} s: what is left is killed (cluster.stop_timeout_s)\n"
    with contextlib.suppress(OSError):
        os.write(2, line.encode())
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
