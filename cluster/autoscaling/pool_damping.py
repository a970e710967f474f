"""The autoscaler's decisions: what both pools need, damped, within all bounds. The same inputs give the same decisions.

A pool is changed at once when it is short (`PoolDamping`), late and by steps when it has too many:

- Nothing changes while need and size differ by no more than `tolerance`.
- A pool grows where requests wait or come late and two decisions in a row would have it, and else to what all decisions
  within `window_s` have needed: by `grow_step` at most, not within `grow_cooldown_s` of its last growth, and not while
  a failed start is waited off.
- It shrinks to the most that it has needed within `shrink_window_s` and no further, by `shrink_step` at most, not
  within `shrink_cooldown_s` of any change of it, not while anyone comes or goes, and not while its target is missed.
  All of the window must have been observed: a controller that was started again shrinks nothing until then.
- A shrinking that was regretted, in that the pool grew again within `REGRET` windows, doubles the window, to
  `MAX_WINDOWS` times it at most, and that size is not gone back to while the load is what it was then. After
  `FORGIVEN` windows without regret all is as configured again.
- Starts that wait for a node are withdrawn when nothing within `window_s` needed them. Where that was regretted, in
  that the pool grew again within `REGRET` windows, further ones are withdrawn as late as workers leave: each start that
  is begun anew waits from the beginning.
- Bounds hold: a pool below its least grows at once, one above its most shrinks as above.

Workers that share their experts (`decode.dp`) come and go as whole groups: a pool grows by as many groups as hold what
it is short of, and by one where `grow_step` is less than that; it shrinks by those of which it needs nobody. Their
roles stay.

At most one of the pools' changes is of roles. A pool that is short grows before any other gives a worker away; where
both are short and there is no room for both, the one whose pressure is higher comes first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from twinpool.cluster.autoscaling.load_window import MeasuredLoad, PoolState
from twinpool.cluster.autoscaling.pool_need import PoolNeed, decode_need, prefill_need
from twinpool.contracts.config.autoscaling_config import AutoscalingConfig
from twinpool.contracts.ids import PAIR, Role

GAP_PERIODS = 3.0
"""Periods without a known need after which the window begins anew."""
REGRET, MAX_WINDOWS, FORGIVEN = 3.0, 8.0, 24.0
"""Each in numbers of `shrink_window_s`."""


def whole_groups(workers: int, together: int) -> int:
    """So many of the workers as are whole groups of `together`."""
    return workers - workers % together


class PoolDamping:
    """The memory of one pool. `now`: seconds of a clock that goes on while this lives."""

    def __init__(self, config: AutoscalingConfig, least: int, most: int, together: int = 1) -> None:
        """`together`: so many workers of the pool share their experts."""
        self._config, self._together = config, together
        self.least, self.most = least, most
        self._needs: deque[tuple[float, float]] = deque()
        """When, and the most workers that shrinking might have left then."""
        self._began: float | None = None
        self._asked: deque[tuple[float, float]] = deque()
        """When, and the workers that were needed then; of the last `window_s`."""
        self._grown_at = self._changed_at = -math.inf
        self._shrunk_at = self._regretted_at = -math.inf
        self._withdrawn_at = self._missed_at = -math.inf
        """When starts were withdrawn last, and when one was that had to be begun again."""
        self._too_few: dict[int, float] = {}
        """Sizes that were regretted, each with the least load at which it was."""
        self._windows = 1.0
        """The window by which it shrinks now, in numbers of `shrink_window_s`."""
        self._failures = 0
        self._no_growth_until = -math.inf

    # ------------------------------------------------------------ what has happened

    def observe(self, now: float, need: PoolNeed, pool: PoolState) -> None:
        """Take in what is needed; once for each decision."""
        if not need.known:
            self._asked.clear()
            return
        gap = now - self._needs[-1][0] if self._needs else 0.0
        if self._began is None or gap > GAP_PERIODS * self._config.period_s:
            self._began = now
            self._needs.clear()
            self._asked.clear()
        needed = need.workers / (1 - self._config.tolerance)
        again = [size for size, load in self._too_few.items() if need.load >= load * (1 - self._config.tolerance)]
        needed = max([needed, *(size + 1.0 for size in again)])
        if need.urgent:
            needed = max(needed, float(pool.ready))
        self._needs.append((now, needed))
        while self._needs[0][0] <= now - MAX_WINDOWS * self._config.shrink_window_s:
            self._needs.popleft()
        self._asked.append((now, need.workers))
        while len(self._asked) > 1 and self._asked[1][0] <= now - self._config.window_s:
            self._asked.popleft()

    def changed(self, now: float) -> None:
        """Note that the pool was changed, by whomever."""
        self._changed_at = now

    def grown(self, now: float, need: PoolNeed, pool: PoolState) -> None:
        """Note that workers were told to start."""
        self._changed_at = self._grown_at = now
        if now - self._shrunk_at <= REGRET * self.window_s:
            self._windows, self._regretted_at = min(MAX_WINDOWS, 2 * self._windows), now
            self._shrunk_at = -math.inf
            self._too_few[pool.wanted] = min(need.load, self._too_few.get(pool.wanted, math.inf))
        if now - self._withdrawn_at <= REGRET * self._config.shrink_window_s:
            self._missed_at = now

    def shrunk(self, now: float) -> None:
        """Note that workers were told to leave for want of work."""
        self._changed_at = self._shrunk_at = now

    def withdrawn(self, now: float) -> None:
        """Note that starts which waited for a node were taken back."""
        self._withdrawn_at = now

    @property
    def window_s(self) -> float:
        """Seconds of the window by which it shrinks now."""
        return self._windows * self._config.shrink_window_s

    def failed(self, now: float) -> float:
        """Note that a start failed or was given up; returns the seconds without growth. What fails while an earlier
        failure is waited off was begun before that, and counts with it."""
        if self.backs_off(now):
            return self._no_growth_until - now
        self._failures += 1
        pause = min(self._config.max_backoff_s, self._config.backoff_s * 2.0 ** min(self._failures - 1, 30))
        self._no_growth_until = now + pause
        return pause

    def started(self) -> None:
        """Note that a start has succeeded."""
        self._failures, self._no_growth_until = 0, -math.inf

    # ------------------------------------------------------------ questions

    def backs_off(self, now: float) -> bool:
        """Whether a failed start is waited off."""
        return now < self._no_growth_until

    def growth(self, now: float, need: PoolNeed, pool: PoolState) -> int:
        """How many workers are to be started."""
        if self.backs_off(now) or now < self._grown_at + self._config.grow_cooldown_s:
            return 0
        wanted, asked = pool.wanted, self._asked_for(now, need)
        target = wanted
        if asked > wanted * (1 + self._config.tolerance):
            target = min(math.ceil(asked), self.most)
        short = self._whole(max(target, self.least) - wanted + self._together - 1)
        return min(short, self._step(self._config.grow_step), self._whole(self.most - wanted))

    def _asked_for(self, now: float, need: PoolNeed) -> float:
        """What was needed all the while: by the last two decisions where it is urgent, else within `window_s`."""
        if need.urgent and len(self._asked) > 1:
            return min(self._asked[-1][1], self._asked[-2][1])
        if self._asked and self._asked[0][0] <= now - self._config.window_s:
            return min(workers for _, workers in self._asked)
        return 0.0

    def shrinkage(self, now: float, pool: PoolState) -> int:
        """How many workers are to leave by drain."""
        if pool.in_flux or now < self._changed_at + self._config.shrink_cooldown_s:
            return 0
        if now > self._regretted_at + FORGIVEN * self._config.shrink_window_s:
            self._windows = 1.0
            self._too_few.clear()
        if self._began is None or now < self._began + self.window_s or not self._needs:
            return 0
        target = max(self.least, min(self.most, self._least_lately(now - self.window_s)))
        return min(self._whole(pool.ready - target), self._step(self._config.shrink_step))

    def not_wanted(self, now: float, pool: PoolState) -> int:
        """How many starts that wait for a node are no longer wanted: nothing within a window needed them."""
        missed = now <= self._missed_at + FORGIVEN * self._config.shrink_window_s
        since = now - (self.window_s if missed else self._config.window_s)
        if not pool.unplaced or not self._needs or self._needs[0][0] > since:
            return 0
        target = max(self.least, min(self.most, self._least_lately(since)))
        return self._whole(min(pool.unplaced, pool.wanted - target))

    def _whole(self, workers: int) -> int:
        return whole_groups(max(0, workers), self._together)

    def _step(self, most: int) -> int:
        """The most workers by which the pool changes at a time, where `most` are configured: a group at least."""
        return self._whole(max(self._together, most))

    def _least_lately(self, since: float) -> int:
        """The fewest workers that were enough at every time from `since` on."""
        return math.ceil(max(needed for at, needed in self._needs if at >= since) - 1e-9)


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

    def __init__(
        self, config: AutoscalingConfig, page_tokens: int, together: Callable[[Role], int] = lambda role: 1
    ) -> None:
        """`page_tokens`: tokens of a page of a decode worker. `together`: how many workers of a role share their
        experts; the bounds of its pool are multiples of it."""
        self._config, self._page_tokens, self._together = config, page_tokens, together
        bounds = {role: config.bounds(role) for role in PAIR}
        self.pools = {
            role: PoolDamping(config, bounds[role].min_workers, bounds[role].max_workers, together(role))
            for role in PAIR
        }
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
            count = whole_groups(max(0, min(wished, fits.get(role, wished))), self._together(role))
            if wished > count:
                self.unfit[role] = wished - count
            if count:
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
        if any(self._together(role) > 1 for role in PAIR):
            return None
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
