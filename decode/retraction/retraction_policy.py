"""Who leaves the device when memory is short, who comes back first, and whether state is copied or computed again.

Plain functions of plain facts; another policy is another function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

__all__ = [
    "HasArrival",
    "RetractionCandidate",
    "RetractionRates",
    "cheaper_to_copy",
    "retract_first",
    "returns_first",
    "victims",
]

R = TypeVar("R")


class HasArrival(Protocol):
    """Whatever came at some time, in seconds."""

    arrived: float


@dataclass(frozen=True)
class RetractionCandidate(Generic[R]):
    """A request that may be retracted, as the policy sees it."""

    request: R
    priority: int
    generated: int
    """Tokens of its answer."""
    prompt: int
    """Tokens of its prompt."""
    arrived: float
    """When it came, in seconds."""
    pages: int
    """Pages of its own that others could have."""


def retract_first(candidate: RetractionCandidate[R]) -> tuple[int, int, int, float]:
    """The order in which requests leave: of lower priority, then with fewer tokens generated, then with the longer
    prompt, then those that came last."""
    return candidate.priority, candidate.generated, -candidate.prompt, -candidate.arrived


def victims(candidates: Sequence[RetractionCandidate[R]], pages: int) -> list[R]:
    """Who leaves so that `pages` pages become free: as few as do, at least one, as long as there is any."""
    chosen: list[R] = []
    for candidate in sorted(candidates, key=retract_first):
        chosen.append(candidate.request)
        pages -= candidate.pages
        if pages <= 0:
            break
    return chosen


def returns_first(request: HasArrival) -> float:
    """The order in which requests come back: oldest first, so that none starves."""
    return request.arrived


@dataclass
class RetractionRates:
    """What was measured lately; 0: nothing yet. Each new figure counts for three tenths."""

    out_bytes_per_s: float = 0.0
    """To host memory."""
    back_bytes_per_s: float = 0.0
    positions_per_s: float = 0.0
    """What prefill brings: from a grant to the arrival of everything, its queue and the transfer included."""

    def saw_out(self, nbytes: int, seconds: float) -> None:
        self.out_bytes_per_s = _blend(self.out_bytes_per_s, nbytes, seconds)

    def saw_back(self, nbytes: int, seconds: float) -> None:
        self.back_bytes_per_s = _blend(self.back_bytes_per_s, nbytes, seconds)

    def saw_prefill(self, positions: int, seconds: float) -> None:
        self.positions_per_s = _blend(self.positions_per_s, positions, seconds)


def cheaper_to_copy(nbytes: int, positions: int, rates: RetractionRates) -> bool:
    """Whether `nbytes` of state are sooner there and back than `positions` positions computed again.

    Where a rate isn't known yet, it is copied: that is how it becomes known, and it takes nothing from others.
    """
    if not (rates.out_bytes_per_s and rates.back_bytes_per_s and rates.positions_per_s):
        return True
    return nbytes / rates.out_bytes_per_s + nbytes / rates.back_bytes_per_s <= positions / rates.positions_per_s


def _blend(before: float, amount: int, seconds: float) -> float:
    if seconds <= 0 or not amount:
        return before
    rate = amount / seconds
    return rate if not before else 0.7 * before + 0.3 * rate
