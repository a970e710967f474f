"""Rates of prefill workers, as they measured them: how fast each computes and loads, beside the others.

Measured rates differ from run to run, and a choice by them would send everything to whoever was luckiest. So a worker
counts as of usual speed unless it is off by more than an eighth, and slower ones in steps of a quarter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from contracts.ids import Role
from router.state.worker_table import WorkerEntry, WorkerKey

LOAD_SHARE = 0.1
"""What loading a token from host memory costs where it wasn't measured, in tokens that are computed meanwhile."""
SLOWEST = 4.0


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """The rates of one worker. `slowness`: how long it takes, over the usual time; 1 is usual. `load_share`: what
    loading a token from its host memory costs, in tokens of usual speed. `tokens_per_s`: prompt tokens that it
    computes."""

    slowness: float
    load_share: float
    tokens_per_s: float


class PoolRates:
    """The rates of all workers of the table that compute prompts and have told theirs."""

    def __init__(self) -> None:
        self.known: Mapping[WorkerKey, WorkerRates] = {}

    def follow(self, workers: Iterable[WorkerEntry]) -> None:
        """Take in the table of workers, with their latest counters."""
        told = {}
        for entry in workers:
            computed = entry.status.counters.get("compute_tokens_per_s", 0.0)
            if entry.record.role is not Role.DECODE and computed > 0:
                told[entry.key] = computed, entry.status.counters.get("load_tokens_per_s", 0.0)
        usual = median(computed for computed, _ in told.values()) if told else 1.0
        self.known = {
            key: WorkerRates(
                slowness=min(SLOWEST, max(0.25, round(4 * usual / computed) / 4)),
                load_share=min(1.0, usual / loaded) if loaded > 0 else LOAD_SHARE,
                tokens_per_s=computed,
            )
            for key, (computed, loaded) in told.items()
        }
