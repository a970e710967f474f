"""What the tree's operations cost beside themselves: on a short path and on a long one, with few salts and with many.

Every row is one operation at two sizes in the same run, and what it costs of one part at the large size over what it
costs at the small one: 1 where only what is touched is paid for. Times are processor time, the median of several runs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from twinpool.cache.device.device_backends import CpuDevice
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.memory.kv_cache_spec import BufferSpec, PoolKind, PoolSetSpec, PoolSpec
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.nodes.token_prefix import TokenPrefix
from twinpool.cache.prefix_cache.nodes.tree_node import PageOffer, Tier
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.storage.backends.file_backend import FileBackend
from twinpool.cache.storage.storage_backend import ObjectBuffer, ObjectName
from twinpool.cache.tiers.kv_event_recorder import KVEventRecorder
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.cache_config import CacheConfig, EventsConfig
from twinpool.router.kv_indexer.kv_event_subscriber import KVEventSubscriber

PAGE_TOKENS = 16
DEPTHS, SALTS, LEAVES, EVENTS, PROMPTS, FILES = (
    (64, 4096),
    (100, 100_000),
    (64, 65_536),
    (10_000, 100_000),
    20_000,
    20_000,
)
QUICK = 16
"""A quick run's large sizes are so many times smaller."""
_FULL = PoolSpec("full", (BufferSpec("k", 1, (1, 1), torch.uint8),))
SPEC = PoolSetSpec(PAGE_TOKENS, (_FULL,))


@dataclass(frozen=True)
class Cost:
    """Of one operation at two sizes. `per`: what the ratio is of."""

    name: str
    sizes: tuple[int, int]
    micros: tuple[float, float]
    per: str
    ratio: float


def _timed(run: Callable[[], object]) -> float:
    start = time.process_time_ns()
    run()
    return (time.process_time_ns() - start) / 1e3


class _Path:
    """A KV cache manager whose tree is one path, two pages a node: a conversation of many turns."""

    def __init__(self, depth: int) -> None:
        pools = PoolSet(SPEC, {"full": 4 * depth + 16})
        self.manager = KVCacheManager(pools, CpuDevice(), CacheConfig(), time.monotonic)
        self.tokens = 2 * depth * PAGE_TOKENS
        self.prefix = TokenPrefix.of(range(self.tokens), PAGE_TOKENS)
        self._lease = pools.allocators["full"].lease
        for turn in range(depth):
            self._add(turn)

    def _add(self, turn: int) -> None:
        lease = self._lease(2, "a request")
        self.manager.tree.insert(self.prefix.head(2 * turn + 2), {"full": [PageOffer(2 * turn, lease, [1, 1])]})
        lease.release()

    def times(self) -> dict[str, float]:
        manager, pages, out = self.manager, len(self.prefix), dict[str, float]()
        out["match"] = _timed(lambda: manager.tree.match(self.prefix))
        start = time.process_time_ns()
        allocation = manager.prefixes.allocate(self.prefix, self.tokens + 1, "a request", reusable=pages)
        out["allocate"] = (time.process_time_ns() - start) / 1e3
        assert allocation is not None
        out["release"] = _timed(lambda: manager.table.free(allocation))
        start = time.process_time_ns()
        reserved = manager.handover.preallocate(self.prefix, self.tokens, self.tokens + 1, "a request")
        out["reserve"] = (time.process_time_ns() - start) / 1e3
        assert reserved is not None
        taken, leases = reserved
        out["adopt"] = _timed(lambda: manager.handover.commit_transfer(taken, self.tokens, leases, {}))
        manager.table.free(taken)
        for lease in leases.values():
            lease.release()
        manager.tree.eviction.evict(Tier.DEVICE, "full", 2)
        out["insert a turn"] = _timed(lambda: self._add(pages // 2 - 1))
        return out


def path_costs(depths: tuple[int, int], repeats: int) -> Iterator[Cost]:
    paths = [_Path(depth) for depth in depths]
    runs = [[path.times() for _ in range(repeats)] for path in paths]
    evict = [_timed(partial(path.manager.tree.eviction.evict, Tier.DEVICE, "full", len(path.prefix))) for path in paths]
    for name in runs[0][0]:
        few, many = (statistics.median(run[name] for run in side) for side in runs)
        yield _cost(f"{name}, nodes of the path", depths, (few, many), "node")
    yield _cost("evict all of the path", depths, (evict[0], evict[1]), "node")


def _cost(name: str, sizes: tuple[int, int], micros: tuple[float, float], per: str) -> Cost:
    parts = sizes if per == "node" else (1, 1)
    return Cost(name, sizes, micros, per, (micros[1] / parts[1]) / (micros[0] / parts[0]))


def _salted(salts: int) -> RadixTree:
    tree, allocator = RadixTree(SPEC), PoolSet(SPEC, {"full": salts + 2}).allocators["full"]
    for number in range(salts):
        lease = allocator.lease(1, "a request")
        tree.insert(
            TokenPrefix.of(range(PAGE_TOKENS), PAGE_TOKENS, f"tenant {number}"), {"full": [PageOffer(0, lease, [1])]}
        )
        lease.release()
    return tree


def _leaf(pages: int) -> RadixTree:
    tree, lease = RadixTree(SPEC), PoolSet(SPEC, {"full": pages + 2}).allocators["full"].lease(pages, "a request")
    prefix = TokenPrefix.of(range(PAGE_TOKENS * pages), PAGE_TOKENS)
    tree.insert(prefix, {"full": [PageOffer(0, lease, list(range(pages)))]})
    lease.release()
    return tree


def evict_costs(
    name: str, sizes: tuple[int, int], make: Callable[[int], RadixTree], count: int, repeats: int
) -> Iterator[Cost]:
    """Microseconds to free a page, `count` of them asked for at a time."""
    sides = []
    for size in sizes:
        tree = make(size)
        calls = min(20 * repeats, size // count // 2)
        sides.append(
            statistics.median(_timed(partial(tree.eviction.evict, Tier.DEVICE, "full", count)) for _ in range(calls))
        )
    yield _cost(name, sizes, (sides[0] / count, sides[1] / count), "page")


def queue_costs(prompts: int) -> Iterator[Cost]:
    """Places in the window's queue for each part in the tree, after a tenth of the prompts and after all of them."""
    spec = PoolSetSpec(PAGE_TOKENS, (_FULL, PoolSpec("window", _FULL.buffers, PoolKind.WINDOW, 2 * PAGE_TOKENS)))
    pools = PoolSet(spec, {"full": 65, "window": 4097})
    tree, places = RadixTree(spec), []
    for prompt in range(prompts):
        leases = {}
        for pool, count in (("full", 8), ("window", 2)):
            allocator = pools.allocators[pool]
            if count > allocator.free:
                tree.eviction.evict(Tier.DEVICE, pool, count - allocator.free)
            leases[pool] = allocator.lease(count, "a request")
        first = 8 * PAGE_TOKENS * prompt
        prefix = TokenPrefix.of(range(first, first + 8 * PAGE_TOKENS), PAGE_TOKENS)
        offers = {"full": [PageOffer(0, leases["full"], [1] * 8)], "window": [PageOffer(6, leases["window"], [2] * 2)]}
        tree.insert(prefix, offers)
        for lease in leases.values():
            lease.release()
        if prompt + 1 in (prompts // 10, prompts):
            places.append(float(tree.eviction.order.queues[Tier.DEVICE, "window"].places))
    yield _cost("places in a queue, after so many prompts", (prompts // 10, prompts), (places[0], places[1]), "queue")


def truth_costs(sizes: tuple[int, int]) -> Iterator[Cost]:
    """The longest round of a loop that is asked for all that its tree holds."""
    worst = []
    for pages in sizes:
        tree, allocator = RadixTree(SPEC), PoolSet(SPEC, {"full": pages + 101}).allocators["full"]
        local = "tcp://127.0.0.1:0"
        event_recorder = KVEventRecorder(
            tree, EventsConfig(endpoint=local, replay_endpoint=local, buffer_batches=4), time.time, 0
        )
        for first in range(0, pages, 100):
            lease, start = allocator.lease(100, "a request"), first * PAGE_TOKENS
            prefix = TokenPrefix.of(range(start, start + 100 * PAGE_TOKENS), PAGE_TOKENS)
            tree.insert(prefix, {"full": [PageOffer(0, lease, [1] * 100)]})
            lease.release()
            event_recorder.round()
        publisher, rounds = event_recorder.publisher, []
        with KVEventSubscriber(publisher.endpoint, SystemClock(), publisher.replay_endpoint) as reader:
            while not reader.complete:
                rounds.append(_timed(event_recorder.round))
                reader.poll(0.001)
        event_recorder.close()
        worst.append(sorted(rounds)[-2])
    yield _cost("the truth of the KV events, longest round", sizes, (worst[0], worst[1]), "round")


def folder_costs(files: int) -> Iterator[Cost]:
    """To open a folder of the file backend, and to write one object to it when it is full."""
    opened, full = [], []
    sizes = (files // 100, files)
    for count in sizes:
        with ExitStack() as stack:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            names = [ObjectName("f", "full", number.to_bytes(16, "big")) for number in range(count + 40)]
            first = FileBackend(root, 1 << 40)
            for at in range(0, count, 64):
                first.write([ObjectBuffer(name, 1, b"x" * 64) for name in names[at : min(count, at + 64)]])
            used = first.capacity().used_bytes
            first.close()
            start = time.perf_counter_ns()
            backend = FileBackend(root, used)
            opened.append((time.perf_counter_ns() - start) / 1e3)
            backend.wait_counted(600)
            writes = [partial(backend.write, [ObjectBuffer(name, 1, b"x" * 64)]) for name in names[count:]]
            full.append(max(map(_timed, writes)))
            backend.close()
    yield _cost("open a folder of so many files", sizes, (opened[0], opened[1]), "folder")
    yield _cost("write to a full one, the longest", sizes, (full[0], full[1]), "write")


def measure(quick: bool, repeats: int) -> list[Cost]:
    def sized(sizes: tuple[int, int]) -> tuple[int, int]:
        return sizes[0], sizes[1] // QUICK if quick else sizes[1]

    return [
        *path_costs(sized(DEPTHS), repeats),
        *evict_costs("evict a page, salts", sized(SALTS), _salted, 10, repeats),
        *evict_costs("evict the last page of a leaf, pages", sized(LEAVES), _leaf, 1, repeats),
        *queue_costs(PROMPTS // QUICK if quick else PROMPTS),
        *truth_costs(sized(EVENTS)),
        *folder_costs(FILES // QUICK if quick else FILES),
    ]


def table(costs: list[Cost]) -> Table:
    out = Table(pad_edge=False, title="what grows: microseconds of processor time (places of the queue)")
    for name in ("", "small", "large", "at small", "at large"):
        out.add_column(name, justify="right" if name else "left")
    out.add_column("large / small, each", justify="right")
    for cost in costs:
        sizes, micros = [f"{size:,}" for size in cost.sizes], [f"{each:,.1f}" for each in cost.micros]
        out.add_row(cost.name, *sizes, *micros, f"{cost.ratio:.2f} a {cost.per}")
    return out


def run(console: Console, quick: bool, repeats: int) -> list[dict[str, Any]]:
    costs = measure(quick, repeats)
    console.print(table(costs))
    return [asdict(cost) for cost in costs]
