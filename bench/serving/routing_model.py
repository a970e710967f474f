"""A queueing model of prefill workers under the production router: its core, its policies and its index of KV events.

Each worker computes its prompts one after the other; what its cache has of a prompt it needn't compute, what lies in
host memory it loads. Costs are those of `StepCosts`. A cache is two tiers of blocks, the least recently used leave
first: from the device to the host, from there altogether. Every change is told to the index, `StepCosts.event_s` later.
Answers have one token, so no decode worker has a part: what is measured is the choice of the prefill worker.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cache_config import CacheConfig
from twinpool.contracts.config.router_config import AuditConfig, RouterConfig
from twinpool.contracts.ids import Incarnation, RequestId, Role, WorkerName
from twinpool.contracts.messages.router_commands import Submit
from twinpool.contracts.messages.worker_events import Done, Event, LegReport, Tokens
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.core.router_actions import EndRequest, SendCommand
from twinpool.router.core.router_core import RouterCore
from twinpool.router.kv_indexer.holder_sets import DEVICE, HOST
from twinpool.router.kv_indexer.holder_table import HolderTable
from twinpool.router.kv_indexer.table_memory import TableMemory, TableSize
from twinpool.router.kv_indexer.table_slots import SlotWriter
from twinpool.router.kv_indexer.told_prefixes import ToldPrefixes
from twinpool.router.state.prefix_hashes import PrefixHashes
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.state.worker_table import WorkerKey

VIEW_S = 1.0
"""Seconds between two tables of the controller."""
PULSE_S = 0.5
OLD_S = 120.0
"""Seconds before the prompts that are measured, in which caches fill and chats become old."""


@dataclass(frozen=True, slots=True)
class PromptAsk:
    """One prompt: when it comes, its blocks by content, and what conversation it is of."""

    at_s: float
    tokens: int
    blocks: tuple[int, ...]
    session: str


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a prefill worker's time goes to, and the sizes of its cache in tokens."""

    base_s: float
    compute_per_s: float
    load_per_s: float
    device_tokens: int
    host_tokens: int
    event_s: float = 0.02
    """From a change of a cache to its event in the index."""


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """What one policy came to."""

    policy: str
    index: bool
    hit_rate: float
    """Prompt tokens that were not computed, of all."""
    host_share: float
    """Those that were loaded from host memory, of all."""
    ttft_p50_s: float
    ttft_p99_s: float
    goodput: float
    """Requests a second whose first token came within the limit."""
    in_time: float


class ModelCache:
    """The blocks of one worker's tiers, the least recently used first."""

    def __init__(self, device: int, host: int, tell: Callable[[bool, int, list[int]], None]) -> None:
        """`tell`: whether blocks came or went, the tier, and their keys."""
        self._room = {DEVICE: device, HOST: host}
        self._tiers: dict[int, OrderedDict[int, None]] = {DEVICE: OrderedDict(), HOST: OrderedDict()}
        self._tell = tell

    def match(self, keys: Sequence[int]) -> tuple[int, int]:
        """How many leading blocks are on the device, and how many of those after them are on the host."""
        held = 0
        while held < len(keys) and any(keys[held] in tier for tier in self._tiers.values()):
            held += 1
        device = sum(key in self._tiers[DEVICE] for key in keys[:held])
        return device, held - device

    def use(self, keys: Sequence[int]) -> None:
        """Have all of a prompt's blocks on the device, as the latest used."""
        device, host = self._tiers[DEVICE], self._tiers[HOST]
        new = [key for key in keys if key not in device]
        # Deepest first, so that a chain's head outlives its tail.
        for key in reversed(keys):
            device[key] = None
            device.move_to_end(key)
        out = [device.popitem(last=False)[0] for _ in range(len(device) - self._room[DEVICE])]
        for key in out:
            host[key] = None
            host.move_to_end(key)
        gone = [host.popitem(last=False)[0] for _ in range(len(host) - self._room[HOST])]
        self._tell(True, DEVICE, new)
        self._tell(True, HOST, out)
        self._tell(False, DEVICE, out)
        self._tell(False, HOST, gone)


@dataclass
class ModelWorker:
    """A prefill worker: its queue, its cache, its rates as it would tell them."""

    key: WorkerKey
    cache: ModelCache
    waiting: list[tuple[Submit, PrefixHashes]] = field(default_factory=list)
    busy: bool = False
    computed: int = 0


class RoutingModel:
    """One run of one policy."""

    def __init__(
        self,
        policy: str,
        workers: int,
        costs: StepCosts,
        block_tokens: int,
        folder: Path,
        *,
        index: bool,
        since_s: float,
        routers: int,
    ) -> None:
        """`since_s`: prompts that come earlier aren't measured."""
        self._since = since_s
        self._costs, self._block_tokens = costs, block_tokens
        self._clock = ManualClock(0.0)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        path = folder / f"index-{policy}-{index}"
        memory = TableMemory.create(path, TableSize(1 << 16, 64, 4096), block_tokens)
        self._table, self._slots, self._memory = HolderTable(memory), SlotWriter(memory), memory
        rooms = (f"room-{n}" for n in itertools.count())
        self._cores = [
            RouterCore(
                RouterConfig(policy=policy, max_queue=10**6, request_timeout_s=10**6),  # type: ignore[arg-type]
                self._clock,
                lambda: next(rooms),
                AuditConfig(fraction=0.0),
                cache=CacheConfig(page_tokens=block_tokens),
                told=ToldPrefixes(path) if index else None,
                rng=random.Random(number),
            )
            for number in range(routers)
        ]
        self._owner: dict[RequestId, RouterCore] = {}
        self._rng = random.Random(7)
        """Which router a prompt goes to."""
        self._workers: dict[WorkerKey, ModelWorker] = {}
        for number in range(workers):
            key = (WorkerName(f"prefill-{number}"), Incarnation(1))
            slot = self._slots.take(key)
            assert slot is not None, "there are slots for all"
            self._slots.set_live(slot, True)
            cache = ModelCache(
                costs.device_tokens // block_tokens, costs.host_tokens // block_tokens, self._teller(slot)
            )
            self._workers[key] = ModelWorker(key, cache)
        self._asked: dict[RequestId, tuple[float, PrefixHashes, int]] = {}
        self.answered = 0
        self.ttft_s: list[float] = []
        """Of the prompts that are measured."""
        self.tokens = self.hit = self.loaded = 0

    def _teller(self, slot: int) -> Callable[[bool, int, list[int]], None]:
        def tell(came: bool, tier: int, keys: list[int]) -> None:
            if keys:
                change = self._table.add if came else self._table.remove
                self._after(self._costs.event_s, lambda: change(slot, tier, np.array(keys, np.uint64)))

        return tell

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self._clock.now() + seconds, next(self._numbers), do))

    def _view(self) -> None:
        views = []
        for key, worker in self._workers.items():
            counters = {}
            if worker.computed:
                rates = (self._costs.compute_per_s, self._costs.load_per_s)
                counters = dict(zip(("compute_tokens_per_s", "load_tokens_per_s"), rates, strict=True))
            record = WorkerRecord(key[0], Role.PREFILL, key[1], 1, "", "", "", WorkerLimits(10**7, 10**7))
            status = WorkerStatus(key[0], Role.PREFILL, "ready", 1, "", key[1], 0, 0, 0, 0, counters=counters)
            views.append(WorkerView(record, status))
        for core in self._cores:
            core.on_view(views)

    def run(self, asks: Sequence[PromptAsk]) -> None:
        """Ask everything when it is due, until all of it is answered."""
        self._beat()
        self._view()
        for key, core in itertools.product(self._workers, self._cores):
            core.on_linked(key)
        for ask in asks:
            heapq.heappush(self._due, (ask.at_s, next(self._numbers), lambda ask=ask: self._ask(ask)))  # type: ignore[misc]
        next_view = VIEW_S
        while self.answered < len(asks):
            at, _, do = heapq.heappop(self._due)
            self._clock.advance(max(0.0, at - self._clock.now()))
            if self._clock.now() >= next_view:
                next_view = self._clock.now() + VIEW_S
                self._view()
                for core in self._cores:
                    core.tick()
            do()
            self._act()

    def _beat(self) -> None:
        self._memory.header["pulse"][0] = self._clock.now()
        self._after(PULSE_S, self._beat)

    def _ask(self, ask: PromptAsk) -> None:
        hashes = PrefixHashes(chained(ask.blocks[: ask.tokens // self._block_tokens]).tobytes(), self._block_tokens)
        rid, now = RequestId(f"r{len(self._asked)}"), self._clock.now()
        self._asked[rid] = now, hashes, ask.tokens
        prompt = (0,) * ask.tokens
        request = RoutedRequest(
            rid, prompt, SamplingParams(1), now=now, deadline=now + 10**6, hashes=hashes, session=ask.session
        )
        self._owner[rid] = self._rng.choice(self._cores)
        self._owner[rid].submit(request)

    def _act(self) -> None:
        for action in itertools.chain.from_iterable([core.take_actions() for core in self._cores]):
            if isinstance(action, SendCommand) and isinstance(action.command, Submit):
                worker = self._workers[action.worker]
                worker.waiting.append((action.command, self._asked[action.command.request_id][1]))
                self._next(worker)
            elif isinstance(action, EndRequest):
                assert action.done.error is None, action.done.message
                came = self._asked[action.request_id][0]
                self.answered += 1
                if came >= self._since:
                    self.ttft_s.append(self._clock.now() - came)

    def _next(self, worker: ModelWorker) -> None:
        if worker.busy or not worker.waiting:
            return
        worker.busy = True
        submit, hashes = worker.waiting.pop(0)
        keys, tokens = hashes.pages.tolist(), self._asked[submit.request_id][2]
        device, host = worker.cache.match(keys)
        hit = min((device + host) * self._block_tokens, tokens - 1)
        loaded = host * self._block_tokens
        if self._asked[submit.request_id][0] >= self._since:
            self.tokens, self.hit, self.loaded = self.tokens + tokens, self.hit + hit, self.loaded + loaded
        costs = self._costs
        seconds = costs.base_s + (tokens - hit) / costs.compute_per_s + loaded / costs.load_per_s
        worker.computed += tokens - hit
        self._after(seconds, lambda: self._done(worker, submit, keys))

    def _done(self, worker: ModelWorker, submit: Submit, keys: list[int]) -> None:
        worker.cache.use(keys)
        worker.busy = False
        rid, attempt = submit.request_id, submit.attempt
        events: list[Event] = [
            Tokens(rid, attempt, len(submit.tokens), (1,)),
            LegReport(rid, attempt, Role.PREFILL, worker.key[0]),
            Done(rid, attempt, "length"),
        ]
        for event in events:
            self._owner[rid].on_event(worker.key, event)
        self._next(worker)


def chained(blocks: Sequence[int]) -> NDArray[np.uint64]:
    """Keys of a chain of blocks: each names all before it. uint64 (blocks,)."""
    keys, last = [], 0
    for block in blocks:
        last = hash((last, block)) & 0xFFFF_FFFF_FFFF_FFFF
        keys.append(last)
    return np.array(keys, np.uint64)


def conversations(seconds: float, rate: float, block_tokens: int, seed: int) -> list[PromptAsk]:
    """Multi-turn chats: one of eight system prompts of 2,048 tokens, two to twelve turns of about 1,200 tokens and
    answers of about 400, half a minute apart; each turn's prompt is all that was said before. `rate`: prompts a second,
    once as many chats end as begin. The prompts of `seconds` seconds, after so many that chats have become old."""
    rng = random.Random(seed)
    asks: list[PromptAsk] = []
    fresh, at, number = itertools.count(1000), 0.0, 0
    while at < seconds + OLD_S:
        system = rng.randrange(8)
        blocks = [system * 100 + n for n in range(max(1, 2048 // block_tokens))]
        moment = at
        for _ in range(rng.randint(2, 12)):
            said = max(1, round(rng.expovariate(1 / 1200) / block_tokens))
            blocks += [next(fresh) for _ in range(said)]
            asks.append(PromptAsk(moment, len(blocks) * block_tokens + 5, tuple(blocks), f"chat-{number}"))
            blocks += [next(fresh) for _ in range(max(1, round(rng.expovariate(1 / 400) / block_tokens)))]
            moment += 4 + rng.expovariate(1 / 26)
        at += rng.expovariate(rate / 7)
        number += 1
    return sorted((ask for ask in asks if ask.at_s < seconds + OLD_S), key=lambda ask: ask.at_s)


def measure(
    policy: str,
    asks: Sequence[PromptAsk],
    workers: int,
    costs: StepCosts,
    block_tokens: int,
    limit_s: float,
    index: bool,
    since_s: float,
    routers: int,
) -> PolicyFigures:
    """Run one policy over all asks. `limit_s`: a first token that comes later is of no use."""
    with tempfile.TemporaryDirectory() as folder:
        model = RoutingModel(
            policy, workers, costs, block_tokens, Path(folder), index=index, since_s=since_s, routers=routers
        )
        model.run(asks)
    ttft = sorted(model.ttft_s)
    good = sum(seconds <= limit_s for seconds in ttft)
    cuts = statistics.quantiles(ttft, n=100)
    return PolicyFigures(
        policy,
        index,
        model.hit / model.tokens,
        model.loaded / model.tokens,
        cuts[49],
        cuts[98],
        good / (asks[-1].at_s - since_s),
        good / len(ttft),
    )
