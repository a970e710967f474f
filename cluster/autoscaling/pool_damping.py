"""From what a pool needs to how it is changed: at once when it is short, late and by steps when it has too many.

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
"""

from __future__ import annotations

import math
from collections import deque

from twinpool.cluster.autoscaling.pool_need import PoolNeed
from twinpool.cluster.autoscaling.pool_state import PoolState
from twinpool.contracts.config.autoscaling_config import AutoscalingConfig

GAP_PERIODS = 3.0
"""Periods without a known need after which the window begins anew."""
REGRET, MAX_WINDOWS, FORGIVEN = 3.0, 8.0, 24.0
"""Each in numbers of `shrink_window_s`."""


class PoolDamping:
    """The memory of one pool. `now`: seconds of a clock that goes on while this lives."""

    def __init__(self, config: AutoscalingConfig, least: int, most: int) -> None:
        self._config = config
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
        target = max(target, self.least)
        return min(max(0, target - wanted), self._config.grow_step)

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
        return min(max(0, pool.ready - target), self._config.shrink_step)

    def not_wanted(self, now: float, pool: PoolState) -> int:
        """How many starts that wait for a node are no longer wanted: nothing within a window needed them."""
        missed = now <= self._missed_at + FORGIVEN * self._config.shrink_window_s
        since = now - (self.window_s if missed else self._config.window_s)
        if not pool.unplaced or not self._needs or self._needs[0][0] > since:
            return 0
        target = max(self.least, min(self.most, self._least_lately(since)))
        return min(pool.unplaced, max(0, pool.wanted - target))

    def _least_lately(self, since: float) -> int:
        """The fewest workers that were enough at every time from `since` on."""
        return math.ceil(max(needed for at, needed in self._needs if at >= since) - 1e-9)
