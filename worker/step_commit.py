"""The launched steps of a worker of either role: a queue, steps in parts, what is counted, and rows not to be trusted.

A round plans and launches step n+1, and then commits step n, which ran meanwhile; so the device always has a step to
run while the host publishes the results of the last one. A request has three lengths, in positions:

    committed    known to be complete: what may be hashed, inserted, sent and counted
    launched     given to the device
    planned      decided by the scheduler; equal to launched between rounds

A request may end at step n (a stop token, a cancel) while n+1, which names its pages, is under way. Then the result
of n+1 is dropped, and the request's pages are not leased again before n+1 is complete (`InFlightPins`). On a device
that completes at once (CPU torch) a step is committed in the round that launched it, and there is no overlap.

Non-finite rows decide whether a worker's results can be trusted. One such row may come from the prompt itself: a model
in half precision can overflow. Several within `cluster.nonfinite_window_s` seconds point to a device, a driver or
weights gone bad, and whatever else that worker computes is suspect: the worker is ended and started again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from twinpool.cache.device.device_port import Completion
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.damage import DamageSite, log_damage
from twinpool.engine.runner.batch import RowOutput, StepHandle
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.worker.request_table import R, RequestPages, RequestTable

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


def split(step: StepHandle, counts: Sequence[int]) -> list[StepHandle]:
    """Return a handle for each run of `counts` rows of `step`, in order; together they are all of its rows."""
    shared, first, parts = _SharedOutputs(step), 0, list[StepHandle]()
    for count in counts:
        parts.append(_StepPart(step, shared, first, count))
        first += count
    return parts


class _SharedOutputs:
    """The outputs of a step, fetched once for all its parts."""

    def __init__(self, step: StepHandle) -> None:
        self._step = step
        self._outputs: list[RowOutput] | None = None

    def get(self) -> list[RowOutput]:
        if self._outputs is None:
            self._outputs = self._step.outputs()
        return self._outputs


class _StepPart:
    """Implements `engine.runner.batch.StepHandle` for `count` rows from row `first` on."""

    def __init__(self, step: StepHandle, shared: _SharedOutputs, first: int, count: int) -> None:
        self._step, self._shared = step, shared
        self._rows = slice(first, first + count)

    @property
    def completion(self) -> Completion:
        return self._step.completion

    @property
    def done(self) -> bool:
        return self._step.done

    def outputs(self) -> list[RowOutput]:
        return self._shared.get()[self._rows]


class NonfiniteRows:
    """One worker's record of rows with non-finite logits: `limit_rows` of them within `window_s` seconds make the
    worker unfit. See the module's prose."""

    def __init__(self, limit_rows: int, window_s: float, clock: Clock) -> None:
        self._limit, self._window_s, self._clock = limit_rows, window_s, clock
        self._at: deque[float] = deque(maxlen=limit_rows)
        self.rows = 0
        """Rows with non-finite logits since the worker's start."""
        self.unfit = ""
        """Why this worker must not go on, in words; empty while it may."""

    def nonfinite(self) -> None:
        """Record one more row; sets `unfit` when the limit is reached within the window."""
        now = self._clock.now()
        self.rows += 1
        self._at.append(now)
        if len(self._at) == self._limit and now - self._at[0] <= self._window_s:
            self.unfit = (
                f"the logits of {self._limit} rows were no finite numbers within {self._window_s:g} s "
                "(cluster.nonfinite_rows, cluster.nonfinite_window_s): its device or its weights are suspect"
            )


class StepCommit(Generic[R, M]):
    """What both roles do with launched steps: they are counted, and what can't be trusted is reported. `M` is the type
    of a row's owner."""

    log: ClassVar[logging.Logger]

    def __init__(
        self,
        requests: RequestTable[R],
        pages: RequestPages,
        engine: ModelRunner,
        fitness: NonfiniteRows,
        config: Config,
        pause: Callable[[float], None],
    ) -> None:
        """`pause(seconds)` sleeps, for `faults.step_delay_s`."""
        self._requests, self._engine, self._fitness, self._request_pages = requests, engine, fitness, pages
        self._manager, self._config, self._clock, self._pause = pages.manager, config, requests.clock, pause
        self._overlap = StepOverlap[M]()
        self.committed = False
        """Whether the last round committed a step: then the next round may have pages for a waiting request."""
        self.steps = 0
        self.counters = {"prompt_tokens_computed": 0.0, "stale_pages": 0.0}

    def __len__(self) -> int:
        """Steps under way."""
        return len(self._overlap)

    def drop(self) -> None:
        """Wait for the steps under way and drop their results: the worker closes."""
        self._overlap.drop()

    def _delay(self) -> None:
        if self._config.faults.step_delay_s:
            self._pause(self._config.faults.step_delay_s)

    def _count_launched(self, requests: Sequence[R]) -> None:
        """Count what was planned of these requests as launched, and keep their recurrent states as they will be at a
        page boundary, where it is sure that they will."""
        stateful, page_tokens = self._manager.running.stateful, self._manager.spec.page_tokens
        for request in requests:
            request.launched = request.planned
            if not stateful or request.allocation is None or not self._sure(request):
                continue
            if request.launched % page_tokens == 0:
                self._manager.running.snapshot(request.allocation, request.launched)

    def _sure(self, request: R) -> bool:
        """Whether all positions that were launched of a request will count."""
        return True

    def _distrust(self, request: R, site: DamageSite) -> None:
        """Report a request whose row found one of its pages given away (`DamageSite.STEP`), or had non-finite logits,
        and keep its state from others: neither its allocation nor what the tree has of its prompt can be trusted."""
        if site is DamageSite.STEP:
            self.counters["stale_pages"] += 1
        else:
            self._fitness.nonfinite()
        positions = [request.committed, request.launched]
        log_damage(self.log, site, request_id=request.submit.request_id, positions=positions)
        self._request_pages.distrust(request)
