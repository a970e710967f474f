"""What a run of the fast simulator came to: each request's times in a few bytes, and their summary.

Gaps between tokens are counted in a histogram of seconds, in bins of one per cent. A `RunWatcher` is told of requests
while the run goes on, and shows them as production's routers would.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from math import log
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twinpool.contracts.ids import Role
from twinpool.contracts.messages.worker_events import Done
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.sim.scale.cluster_plan import AnswerTarget
from twinpool.sim.scale.traffic import SimRequest

MIN_S, MAX_S = 1e-6, 1e5
"""What is shorter or longer counts as so long."""
_STEP = log(1.01)
_BINS = int(log(MAX_S / MIN_S) / _STEP) + 2
MIDDLES_S = MIN_S * np.exp((np.arange(_BINS) + 0.5) * _STEP)
"""The seconds that what a bin has counts as: (bins,)."""


class GapHistogram:
    """Counts of seconds; a quantile is right to half a per cent."""

    def __init__(self) -> None:
        self.counts = [0.0] * _BINS
        """By the bins of `MIDDLES_S`."""
        self.total = 0.0
        self.sum_s = 0.0

    def add(self, seconds: float, count: float = 1.0) -> None:
        at = int(log(seconds / MIN_S) / _STEP) if seconds > MIN_S else 0
        self.counts[at if at < _BINS else _BINS - 1] += count
        self.total += count
        self.sum_s += seconds * count

    def quantile(self, share: float) -> float:
        """The seconds that `share` of all that were counted are no longer than; 0 where nothing was counted."""
        if not self.total:
            return 0.0
        at = int(np.searchsorted(np.cumsum(self.counts), share * self.total))
        return float(MIDDLES_S[min(at, _BINS - 1)])

    def share_within(self, seconds: float) -> float:
        """The share of all that took no longer than `seconds`; 1 where nothing was counted."""
        if not self.total:
            return 1.0
        at = int(log(max(seconds, MIN_S) / MIN_S) / _STEP)
        return sum(self.counts[: at + 1]) / self.total


PENDING, ANSWERED, REFUSED, FAILED = 0, 1, 2, 3


@dataclass(slots=True)
class RunFigures:
    """Figures while a run goes on, by a request's number: twenty bytes each."""

    sent: int = 0
    state: bytearray = field(default_factory=bytearray)
    arrived_s: array[float] = field(default_factory=lambda: array("d"))
    ttft_s: array[float] = field(default_factory=lambda: array("f"))
    answer_s: array[float] = field(default_factory=lambda: array("f"))
    """From a request's arrival until its last token."""
    tpot_s: array[float] = field(default_factory=lambda: array("f"))
    """From a token of its answer to the next, on average; 0 where it has one."""
    gaps: GapHistogram = field(default_factory=GapHistogram)
    prompt_tokens: int = 0
    held_tokens: int = 0
    """Prompt tokens that prefill workers needn't compute."""
    loaded_tokens: int = 0
    """Those of them that came from host memory."""
    answer_tokens: int = 0
    worker_s: float = 0.0
    """Seconds of all workers, from their starts to their ends."""
    sizes: list[tuple[float, int, int]] = field(default_factory=list)
    """Ready workers of both pools whenever that changed: when, prefill, decode."""
    events: int = 0

    def began(self, at_s: float) -> int:
        """Enter a request; returns its number."""
        self.sent += 1
        self.state.append(PENDING)
        self.arrived_s.append(at_s)
        for times in (self.ttft_s, self.answer_s, self.tpot_s):
            times.append(0.0)
        return self.sent - 1


@dataclass(frozen=True, slots=True)
class RunReport:
    """The summary of a run. Quantiles are of the requests that were answered."""

    sent: int
    answered: int
    refused: int
    failed: int
    seconds: float
    """Of virtual time, until the last answer."""
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    answer_p50_s: float
    answer_p99_s: float
    ttft_met: float
    """Requests whose first token came in time, of all that were sent."""
    good: float
    """Those that kept both targets, of all that were sent."""
    goodput: float
    """Those, a second."""
    tokens_per_s: float
    hit_rate: float
    loaded_rate: float
    worker_s: float
    role_sizes: dict[str, tuple[int, int]]
    """The fewest and the most ready workers of each pool."""
    reversals: int
    """How often a pool shrank after it had grown, or grew after it had shrunk."""
    events: int
    digest: str
    """Of every request's times: equal runs have equal ones."""


def summary(figures: RunFigures, target: AnswerTarget, seconds: float, since_s: float = 0.0) -> RunReport:
    """Summarise a run of so many seconds. `since_s`: requests that came earlier aren't in quantiles and shares."""
    state = np.frombuffer(bytes(figures.state), np.uint8)
    counted = np.frombuffer(figures.arrived_s, np.float64) >= since_s
    done = (state == ANSWERED) & counted
    ttft, answer, tpot = (
        np.frombuffer(times, np.float32)[done] for times in (figures.ttft_s, figures.answer_s, figures.tpot_s)
    )
    first = ttft <= target.ttft_s
    good = int((first & (tpot <= target.tpot_s)).sum())
    sent = max(1, int(counted.sum()))
    digest = hashlib.blake2b(digest_size=16)
    for part in (figures.ttft_s, figures.answer_s, figures.tpot_s, figures.state):
        digest.update(part)
    pools = list(zip(*figures.sizes, strict=True))[1:] or [(0,), (0,)]
    return RunReport(
        figures.sent,
        int((state == ANSWERED).sum()),
        int((state == REFUSED).sum()),
        int((state == FAILED).sum()),
        seconds,
        _at(ttft, 50),
        _at(ttft, 99),
        float(ttft.mean()) if len(ttft) else 0.0,
        _at(tpot, 50),
        _at(tpot, 99),
        figures.gaps.quantile(0.5),
        figures.gaps.quantile(0.99),
        _at(answer, 50),
        _at(answer, 99),
        int(first.sum()) / sent,
        good / sent,
        good / max(1e-9, seconds - since_s),
        figures.answer_tokens / max(1e-9, seconds),
        figures.held_tokens / max(1, figures.prompt_tokens),
        figures.loaded_tokens / max(1, figures.prompt_tokens),
        figures.worker_s,
        {str(role): (min(sizes), max(sizes)) for role, sizes in zip((Role.PREFILL, Role.DECODE), pools, strict=True)},
        sum(_turns(sizes) for sizes in pools),
        figures.events,
        digest.hexdigest(),
    )


def _at(times: NDArray[np.float32], percent: float) -> float:
    return float(np.percentile(times, percent)) if len(times) else 0.0


def _turns(sizes: tuple[float, ...]) -> int:
    """How often a row of sizes changes its direction."""
    steps = [b - a for a, b in pairwise(sizes) if a != b]
    return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that is over. Times are of the virtual clock."""

    router: int
    """The number of its router."""
    routed: RoutedRequest
    """As its router has it: with the journal and what its workers reported, from which records are made."""
    request: SimRequest
    first_at: float
    """When its first token came to the router; 0: none came."""
    ended_at: float
    done: Done


class RunWatcher(Protocol):
    """Called on the run's thread, at the moment of the virtual clock at which it happens."""

    def came(self, router: int) -> None:
        """A request has come to a router."""

    def refused(self, router: int) -> None:
        """A request that had come was not taken: the queue is full, or its first token would have come too late."""

    def first_token(self, router: int, seconds: float, held: int) -> None:
        """A first token came to a router, so long after its request, of whose prompt `held` tokens were cached."""

    def ended(self, ended: EndedRequest) -> None:
        """A request is over."""
