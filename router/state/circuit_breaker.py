"""Circuit breakers: a worker that keeps failing its requests gets none for a while, then one request as a trial.

The states are drawn in docs/states.md.

An attempt that ends well counts for both of its workers; one that fails counts against the worker at fault. A worker
that complains about a peer is believed, but its complaint is remembered: a worker that has complained about two
different peers within the window is what the peers' failures have in common, so each of its complaints counts against
itself as well. So a prefill worker that sends damage is left alone and not the decode workers that report it, and a
decode worker with a bad network card doesn't open the breaker of every prefill worker.

A breaker whose trials fail is open longer and longer, as long as other workers of the role take its requests. Where
none does, trials come as often as at first: patience would spare nobody, and requests would end that wait for a worker.

A breaker lives as long as its worker's incarnation. A request that a worker refuses because it drains, that runs out of
time or that its client cancels doesn't count.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.ids import RequestId
from twinpool.contracts.state_table import StateTable

MAX_PATIENCE = 8
"""The largest multiple of `breaker_open_s` for which a breaker is open while other workers admit requests; the multiple
doubles with each failed trial."""
ACCUSED_AT = 2
"""Different peers that a worker complains about before it is suspected itself."""


class CircuitState(StrEnum):
    CLOSED = "closed"
    """The worker gets requests."""
    OPEN = "open"
    """The worker gets no requests."""
    HALF_OPEN = "half-open"
    """The worker gets one request as a trial."""
    OVER = "over"


class CircuitEvent(StrEnum):
    TRIP = "trip"
    """Too many of the worker's latest attempts failed."""
    COOLED = "cooled"
    """The worker was left alone for long enough."""
    PROVED = "proved"
    """The trial went well."""
    FAILED = "failed"
    """The trial failed."""
    OVER = "over"
    """The worker's incarnation has ended."""


CIRCUIT = StateTable[CircuitState, CircuitEvent](
    "circuit breaker",
    {
        CircuitState.CLOSED: {CircuitEvent.TRIP: CircuitState.OPEN, CircuitEvent.OVER: CircuitState.OVER},
        CircuitState.OPEN: {CircuitEvent.COOLED: CircuitState.HALF_OPEN, CircuitEvent.OVER: CircuitState.OVER},
        CircuitState.HALF_OPEN: {
            CircuitEvent.PROVED: CircuitState.CLOSED,
            CircuitEvent.FAILED: CircuitState.OPEN,
            CircuitEvent.OVER: CircuitState.OVER,
        },
    },
)


@dataclass(frozen=True, slots=True)
class _AttemptOutcome:
    at: float
    failed: bool
    about: str = ""
    """The peer that the worker complained about; empty for an outcome of its own."""


class CircuitBreaker:
    """The breaker of one worker's incarnation. Times are seconds of the router core's clock, given with each call."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.state = CircuitState.CLOSED
        self.opened = 0
        """How often the breaker has opened."""
        self._outcomes: deque[_AttemptOutcome] = deque()
        self._opened_at = 0.0
        self._patience = 1
        self._probe: RequestId | None = None

    def admits(self, now: float, *, needed: bool = False) -> bool:
        """Whether a request may be sent to the worker; changes nothing.

        `needed`: whether no other worker that could take the request admits it; then an open breaker admits its trial
        after `breaker_open_s`, however many trials have failed.
        """
        match self.state:
            case CircuitState.CLOSED:
                return True
            case CircuitState.OPEN:
                patience = 1 if needed else self._patience
                return now >= self._opened_at + patience * self._config.breaker_open_s
            case CircuitState.HALF_OPEN:
                return self._probe is None
            case _:
                return False

    def sent(self, request: RequestId) -> None:
        """Note that a request goes to the worker. `admits` must have allowed it: an open breaker has cooled."""
        if self.state is CircuitState.OPEN:
            self._step(CircuitEvent.COOLED)
        if self.state is CircuitState.HALF_OPEN:
            self._probe = request

    def succeeded(self, request: RequestId, now: float) -> None:
        """Count an attempt in which the worker did its part. A trial that succeeds closes the breaker."""
        self._outcomes.append(_AttemptOutcome(now, False))
        if self.state is CircuitState.HALF_OPEN and request == self._probe:
            self._probe = None
            self._outcomes.clear()
            self._patience = 1
            self._step(CircuitEvent.PROVED)

    def failed(self, request: RequestId, now: float) -> None:
        """Count a failed attempt in which this worker is at fault; may open the breaker."""
        self._outcomes.append(_AttemptOutcome(now, True))
        if self.state is CircuitState.HALF_OPEN and request == self._probe:
            self._probe = None
            self._patience = min(2 * self._patience, MAX_PATIENCE)
            self._open(CircuitEvent.FAILED, now)
        elif self.state is CircuitState.CLOSED:
            self._judge(now)

    def complained(self, about: str, now: float) -> None:
        """Note that this worker reported its peer `about` as at fault; may open the breaker."""
        self._outcomes.append(_AttemptOutcome(now, False, about))
        if self.state is CircuitState.CLOSED:
            self._judge(now)

    def justified(self, about: str) -> None:
        """Drop the complaints about `about`: that peer is dead, so they were right."""
        self._outcomes = deque(o for o in self._outcomes if o.about != about)

    def left(self, request: RequestId) -> None:
        """Note that the request is gone from the worker. If it was a trial without outcome, the next is one."""
        if request == self._probe:
            self._probe = None

    def over(self) -> None:
        """End the breaker with its worker's incarnation. Idempotent."""
        if self.state is not CircuitState.OVER:
            self._probe = None
            self._step(CircuitEvent.OVER)

    @property
    def probe(self) -> RequestId | None:
        """The request that is the trial; None where none is under way."""
        return self._probe

    def _judge(self, now: float) -> None:
        """Open the breaker where the window holds enough failures, and they are enough of all outcomes."""
        while self._outcomes and self._outcomes[0].at < now - self._config.breaker_window_s:
            self._outcomes.popleft()
        suspected = len({o.about for o in self._outcomes if o.about}) >= ACCUSED_AT
        bad = sum(o.failed or (suspected and bool(o.about)) for o in self._outcomes)
        # Complaints that aren't held against the worker are no successes either.
        judged = sum(o.failed or suspected or not o.about for o in self._outcomes)
        if bad >= self._config.breaker_failures and bad >= self._config.breaker_rate * judged:
            self._open(CircuitEvent.TRIP, now)

    def _open(self, event: CircuitEvent, now: float) -> None:
        self._step(event)
        self.opened += 1
        self._opened_at = now

    def _step(self, event: CircuitEvent) -> None:
        self.state = CIRCUIT.next(self.state, event)
