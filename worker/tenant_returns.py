"""The tenants that came back lately: whose next prompt is to be expected soon, and must not find a long step under way.

Of all tenants the two that came last are remembered, which is all that the question needs: whether there is one of the
last so many seconds that isn't the only one with work now.
"""

from __future__ import annotations

from collections.abc import Set


class TenantReturns:
    """The latest returns of tenants to having something to do. Times are seconds of one clock."""

    def __init__(self, window_s: float) -> None:
        """`window_s`: seconds after which a return is forgotten."""
        self._window_s = window_s
        self._there: Set[str] = frozenset()
        self._latest: list[tuple[str, float]] = []
        """The two that came last, the last one first."""

    def follow(self, active: Set[str], now: float) -> None:
        """Take in which tenants have something to do now. To be called whenever that may have changed."""
        for tenant in sorted(active - self._there):
            self._latest = [(tenant, now), *(one for one in self._latest if one[0] != tenant)][:2]
        self._there = frozenset(active)

    def expected(self, now: float) -> bool:
        """Whether a tenant came back within the window that isn't the only one with something to do now."""
        return any(now - at < self._window_s and self._there != {tenant} for tenant, at in self._latest)
