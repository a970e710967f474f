"""What a run tells of its requests while it goes on, to whoever shows them as production's routers would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from twinpool.contracts.messages.worker_events import Done
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.sim.scale.traffic import SimRequest


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that is over. Times are of the virtual clock."""

    router: int
    """The number of its router."""
    routed: RoutedRequest
    """As its router has it: with the journal and what its workers reported, from which records are made."""
    request: SimRequest
    first_at: float
    """When its first token came to the router; 0: none came."""
    ended_at: float
    done: Done


class RunWatcher(Protocol):
    """Called on the run's thread, at the moment of the virtual clock at which it happens."""

    def came(self, router: int) -> None:
        """A request has come to a router."""

    def refused(self, router: int) -> None:
        """A request that had come was not taken: the queue is full, or its first token would have come too late."""

    def first_token(self, router: int, seconds: float, held: int) -> None:
        """A first token came to a router, so long after its request, of whose prompt `held` tokens were cached."""

    def ended(self, ended: EndedRequest) -> None:
        """A request is over."""
