"""What a cache can do for a trace, computed from page names alone: no tree, no tokens, no KV cache manager.

A request is the list of its pages, each named by all pages up to it. *Unlimited* remembers every name. *Plain LRU*
holds so many pages and drops the ones used longest ago, the deeper first; it is what the tree's LRU must equal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twinpool.sim.scale.traffic import TRACE_BLOCK_TOKENS, TraceLine, read_trace


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `names` are of its whole pages, equal where everything up to the page's end is equal."""

    tokens: int
    blocks: tuple[int, ...]
    names: tuple[int, ...]
    reusable: int
    """Pages that may come from a cache: at least one token is computed."""


@dataclass(frozen=True)
class Trace:
    page_tokens: int
    asks: tuple[Ask, ...]

    @property
    def tokens(self) -> int:
        return sum(ask.tokens for ask in self.asks)

    @property
    def longest(self) -> int:
        return max(ask.tokens for ask in self.asks)

    @property
    def distinct(self) -> int:
        """Different pages."""
        return len({name for ask in self.asks for name in ask.names})

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


def load(path: Path, page_tokens: int, limit: int | None = None) -> Trace:
    """Read a trace. Raises `ValueError` for pages that don't fill its blocks of 512 tokens, and for a bad line."""
    if TRACE_BLOCK_TOKENS % page_tokens:
        raise ValueError(f"pages of {page_tokens} tokens don't fill a trace's blocks of {TRACE_BLOCK_TOKENS}")
    known: dict[tuple[int, int, int], int] = {}
    asks = tuple(_ask(line, page_tokens, known) for line in read_trace(path, limit))
    if not asks:
        raise ValueError(f"{path} has no requests")
    return Trace(page_tokens, asks)


def _ask(line: TraceLine, page_tokens: int, known: dict[tuple[int, int, int], int]) -> Ask:
    names, above = [], 0
    for page in range(line.input_length // page_tokens):
        block, offset = divmod(page * page_tokens, TRACE_BLOCK_TOKENS)
        above = known.setdefault((above, line.hash_ids[block], offset), len(known) + 1)
        names.append(above)
    return Ask(line.input_length, line.hash_ids, tuple(names), (line.input_length - 1) // page_tokens)


def unlimited(trace: Trace) -> int:
    """Tokens that need not be computed when nothing is ever forgotten."""
    seen: set[int] = set()
    hits = 0
    for ask in trace.asks:
        hits += _leading(ask.names[: ask.reusable], seen)
        seen.update(ask.names)
    return hits * trace.page_tokens


def plain_lru(trace: Trace, capacity: int) -> int:
    """Tokens that need not be computed with room for `capacity` pages, requests included, one at a time."""
    cache: OrderedDict[int, None] = OrderedDict()
    total = 0
    for ask in trace.asks:
        hits = _leading(ask.names[: ask.reusable], cache)
        _touch(cache, ask.names[:hits])
        need = trace.pages(ask.tokens) - hits
        while len(cache) + need > capacity:
            cache.popitem(last=False)
        _touch(cache, ask.names)
        total += hits
    return total * trace.page_tokens


def _leading(names: Sequence[int], known: set[int] | OrderedDict[int, None]) -> int:
    for count, name in enumerate(names):
        if name not in known:
            return count
    return len(names)


def _touch(cache: OrderedDict[int, None], names: Sequence[int]) -> None:
    """The deepest first, so that it goes first."""
    for name in reversed(names):
        cache[name] = None
        cache.move_to_end(name)
