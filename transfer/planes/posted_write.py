"""A posted write that another thread carries out: pending, then done or failed."""

from __future__ import annotations

import threading
from collections.abc import Callable


class PostedWrite:
    """Implements `cache.device.device_port.Completion`. Any thread may ask; one of them ends it, once."""

    def __init__(self, ended: Callable[[], None] = lambda: None) -> None:
        """`ended` is called after the end, on the thread that ended it."""
        self._over = threading.Event()
        self._error: RuntimeError | None = None
        self._ended = ended

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._over.is_set()

    def wait(self) -> None:
        """Wait for the end. Raises `RuntimeError` where the write failed."""
        self._over.wait()
        if self._error is not None:
            raise self._error

    def order(self) -> None:
        self.wait()

    def end(self, error: RuntimeError | None = None) -> None:
        """End the write: it has landed or, with an `error`, perhaps not. Later calls change nothing."""
        if not self._over.is_set():
            self._error = error
            self._over.set()
            self._ended()
