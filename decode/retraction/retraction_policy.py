"""The retraction policy: which requests leave the device first, which come back first, and whether to copy their state.

Pure functions of plain values; another policy is another function.
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
    """A request as the order of return sees it: it came at `arrived`, in seconds of the worker's clock."""

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
    """When it came, in seconds of the worker's clock."""
    pages: int
    """Pages of the full pool that it leased itself, which others could have."""


def retract_first(candidate: RetractionCandidate[R]) -> tuple[int, int, int, float]:
    """Sort key of the order in which requests leave: lower priority first, then fewer tokens generated, then the longer
    prompt, then the later arrival."""
    return candidate.priority, candidate.generated, -candidate.prompt, -candidate.arrived


def victims(candidates: Sequence[RetractionCandidate[R]], pages: int) -> list[R]:
    """Return the requests to retract, in the order of `retract_first`, so that `pages` pages become free: as few as do,
    at least one, all where they don't suffice."""
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
    """Moving averages of measured rates; 0: nothing measured yet. Each new figure has a weight of three tenths."""

    out_bytes_per_s: float = 0.0
    """From the device to host memory."""
    back_bytes_per_s: float = 0.0
    """From host memory to the device."""
    positions_per_s: float = 0.0
    """Prompt positions that prefill delivers, from grant to full arrival: its queue and the transfer included."""

    def saw_out(self, nbytes: int, seconds: float) -> None:
        self.out_bytes_per_s = _blend(self.out_bytes_per_s, nbytes, seconds)

    def saw_back(self, nbytes: int, seconds: float) -> None:
        self.back_bytes_per_s = _blend(self.back_bytes_per_s, nbytes, seconds)

    def saw_prefill(self, positions: int, seconds: float) -> None:
        self.positions_per_s = _blend(self.positions_per_s, positions, seconds)


def cheaper_to_copy(nbytes: int, positions: int, rates: RetractionRates) -> bool:
    """Whether `nbytes` of state are copied out and back no later than `positions` positions are computed again.

    Where a rate isn't known yet, state is copied: so the rate becomes known, and it takes nothing from other requests.
    """
    if not (rates.out_bytes_per_s and rates.back_bytes_per_s and rates.positions_per_s):
        return True
    return nbytes / rates.out_bytes_per_s + nbytes / rates.back_bytes_per_s <= positions / rates.positions_per_s


def _blend(before: float, amount: int, seconds: float) -> float:
    if seconds <= 0 or not amount:
        return before
    rate = amount / seconds
    return rate if not before else 0.7 * before + 0.3 * rate
