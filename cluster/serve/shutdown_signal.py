"""How a run of `twinpool serve` is asked to end, and the promise that it does.

Python runs signal handlers between two instructions of its main thread, which may sit in native code for a minute
(joining a Ray that doesn't answer). So a thread listens too: the interpreter writes every signal's number to a pipe
at once, whatever the main thread does, and from then on the end has a deadline.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

STOP_DEADLINE_S = 4.0
"""After this long, an orderly end is given up: this process kills itself and the reaper takes the rest."""
START_DEADLINE_S = 1.5
"""The same until the cluster is ready: nobody waits for an answer yet."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ShutdownSignal:
    """The first Ctrl-C or SIGTERM asks for an end within seconds; a second one ends it at once."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self.deadline_s = START_DEADLINE_S
        self._listener: threading.Thread | None = None

    def install(self) -> None:
        """Handle SIGINT, SIGTERM and SIGHUP from now on. Main thread only; again after a library took them over."""
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
        """Wait to be asked, up to `timeout_s`; returns whether it has happened."""
        return self._asked.wait(timeout_s)

    def ready(self) -> None:
        """From now on there are requests whose clients deserve an orderly end."""
        self.deadline_s = STOP_DEADLINE_S

    def promise(self) -> None:
        """Start the clock: this process is gone in `deadline_s`, orderly or not."""
        timer = threading.Timer(self.deadline_s, _die)
        timer.daemon = True
        timer.start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Signals are acted on by the listener; this keeps them from raising in the main thread."""

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


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
