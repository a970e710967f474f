"""Priorities on a busy machine (starts after serving, leases before all), and deadlines of calls in foreign
code.

Linux has a niceness for each thread, and a thread begins with that of whoever starts it. Lowering one is always
allowed, and raising one takes the right to (CAP_SYS_NICE, which containers rarely have, or RLIMIT_NICE). So:

- What a worker does before it serves (importing packages, reading and packing a model) runs on a thread that ends then,
  with `STARTING` niceness: nothing that serves later has come from it, and no right is needed to be back.
- Threads that renew leases, and the controller, raise themselves by `LEASES` where they may. They take next to nothing,
  so that nobody misses it.

`exit_deadline` is for a call that nothing can interrupt: the process ends when it has passed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

STARTING = 10
"""Niceness of what starts: a ninth of the processor time of whoever serves, where both would have all."""
LEASES = -10
"""Niceness of threads that renew leases, where that is allowed."""


def run_low(run: Callable[[], T], niceness: int = STARTING) -> T:
    """Run something on a thread of its own with this niceness, and wait for it. Returns what it returns, and raises
    what it raises."""
    results: list[T] = []
    errors: list[BaseException] = []

    def on_thread() -> None:
        try:
            set_niceness(max(niceness, niceness_of_thread()))
            results.append(run())
        except BaseException as error:  # It is the caller's.
            errors.append(error)

    thread = threading.Thread(target=on_thread, name="starting", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def set_niceness(niceness: int) -> bool:
    """Give the calling thread this niceness; returns whether that was allowed."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    except OSError:
        return False
    return True


def niceness_of_thread() -> int:
    """The niceness of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def may_raise() -> bool:
    """Whether this process may raise threads to `LEASES`: tried on a thread that ends."""
    allowed: list[bool] = []
    thread = threading.Thread(target=lambda: allowed.append(set_niceness(LEASES)))
    thread.start()
    thread.join()
    return allowed[0]


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
