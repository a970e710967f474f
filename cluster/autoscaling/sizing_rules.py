"""The autoscaler's decisions: what both pools need, damped, within all bounds. The same inputs give the same decisions.

At most one of the pools' changes is of roles. A pool that is short grows before any other gives a worker away; where
both are short and there is no room for both, the one whose pressure is higher comes first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from twinpool.cluster.autoscaling.load_window import MeasuredLoad
from twinpool.cluster.autoscaling.pool_damping import PoolDamping
from twinpool.cluster.autoscaling.pool_need import PoolNeed, decode_need, prefill_need
from twinpool.cluster.autoscaling.pool_state import PoolState
from twinpool.contracts.config.autoscaling_config import AutoscalingConfig
from twinpool.contracts.ids import PAIR, Role


class RoleBalance:
    """The ratio of prefill to decode workers where there can't be more of both, and the memory of its changes.

    The pressure of a pool is what it needs over what it has. A worker changes its role where the greater of both
    pressures is above 1, and would fall, by more than `tolerance`, where every decision within `role_window_s` would
    have had it, where nobody comes or goes, and not within `role_cooldown_s` of the last change of roles. With the same
    load the way back would raise the greater pressure, so a worker doesn't go to and fro.
    """

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


@dataclass(frozen=True, slots=True)
class GrowPool:
    """Start `count` workers."""

    role: Role
    count: int
    why: str


@dataclass(frozen=True, slots=True)
class ShrinkPool:
    """Have `count` workers drain and leave."""

    role: Role
    count: int
    why: str


@dataclass(frozen=True, slots=True)
class CancelStarts:
    """Take back `count` starts that wait for a node."""

    role: Role
    count: int
    why: str


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """Have a worker of the other pool drain and come back in `role`."""

    role: Role
    why: str


SizingChange = GrowPool | ShrinkPool | CancelStarts | ChangeRole


class SizingRules:
    """The rules of both pools, and what they remember."""

    def __init__(self, config: AutoscalingConfig, page_tokens: int) -> None:
        """`page_tokens`: tokens of a page of a decode worker."""
        self._config, self._page_tokens = config, page_tokens
        bounds = {role: config.bounds(role) for role in PAIR}
        self.pools = {role: PoolDamping(config, bounds[role].min_workers, bounds[role].max_workers) for role in PAIR}
        self._balance = RoleBalance(config)
        self.needs: dict[Role, PoolNeed] = {}
        """What was needed at the last decision."""
        self.unfit: dict[Role, int] = {}
        """Workers that would have been started at the last decision, and that there is no room for."""

    def decide(
        self,
        now: float,
        pools: Mapping[Role, PoolState],
        load: MeasuredLoad,
        *,
        held: bool = False,
        fits: Mapping[Role, int] | None = None,
    ) -> list[SizingChange]:
        """What is to be changed now. `held`: observe only. `fits`: workers more of each role that there is room for;
        None: any number. What is returned counts as done."""
        needs = {
            Role.PREFILL: prefill_need(self._config, load),
            Role.DECODE: decode_need(self._config, load, self._page_tokens),
        }
        self.needs = needs
        for role in PAIR:
            self.pools[role].observe(now, needs[role], pools[role])
        if held:
            return []
        self.unfit = {}
        fits = {} if fits is None else fits
        changes: list[SizingChange] = self._grow(now, pools, needs, fits)
        grown = {change.role for change in changes}
        for role in PAIR:
            if role not in grown and (change := self._fewer(now, role, pools[role])) is not None:
                changes.append(change)
        if not changes and (change := self._other_role(now, pools, needs, fits)) is not None:
            changes.append(change)
        return changes

    def _grow(
        self,
        now: float,
        pools: Mapping[Role, PoolState],
        needs: Mapping[Role, PoolNeed],
        fits: Mapping[Role, int],
    ) -> list[SizingChange]:
        changes: list[SizingChange] = []
        for role in sorted(PAIR, key=lambda role: -needs[role].workers / max(1, pools[role].wanted)):
            asked = self.pools[role].growth(now, needs[role], pools[role])
            started = sum(change.count for change in changes if isinstance(change, GrowPool))
            wished = min(asked, self._room(pools) - started)
            count = min(wished, fits.get(role, wished))
            if wished > max(0, count):
                self.unfit[role] = wished - max(0, count)
            if count > 0:
                short = pools[role].wanted < self.pools[role].least
                changes.append(GrowPool(role, count, "it has fewer than its least" if short else needs[role].why))
                self.pools[role].grown(now, needs[role], pools[role])
        return changes

    def _fewer(self, now: float, role: Role, pool: PoolState) -> SizingChange | None:
        damping = self.pools[role]
        if (count := damping.not_wanted(now, pool)) > 0:
            damping.withdrawn(now)
            return CancelStarts(role, count, "the load has fallen before a node had a place")
        if (count := damping.shrinkage(now, pool)) > 0:
            damping.shrunk(now)
            return ShrinkPool(role, count, f"for {damping.window_s:g} s fewer were enough ({self.needs[role].why})")
        return None

    def _other_role(
        self,
        now: float,
        pools: Mapping[Role, PoolState],
        needs: Mapping[Role, PoolNeed],
        fits: Mapping[Role, int],
    ) -> SizingChange | None:
        full = {role: self._room(pools) <= 0 or fits.get(role, 1) <= 0 for role in PAIR}
        # A change needs a start, so where starts fail there is none either.
        no_more = {
            role: (full[role] or bool(pools[role].unplaced)) and not self.pools[role].backs_off(now) for role in PAIR
        }
        short = self._balance.short_pool(now, pools, needs, no_more=no_more)
        if short is None:
            return None
        self._balance.changed(now)
        for role in PAIR:
            self.pools[role].changed(now)
        return ChangeRole(short, needs[short].why)

    def _room(self, pools: Mapping[Role, PoolState]) -> int:
        """How many workers more both pools may have together."""
        return self._config.max_together - sum(pools[role].wanted for role in PAIR)
