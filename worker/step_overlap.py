"""The loop one step ahead of the device: launched steps, oldest first, and what becomes of their results.

A round plans and launches step n+1, and then commits step n, which ran meanwhile; so the device always has a step to
go on with while the host publishes the last one. A request has three lengths, in positions:

    committed    known to be complete: what may be hashed, inserted, sent and counted
    launched     given to the device
    planned      decided; equal to launched between rounds

A request may end at step n (a stop token, a cancel) while n+1, which names its pages, is under way. Then the result
of n+1 is dropped, and its pages are nobody's until n+1 is complete (`InFlightPins`). On a device that completes at once
(CPU torch) a step is committed in the round that launched it, and nothing of this shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.runner.batch import RowOutput, StepHandle

M = TypeVar("M")
_UNDER_WAY = 1
"""Steps that may be under way when a round ends."""
LAUNCHED = _UNDER_WAY + 1
"""Steps that are launched and not committed at most: those, and the one of the round."""


@dataclass(frozen=True)
class InFlightStep(Generic[M]):
    """A launched step, and whose each of its rows is."""

    step: StepHandle
    members: Sequence[M]


class StepOverlap(Generic[M]):
    """The steps under way of one worker."""

    def __init__(self) -> None:
        self._flights: deque[InFlightStep[M]] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def launched(self, step: StepHandle, members: Sequence[M]) -> None:
        """`step` was given to the device; `members` are whose its rows are, in order."""
        self._flights.append(InFlightStep(step, members))

    def landed(self, *, go_on: bool) -> Iterator[Sequence[tuple[M, RowOutput]]]:
        """Results to commit, step by step in order.

        All that is complete; and the oldest, waiting for it, as long as more than one step is under way, or any when
        there is nothing to go on with before it is committed.
        """
        while self._flights:
            flight = self._flights[0]
            if go_on and len(self._flights) <= _UNDER_WAY and not flight.step.done:
                return
            self._flights.popleft()
            yield list(zip(flight.members, flight.step.outputs(), strict=True))
            go_on = True

    def drop(self) -> None:
        """Wait for everything under way; its results are nobody's."""
        while self._flights:
            self._flights.popleft().step.completion.wait()
