"""The command `twinpool sim --requests`: simulates many workers and requests, and says what that came to.

And the search for the smallest pools that keep a latency target under given requests (`PoolSearch`, for `twinpool
plan`). More workers of a pool never make anything worse, which is what the search goes by. First both pools double
until they are enough: neither is taken to be worth more than twice that. The fewest of each pool that are enough while
the other is that large are a lower bound, and sums from there on are tried in order. So what it finds is the smallest
sum, at a few dozen simulations instead of all pairs, and small ones are quick.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.sim.scale.cluster_model import ClusterModel
from twinpool.sim.scale.cluster_plan import ClusterPlan, DecodePool, PrefillPool
from twinpool.sim.scale.scale_figures import RunReport
from twinpool.sim.scale.traffic import SimRequest, TrafficShape, drawn, read_trace, replayed, shape_of


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
