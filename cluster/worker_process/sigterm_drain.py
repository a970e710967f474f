"""SIGTERM to a worker's process: the worker drains, and leaves when its requests have ended or migrated.

The process's main thread is Ray's, and runs no Python while it waits; a handler would never be called.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from twinpool.contracts.signal_listener import SignalListener


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
        SignalListener([signal.SIGTERM], lambda number: self.announce()).listen()
        self.listening = True
        return True

    def off(self, call: Callable[[], object]) -> None:
        """Call `call`, which was registered, no more."""
        with self._lock:
            self._calls.remove(call)

    @property
    def asked(self) -> bool:
        """Whether SIGTERM has come."""
        return self._asked.is_set()

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
