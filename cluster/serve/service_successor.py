"""The next process of a service, started while the one before goes on, whose place it takes."""

from __future__ import annotations

from typing import Generic, TypeVar

from twinpool.cluster.serve.child_service import ChildService, ServiceFailed
from twinpool.contracts.clock import Clock

POLL_S = 0.1
REPLACE_S = 90.0
"""Seconds in which it must have taken the place."""
T = TypeVar("T")


class ServiceSuccessor(Generic[T]):
    """One that is on its way. `number`: of the service among its like; `what` is the service with what its keeper knows
    of it."""

    def __init__(self, number: int, what: T, service: ChildService, clock: Clock) -> None:
        self.number, self.what, self.service = number, what, service
        self._clock, self._deadline = clock, clock.now() + REPLACE_S

    def ready(self, wait_s: float) -> bool:
        """Whether it has taken the place; waits up to `wait_s`. Raises `ServiceFailed` where it has ended, or isn't
        ready in time."""
        if self.service.listening(wait_s):
            return True
        if self._clock.now() > self._deadline:
            raise ServiceFailed(f"the next {self.service.name} isn't ready within {REPLACE_S:g} s")
        return False
