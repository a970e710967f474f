"""The restart policy of processes that have died: one rule for workers, the router and the local arena agent.

Deaths count within a sliding window (`cluster.restart_window_s`), so that one a day doesn't matter and more than twenty
in ten minutes are too many (`cluster.restart_limit`). A process that served for `SETTLED_S` before it died is started
at once, and so is one after its first quick death; each further quick death doubles the delay, from `BACKOFF_S` up to
`BACKOFF_MAX_S`.
"""

from __future__ import annotations

from collections import deque

from twinpool.contracts.config.cluster_config import ClusterConfig

SETTLED_S = 10.0
"""A process that served this long before it died is started again without delay."""
BACKOFF_S = 0.5
BACKOFF_MAX_S = 10.0


class RestartHistory:
    """The deaths of one process, across its starts."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._deaths: deque[tuple[float, bool]] = deque()
        """When, and whether it was by itself."""
        self._quick = 0

    def died(self, now: float, serving_since: float | None, *, silent: bool = False) -> float:
        """Count a death; returns the seconds that the next start has to wait. `serving_since`: when the process began
        to serve, None if it never did. Both times are by the same clock. `silent`: it was ended for its silence."""
        self._deaths.append((now, not silent))
        while self._deaths[0][0] < now - self._config.restart_window_s:
            self._deaths.popleft()
        settled = serving_since is not None and now - serving_since >= SETTLED_S
        self._quick = 0 if settled else self._quick + 1
        return min(BACKOFF_MAX_S, BACKOFF_S * 2 ** (self._quick - 2)) if self._quick > 1 else 0.0

    @property
    def deaths(self) -> int:
        """Number of deaths within the window that ended with the last death."""
        return len(self._deaths)

    @property
    def too_many(self) -> bool:
        """Whether the process has died by itself too often within the window to be started again."""
        return sum(by_itself for _, by_itself in self._deaths) > self._config.restart_limit

    def forgive(self) -> None:
        """Forget all deaths, because an operator wants the process back."""
        self._deaths.clear()
        self._quick = 0
