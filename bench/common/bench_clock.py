"""What benches of engines measure time with: the wall's clock, or on a busy machine the processor's.

Processor time tells how much work an engine makes of the same task, whoever else is using the machine; it is fair to
engines on one thread only, since waiting threads may spin.
"""

from __future__ import annotations

import time
from collections.abc import Callable

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
now: Callable[[], float] = time.perf_counter


def use(name: str) -> None:
    """From now on `clock.now` is this one of `CLOCKS`."""
    global now
    now = CLOCKS[name]
