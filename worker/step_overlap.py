"""Step overlap: the queue of launched steps, whose results are committed while the next step runs.

A round plans and launches step n+1, and then commits step n, which ran meanwhile; so the device always has a step to
run while the host publishes the results of the last one. A request has three lengths, in positions:

    committed    known to be complete: what may be hashed, inserted, sent and counted
    launched     given to the device
    planned      decided by the scheduler; equal to launched between rounds

A request may end at step n (a stop token, a cancel) while n+1, which names its pages, is under way. Then the result
of n+1 is dropped, and the request's pages are not leased again before n+1 is complete (`InFlightPins`). On a device
that completes at once (CPU torch) a step is committed in the round that launched it, and there is no overlap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from twinpool.engine.runner.batch import RowOutput, StepHandle

M = TypeVar("M")
_UNDER_WAY = 1
"""Steps that may be under way when a round ends."""
LAUNCHED = _UNDER_WAY + 1
"""Steps that are launched and not committed at any time, at most: those under way, and the one of the round."""


@dataclass(frozen=True)
class InFlightStep(Generic[M]):
    """A launched step; `members` are the owners of its rows, in the order of the rows."""

    step: StepHandle
    members: Sequence[M]


class StepOverlap(Generic[M]):
    """The launched and not yet committed steps of one worker, oldest first. `M` is the type of a row's owner."""

    def __init__(self) -> None:
        self._flights: deque[InFlightStep[M]] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def launched(self, step: StepHandle, members: Sequence[M]) -> None:
        """Add a step that was given to the device; `members` are the owners of its rows, in the order of the rows."""
        self._flights.append(InFlightStep(step, members))

    def landed(self, *, go_on: bool) -> Iterator[Sequence[tuple[M, RowOutput]]]:
        """Yield the results to commit, step by step, oldest first: pairs of owner and output, in the order of the rows.

        Steps that are complete are yielded. The oldest is waited for as long as more than one step is under way, and
        once if `go_on` is false: no step was launched in this round, and there may be none to launch before the oldest
        is committed. Raises what a step raised.
        """
        while self._flights:
            flight = self._flights[0]
            if go_on and len(self._flights) <= _UNDER_WAY and not flight.step.done:
                return
            self._flights.popleft()
            yield list(zip(flight.members, flight.step.outputs(), strict=True))
            go_on = True

    def all_landed(self) -> Iterator[Sequence[tuple[M, RowOutput]]]:
        """Yield the results of all steps, oldest first, each waited for."""
        while self._flights:
            flight = self._flights.popleft()
            yield list(zip(flight.members, flight.step.outputs(), strict=True))

    def drop(self) -> None:
        """Wait for all steps under way, and drop their results."""
        while self._flights:
            self._flights.popleft().step.completion.wait()
