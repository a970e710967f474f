"""The waiter: the one place where a worker sleeps, until a socket, a process's death or another thread wakes it."""

from __future__ import annotations

import contextlib
import math
import os
import threading

import zmq

Waitable = zmq.Socket[bytes] | int


class Waiter:
    """Sleeps until a registered socket or file descriptor is readable, or `wake` was called."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Lock()
        """Held to write to `_event` and to close it: a closed descriptor's number may soon be another file's."""
        self._poller = zmq.Poller()
        self._poller.register(self._event, zmq.POLLIN)

    def add(self, waitable: Waitable) -> None:
        self._poller.register(waitable, zmq.POLLIN)

    def remove(self, waitable: Waitable) -> None:
        if waitable in self._poller:
            self._poller.unregister(waitable)

    def wake(self) -> None:
        """May be called from any thread, also during and after `close`."""
        with self._closing:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def wait(self, timeout_s: float) -> None:
        self._poller.poll(math.ceil(max(0.0, timeout_s) * 1000))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def close(self) -> None:
        with self._closing:
            event, self._event = self._event, -1
            if event >= 0:
                self._poller.unregister(event)
                os.close(event)
