"""A cache as it looks in service: shared system prompts, conversations of many turns, prompts of 128k tokens.

Pages have 64 tokens. A third of the pages are documents of 2,000 pages (every fourth is a fork of the one before,
from its middle on), the rest conversations of 1 to 20 turns, inserted turn by turn. One of 32 system prompts begins
every sequence, the first ones more often than the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from twinpool.cache.memory.kv_cache_spec import BufferSpec, PoolSetSpec, PoolSpec
from twinpool.cache.pool.page_allocator import PageAllocator
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import PageOffer, Tier, TokenPrefix

PAGE_TOKENS = 64
PAGE_BYTES = 4 * PAGE_TOKENS
"""Of a page's tokens, in a prefix."""
DOCUMENT_PAGES = 2000
VOCABULARY = 128_000
SPEC = PoolSetSpec(PAGE_TOKENS, (PoolSpec("full", (BufferSpec("k", 1, (1,), torch.uint8),)),))
SPARE_PAGES = 8 * DOCUMENT_PAGES
"""For what is inserted while measuring."""
_KEPT = 400


@dataclass(frozen=True)
class Dialogue:
    """What one client sent: the tokens of all its turns (4 bytes each), and how many pages it had after each."""

    raw: bytes
    ends: tuple[int, ...]

    def prefixes(self) -> list[TokenPrefix]:
        return [TokenPrefix(self.raw[: end * PAGE_BYTES], PAGE_TOKENS) for end in self.ends]

    @property
    def whole(self) -> TokenPrefix:
        return TokenPrefix(self.raw, PAGE_TOKENS)


class Clients:
    """Makes dialogues, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._systems = [self.tokens(int(pages)) for pages in self._rng.integers(8, 65, 32)]

    def tokens(self, pages: int) -> bytes:
        return self._rng.integers(0, VOCABULARY, pages * PAGE_TOKENS, dtype=np.uint32).tobytes()

    def _system(self) -> bytes:
        return self._systems[min(31, int(self._rng.geometric(0.12)) - 1)]

    def document(self) -> Dialogue:
        system = self._system()
        return Dialogue(system + self.tokens(DOCUMENT_PAGES - len(system) // PAGE_BYTES), (DOCUMENT_PAGES,))

    def fork(self, other: Dialogue, pages: int = DOCUMENT_PAGES // 2) -> Dialogue:
        """The first `pages` pages of `other`, then something else."""
        return Dialogue(other.raw[: pages * PAGE_BYTES] + self.tokens(DOCUMENT_PAGES - pages), (DOCUMENT_PAGES,))

    def conversation(self, turns: int = 0, pages: int = 0) -> Dialogue:
        """Of 1 to 20 turns of 2 to 24 pages each, unless told otherwise."""
        system = self._system()
        turns = turns or int(self._rng.integers(1, 21))
        sizes: list[int] = [pages] * turns if pages else self._rng.integers(2, 25, turns).tolist()
        ends = np.cumsum([len(system) // PAGE_BYTES, *sizes])[1:].tolist()
        return Dialogue(system + self.tokens(sum(sizes)), tuple(ends))


@dataclass
class Samples:
    """Some of the dialogues in a cache, to be looked for again."""

    documents: list[Dialogue]
    conversations: list[Dialogue]

    @property
    def nbytes(self) -> int:
        return sum(len(d.raw) for d in [*self.documents, *self.conversations])


def fill(clients: Clients, pages: int, insert: Callable[[TokenPrefix], int]) -> Samples:
    """Insert dialogues until there are `pages` pages, as `insert` counts the new ones; returns some of them."""
    documents: list[Dialogue] = []
    samples = Samples(documents, [])
    total = inside = made = 0
    while total < pages:
        if inside * 3 <= total and pages >= 3 * DOCUMENT_PAGES:
            fork = made % 4 == 3
            dialogue = clients.fork(documents[-1]) if fork else clients.document()
            made, inside = made + 1, inside + (DOCUMENT_PAGES // 2 if fork else DOCUMENT_PAGES)
            documents.append(dialogue)
            del documents[:-40]
        else:
            dialogue = clients.conversation()
            samples.conversations.append(dialogue)
            del samples.conversations[:-_KEPT]
        total += sum(insert(prefix) for prefix in dialogue.prefixes())
    return samples


class TreeSide:
    """A prefix tree and the pages that it is given."""

    def __init__(self, pages: int, seed: int = 1) -> None:
        self.tree = RadixTree(SPEC)
        self.match = self.tree.match
        self.allocator = PageAllocator("full pages", pages + SPARE_PAGES, first=1)
        self._digests = np.random.default_rng(seed)

    def offer(self, prefix: TokenPrefix) -> PageOffer:
        """Pages that a request has computed: what the tree lacks of `prefix`."""
        held = self.tree.match(prefix).depth
        count = len(prefix) - held
        digests = self._digests.integers(0, 2**64, count, dtype=np.uint64).tolist()
        return PageOffer(held, self.allocator.lease(count, "request"), digests)

    def take(self, prefix: TokenPrefix, offer: PageOffer) -> None:
        self.tree.insert(prefix, {"full": (offer,)})

    def insert(self, prefix: TokenPrefix) -> int:
        offer = self.offer(prefix)
        self.take(prefix, offer)
        offer.lease.release()
        return len(offer.digests)

    def lock(self, prefix: TokenPrefix) -> None:
        """Match, lock, unlock: what every request costs."""
        self.tree.locks.unlock(self.tree.lock(self.tree.match(prefix), "request"))

    def evict(self, pages: int) -> int:
        return self.tree.eviction.evict(Tier.DEVICE, "full", pages)

    def nodes(self) -> Iterator[int]:
        """The pages of every node."""
        return (len(node) for node in self.tree.accounts.nodes())
