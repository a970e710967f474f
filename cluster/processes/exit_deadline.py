"""The deadline of a call that nothing can interrupt: the process ends when it has passed."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

log = logging.getLogger("twinpool.deadline")


@contextlib.contextmanager
def exit_deadline(seconds: float, what: str) -> Iterator[None]:
    """End this process with code 1 where the block takes longer than `seconds`; `what` says in the log what didn't
    happen.

    For calls that wait in foreign code, which no exception reaches: a call of Ray, say, whose answer was lost with
    Ray's control store. Whoever keeps the process starts the next one, which tries anew.
    """

    def end() -> None:
        log.error("%s within %g s: this process ends, and the next one tries again", what, seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
