"""Signals that a thread acts on. A handler runs between two instructions of the main thread, which may hold a lock that
the handler needs (an event's, a stream's), also where that is another handler; and it doesn't run at all while the main
thread is in native code. But the interpreter writes the number of each signal to a descriptor at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType


class SignalListener:
    """A thread that calls `act` with the number of each signal of `numbers` that comes, one after the other.

    A process has one that listens: the interpreter writes to one descriptor. uvloop has it write to its own while a
    loop runs in the main thread, and signals are that loop's then.
    """

    def __init__(self, numbers: Iterable[int], act: Callable[[int], object]) -> None:
        self._numbers, self._act = frozenset(numbers), act
        self._thread: threading.Thread | None = None

    def listen(self, handler: Callable[[int, FrameType | None], object] | None = None) -> None:
        """Take the signals over, also again, after a library has installed handlers of its own. Main thread only.

        `handler`: what runs in the main thread beside `act`; it takes no lock.
        """
        for number in self._numbers:
            signal.signal(number, handler or _nothing)
        if self._thread is not None:
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._read, args=(reader,), name="signals", daemon=True)
        self._thread.start()

    def _read(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if number in self._numbers:
                    self._act(number)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Keep a signal from ending the process, or raising in its main thread."""
