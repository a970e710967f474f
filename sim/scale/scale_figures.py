"""What a run of the fast simulator came to: each request's times in a few bytes, and their summary."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from twinpool.contracts.ids import Role
from twinpool.sim.scale.cluster_plan import LatencyTarget
from twinpool.sim.scale.gap_histogram import GapHistogram

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


def summary(figures: RunFigures, target: LatencyTarget, seconds: float, since_s: float = 0.0) -> RunReport:
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
