"""Measure the prefix tree by its size.

    python -m bench.cache.tree_speed  # trees of 10,000, 100,000 and 1,000,000 pages
    python -m bench.cache.tree_speed --quick  # small and short
    python -m bench.cache.tree_speed --pages 3000000

The tree stands beside a trie of plain dictionaries with a node a page (`bench/cache/plain_trie.py`), grown from the
same dialogues (`bench/cache/tree_workload.py`) in the same run. Times are processor time, medians over many calls:
waiting for a neighbour's turn on a shared machine isn't in them. Memory is what Python allocated while a side was
filled.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from bench.cache.plain_trie import Trie
from bench.cache.tree_workload import DOCUMENT_PAGES, PAGE_TOKENS, Clients, Samples, TreeSide, fill
from bench.common.bench_report import figure_table, flag_parser, headline, write_report
from twinpool.cache.prefix_cache.tree_node import TokenPrefix
from twinpool.contracts.block_hash import block_hashes

T = TypeVar("T")
GOAL_MS = 0.25
"""For the match of a prompt of 128k tokens."""
MATCH_128K = "match 128k tokens"
SIZES = (10_000, 100_000, 1_000_000)
TURN_PAGES = 16


@dataclass(frozen=True)
class Timing:
    """Of one operation, in microseconds of processor time; `p99` is the longest of fewer than 100."""

    p50_us: float
    p99_us: float
    calls: int


@dataclass(frozen=True)
class Side:
    """The tree or the trie, at one size."""

    pages: int
    nodes: int
    bytes_per_page: float
    collect_ms: float
    """A full run of Python's garbage collector over it, which looks at every object that can hold others."""
    timings: dict[str, Timing]


def timed(call: Callable[[T], Any], arguments: Iterable[T], per: int = 1) -> Timing:
    """Call with each argument; times are divided by `per`."""
    times = []
    for argument in arguments:
        start = time.thread_time_ns()
        call(argument)
        times.append((time.thread_time_ns() - start) / 1e3 / per)
    times.sort()
    return Timing(statistics.median(times), times[min(len(times) - 1, len(times) * 99 // 100)], len(times))


class Asked:
    """Prefixes that both sides are asked for, of one filled cache."""

    def __init__(self, clients: Clients, samples: Samples, repeats: int, deep: int) -> None:
        documents = samples.documents or [clients.document()]
        self.documents = [d.whole for d in documents] * repeats
        self.conversations = [d.whole for d in samples.conversations] * repeats
        self.forks = [clients.fork(d, DOCUMENT_PAGES * 3 // 4).whole for d in documents[:10]] * repeats
        self.strangers = [TokenPrefix(clients.tokens(DOCUMENT_PAGES), PAGE_TOKENS) for _ in range(5)] * repeats
        self.new_documents = [clients.document().whole for _ in range(3)]
        turns = samples.conversations[:: max(1, len(samples.conversations) // 50)]
        self.new_turns = [TokenPrefix(d.raw + clients.tokens(TURN_PAGES), PAGE_TOKENS) for d in turns]
        self.page_by_page = clients.conversation(turns=deep, pages=1).prefixes()
        for prefix in [*self.new_documents, *self.new_turns]:
            assert len(prefix.chain)


@contextmanager
def allocated() -> Iterator[list[int]]:
    """Put what Python allocates within, and has not freed, into the list: bytes."""
    out = [0]
    tracemalloc.start()
    try:
        yield out
        gc.collect()
        out[0], _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def collect_ms() -> float:
    gc.collect()
    start = time.thread_time_ns()
    gc.collect()
    return (time.thread_time_ns() - start) / 1e6


class TrieSide:
    """The trie, asked as `TreeSide` is."""

    def __init__(self, pages: int) -> None:
        self.trie, self._numbers = Trie(), list(range(DOCUMENT_PAGES + 100))
        self.match, self.evict = self.trie.match, self.trie.evict

    def insert(self, prefix: TokenPrefix) -> int:
        return self.trie.insert(prefix, self._numbers)

    def lock(self, prefix: TokenPrefix) -> None:
        path = self.trie.match(prefix)
        self.trie.lock(path)
        self.trie.unlock(path)

    def time_inserts(self, prefixes: Sequence[TokenPrefix]) -> Timing:
        return timed(self.insert, prefixes)

    def sizes(self) -> tuple[int, int]:
        """Pages and nodes that are held."""
        return self.trie.pages, self.trie.pages

    def check(self) -> list[str]:
        return []


class RadixSide(TreeSide):
    """The prefix tree. Inserts are timed without the making of what is inserted."""

    def time_inserts(self, prefixes: Sequence[TokenPrefix]) -> Timing:
        offers = [(prefix, self.offer(prefix)) for prefix in prefixes]
        timing = timed(lambda pair: self.take(*pair), offers)
        for _, offer in offers:
            offer.lease.release()
        return timing

    def sizes(self) -> tuple[int, int]:
        """Pages and nodes that are held."""
        counts = list(self.nodes())
        return sum(counts), len(counts)

    def check(self) -> list[str]:
        return self.tree.check()


def measure_side(kind: type[RadixSide] | type[TrieSide], pages: int, repeats: int, deep: int) -> Side:
    """Fill a tree or a trie, then ask, insert and evict."""
    clients = Clients(pages)
    with allocated() as grown:
        side = kind(pages)
        samples = fill(clients, pages, side.insert)
    held, nodes = side.sizes()
    bytes_per_page, collected_ms = (grown[0] - samples.nbytes) / held, collect_ms()
    asked = Asked(clients, samples, repeats, deep)
    match: Callable[[TokenPrefix], object] = side.match
    out = {
        MATCH_128K: timed(match, asked.documents),
        "match 128k tokens, the last quarter new": timed(match, asked.forks),
        "match 128k tokens, all new": timed(match, asked.strangers),
        "match a conversation": timed(match, asked.conversations),
        "match, lock, unlock 128k tokens": timed(side.lock, asked.documents),
        "match, lock, unlock a conversation": timed(side.lock, asked.conversations),
        "insert 2,000 pages": side.time_inserts(asked.new_documents),
        "insert a turn": side.time_inserts(asked.new_turns),
    }
    for prefix in asked.page_by_page:  # One page longer each: a node a page.
        side.insert(prefix)
    out[f"match {deep:,} pages, a node a page"] = timed(match, [asked.page_by_page[-1]] * 5 * repeats)
    out["evict 16 pages, each"] = timed(side.evict, [TURN_PAGES] * 20 * repeats, TURN_PAGES)
    out["evict 2,000 pages, each"] = timed(side.evict, [DOCUMENT_PAGES] * 2, DOCUMENT_PAGES)
    wrong = side.check() if pages <= SIZES[1] else []
    assert not wrong, wrong
    return Side(held, nodes, bytes_per_page, collected_ms, out)


def measure_prefixes(repeats: int) -> dict[str, Timing]:
    """What it costs to make the prefix of 128k tokens, and to hash its 2,000 pages."""
    clients, times = Clients(0), range(10 * repeats)
    prefix = clients.document().whole
    tokens = list(prefix.tokens())
    more = list(TokenPrefix(clients.tokens(TURN_PAGES), PAGE_TOKENS).tokens())
    assert len(prefix.chain) == 16 * DOCUMENT_PAGES
    return {
        "prefix of a list of 128k tokens": timed(lambda _: TokenPrefix.of(tokens, PAGE_TOKENS), times),
        "prefix of 128k tokens as bytes": timed(lambda _: TokenPrefix(prefix.raw, PAGE_TOKENS), times),
        "block hashes of 2,000 pages": timed(lambda _: TokenPrefix(prefix.raw, PAGE_TOKENS).chain, times),
        "block hashes of 2,000 pages, of a list": timed(lambda _: block_hashes(tokens, PAGE_TOKENS), times),
        "16 pages more, with their keys": timed(lambda _: prefix.longer(more).chain, times),
    }


def tree_table(trees: Sequence[Side], tries: Sequence[Side]) -> Table:
    """Microseconds by size; the trie's at the largest, and what it takes more."""
    heads = [*(f"{side.pages:,} pages" for side in trees), f"trie, {tries[-1].pages:,}", "trie / tree"]
    out = figure_table("tree: microseconds, p50 (p99)", ("", *heads))
    for name, last in trees[-1].timings.items():
        theirs = tries[-1].timings[name]
        cells = [f"{s.timings[name].p50_us:.1f} ({s.timings[name].p99_us:.1f})" for s in trees]
        out.add_row(name, *cells, f"{theirs.p50_us:.1f}", f"{theirs.p50_us / last.p50_us:.1f}")
    theirs_bytes, ours_bytes = tries[-1].bytes_per_page, trees[-1].bytes_per_page
    out.add_row("nodes", *[f"{s.nodes:,}" for s in trees], f"{tries[-1].nodes:,}", "")
    cells = [f"{s.bytes_per_page:.0f}" for s in trees]
    out.add_row("bytes a page", *cells, f"{theirs_bytes:.0f}", f"{theirs_bytes / ours_bytes:.1f}")
    cells = [f"{s.collect_ms:.0f}" for s in trees]
    out.add_row("garbage collection, ms", *cells, f"{tries[-1].collect_ms:.0f}", "")
    return out


def prefix_table(timings: dict[str, Timing]) -> Table:
    rows = ((name, f"{timing.p50_us:.0f}", f"{timing.p99_us:.0f}") for name, timing in timings.items())
    return figure_table("before the tree", ("", "microseconds, p50", "p99"), rows)


def measure_trees(console: Console, sizes: Sequence[int], repeats: int, deep: int) -> dict[str, Any]:
    trees, tries = [], []
    for size in sizes:
        trees.append(measure_side(RadixSide, size, repeats, deep))
        tries.append(measure_side(TrieSide, size, repeats, deep))
    prefixes = measure_prefixes(repeats)
    console.print(tree_table(trees, tries))
    console.print(prefix_table(prefixes))
    match_ms = trees[-1].timings[MATCH_128K].p50_us / 1e3
    verdict = "met" if match_ms < GOAL_MS else "missed"
    console.print(f"goal: match of 128k tokens under {GOAL_MS} ms: {match_ms:.3f} ms, {verdict}")
    return {
        "tree": [asdict(side) for side in trees],
        "trie": [asdict(side) for side in tries],
        "prefix": {name: asdict(timing) for name, timing in prefixes.items()},
    }


def main(argv: list[str] | None = None) -> int:
    flags = flag_parser(__doc__)
    flags.add_argument("--pages", type=int, nargs="+", help="sizes of the trees (default: 10,000 to 1,000,000)")
    flags.add_argument("--quick", action="store_true", help="trees up to 8,000 pages, once")
    flags.add_argument("--repeats", type=int, default=5)
    args = flags.parse_args(argv)
    sizes = args.pages or ([1_000, 8_000] if args.quick else list(SIZES))
    if min(*sizes, args.repeats) < 1:
        flags.error("all numbers must be 1 or more")
    repeats = 1 if args.quick else args.repeats
    torch.set_num_threads(1)
    console = Console()
    console.print(headline())
    deep = DOCUMENT_PAGES // 8 if args.quick else DOCUMENT_PAGES
    write_report(args, **measure_trees(console, sizes, repeats, deep))
    return 0


if __name__ == "__main__":
    sys.exit(main())
