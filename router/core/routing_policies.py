"""Routing policies: which of the workers that can take a request gets it (`router.policy`).

Placement leaves out whoever can't take the request (`router/core/placement.py`); a policy chooses among the rest. Each
looks at the same view: the workers' loads, and what they hold of the prompt. Ties go to the worker that was chosen
longest ago, so that idle workers take turns.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from contracts.config.cache_config import PrefetchConfig
from router.core.worker_rates import PoolRates
from router.kv_indexer.prefix_indexes import PromptHits
from router.state.worker_table import SEQUENCE_TOKENS, WorkerEntry


@dataclass(frozen=True, slots=True)
class RoutingAsk:
    """A request as a policy sees it."""

    positions: int
    """Positions that prefill is asked for: the prompt, and what was emitted before."""
    max_len: int
    """Positions of the sequence when its answer is as long as it may be."""
    hits: PromptHits
    session: str
    """What requests of one conversation have in common."""
    now: float


class RoutingPolicy(Protocol):
    """Chooses among workers; there is at least one."""

    def prefill(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        """Choose the worker that computes the prompt, on a colocated worker also what follows."""

    def decode(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        """Choose the worker that computes what follows."""

    def local(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        """Choose the decode worker that computes the prompt, too, were no prefill worker to compute it."""


def least_loaded(able: Sequence[WorkerEntry]) -> WorkerEntry:
    return min(able, key=lambda e: (e.whole_load, e.turn))


class LeastLoaded:
    """The fewest prompt tokens in flight, the fewest sequences."""

    def prefill(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        return least_loaded(able)

    decode = local = prefill


class RoundRobin:
    """The worker that was chosen longest ago."""

    def prefill(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        return min(able, key=lambda e: e.turn)

    decode = local = prefill


class PowerOfTwo:
    """The less loaded of two drawn at random (Mitzenmacher 2001, "The power of two choices in randomized load
    balancing")."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def prefill(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        return least_loaded(self._rng.sample(able, min(2, len(able))))

    decode = local = prefill


class Session:
    """The same worker for the same session: the one whose name has the highest hash with it (rendezvous hashing, Thaler
    and Ravishankar 1998). When a worker goes, its sessions alone move; when it is back, they return."""

    def prefill(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        key = hashlib.blake2b(ask.session.encode(), digest_size=16).digest()
        return max(able, key=lambda e: hashlib.blake2b(e.record.name.encode(), digest_size=8, key=key).digest())

    decode = local = prefill


class CacheAware:
    """Prefill: the earliest first token, as far as is known; decode: room first, then the fewest sequences.

    Costs are counted in prompt tokens of a worker of usual speed, so that they can be compared before anything was
    measured. Prefill: the tokens in flight there, and those of this prompt that have to be computed, times how slow the
    worker is; what is loaded from its host memory, or from storage, counts as many tokens as would be computed
    meanwhile. Sending pages to decode costs the same whoever computed them, so it counts where decode is chosen: a
    worker that holds the prompt already is preferred to one with a sequence less. A local prompt: room first, then the
    tokens of prompts that wait there and of this one, and `SEQUENCE_TOKENS` for each sequence.
    """

    def __init__(self, rates: PoolRates, prefetch: PrefetchConfig) -> None:
        self._rates, self._prefetch = rates, prefetch

    def prefill(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        device, held, storage = ask.hits.device, ask.hits.held, ask.hits.storage
        positions, now, known = ask.positions, ask.now, self._rates.known
        costs: list[tuple[float, int, int]] = []
        for e in able:  # No function a worker: there may be a thousand.
            here = held.get(e.key, 0)
            uncached = positions - here
            tokens: float = e.load + e.others + uncached
            if (rates := known.get(e.key)) is not None:
                if e.load:
                    tokens -= e.prompts.under_way(rates.tokens_per_s, now)
                if storage > here:
                    tokens -= self._stored(storage - here, rates.tokens_per_s)
                tokens *= rates.slowness
                if here:
                    tokens += (here - device.get(e.key, 0)) * rates.load_share
            costs.append((tokens, uncached, e.turn))
        return able[min(range(len(able)), key=costs.__getitem__)]

    def decode(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        device, positions = ask.hits.device, max(1, ask.positions)

        def cost(e: WorkerEntry) -> tuple[int, float, int]:
            here = device.get(e.key, 0)
            short = max(0, ask.max_len - here - e.headroom) if e.headroom is not None else 0
            return (short, e.load + e.others - min(1.0, here / positions), e.turn)

        return min(able, key=cost)

    def local(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        held = ask.hits.held

        def cost(e: WorkerEntry) -> tuple[int, int, int]:
            here = held.get(e.key, 0)
            short = max(0, ask.max_len - here - e.headroom) if e.headroom is not None else 0
            waiting = e.local_tokens + e.other_local + ask.positions - here
            return (short, waiting + SEQUENCE_TOKENS * e.whole_load, e.turn)

        return min(able, key=cost)

    def _stored(self, tokens: int, tokens_per_s: float) -> float:
        """Tokens that needn't be computed as storage has them, less those computed while they are read at the rate of
        `cache.prefetch`."""
        reading = (self._prefetch.base_s + self._prefetch.per_token_s * tokens) * tokens_per_s
        return max(0.0, tokens - reading)


def make_policy(name: str, rates: PoolRates, prefetch: PrefetchConfig, rng: random.Random) -> RoutingPolicy:
    """Return the policy of a name that `router.policy` may have. `rng`: the draws of ``power_of_two``."""
    makers: Mapping[str, Callable[[], RoutingPolicy]] = {
        "cache_aware": lambda: CacheAware(rates, prefetch),
        "least_loaded": LeastLoaded,
        "power_of_two": lambda: PowerOfTwo(rng),
        "round_robin": RoundRobin,
        "session": Session,
    }
    return makers[name]()
