"""The ratio of prefill to decode workers where there can't be more of both.

The pressure of a pool is what it needs over what it has. A worker changes its role where the greater of both pressures
is above 1, and would fall, by more than `tolerance`, where every decision within `role_window_s` would have had it,
where nobody comes or goes, and not within `role_cooldown_s` of the last change of roles. With the same load the way
back would raise the greater pressure, so a worker doesn't go to and fro.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from twinpool.cluster.autoscaling.pool_need import PoolNeed
from twinpool.cluster.autoscaling.pool_state import PoolState
from twinpool.contracts.config.autoscaling_config import AutoscalingConfig
from twinpool.contracts.ids import PAIR, Role


class RoleBalance:
    """The memory of the ratio's changes."""

    def __init__(self, config: AutoscalingConfig) -> None:
        self._config = config
        self._favoured: tuple[Role, float] | None = None
        """The pool that should get a worker of the other, and since when."""
        self._changed_at = -math.inf

    def changed(self, now: float) -> None:
        """Note that a worker changes its role."""
        self._changed_at, self._favoured = now, None

    def short_pool(
        self,
        now: float,
        pools: Mapping[Role, PoolState],
        needs: Mapping[Role, PoolNeed],
        *,
        no_more: Mapping[Role, bool],
    ) -> Role | None:
        """The pool that is to get a worker of the other one now; None: neither. `no_more`: whether a pool can't get
        one by a start."""
        short = self._relieved(pools, needs)
        if short is None or not no_more[short] or any(pool.in_flux for pool in pools.values()):
            self._favoured = None
            return None
        if self._favoured is None or self._favoured[0] is not short:
            self._favoured = short, now
        waited = now >= self._favoured[1] + self._config.role_window_s
        return short if waited and now >= self._changed_at + self._config.role_cooldown_s else None

    def _relieved(self, pools: Mapping[Role, PoolState], needs: Mapping[Role, PoolNeed]) -> Role | None:
        """The pool that one worker more would relieve by more than the tolerance, both pools taken together."""
        if not all(needs[role].known and pools[role].ready for role in PAIR):
            return None
        pressure = {role: needs[role].workers / pools[role].ready for role in PAIR}
        short = max(PAIR, key=lambda role: pressure[role])
        other = PAIR[1] if short is PAIR[0] else PAIR[0]
        gets, gives = pools[short].ready + 1, pools[other].ready - 1
        if pressure[short] <= 1 + self._config.tolerance or gives < self._config.bounds(other).min_workers:
            return None
        if gets > self._config.bounds(short).max_workers:
            return None
        after = max(needs[short].workers / gets, needs[other].workers / gives)
        return short if after < pressure[short] * (1 - self._config.tolerance) else None
