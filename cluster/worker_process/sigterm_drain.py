"""SIGTERM to a worker's process: it drains, and leaves when it has handed on or finished what it has.

The process's main thread is Ray's, and runs no Python while it waits; a handler would never be called. But the
interpreter writes the number of each signal to a descriptor at once, on whichever thread, and a thread of ours reads.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


class SigtermDrain:
    """Calls whoever wants to know of SIGTERM, also of one that came before."""

    def __init__(self) -> None:
        self.listening = False
        self._asked = threading.Event()
        self._calls: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def listen(self) -> bool:
        """Take SIGTERM over. To be called on the main thread; on another nothing happens, and False is returned."""
        if threading.current_thread() is not threading.main_thread():
            return False
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self.listening = True
        threading.Thread(target=self._read, args=(reader,), name="signals", daemon=True).start()
        return True

    def _read(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            if signal.SIGTERM in numbers:
                self.announce()

    def announce(self) -> None:
        """SIGTERM has come."""
        self._asked.set()
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call()

    def on(self, call: Callable[[], object]) -> None:
        """`call` when it comes, on a thread of its own, or now if it has."""
        with self._lock:
            self._calls.append(call)
        if self._asked.is_set():
            call()


TERMINATED = SigtermDrain()
"""This process's."""
