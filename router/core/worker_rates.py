"""Rates of prefill workers, as they measured them: how fast each computes and loads, beside the others.

A worker's rate moves with what its steps happened to hold: two equal ones were seen to tell rates that differ by 1.4. A
choice by such figures would send everything to whoever was luckiest. So a worker counts as of usual speed unless it is
off by more than a factor of 1.4, and then in powers of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from statistics import median

import numpy as np
from numpy.typing import NDArray

from twinpool.contracts.ids import Role
from twinpool.router.state.able_workers import AbleWorkers
from twinpool.router.state.worker_table import WorkerEntry, WorkerKey, WorkerTable

LOAD_SHARE = 0.1
"""What loading a token from host memory costs where it wasn't measured, in tokens that are computed meanwhile."""


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
        self._told: dict[WorkerKey, tuple[float, float]] = {}
        """What `known` was made of: tokens a second that each worker computes, and that it loads."""
        self._keys: list[WorkerKey] = []
        self._rows = _rows((), {})

    def of(self, able: AbleWorkers) -> NDArray[np.float64]:
        """The rates of these workers, a row each: slowness, load share, tokens a second; the last is 0 where it isn't
        known. (workers, 3)."""
        if self._keys is able.columns.keys:
            return self._rows[able.at]
        return _rows([e.key for e in able], self.known)

    def follow(self, workers: Iterable[WorkerEntry]) -> None:
        """Take in the table of workers, with their latest counters."""
        told: dict[WorkerKey, tuple[float, float]] = {}
        for entry in workers:
            counters = entry.status.counters
            computed = counters.get("compute_tokens_per_s", 0.0)
            if computed > 0 and entry.record.role is not Role.DECODE:
                told[entry.key] = computed, counters.get("load_tokens_per_s", 0.0)
        usual = median(computed for computed, _ in told.values()) if told else 1.0
        keys = workers.keys if isinstance(workers, WorkerTable) else []
        if keys is self._keys and told == self._told and keys:
            return
        self._keys, self._told = keys, told
        alike: dict[tuple[float, float], WorkerRates] = {}
        known: dict[WorkerKey, WorkerRates] = {}
        for key, rates in told.items():
            if rates not in alike:
                computed, loaded = rates
                alike[rates] = WorkerRates(
                    slowness=2.0 ** round(log2(usual / computed)),
                    load_share=min(1.0, usual / loaded) if loaded > 0 else LOAD_SHARE,
                    tokens_per_s=computed,
                )
            known[key] = alike[rates]
        self.known = known
        self._rows = _rows(self._keys, self.known)


def _rows(keys: Sequence[WorkerKey], known: Mapping[WorkerKey, WorkerRates]) -> NDArray[np.float64]:
    found = np.zeros((len(keys), 3))
    for at, key in enumerate(keys):
        if (rates := known.get(key)) is not None:
            found[at] = rates.slowness, rates.load_share, rates.tokens_per_s
    return found
