"""The fault `faults.hang`: a worker's engine thread hangs on purpose."""

from __future__ import annotations

import threading

from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, WorkerName

FIRST = Incarnation(1)
"""Only the first incarnation of a worker hangs, so that the next one can show that it serves."""


def hang_at(faults: str, name: WorkerName, incarnation: Incarnation) -> int | None:
    """The number of steps after which this incarnation hangs, or None. Raises `ConfigError` where `faults` isn't
    NAME:STEP, several with commas."""
    steps: dict[str, int] = {}
    for part in filter(None, faults.split(",")):
        worker, _, step = part.strip().rpartition(":")
        if not worker or not step.isdigit() or not int(step):
            raise ConfigError(f"config key faults.hang takes WORKER:STEP, as in decode-0:20; got {part!r}")
        steps[worker] = int(step)
    return steps.get(name) if incarnation == FIRST else None


class HangFault:
    """Hangs the thread that calls it, for ever, once `step` steps have ended; None: never."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def __call__(self, steps: int) -> None:
        if self._step is not None and steps >= self._step:
            threading.Event().wait()
