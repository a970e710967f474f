"""Signals that a thread acts on. A handler runs between two instructions of the main thread, which may hold a lock that
the handler needs (an event's, a stream's), also where that is another handler; and it doesn't run at all while the main
thread is in native code. But the interpreter writes the number of each signal to a descriptor at once.

And what a process tells the service manager that keeps it, where one does: systemd, by the protocol of sd_notify(3). A
unit of ``Type=notify`` counts as started when its process says so here, not when it has been forked.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
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


log = logging.getLogger("twinpool.service_manager")

SOCKET_VARIABLE = "NOTIFY_SOCKET"
TIMEOUT_S = 1.0


class ServiceManager:
    """The service manager at `address`; empty: there is none, and nothing is told."""

    def __init__(self, address: str = "") -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address

    @classmethod
    def adopt(cls) -> ServiceManager:
        """Return the one that this process's environment names, and take it out of the environment: processes that this
        one starts have nothing to tell it."""
        return cls(os.environ.pop(SOCKET_VARIABLE, ""))

    def ready(self, status: str) -> None:
        """Say that the process serves. `status`: one line, which ``systemctl status`` shows."""
        self._tell(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """Say that the process has begun to end."""
        self._tell("STOPPING=1")

    def _tell(self, message: str) -> None:
        """Send a message. A service manager that can't be told is logged: it ends the process if it waits for that."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(TIMEOUT_S)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            log.warning("the service manager can't be told: %s", error)
