"""Routing policies: which of the workers that can take a request gets it (`router.policy`).

Placement leaves out whoever can't take the request (`router/core/placement.py`); a policy chooses among the rest. Each
looks at the same view: the workers' loads, and what they hold of the prompt. Ties go to the worker that was chosen
longest ago, so that idle workers take turns.

**Rates of prefill workers** (`PoolRates`) are as they measured them: how fast each computes and loads, beside the
others. A worker's rate moves with what its steps happened to hold: two equal ones were seen to tell rates that differ
by 1.4. A choice by such figures would send everything to whoever was luckiest. So a worker counts as of usual speed
unless it is off by more than a factor of 1.4, and then in powers of two.

**A decode worker computes a prompt itself** (`LocalPrefill`) where its answer is expected to begin earlier than by a
hand-over. By hand-over a prompt waits in the queue of its prefill worker, is computed, and what decode lacks of it is
sent, before which the answer can't go on. Locally it waits behind the prompts that the decode worker computes already,
and is computed in the smaller steps of a worker with running requests; what that worker holds of it needs neither. All
of these are measured: a first token by when it came after the prompt was sent (`router.state.ttft_prediction`), a
transfer by what decode says came after the computation.

A decode worker that was not given a prompt lately, or only far shorter ones, is expected to compute like the prefill
worker, but with the fixed part of a prompt's cost in each of its steps. Until the prefill worker was measured, prompts
are handed over.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import log2
from statistics import median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from twinpool.contracts.config.cache_config import PrefetchConfig
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.worker_config import DisaggregationConfig
from twinpool.contracts.ids import Role
from twinpool.router.kv_indexer.prefix_indexes import PromptHits
from twinpool.router.state.able_workers import UNKNOWN_ROOM, AbleWorkers
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.state.worker_table import SEQUENCE_TOKENS, WorkerEntry, WorkerKey, WorkerTable

LOAD_SHARE = 0.1
"""What loading a token from host memory costs where it wasn't measured, in tokens that are computed meanwhile."""


@dataclass(frozen=True, slots=True)
class PrefillRates:
    """The rates of one worker. `slowness`: how long it takes, over the usual time; 1 is usual. `load_share`: what
    loading a token from its host memory costs, in tokens of usual speed. `tokens_per_s`: prompt tokens that it
    computes."""

    slowness: float
    load_share: float
    tokens_per_s: float


class PoolRates:
    """The rates of all workers of the table that compute prompts and have told theirs."""

    def __init__(self) -> None:
        self.known: Mapping[WorkerKey, PrefillRates] = {}
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
        alike: dict[tuple[float, float], PrefillRates] = {}
        known: dict[WorkerKey, PrefillRates] = {}
        for key, rates in told.items():
            if rates not in alike:
                computed, loaded = rates
                alike[rates] = PrefillRates(
                    slowness=2.0 ** round(log2(usual / computed)),
                    load_share=min(1.0, usual / loaded) if loaded > 0 else LOAD_SHARE,
                    tokens_per_s=computed,
                )
            known[key] = alike[rates]
        self.known = known
        self._rows = _rows(self._keys, self.known)


def _rows(keys: Sequence[WorkerKey], known: Mapping[WorkerKey, PrefillRates]) -> NDArray[np.float64]:
    found = np.zeros((len(keys), 3))
    for at, key in enumerate(keys):
        if (rates := known.get(key)) is not None:
            found[at] = rates.slowness, rates.load_share, rates.tokens_per_s
    return found


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

    prefill_unit: str
    """What `prefill_cost` counts, in words."""
    decode_unit: str

    def prefill(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        """Choose the worker that computes the prompt, on a colocated worker also what follows."""

    def decode(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        """Choose the worker that computes what follows."""

    def local(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        """Choose the decode worker that computes the prompt, too, were no prefill worker to compute it."""

    def prefill_cost(self, able: AbleWorkers, ask: RoutingAsk) -> NDArray[Any]:
        """What `prefill` goes by, for each worker; the least is the best: (workers,)."""

    def decode_cost(self, able: AbleWorkers, ask: RoutingAsk) -> NDArray[Any]:
        """What `decode` goes by: (workers,)."""


def least_loaded(able: Sequence[WorkerEntry]) -> WorkerEntry:
    some = AbleWorkers.of(able)
    return some.least(some.column("whole_load"), some.column("turn"))


class ByLoad:
    """What each worker has in flight, as the cost of those policies that go by it, and to look at of the others."""

    prefill_unit = "prompt tokens in flight"
    decode_unit = "sequences in flight"

    def prefill_cost(self, able: AbleWorkers, ask: RoutingAsk) -> NDArray[Any]:
        return able.column("whole_load")

    decode_cost = prefill_cost


class LeastLoaded(ByLoad):
    """The fewest prompt tokens in flight, the fewest sequences."""

    def prefill(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        return least_loaded(able)

    decode = local = prefill


class RoundRobin(ByLoad):
    """The worker that was chosen longest ago."""

    def prefill(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        some = AbleWorkers.of(able)
        return some.least(some.column("turn"))

    decode = local = prefill


class PowerOfTwo(ByLoad):
    """The less loaded of two drawn at random (Mitzenmacher 2001, "The power of two choices in randomized load
    balancing")."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def prefill(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        return least_loaded(self._rng.sample(able, min(2, len(able))))

    decode = local = prefill


class Session(ByLoad):
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
        self._latest: tuple[RoutingAsk, AbleWorkers, NDArray[Any]] | None = None
        """The costs of the latest choice of a prefill worker, for whoever asks about it."""
        self._latest_decode: tuple[RoutingAsk, AbleWorkers, NDArray[Any]] | None = None

    prefill_unit = "prompt tokens to be computed before its first token"
    decode_unit = "sequences in flight, less what it holds of the prompt"

    def prefill(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        some = AbleWorkers.of(able)
        uncached = ask.positions - ask.hits.held_of(some)
        return some.least(self.prefill_cost(some, ask), uncached, some.column("turn"))

    def prefill_cost(self, able: AbleWorkers, ask: RoutingAsk) -> NDArray[Any]:
        if self._latest is not None and self._latest[0] is ask and self._latest[1] is able:
            return self._latest[2]
        some = able
        slowness, load_share, per_s = self._rates.of(some).T
        here, measured = ask.hits.held_of(some), per_s > 0
        uncached = ask.positions - here
        tokens = (some.column("whole_load") + uncached).astype(np.float64)
        if measured.any():
            first, since = some.column("first_tokens"), some.column("worked_from")
            under_way = np.minimum(first, (ask.now - since) * per_s)
            tokens -= np.where(measured & (some.column("load") != 0), under_way, 0.0)
            if ask.hits.storage:
                stored = self._stored(np.maximum(0, ask.hits.storage - here), per_s)
                tokens -= np.where(measured, stored, 0.0)
            loaded = (here - ask.hits.device_of(some)) * load_share
            tokens = np.where(measured, tokens * slowness + loaded, tokens)
        self._latest = ask, able, tokens
        return tokens

    def decode(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        some = AbleWorkers.of(able)
        here, room = ask.hits.device_of(some), some.column("headroom")
        short = np.where(room == UNKNOWN_ROOM, 0, np.maximum(0, ask.max_len - here - room))
        return some.least(short, self.decode_cost(some, ask), some.column("turn"))

    def decode_cost(self, able: AbleWorkers, ask: RoutingAsk) -> NDArray[Any]:
        if self._latest_decode is not None and self._latest_decode[0] is ask and self._latest_decode[1] is able:
            return self._latest_decode[2]
        here = ask.hits.device_of(able)
        cost: NDArray[Any] = able.column("whole_load") - np.minimum(1.0, here / max(1, ask.positions))
        self._latest_decode = ask, able, cost
        return cost

    def local(self, able: Sequence[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
        held = ask.hits.held

        def cost(e: WorkerEntry) -> tuple[int, int, int]:
            here = held.get(e.key, 0)
            short = max(0, ask.max_len - here - e.headroom) if e.headroom is not None else 0
            waiting = e.local_tokens + e.other_local + ask.positions - here
            return (short, waiting + SEQUENCE_TOKENS * e.whole_load, e.turn)

        return min(able, key=cost)

    def _stored(self, tokens: NDArray[np.int64], tokens_per_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens that needn't be computed as storage has them, less those computed while they are read at the rate of
        `cache.prefetch`."""
        reading = (self._prefetch.base_s + self._prefetch.per_token_s * tokens) * tokens_per_s
        return np.where(tokens > 0, np.maximum(0.0, tokens - reading), 0.0)


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


class LocalReason(StrEnum):
    """Why a decode worker computes a prompt itself."""

    EARLIER = "earlier"
    """Its first token is expected earlier so."""
    NO_PREFILL = "no_prefill"
    """No prefill worker can take it."""
    HANDOVER_FAILED = "handover_failed"
    """Between the workers that would be chosen a hand-over of it has failed."""


class LocalPrefill:
    """Compares a hand-over with a local prompt; see the module's prose. Times are seconds of the router core's
    clock."""

    def __init__(self, config: DisaggregationConfig, page_tokens: int) -> None:
        """`page_tokens`: `cache.page_tokens` of decode, the least that prompts get of a step."""
        self._config, self._page_tokens = config, page_tokens

    def has_room(self, decode: WorkerEntry, tokens: int) -> bool:
        """Whether a decode worker may be given `tokens` more of prompts, while a prefill worker could take them."""
        return decode.local_tokens + decode.other_local + tokens <= self._config.local_tokens

    def local_s(
        self, r: RoutedRequest, decode: WorkerEntry, uncached: int, prefill: WorkerEntry, now: float
    ) -> float | None:
        """The seconds after which a local prompt is computed of which the worker lacks `uncached` tokens; None where
        nothing is known of its speed or the prefill worker's."""
        if decode.prompts.measured(uncached, now):
            return decode.prompts.expect(uncached, r.priority, now, r.share)
        cost = prefill.prompts.cost
        if cost is None:
            return None
        tokens = decode.local_tokens + decode.other_local + uncached
        a_step = max(self._page_tokens, self._config.step_tokens - decode.whole_load)
        return cost[0] * -(-tokens // a_step) + cost[1] * tokens

    def handover_s(
        self,
        r: RoutedRequest,
        prefill: WorkerEntry,
        uncached: int,
        decode: WorkerEntry | None,
        lacking: int,
        now: float,
    ) -> float | None:
        """The seconds after which a prompt is computed and at its decode worker, if it needs one. `uncached` and
        `lacking`: tokens that prefill computes and that are sent. None where too little was seen of the prefill
        worker."""
        computed = prefill.prompts.expect(uncached, r.priority, now, r.share)
        if computed is None or decode is None:
            return computed
        return computed + (decode.transfers.seconds(lacking) or 0.0)


def local_prefill(config: Config) -> LocalPrefill | None:
    """Return what compares the two, by the configuration; None where each prompt is handed over."""
    if not config.conditional:
        return None
    return LocalPrefill(config.disaggregation, config.cache_for(Role.DECODE).page_tokens)
