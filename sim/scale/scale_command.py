"""The command `twinpool sim --requests`: simulates many workers and requests, and says what that came to.

And the search for the smallest pools that keep a latency target under given requests (`PoolSearch`, for `twinpool
plan`). More workers of a pool never make anything worse, which is what the search goes by. First both pools double
until they are enough: neither is taken to be worth more than twice that. The fewest of each pool that are enough while
the other is that large are a lower bound, and sums from there on are tried in order. So what it finds is the smallest
sum, at a few dozen simulations instead of all pairs, and small ones are quick.

Of each request a run keeps its times in a few bytes. Gaps between tokens are counted in a histogram of seconds, in bins
of one per cent. A `RunWatcher` is told of requests while the run goes on, and shows them as production's routers would.
"""

from __future__ import annotations

import hashlib
import resource
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role
from twinpool.contracts.messages.worker_events import Done
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.sim.scale.cluster_model import ClusterModel
from twinpool.sim.scale.cluster_plan import AnswerTarget, ClusterPlan, DecodePool, PrefillPool
from twinpool.sim.scale.traffic import SimRequest, TrafficShape, drawn, read_trace, replayed, shape_of

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


PREFILL_PART = 0.6
"""The part of the workers that prefill where only their sum is given: prompts of chats are long and answers short."""
HOUR_S = 3600.0
MAX_QUEUED = 100_000
"""`router.max_queue` of the simulated routers."""


@dataclass(frozen=True, slots=True)
class ScaleOptions:
    """What the command line says."""

    workers: int
    requests: int
    seed: int = 0
    policy: str = "cache_aware"
    seconds: float | None = None
    """Virtual time in which the requests come; None: an hour, or the trace's own with `replay`."""
    trace: Path | None = None
    replay: bool = False
    """Whether the requests are the trace's own, and not drawn in its shape."""

    def plan(self) -> ClusterPlan:
        """The cluster. Raises `ConfigError` for one that can't be."""
        if self.workers < 2:
            raise ConfigError(f"--workers must be 2 or more, one of each pool; got {self.workers}")
        prefill = min(self.workers - 1, max(1, round(self.workers * PREFILL_PART)))
        config = config_from_dict({"router": {"policy": self.policy, "max_queue": MAX_QUEUED}})
        return ClusterPlan(PrefillPool(prefill), DecodePool(self.workers - prefill), config=config)

    def traffic(self) -> Iterator[SimRequest]:
        """The requests. Raises `ConfigError` for a trace that can't be read."""
        if self.replay and self.trace is None:
            raise ConfigError("--replay needs --trace FILE: the requests are the trace's own")
        if self.requests < 1:
            raise ConfigError(f"--requests must be 1 or more, got {self.requests}")
        seconds = HOUR_S if self.seconds is None else self.seconds
        if self.trace is None:
            return drawn(TrafficShape(self.requests, seconds, self.seed))
        try:
            lines = read_trace(self.trace, self.requests if self.replay else None)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--trace: {error}") from None
        if not self.replay:
            return drawn(shape_of(lines, self.requests, seconds, self.seed))
        lasts = max(1e-3, lines[-1].at_s - lines[0].at_s)
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise ConfigError(f"--seconds must be above 0, got {self.seconds:g}")
        return replayed(lines, speed=lasts / self.seconds if self.seconds is not None else 1.0)


def simulate(plan: ClusterPlan, requests: Iterator[SimRequest], seed: int) -> tuple[RunReport, list[str]]:
    """Run a cluster until all requests have ended; returns what that came to, and what doesn't add up."""
    model = ClusterModel(plan, requests, seed)
    try:
        model.run()
        return model.report(), model.check()
    finally:
        model.close()


def simulate_scale(options: ScaleOptions, say: Callable[[str], None]) -> bool:
    """Run the command; True if all requests were answered or refused. Raises `ConfigError` for what can't be run."""
    plan, requests = options.plan(), options.traffic()
    pools = f"{plan.prefill.workers} prefill and {plan.decode.workers} decode workers"
    say(f"{pools}, policy {options.policy}, seed {options.seed}")
    began, spent = time.monotonic(), time.process_time()
    report, wrong = simulate(plan, requests, options.seed)
    took, spent = time.monotonic() - began, time.process_time() - spent
    for line in described(report):
        say(line)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    each = f"{1e6 * spent / max(1, report.sent):,.0f} us a request"
    say(f"simulated in {took:,.1f} s, {spent:,.1f} s of them computing: {each}, {rss:,.0f} MiB at most")
    for line in wrong:
        say(f"VIOLATION {line}")
    return not wrong and report.sent == report.answered + report.refused


def described(report: RunReport) -> list[str]:
    """A report in lines that people can read."""

    def pair(p50: float, p99: float) -> str:
        return f"p50 {1000 * p50:,.1f} ms, p99 {1000 * p99:,.1f} ms"

    sizes = ", ".join(f"{role} {least} and {most}" for role, (least, most) in report.role_sizes.items())
    return [
        f"requests: {report.sent:,} sent, {report.answered:,} answered, {report.refused:,} refused, "
        f"{report.failed:,} failed, in {report.seconds:,.1f} s of virtual time, {report.events:,} events",
        f"first token: {pair(report.ttft_p50_s, report.ttft_p99_s)}, mean {1000 * report.ttft_mean_s:,.1f} ms; "
        f"{report.ttft_met:.1%} in time",
        f"next token: {pair(report.itl_p50_s, report.itl_p99_s)}",
        f"time per output token (TPOT): {pair(report.tpot_p50_s, report.tpot_p99_s)}",
        f"whole answer: {pair(report.answer_p50_s, report.answer_p99_s)}",
        f"good: {report.good:.1%} of the requests, {report.goodput:,.2f} a second; "
        f"{report.tokens_per_s:,.0f} tokens a second",
        f"prompt tokens that were not computed: {report.hit_rate:.1%}; of host memory: {report.loaded_rate:.1%}",
        f"ready workers, fewest and most: {sizes}; {report.reversals} reversals; {report.worker_s:,.0f} worker-seconds",
        f"digest: {report.digest}",
    ]
