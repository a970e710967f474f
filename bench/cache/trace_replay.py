"""Replay a trace of prompts through tree and tiers alone, as fast as it goes: hit rates by cache size.

    python -m bench.cache.trace_replay bench/traces/conversation_200.jsonl
    python -m bench.cache.trace_replay TRACE.jsonl --sizes 0.5M 2M 8M 32M --plot curve.svg

A trace has a line a request: `input_length`, and `hash_ids`, one for each 512 tokens of the prompt; equal ids become
equal tokens. Each request goes through a KV cache manager as in a worker (prefetch, allocate, load, seal, share,
release), one at a time; nothing is computed, and a page's state is eight bytes. First the device alone by size and
eviction policy, beside a plain LRU of pages and the unlimited bound, both found without a tree
(`tests/support/plain_trace_cache.py`). Then the tiers: a device of the smallest size, a host of each size, and with
`--storage` storage behind it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.common.bench_report import flag_parser, headline, write_report
from tests.support.plain_trace_cache import Ask, Trace, load, plain_lru, unlimited
from twinpool.cache.allocation import CachedTokens
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.manager.tier_set import LowerTiers
from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace, LayoutOrder, PoolSetSpec, PoolSpec
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.eviction_policy import POLICIES
from twinpool.cache.prefix_cache.tree_node import TokenPrefix
from twinpool.cache.storage.backends.memory_backend import MemoryBackend
from twinpool.cache.storage.io_queue import InlineIoQueue
from twinpool.cache.storage.storage_backend import ObjectName, seal_bytes
from twinpool.contracts.config.cache_config import CacheConfig, PrefetchConfig
from twinpool.sim.scale.traffic import TRACE_BLOCK_TOKENS

_TICK_S = 0.001
_ROUNDS = 10_000


@dataclass(frozen=True)
class Sizes:
    """Tokens each tier has room for; 0: there is none."""

    device: int
    host: int = 0
    storage: int = 0


@dataclass(frozen=True)
class Hits:
    """Tokens of all prompts that were not computed, by the tier that had them."""

    sizes: Sizes
    policy: str
    cached: CachedTokens
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.cached.total / self.tokens

    def as_dict(self) -> dict[str, Any]:
        cached = {tier: getattr(self.cached, tier) for tier in ("device", "host", "storage")}
        return {**vars(self.sizes), "policy": self.policy, "cached": cached, "rate": self.rate, "seconds": self.seconds}


class Replay:
    """One KV cache manager of the given sizes, and the requests that went through it."""

    def __init__(self, page_tokens: int, sizes: Sizes, policy: str) -> None:
        spec = PoolSetSpec(
            page_tokens, (PoolSpec("full", (BufferSpec("state", 1, (8,), torch.uint8, index=IndexSpace.PAGE),)),)
        )
        self._page_tokens = page_tokens
        self._now = 0.0
        self._backend = self._queue = host = None
        if sizes.host:
            host = PoolSet(spec, {"full": sizes.host // page_tokens + 1}, order=LayoutOrder.PAGE_FIRST, tier="host")
        if sizes.storage:
            object_bytes = spec.unit_bytes("full") + seal_bytes(ObjectName("trace", "full", bytes(16)))
            name = f"trace replay {id(self)}"
            self._backend = MemoryBackend(name, sizes.storage // page_tokens * object_bytes)
            self._queue = InlineIoQueue(self._backend)
        config = CacheConfig(
            page_tokens=page_tokens,
            eviction=policy,  # type: ignore[arg-type]
            load_back="always",
            prefetch=PrefetchConfig(policy="wait_complete"),
        )
        self.manager = KVCacheManager(
            PoolSet(spec, {"full": sizes.device // page_tokens + 1}),
            CpuDevice(),
            config,
            self._tick,
            below=LowerTiers(host, self._queue, fingerprint="trace"),
        )

    def _tick(self) -> float:
        self._now += _TICK_S
        return self._now

    def _settle(self) -> None:
        """Let storage answer until nothing is under way."""
        for _ in range(_ROUNDS):
            self.manager.poll()
            if not self.manager.busy:
                return
            if self._queue is not None:
                self._queue.run_all()
        raise TimeoutError("the tiers don't come to rest")

    def ask(self, ask: Ask) -> CachedTokens:
        """One request from its arrival to its end; what it found."""
        prefix = self._prefix(ask)
        prefetch = self.manager.tiers.prefetcher.start(prefix.head(ask.reusable))
        self._settle()
        allocation = self.manager.allocations.allocate(
            prefix, ask.tokens, "request", reusable=ask.reusable, prefetch=prefetch
        )
        assert allocation is not None, "the device holds any single request"
        self.manager.launch()
        self._settle()
        self.manager.finished.seal([(allocation, ask.tokens)])
        self.manager.finished.cache_pages(allocation, prefix)
        self.manager.allocations.free(allocation)
        self._settle()
        return allocation.cached

    def _prefix(self, ask: Ask) -> TokenPrefix:
        return TokenPrefix(b"".join(map(_tokens, ask.blocks))[: 4 * ask.tokens], self._page_tokens)

    def close(self) -> None:
        """Raises `AssertionError` where something is lost or leaked."""
        wrong = self.manager.check()
        assert not wrong, wrong
        if self._queue is not None:
            self._queue.close()
        self.manager.close()


@lru_cache(maxsize=65_536)
def _tokens(block: int) -> bytes:
    """The tokens of a block: different in every position from those of any other."""
    return (np.arange(TRACE_BLOCK_TOKENS, dtype=np.uint32) * np.uint32(0x9E3779B1) ^ np.uint32(block)).tobytes()


def replay(trace: Trace, sizes: Sizes, policy: str = "lru") -> Hits:
    """The whole trace through a fresh manager. Raises `ValueError` for a device smaller than the longest prompt."""
    if trace.pages(trace.longest) > sizes.device // trace.page_tokens:
        raise ValueError(f"the longest prompt has {trace.longest:,} tokens: a device of {sizes.device:,} is too small")
    start = time.perf_counter()
    run = Replay(trace.page_tokens, sizes, policy)
    found = [run.ask(ask) for ask in trace.asks]
    run.close()
    cached = CachedTokens(sum(c.device for c in found), sum(c.host for c in found), sum(c.storage for c in found))
    return Hits(sizes, policy, cached, trace.tokens, time.perf_counter() - start)


def amount(text: str) -> int:
    """A number of tokens: 250000, 250k, 0.25M."""
    scale = {"k": 1_000, "M": 1_000_000}.get(text[-1:], 1)
    try:
        tokens = int(float(text[:-1] if scale > 1 else text) * scale)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens: 250000, 250k or 0.25M") from None
    if tokens < 1:
        raise argparse.ArgumentTypeError("a tier holds 1 token or more")
    return tokens


def default_sizes(trace: Trace) -> list[int]:
    """From what the longest prompt needs, doubling, to what all different pages need."""
    size, out = trace.pages(trace.longest) * trace.page_tokens, []
    while size < trace.distinct * trace.page_tokens:
        out.append(size)
        size *= 2
    return [*out, size]


def share(tokens: int, trace: Trace) -> str:
    return f"{tokens / trace.tokens:.1%}"


def device_table(trace: Trace, runs: Sequence[Hits], plain: dict[int, int], bound: int) -> Table:
    policies = list(dict.fromkeys(run.policy for run in runs))
    title = f"prompt tokens found, device alone; unlimited cache {share(bound, trace)}"
    out = Table("tokens", *policies, "plain LRU of pages", pad_edge=False, title=title)
    for size, lru in plain.items():
        row = [f"{run.rate:.1%}" for run in runs if run.sizes.device == size]
        out.add_row(f"{size:,}", *row, share(lru, trace))
    return out


def tier_table(trace: Trace, runs: Sequence[Hits], bound: int) -> Table:
    title = f"prompt tokens found by tier; unlimited cache {share(bound, trace)}"
    headers = ("device tokens", "host", "storage", "on device", "on host", "in storage", "together")
    out = Table(*headers, pad_edge=False, title=title)
    for run in runs:
        sizes = [f"{size:,}" if size else "-" for size in (run.sizes.device, run.sizes.host, run.sizes.storage)]
        found = [share(tokens, trace) for tokens in (run.cached.device, run.cached.host, run.cached.storage)]
        out.add_row(*sizes, *found, f"{run.rate:.1%}")
    return out


def plot(path: Path, trace: Trace, alone: Sequence[Hits], tiers: Sequence[Hits], bound: int) -> None:
    """Both tables as an SVG: the same figures give the same file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "twinpool"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for policy in dict.fromkeys(run.policy for run in alone):
        points = [(run.sizes.device / 1e6, 100 * run.rate) for run in alone if run.policy == policy]
        left.plot(*zip(*points, strict=True), marker="o", markersize=3, label=policy)
    left.set(title="device alone", xlabel="device, million tokens", ylabel="prompt tokens found, %", xscale="log")
    by_host = [run for run in tiers if not run.sizes.storage]
    sizes = [run.sizes.host / 1e6 for run in by_host]
    parts = [[100 * getattr(run.cached, tier) / trace.tokens for run in by_host] for tier in ("device", "host")]
    device = by_host[0].sizes.device / 1e6 if by_host else 0
    right.stackplot(sizes, *parts, labels=[f"on the device ({device:.2g} million tokens)", "on the host"], alpha=0.7)
    right.set(title="device and host, LRU, write-through", xlabel="host, million tokens", xscale="log")
    for axes in (left, right):
        axes.axhline(100 * bound / trace.tokens, color="black", linestyle="--", label="unlimited cache")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    flags = flag_parser(__doc__)
    flags.add_argument("trace", type=Path, help="JSON lines")
    flags.add_argument("--sizes", type=amount, nargs="+", help="tokens: 250000, 250k, 0.25M (default: doubling)")
    flags.add_argument("--policies", nargs="+", choices=sorted(POLICIES), default=list(POLICIES))
    flags.add_argument("--storage", type=amount, nargs="+", default=[], help="sizes of storage behind the first host")
    flags.add_argument("--page-tokens", type=int, default=TRACE_BLOCK_TOKENS, help="a divisor of 512")
    flags.add_argument("--requests", type=int, help="only the first ones")
    flags.add_argument("--plot", type=Path, help="draw the curves into this SVG file")
    args = flags.parse_args(argv)
    torch.set_num_threads(1)
    console = Console()
    console.print(headline())
    try:
        trace = load(args.trace, args.page_tokens, args.requests)
    except (OSError, ValueError) as error:
        flags.error(str(error))
    sizes = sorted(args.sizes or default_sizes(trace))
    if trace.pages(trace.longest) > sizes[0] // trace.page_tokens:
        flags.error(f"the longest prompt has {trace.longest:,} tokens: a device of {sizes[0]:,} is too small for it")
    bound, plain = unlimited(trace), {size: plain_lru(trace, size // trace.page_tokens) for size in sizes}
    console.print(f"{len(trace.asks):,} requests, {trace.tokens:,} prompt tokens, {trace.distinct:,} different pages")
    alone = [replay(trace, Sizes(size), policy) for size in sizes for policy in args.policies]
    console.print(device_table(trace, alone, plain, bound))
    ways = [Sizes(sizes[0], size) for size in sizes] + [Sizes(sizes[0], sizes[0], size) for size in args.storage]
    tiers = [replay(trace, way) for way in ways]
    console.print(tier_table(trace, tiers, bound))
    seconds = sum(run.seconds for run in [*alone, *tiers])
    console.print(f"{len(trace.asks) * (len(alone) + len(tiers)) / seconds:,.0f} requests/s replayed")
    if args.plot is not None:
        plot(args.plot, trace, alone, tiers, bound)
    runs = [run.as_dict() for run in [*alone, *tiers]]
    write_report(args, tokens=trace.tokens, unlimited=bound, plain_lru=plain, runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
