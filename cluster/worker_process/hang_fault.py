"""Faults of a worker's loop on purpose: `faults.hang`."""

from __future__ import annotations

import threading

from contracts.errors import ConfigError
from contracts.ids import Incarnation, WorkerName

FIRST = Incarnation(1)
"""Only the first start of a worker hangs: its successor is to show that it serves."""


def hang_at(faults: str, name: WorkerName, incarnation: Incarnation) -> int | None:
    """The step in which this worker hangs, by `faults.hang`. Raises `ConfigError` for what isn't NAME:STEP,..."""
    steps: dict[str, int] = {}
    for part in filter(None, faults.split(",")):
        worker, _, step = part.strip().rpartition(":")
        if not worker or not step.isdigit() or not int(step):
            raise ConfigError(f"config key faults.hang takes WORKER:STEP, as in decode-0:20; got {part!r}")
        steps[worker] = int(step)
    return steps.get(name) if incarnation == FIRST else None


class HangFault:
    """Hangs the thread that calls it, for ever, once so many steps have ended."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def __call__(self, steps: int) -> None:
        if self._step is not None and steps >= self._step:
            threading.Event().wait()
