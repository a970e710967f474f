"""The search for the smallest pools that keep a latency target under given requests.

More workers of a pool never make anything worse, which is what the search goes by. First both pools double until they
are enough: neither is taken to be worth more than twice that. The fewest of each pool that are enough while the other
is that large are a lower bound, and sums from there on are tried in order. So what it finds is the smallest sum, at a
few dozen simulations instead of all pairs, and small ones are quick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twinpool.sim.scale.scale_figures import RunReport


@dataclass(frozen=True, slots=True)
class PoolPrediction:
    """What pools of these sizes would come to."""

    prefill: int
    decode: int
    report: RunReport
    decode_peak: int = 0
    """The most positions that a decode worker held."""

    @property
    def workers(self) -> int:
        return self.prefill + self.decode


Predict = Callable[[int, int], PoolPrediction]
"""Simulates so many prefill and decode workers."""


class PoolSearch:
    """One search. Predictions are kept: none is made twice."""

    def __init__(self, predict: Predict, share: float, most: int) -> None:
        """`share`: of the requests that must be good. `most`: workers of each pool at most."""
        self._predict, self._share, self._most = predict, share, most
        self._made: dict[tuple[int, int], PoolPrediction] = {}

    def look(self, prefill: int, decode: int) -> PoolPrediction:
        sizes = prefill, decode
        if sizes not in self._made:
            self._made[sizes] = self._predict(prefill, decode)
        return self._made[sizes]

    def enough(self, prefill: int, decode: int) -> bool:
        return self.look(prefill, decode).report.good >= self._share

    def smallest(self) -> PoolPrediction | None:
        """The smallest pools that are enough; of equal sums those with fewer prefill workers. None where none are."""
        both = 1
        while not self.enough(both, both):
            if both >= self._most:
                return None
            both = min(2 * both, self._most)
        large = min(2 * both, self._most)
        min_prefill = self._least(large, lambda count: self.enough(count, large))
        min_decode = self._least(large, lambda count: self.enough(large, count))
        for total in range(min_prefill + min_decode, 2 * both + 1):
            for prefill in range(min_prefill, min(large, total - min_decode) + 1):
                if total - prefill <= large and self.enough(prefill, total - prefill):
                    return self.look(prefill, total - prefill)
        return self.look(both, both)

    def _least(self, high: int, enough: Callable[[int], bool]) -> int:
        """The fewest for which `enough` holds, by halving; it holds for `high`."""
        low = 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle + 1, high)
        return low

    def beside(self, found: PoolPrediction) -> list[PoolPrediction]:
        """Those with a worker less or more of one pool: what the choice is beside."""
        sizes = [
            (found.prefill + prefill, found.decode + decode) for prefill, decode in ((-1, 0), (0, -1), (1, 0), (0, 1))
        ]
        return [self.look(*pair) for pair in sizes if min(pair) >= 1 and max(pair) <= self._most]
