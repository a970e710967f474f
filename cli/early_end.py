"""The signals of `serve`, `demo` and `controller` until these handle them: an end that is asked for then has code 0.

There are two steps, because nothing has been made while the first modules are imported, and what preflight makes (a
download's folder, a child that looks at GPUs) is removed by unwinding.
"""

from __future__ import annotations

import os
import time
from types import FrameType

from twinpool.cluster.serve.shutdown_signal import ASKED, START_DEADLINE_S, handled_signals
from twinpool.contracts.signal_listener import SignalListener


class EndAsked(BaseException):
    """Raised in the main thread when a signal asks for an end."""


class EarlyEnd:
    """The handler that unwinds. Whatever swallows the exception (code of others, while it is imported), the process has
    ended `START_DEADLINE_S` later."""

    def __init__(self) -> None:
        self._asked = False

    def install(self) -> None:
        """Handle the signals from now on, until `ShutdownSignal` does. Main thread only."""
        SignalListener(handled_signals(), _end_later).listen(self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._asked:
            self._asked = True
            raise EndAsked


def _end_later(number: int) -> None:
    time.sleep(START_DEADLINE_S)
    os._exit(ASKED)
