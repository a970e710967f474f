"""Circuit breakers: a worker that keeps failing what it is given gets nothing for a while, then one request as a trial.

The states are drawn in docs/states.md.

What counts is the worker at fault. An attempt that ends well speaks for both workers; one that fails speaks against the
one that is blamed for it. Whoever reports that another is bad is believed, but remembered: who has complained about
two different peers within the window is what their failures have in common, and each of its complaints counts against
itself as well. So a prefill worker that sends damage is left alone and not the decode workers that say so, and a
decode worker with a bad network card doesn't close every prefill worker behind it.

A breaker lives as long as its worker's incarnation. Requests that a worker refuses because it drains, that run out of
time or that their client takes back say nothing about it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from contracts.config.router_config import RouterConfig
from contracts.ids import RequestId
from contracts.state_table import StateTable

MOST_PATIENCE = 8
"""`breaker_open_s` doubles up to so many times itself."""
ACCUSED_AT = 2
"""Different peers that somebody complains about before it is suspected itself."""


class CircuitState(StrEnum):
    CLOSED = "closed"
    """Gets requests."""
    OPEN = "open"
    """Gets none."""
    HALF_OPEN = "half-open"
    """Gets one."""
    OVER = "over"


class CircuitEvent(StrEnum):
    TRIP = "trip"
    """Too many of its latest attempts failed."""
    COOLED = "cooled"
    """It was left alone for long enough."""
    PROVED = "proved"
    """The one request went well."""
    FAILED = "failed"
    """It did not."""
    OVER = "over"
    """Its incarnation has ended."""


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
    """The peer that it was a complaint about."""


class CircuitBreaker:
    """One worker's. Times are seconds of the router core's clock, given with each call."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.state = CircuitState.CLOSED
        self.opened = 0
        """How often it has opened."""
        self._outcomes: deque[_AttemptOutcome] = deque()
        self._until = 0.0
        self._patience = 1
        self._probe: RequestId | None = None

    def admits(self, now: float) -> bool:
        """Whether a request may be sent; changes nothing."""
        match self.state:
            case CircuitState.CLOSED:
                return True
            case CircuitState.OPEN:
                return now >= self._until
            case CircuitState.HALF_OPEN:
                return self._probe is None
            case _:
                return False

    def sent(self, request: RequestId) -> None:
        """A request goes to the worker; `admits` said that it may: an open breaker has cooled."""
        if self.state is CircuitState.OPEN:
            self._step(CircuitEvent.COOLED)
        if self.state is CircuitState.HALF_OPEN:
            self._probe = request

    def succeeded(self, request: RequestId, now: float) -> None:
        """An attempt got from the worker what it was to give."""
        self._outcomes.append(_AttemptOutcome(now, False))
        if self.state is CircuitState.HALF_OPEN and request == self._probe:
            self._probe = None
            self._outcomes.clear()
            self._patience = 1
            self._step(CircuitEvent.PROVED)

    def failed(self, request: RequestId, now: float) -> None:
        """An attempt failed, and this worker is at fault."""
        self._outcomes.append(_AttemptOutcome(now, True))
        if self.state is CircuitState.HALF_OPEN and request == self._probe:
            self._probe = None
            self._patience = min(2 * self._patience, MOST_PATIENCE)
            self._open(CircuitEvent.FAILED, now)
        elif self.state is CircuitState.CLOSED:
            self._judge(now)

    def complained(self, about: str, now: float) -> None:
        """This worker reported that `about` is at fault."""
        self._outcomes.append(_AttemptOutcome(now, False, about))
        if self.state is CircuitState.CLOSED:
            self._judge(now)

    def justified(self, about: str) -> None:
        """The one that it complained about is dead: nothing speaks against who said so."""
        self._outcomes = deque(o for o in self._outcomes if o.about != about)

    def left(self, request: RequestId) -> None:
        """The request is gone from the worker. If it was the trial and nothing came of it, the next one is."""
        if request == self._probe:
            self._probe = None

    def over(self) -> None:
        """Idempotent."""
        if self.state is not CircuitState.OVER:
            self._probe = None
            self._step(CircuitEvent.OVER)

    @property
    def probe(self) -> RequestId | None:
        return self._probe

    def _judge(self, now: float) -> None:
        """One expression decides: enough failures, and enough of all."""
        while self._outcomes and self._outcomes[0].at < now - self._config.breaker_window_s:
            self._outcomes.popleft()
        suspected = len({o.about for o in self._outcomes if o.about}) >= ACCUSED_AT
        bad = sum(o.failed or (suspected and bool(o.about)) for o in self._outcomes)
        # Complaints that aren't held against it are no successes either.
        judged = sum(o.failed or suspected or not o.about for o in self._outcomes)
        if bad >= self._config.breaker_failures and bad >= self._config.breaker_rate * judged:
            self._open(CircuitEvent.TRIP, now)

    def _open(self, event: CircuitEvent, now: float) -> None:
        self._step(event)
        self.opened += 1
        self._until = now + self._patience * self._config.breaker_open_s

    def _step(self, event: CircuitEvent) -> None:
        self.state = CIRCUIT.next(self.state, event)
