"""Goodput: how many requests a second get their answers within an SLO, at each rate of arrivals, side beside side.

An open loop: requests are due at the times of a Poisson process, however slow the answers are, and their times count
from then. An answer is good that came whole, whose first token came within the SLO's TTFT and whose later ones came
within its ITL on average (TPOT, as in `bench.common.latency_report`); the worst gaps are told beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tests.support.process_cluster import Served

_AFTER_S = 30.0
"""How long after the last arrival answers are waited for."""


@dataclass(frozen=True)
class Load:
    """What is asked at one rate."""

    rate: float
    """Requests a second."""
    seconds: float
    prompt_tokens: tuple[int, int]
    """From, to."""
    output_tokens: int
    seed: int = 1

    def asks(self, vocab: int) -> list[tuple[float, list[int]]]:
        """When each request is due, in seconds, and its prompt: the same for the same seed."""
        random, at = np.random.default_rng(self.seed), 0.0
        asks: list[tuple[float, list[int]]] = []
        while (at := at + random.exponential(1 / self.rate)) < self.seconds or not asks:
            length = int(random.integers(self.prompt_tokens[0], self.prompt_tokens[1], endpoint=True))
            asks.append((min(at, self.seconds), random.integers(vocab // 2, vocab, length).tolist()))
        return asks


@dataclass(frozen=True)
class Slo:
    """In seconds."""

    ttft_s: float = 1.0
    itl_s: float = 0.04

    def holds(self, served: Served) -> bool:
        times = served.times_s
        if served.failed or len(times) < served.wanted or times[0] > self.ttft_s:
            return False
        return len(times) == 1 or (times[-1] - times[0]) / (len(times) - 1) <= self.itl_s


@dataclass(frozen=True)
class Goodput:
    """One side at one rate."""

    rate: float
    requests: int
    good: int
    goodput_per_s: float
    """Good answers over the time from the first request's due time to the last token."""
    output_tokens_per_s: float
    ttft_ms: tuple[float, float]
    """Median and 99th percentile."""
    itl_ms: tuple[float, float]
    """Of all gaps, likewise."""
    failed: tuple[str, ...]
    transfer_bytes: int
    """Of state that was handed over."""

    @classmethod
    def of(cls, rate: float, served: Sequence[Served], slo: Slo, began: float) -> Goodput:
        ended = max((one.asked_at + one.times_s[-1] for one in served if one.times_s), default=began + 1e-9)
        gaps = [b - a for one in served for a, b in zip(one.times_s, one.times_s[1:], strict=False)]
        good = sum(slo.holds(one) for one in served)
        return cls(
            rate,
            len(served),
            good,
            good / (ended - began),
            sum(len(one.times_s) for one in served) / (ended - began),
            _spread([one.times_s[0] for one in served if one.times_s]),
            _spread(gaps),
            tuple(sorted({one.failed for one in served if one.failed})),
            sum(one.transfer_bytes for one in served),
        )


class ServingSide(Protocol):
    """What is asked: `tests.support.process_cluster`, or a rival."""

    name: str

    def ask(self, prompt: Sequence[int], count: int, due: float | None = None) -> Served: ...

    def wait(self, served: Sequence[Served], timeout_s: float) -> bool: ...


def run_load(side: ServingSide, load: Load, vocab: int, slo: Slo) -> tuple[Goodput, bool]:
    """Ask when requests are due; returns what came of it, and whether all answers have ended."""
    began = time.perf_counter()
    served = []
    for at, prompt in load.asks(vocab):
        time.sleep(max(0.0, began + at - time.perf_counter()))
        served.append(side.ask(prompt, load.output_tokens, began + at))
    over = side.wait(served, _AFTER_S)
    return Goodput.of(load.rate, served, slo, began), over


def _spread(seconds: Sequence[float]) -> tuple[float, float]:
    if not seconds:
        return float("nan"), float("nan")
    middle, last = np.percentile(np.array(seconds) * 1e3, [50, 99])
    return float(middle), float(last)
