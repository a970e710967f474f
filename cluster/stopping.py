"""How a run of `twinpool serve` is asked to end, and the promise that it does."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

STOP_DEADLINE_S = 4.0
"""After this long, an orderly end is given up: this process kills itself and the reaper takes the rest."""


class Stopping:
    """The first Ctrl-C or SIGTERM asks for an end within seconds; a second one ends it at once."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def install(self) -> None:
        """Handle SIGINT, SIGTERM and SIGHUP from now on. Main thread only."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def promise(self) -> None:
        """Start the clock: this process is gone in `STOP_DEADLINE_S`, orderly or not."""
        timer = threading.Timer(STOP_DEADLINE_S, _die)
        timer.daemon = True
        timer.start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked.is_set():
            _die()
        self._asked.set()
        self.promise()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
