"""SIGTERM to a worker's process: the worker drains, and leaves when its requests have ended or migrated.

The process's main thread is Ray's, and runs no Python while it waits; a handler would never be called. But the
interpreter writes the number of each signal to a descriptor at once, on any thread, and a thread of ours reads it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


class SigtermDrain:
    """Calls registered functions at SIGTERM, and at once if SIGTERM came before they were registered."""

    def __init__(self) -> None:
        self.listening = False
        self._asked = threading.Event()
        self._calls: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def listen(self) -> bool:
        """Take SIGTERM over. Call it on the main thread; on another nothing happens, and False is returned."""
        if threading.current_thread() is not threading.main_thread():
            return False
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self.listening = True
        threading.Thread(target=self._read, args=(reader,), name="signals", daemon=True).start()
        return True

    def off(self, call: Callable[[], object]) -> None:
        """Call `call`, which was registered, no more."""
        with self._lock:
            self._calls.remove(call)

    @property
    def asked(self) -> bool:
        """Whether SIGTERM has come."""
        return self._asked.is_set()

    def _read(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            if signal.SIGTERM in numbers:
                self.announce()

    def announce(self) -> None:
        """Call all registered functions, as at a SIGTERM."""
        self._asked.set()
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call()

    def on(self, call: Callable[[], object]) -> None:
        """Register `call`, which is called at each SIGTERM on the signal thread, and now if one has come."""
        with self._lock:
            self._calls.append(call)
        if self._asked.is_set():
            call()


TERMINATED = SigtermDrain()
"""The drain on SIGTERM of this process."""
