"""A cache as it looks in service: shared system prompts, conversations of many turns, prompts of 128k tokens.

Pages have 64 tokens. A third of the pages are documents of 2,000 pages (every fourth is forked half-way), the rest
conversations of 1 to 20 turns, each inserted turn by turn. One system prompt of 32 begins every sequence, the first
ones more often than the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from cache.leases import Allocator
from cache.nodes import Offer
from cache.prefix import Prefix
from cache.registry import BufferSpec, PoolSetSpec, PoolSpec
from cache.tree import PrefixTree

PAGE_TOKENS = 64
DOCUMENT_PAGES = 2000
VOCABULARY = 128_000
KEPT = 400
"""Sequences of each kind that are kept to be looked for again."""
SPEC = PoolSetSpec(PAGE_TOKENS, (PoolSpec("full", (BufferSpec("k", 1, (1,), torch.uint8),)),))


@dataclass(frozen=True)
class Sequence:
    """What one client sent: the tokens of all its turns, and how many pages each turn ended with."""

    raw: bytes
    ends: tuple[int, ...]

    def prefixes(self) -> list[Prefix]:
        return [Prefix(self.raw[: end * 4 * PAGE_TOKENS], PAGE_TOKENS) for end in self.ends]


class Sequences:
    """Makes sequences, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._systems = [self._tokens(int(pages)) for pages in self._rng.integers(8, 65, 32)]

    def _tokens(self, pages: int) -> bytes:
        return self._rng.integers(0, VOCABULARY, pages * PAGE_TOKENS, dtype=np.uint32).tobytes()

    def system(self) -> bytes:
        return self._systems[min(31, int(self._rng.geometric(0.12)) - 1)]

    def document(self) -> Sequence:
        system = self.system()
        raw = system + self._tokens(DOCUMENT_PAGES - len(system) // (4 * PAGE_TOKENS))
        return Sequence(raw, (DOCUMENT_PAGES,))

    def fork(self, other: Sequence) -> Sequence:
        half = DOCUMENT_PAGES // 2
        return Sequence(other.raw[: half * 4 * PAGE_TOKENS] + self._tokens(DOCUMENT_PAGES - half), (DOCUMENT_PAGES,))

    def conversation(self, turns: int = 0, pages: int = 0) -> Sequence:
        """Of 1 to 20 turns of 2 to 24 pages each, unless told otherwise."""
        system = self.system()
        turns = turns or int(self._rng.integers(1, 21))
        sizes = [pages] * turns if pages else self._rng.integers(2, 25, turns).tolist()
        ends = np.cumsum([len(system) // (4 * PAGE_TOKENS), *sizes])[1:].tolist()
        return Sequence(system + self._tokens(sum(sizes)), tuple(ends))

    def stranger(self) -> Sequence:
        """As long as a document, and nowhere in the tree."""
        return Sequence(self._tokens(DOCUMENT_PAGES), (DOCUMENT_PAGES,))


class Grown:
    """A tree of a given size, with the sequences in it that are asked for later."""

    def __init__(self, pages: int, seed: int = 1) -> None:
        self.sequences = Sequences(seed)
        self.tree = PrefixTree(SPEC)
        self.allocator = Allocator("full pages", pages + 8 * DOCUMENT_PAGES, first=1)
        self.documents: list[Sequence] = []
        self.conversations: list[Sequence] = []
        self._digests = np.random.default_rng(seed)

    @property
    def pages(self) -> int:
        return self.tree.sizes[next(iter(self.tree.sizes))]

    def offer(self, prefix: Prefix) -> dict[str, list[Offer]]:
        """Pages that a request has computed for what the tree lacks of `prefix`."""
        held = self.tree.match(prefix).depth
        count = len(prefix) - held
        digests = self._digests.integers(0, 2**64, count, dtype=np.uint64).tolist()
        return {"full": [Offer(held, self.allocator.lease(count, "request"), digests)]}

    def insert(self, prefix: Prefix) -> None:
        offers = self.offer(prefix)
        self.tree.insert(prefix, offers)
        offers["full"][0].lease.release()

    def grow(self, pages: int, also: Callable[[Prefix], None] | None = None) -> None:
        """Insert sequences until the tree has `pages` pages; `also` is told of each."""
        for sequence in self._mix(pages):
            for prefix in sequence.prefixes():
                self.insert(prefix)
                if also is not None:
                    also(prefix)

    def _mix(self, pages: int) -> Iterator[Sequence]:
        inside = made = 0
        while self.pages < pages:
            if inside * 3 <= self.pages and pages >= 3 * DOCUMENT_PAGES:
                fork = made % 4 == 3 and bool(self.documents)
                sequence = self.sequences.fork(self.documents[-1]) if fork else self.sequences.document()
                made, inside = made + 1, inside + (DOCUMENT_PAGES // 2 if fork else DOCUMENT_PAGES)
                self.documents = [*self.documents, sequence][-KEPT:]
            else:
                sequence = self.sequences.conversation()
                if len(self.conversations) < KEPT:
                    self.conversations.append(sequence)
            yield sequence
