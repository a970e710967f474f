"""A prefill worker as a model: prompts in chunks, several in a step, many like steps in one jump; and what it caches.

Prompts are admitted and steps divided as the production scheduler does (`prefill/scheduler.py`): tenants in fair
shares, by its own `FairShares`; a tenant's prompts in order of arrival; a part of the budget first to prompts that have
less left than the oldest; and a prompt waits for blocks that another one is about to compute. Not modelled: a pool that
is too small for the prompts that run, priorities, and what a tenant finds that comes back (its credit, and the short
steps before it).

`PrefixCache` is a worker's blocks on device and host; `SimIndex` is production's index of KV events, told of the
changes of all such caches.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from twinpool.router.kv_indexer.holder_sets import DEVICE, HOST, MAX_SLOTS
from twinpool.router.kv_indexer.holder_table import HolderTable
from twinpool.router.kv_indexer.table_memory import SlotWriter, TableMemory, TableSize
from twinpool.router.state.worker_table import WorkerKey
from twinpool.sim.fabric.virtual_time import StepCosts, StepRun, pairs_of
from twinpool.sim.scale.cluster_plan import PrefillPool
from twinpool.worker.fair_shares import FairShares

CacheChange = tuple[bool, int, list[int]]
"""Whether blocks came or went, the tier, and their keys: what a KV event says."""


class PrefixCache:
    """Blocks by key, the least recently used first: from the device they go to the host, from there altogether. Sizes
    are in blocks."""

    def __init__(self, device: int, host: int) -> None:
        self._device_room, self._host_room = device, host
        self._device: OrderedDict[int, None] = OrderedDict()
        self._host: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._device) + len(self._host)

    @property
    def on_device(self) -> int:
        return len(self._device)

    @property
    def on_host(self) -> int:
        return len(self._host)

    def match(self, keys: Sequence[int], most: int) -> tuple[int, int]:
        """How many of the first `most` blocks are here, as far as none is missing, and how many of them on the host
        alone."""
        device, host, held, loaded = self._device, self._host, 0, 0
        for key in keys[:most]:
            if key not in device:
                if key not in host:
                    break
                loaded += 1
            held += 1
        return held, loaded

    def use(self, keys: Sequence[int]) -> list[CacheChange]:
        """Have all of a prompt's blocks on the device, as the latest used; returns what changed."""
        device, host = self._device, self._host
        new = [key for key in keys if key not in device]
        for key in reversed(keys):  # Deepest first, so that a chain's head outlives its tail.
            device[key] = None
            device.move_to_end(key)
        changes: list[CacheChange] = [(True, DEVICE, new)] if new else []
        if len(device) <= self._device_room:
            return changes
        out = [device.popitem(last=False)[0] for _ in range(len(device) - self._device_room)]
        changes.append((False, DEVICE, out))
        if self._host_room:
            for key in out:
                host[key] = None
                host.move_to_end(key)
            changes.insert(-1, (True, HOST, out))
            gone = [host.popitem(last=False)[0] for _ in range(len(host) - self._host_room)]
            if gone:
                changes.append((False, HOST, gone))
        return changes


PULSE_S = 0.5
"""Seconds between two signs of life of the index's process."""


class SimIndex:
    """The process that keeps the index; routers open its table at `path`."""

    def __init__(self, workers: int, blocks: int, block_tokens: int) -> None:
        """`workers`: as many as there may be at a time; `blocks`: of all of their caches together."""
        self._folder = TemporaryDirectory(prefix="twinpool-sim-")
        self.path = Path(self._folder.name) / "index"
        slots = min(MAX_SLOTS // 8 * 8, -(-(2 * workers + 64) // 8) * 8)
        size = TableSize(max(1 << 10, -(-blocks * 10 // 9 // 8)), slots, 4096)
        self._memory = TableMemory.create(self.path, size, block_tokens)
        self._table, self._slots = HolderTable(self._memory), SlotWriter(self._memory)
        self._slot: dict[WorkerKey, int] = {}

    def close(self) -> None:
        self._folder.cleanup()

    def pulse(self, now: float) -> None:
        self._memory.header["pulse"][0] = now

    def join(self, key: WorkerKey) -> None:
        """Follow a new worker's events."""
        slot = self._slots.take(key)
        if slot is None:
            self._table.forget(self._slots.left)
            self._slots.swept()
            slot = self._slots.take(key)
        assert slot is not None, "there are slots for all workers"
        self._slot[key] = slot
        self._slots.set_live(slot, True)

    def leave(self, key: WorkerKey) -> None:
        slot = self._slot.pop(key, None)
        if slot is not None:
            self._slots.leave(slot)

    def apply(self, key: WorkerKey, changes: Sequence[CacheChange]) -> None:
        """Take in what a worker says of its cache; nothing of one that has left."""
        slot = self._slot.get(key)
        if slot is None:
            return
        for came, tier, keys in changes:
            (self._table.add if came else self._table.remove)(slot, tier, np.array(keys, np.uint64))


class PromptJob:
    """One prompt on its worker."""

    __slots__ = (
        "begun",
        "came",
        "held",
        "keys",
        "loaded",
        "number",
        "planned",
        "position",
        "tenant",
        "tokens",
        "weight",
    )

    def __init__(self, number: int, tokens: int, keys: Sequence[int], tenant: str = "", weight: int = 1) -> None:
        """`keys`: of its full blocks, in order."""
        self.number, self.tokens, self.keys = number, tokens, keys
        self.tenant, self.weight = tenant, weight
        self.position = 0
        """Tokens whose state is there: what was held, and what was computed."""
        self.planned = 0
        self.held = self.loaded = 0
        """Tokens that needn't be computed, and those of them that are loaded from host memory."""
        self.came = self.begun = 0.0
        """When it came to its worker, and when its first step began."""

    @property
    def left(self) -> int:
        return self.tokens - self.position


class PrefillModel:
    """One prefill worker. `due`: when something happens next, unless a prompt comes before; times are those of the
    caller."""

    def __init__(self, costs: StepCosts, pool: PrefillPool, block_tokens: int) -> None:
        self._costs, self._pool, self._block = costs, pool, block_tokens
        self.cache = PrefixCache(pool.device_tokens // block_tokens, pool.host_tokens // block_tokens)
        self._waiting: dict[str, deque[PromptJob]] = {}
        self._running: list[PromptJob] = []
        self._computing: dict[int, PromptJob] = {}
        """By key of a block, the prompt that computes it."""
        self._shares = FairShares()
        self._since, self._run, self._steps = 0.0, StepRun(1.0), 0
        """When the steps under way began, what they take, and how many they are."""
        self._chunk = 0
        """Tokens of each of them, where they are several."""
        self.due = inf
        self.waiting = 0
        self.todo = 0
        """Tokens that are still to be computed, as far as is known."""
        self.computed = 0
        self.held = self.loaded = 0
        """Tokens of all prompts that needn't be computed, and those of them that were loaded from host memory."""
        self.steps = 0
        self.changes: list[CacheChange] = []
        """Changes of the cache that the caller hasn't taken."""

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        return not (self._running or self.waiting)

    @property
    def under_way_tokens(self) -> int:
        """Tokens of the prompts that are being computed whose state is there."""
        return sum(job.position for job in self._running)

    def submit(self, job: PromptJob, now: float) -> None:
        """Take a prompt; `due` may be earlier afterwards."""
        job.came = now
        self._waiting.setdefault(job.tenant, deque()).append(job)
        self.waiting += 1
        self.todo += job.tokens
        if self.due == inf:
            self._plan(now)
        elif self._steps > 1:
            # The step under way is the last of this jump: the next one has another prompt.
            self._steps = min(self._steps, self._run.steps(now - self._since) + 1)
            self.due = self._since + self._run.seconds(self._steps)

    def turn(self, now: float) -> list[PromptJob]:
        """End the steps that are over at `due`, and begin the next; returns the prompts that are computed."""
        done: list[PromptJob] = []
        self.steps += self._steps
        for job in self._running:
            count = self._chunk * self._steps if self._chunk else job.planned
            job.position += count
            self.todo -= count
            self.computed += count
            if job.position >= job.tokens:
                done.append(job)
        for job in done:
            self._running.remove(job)
            for key in job.keys:
                self._computing.pop(key, None)
            self.changes += self.cache.use(job.keys)
        self._plan(now)
        return done

    def _plan(self, now: float) -> None:
        """Admit what waits, and begin the next steps."""
        waits = self.waiting and self._admit(now)
        running = self._running
        if not running:
            self.due = inf
            return
        self._since, self._chunk, self._steps = now, 0, 1
        costs, most = self._costs, self._pool.chunk_tokens
        if len(running) == 1:
            job = running[0]
            whole = (job.left - 1) // most
            loads = job.loaded and job.position == job.held
            if whole > 1 and not waits and not loads:
                first = costs.prefill_s(most, pairs_of(job.position, most))
                self._run = StepRun(first, costs.prefill_pair_s * most * most)
                self._chunk, self._steps = most, whole
                self._charge(job, most * whole)
                self.due = now + self._run.seconds(whole)
                return
            job.planned = 0
            self._plan_one(job, most, most)
        else:
            self._divide(most)
        tokens, pairs = 0, 0.0
        for job in running:
            if job.planned:
                tokens += job.planned
                pairs += pairs_of(job.position, job.planned)
                self._charge(job, job.planned)
        loaded = sum(job.loaded for job in running if job.planned and job.position == job.held)
        self._run = StepRun(costs.prefill_s(tokens, pairs) + costs.load_token_s * loaded)
        self.due = now + self._run.first_s

    def _charge(self, job: PromptJob, tokens: int) -> None:
        if job.tenant:
            self._shares.charge(job.tenant, job.weight, tokens)

    # ------------------------------------------------------------ admission

    def _admit(self, now: float) -> bool:
        """Begin waiting prompts, up to `max_running` in all; returns whether one waits for what another computes."""
        waits, room = False, self._pool.max_running - len(self._running)
        if room <= 0:
            return False
        for job in self._in_turn():
            if not self._match(job):
                waits = True
                continue
            queue = self._waiting[job.tenant]
            queue.remove(job)
            if not queue:
                del self._waiting[job.tenant]
            self.waiting -= 1
            job.begun = now
            self._running.append(job)
            room -= 1
            if not room:
                break
        return waits

    def _in_turn(self) -> list[PromptJob]:
        if len(self._waiting) == 1:
            (only,) = self._waiting.values()
            return list(only)
        weights = {job.tenant: job.weight for job in self._running}
        weights |= {tenant: queue[0].weight for tenant, queue in self._waiting.items()}
        self._shares.follow(weights)
        ahead: dict[str, int] = {}
        for job in self._running:
            ahead[job.tenant] = ahead.get(job.tenant, 0) + job.left
        return list(self._shares.in_turn({tenant: list(queue) for tenant, queue in self._waiting.items()}, ahead))

    def _match(self, job: PromptJob) -> bool:
        """Find what of a prompt needn't be computed; False where it waits for what another one computes."""
        keys, size = job.keys, self._block
        most = min(len(keys), (job.tokens - 1) // size)
        blocks, loaded = self.cache.match(keys, most)
        computing = self._computing
        while blocks < most and (other := computing.get(keys[blocks])) is not None:
            if other.position < (blocks + 1) * size:
                return False
            blocks += 1
        job.position = job.held = blocks * size
        job.loaded = loaded * size
        self.todo -= job.held
        self.held += job.held
        self.loaded += job.loaded
        for key in keys[blocks:]:
            computing[key] = job
        return True

    # ------------------------------------------------------------ the next step

    def _divide(self, budget: int) -> None:
        """Divide a step among several prompts."""
        by_tenant: dict[str, list[PromptJob]] = {}
        for job in self._running:
            job.planned = 0
            by_tenant.setdefault(job.tenant, []).append(job)
        if len(by_tenant) == 1:
            self._plan_in_turn(self._running, budget, short=True)
            return
        self._shares.follow({tenant: jobs[0].weight for tenant, jobs in by_tenant.items()})
        wanted = {tenant: sum(job.left for job in jobs) for tenant, jobs in by_tenant.items()}
        left = budget
        for tenant, part in self._shares.divide(budget, wanted, self._block).items():
            left -= self._plan_in_turn(by_tenant[tenant], part, short=True)
        for jobs in by_tenant.values():
            left -= self._plan_in_turn(jobs, left, short=False)

    def _plan_in_turn(self, jobs: Sequence[PromptJob], budget: int, *, short: bool) -> int:
        size, left, whole = self._block, budget, self._pool.chunk_tokens
        if short and budget >= 2 * size:
            first = max(size, int(budget * self._pool.short_share))
            oldest = jobs[0].left
            for job in sorted((job for job in jobs[1:] if job.left < oldest), key=lambda job: job.left):
                count = self._plan_one(job, min(first, left), whole)
                first, left = first - count, left - count
        for job in jobs:
            if left <= 0:
                break
            left -= self._plan_one(job, left, whole)
        return budget - left

    def _plan_one(self, job: PromptJob, most: int, whole: int) -> int:
        """Plan up to `most` more tokens of a prompt, to the end of a block or of the prompt."""
        begin = job.position + job.planned
        end = min(job.tokens, begin + most)
        if end < job.tokens:
            if (cut := end // self._block * self._block) > begin:
                end = cut
            elif most < whole:
                return 0
        job.planned += max(0, end - begin)
        return max(0, end - begin)
