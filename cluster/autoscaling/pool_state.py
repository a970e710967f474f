"""What the rules are told: each worker's load, and who of a pool is where in its life."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.contracts.ids import Incarnation, Role, WorkerName


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker that serves, as its last heartbeat told."""

    name: WorkerName
    incarnation: Incarnation
    role: Role
    told: int
    """A number that changes whenever it tells its counters: these come more seldom than the rest."""
    running: int
    pages_total: int
    pages_free: int
    prompt_tokens: int
    """Of its prompts that are still to be computed."""
    computed: float = 0.0
    """Counter: prompt tokens computed."""
    generated: float = 0.0
    """Counter: tokens of answers generated."""
    compute_rate: float = 0.0
    """Prompt tokens a second that it computes when it does; 0 while it hasn't said."""
    retractions: float = 0.0
    """Counter: requests put off for want of pages."""
    retracted: float = 0.0
    """Requests that are put off now."""
    ungranted: int = 0
    """Requests that wait for pages now."""
    granted: int = 0
    """Requests that have pages and don't run yet."""

    @property
    def key(self) -> tuple[WorkerName, Incarnation]:
        return self.name, self.incarnation


@dataclass(frozen=True, slots=True)
class PoolState:
    """How many workers of a pool are where in their life."""

    role: Role
    ready: int = 0
    starting: int = 0
    """Starting, and placed on a node or not yet known to wait for one."""
    unplaced: int = 0
    """Starting, and waiting for a node with a place."""
    dead: int = 0
    """Died, and to be started again."""
    leaving: int = 0
    """Draining, to leave or to change their role."""

    @property
    def wanted(self) -> int:
        """Workers that it has or is to have."""
        return self.ready + self.starting + self.unplaced + self.dead

    @property
    def in_flux(self) -> bool:
        """Whether someone comes or goes. A start that waits for a node may do so for long, and doesn't count."""
        return bool(self.starting or self.dead or self.leaving)
