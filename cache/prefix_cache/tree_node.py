"""The building blocks of the prefix tree: prefixes, which are its keys, its nodes, the parts they hold, and locks.

A prefix is the whole pages at the start of a sequence; the tree and storage find state by it.

A leaf is evicted from its end, often a page at a time, so cutting the end off a node costs what is cut and not what
stays: of keys, digests and leases only the counts are reduced at first. The entries that were cut off are dropped when
the rest is read next, or when less than half is left.

A node is cut in two by `split` or `split_end`: keys, parts, children and locks go with the half that they belong to.
`TreeAccounts` has methods of the same names, which also update the tree's counts and its list of nodes: call those.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import Any

import numpy as np

from twinpool.cache.pool.page_allocator import Lease
from twinpool.contracts.block_hash import KEY_BYTES, TOKEN_BYTES, chain_on, chain_start

# ------------------------------------------------------------ prefixes


class TokenPrefix:
    """Whole pages of tokens under a salt (of an adapter or a tenant: prefixes of different salts share nothing).

    `raw` holds 4 bytes a token, so comparing prefixes is comparing bytes; `chain` holds the 16-byte block hash of each
    page. Block hashes are computed when they are asked for; the argument `chain` gives those of the first pages, where
    they are known already.
    """

    __slots__ = ("_chain", "page_bytes", "page_tokens", "raw", "salt")

    def __init__(self, raw: bytes, page_tokens: int, salt: str = "", chain: bytes = b"") -> None:
        self.page_tokens = page_tokens
        self.page_bytes = TOKEN_BYTES * page_tokens
        self.raw = raw[: len(raw) // self.page_bytes * self.page_bytes]
        self.salt = salt
        self._chain = chain

    @classmethod
    def of(
        cls, tokens: Sequence[int], page_tokens: int, salt: str = "", chain: Sequence[bytes] | None = None
    ) -> TokenPrefix:
        """Returns the whole pages of `tokens`, without a last page that isn't full.

        `chain`: block hashes of the first pages, where they are known.
        """
        keys = b"".join(chain[: len(tokens) // page_tokens]) if chain else b""
        return cls(_raw(tokens), page_tokens, salt, keys)

    def __len__(self) -> int:
        return len(self.raw) // self.page_bytes

    def head(self, pages: int) -> TokenPrefix:
        """Returns the prefix of the first `pages` pages, with their known block hashes."""
        if pages >= len(self):
            return self
        return TokenPrefix(
            self.raw[: pages * self.page_bytes], self.page_tokens, self.salt, self._chain[: KEY_BYTES * pages]
        )

    def longer(self, tokens: Sequence[int]) -> TokenPrefix:
        """Returns this prefix extended by the whole pages of the following `tokens`; known block hashes are kept."""
        return TokenPrefix(self.raw + _raw(tokens), self.page_tokens, self.salt, self._chain)

    def knows(self, pages: int) -> bool:
        """Whether the block hashes of the first `pages` pages are known, so that `chain` needn't compute them."""
        return len(self._chain) >= KEY_BYTES * pages

    def know(self, chain: bytes) -> None:
        """Take over block hashes of the first pages. The caller has found the tokens of these pages to be the same."""
        if len(chain) > len(self._chain):
            self._chain = chain

    @property
    def chain(self) -> bytes:
        """The block hashes of all pages, 16 bytes each, one after the other."""
        known = len(self._chain) // KEY_BYTES
        if known < len(self):
            key = self._chain[-KEY_BYTES:] or chain_start(self.salt)
            self._chain += b"".join(chain_on(key, self.raw, self.page_bytes, known * self.page_bytes))
        return self._chain

    def key(self, page: int) -> bytes:
        """Returns the block hash of page number `page`."""
        return self.chain[KEY_BYTES * page : KEY_BYTES * (page + 1)]

    def tokens(self, first: int = 0, end: int | None = None) -> Sequence[int]:
        """Returns the tokens of pages `first .. end-1`."""
        stop = len(self) if end is None else end
        return token_ids(self.raw[first * self.page_bytes : stop * self.page_bytes])


def token_ids(raw: bytes) -> list[int]:
    """Returns the tokens whose bytes `raw` are, 4 bytes each, little-endian."""
    tokens: list[int] = np.frombuffer(raw, dtype="<u4").tolist()
    return tokens


def _raw(tokens: Sequence[int]) -> bytes:
    """Returns the tokens as bytes: 4 bytes each, little-endian."""
    if isinstance(tokens, np.ndarray):
        return tokens.astype("<u4").tobytes()
    # Over three times as fast as numpy for a list.
    words = array("I", tokens)
    if sys.byteorder != "little":
        words.byteswap()
    return words.tobytes()


def common_pages(run: bytes, raw: bytes, at: int, page_bytes: int) -> int:
    """Returns how many leading pages of `run` are the same as those of `raw` from byte `at` on."""
    size = min(len(run), len(raw) - at)
    word = 8 if page_bytes % 8 == 0 else TOKEN_BYTES
    mine = np.frombuffer(run, f"<u{word}", size // word)
    differ = mine != np.frombuffer(raw, f"<u{word}", size // word, at)
    first = int(differ.argmax()) if size else 0
    return (first * word if size and differ[first] else size) // page_bytes


# ------------------------------------------------------------ nodes


class Tier(IntEnum):
    """The tier that state is in: device, host or storage. Storage is content-addressed and outside the tree."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


IN_TREE = (Tier.DEVICE, Tier.HOST)
"""The tiers whose state hangs on nodes of the tree."""

QueueEntry = list[Any]
"""An entry of an eviction queue, see `cache.prefix_cache.eviction_policy.EvictionQueue`."""


NO_LOCKS: frozenset[NodeLock] = frozenset()


class NodePart:
    """The state of one component at one node in one tier: a lease, and the digest of each page or slot in it."""

    __slots__ = ("_count", "_digests", "component", "entry", "lease", "locks", "node", "stored", "tier")

    def __init__(
        self,
        node: TreeNode,
        component: str,
        tier: Tier,
        lease: Lease,
        digests: tuple[int, ...],
        locks: frozenset[NodeLock] = NO_LOCKS,
    ) -> None:
        self.node = node
        self.component = component
        self.tier = tier
        self.lease = lease
        self._digests, self._count = digests, len(digests)
        self.locks = locks
        """The locks that keep this part. Parts with the same locks mostly share one set."""
        self.entry: QueueEntry | None = None
        """The part's entry in an eviction queue; None while it isn't queued."""
        self.stored = 0
        """For a part on the host: how many of its first pages are known to be in storage."""

    def __len__(self) -> int:
        return self.lease.count

    @property
    def digests(self) -> tuple[int, ...]:
        """The digest of each page or slot, in the order of the lease's indices."""
        if len(self._digests) != self._count:
            self._digests = self._digests[: self._count]
        return self._digests

    @property
    def live(self) -> bool:
        """Whether the node still holds this part."""
        return self.node.parts[self.tier].get(self.component) is self

    @property
    def queued(self) -> bool:
        return self.entry is not None

    def split(self, upper: TreeNode, pages: int) -> None:
        """Hand the first `pages` pages, with all locks, to a new part of `upper`."""
        digests = self.digests
        lease = self.lease.split(pages, self.lease.owner)
        head = NodePart(upper, self.component, self.tier, lease, digests[:pages], self.locks)
        self._digests, self._count = digests[pages:], len(digests) - pages
        head.stored, self.stored = min(self.stored, pages), max(0, self.stored - pages)
        upper.parts[self.tier][self.component] = head
        for lock in self.locks:
            lock.parts.insert(lock.parts.index(self), head)

    def split_end(self, lower: TreeNode, pages: int) -> None:
        """Keep the first `pages` pages, and hand the others, with all locks, to a new part of `lower`."""
        digests = self._digests[pages : self._count]
        lease = self.lease.split(self.lease.count - pages, self.lease.owner, start=pages)
        end = NodePart(lower, self.component, self.tier, lease, digests, self.locks)
        end.stored = max(0, self.stored - pages)
        self._keep(pages)
        lower.parts[self.tier][self.component] = end
        for lock in self.locks:
            lock.parts.insert(lock.parts.index(self) + 1, end)

    def cut(self, pages: int) -> None:
        """Keep the first `pages` pages, and release the others."""
        self.lease.cut(pages)
        self._keep(pages)

    def _keep(self, pages: int) -> None:
        self.stored, self._count = min(self.stored, pages), pages
        if 2 * pages < len(self._digests):
            self._digests = self._digests[:pages]


class TreeNode:
    """A run of whole pages that follows its parent's, with the parts that each component holds in each tier."""

    __slots__ = (
        "_chain", "below", "busy", "busy_below", "children", "created", "hits", "latest", "linked", "newer", "older",
        "pages", "parent", "parts", "priority", "run", "salt", "start", "trimmed", "used",
    )  # fmt: skip

    def __init__(
        self, raw: bytes, chain: bytes, parent: TreeNode | None, *, start: int = 0, salt: str = "", priority: int = 0
    ) -> None:
        self.run = raw
        """Tokens, 4 bytes each: those of the node's pages (`raw`), and perhaps of pages behind them that were cut
        off."""
        self._chain = chain
        self.pages = len(chain) // KEY_BYTES
        """The number of pages in `run` that are the node's."""
        self.trimmed = True
        """False: `run` and the block hashes may still have pages that were cut off."""
        self.parent = parent
        self.children: dict[bytes, TreeNode] = {}
        """Children by the tokens of their first page, 4 bytes each."""
        self.latest: TreeNode | None = None
        """The child that was visited last, if it is still one: most nodes have one child, found so without a
        look-up."""
        self.parts: tuple[dict[str, NodePart], dict[str, NodePart]] = ({}, {})
        """For device and host (indexed by `Tier`): the part of each component, by its name."""
        self.below = [0, 0]
        """The numbers of children with full state on the device and on the host (indexed by `Tier`)."""
        self.start = start
        """The number, in the sequence, of the node's first page."""
        self.salt = salt
        """The salt under which the node was inserted."""
        self.linked = True
        """Whether the node can be matched: it hangs on a root, and neither it nor a node above it was invalidated."""
        self.used = self.created = self.hits = 0
        """Ticks of the tree's clock (`TreeAccounts.tick`) at the last use and at the insertion; how often it was
        locked or held."""
        self.priority = priority
        self.busy = self.busy_below = 0
        """Counted in a tree that is written back: locked parts of this node, and children with locked parts in or
        below them."""
        self.older: TreeNode | None = None
        self.newer: TreeNode | None = None
        """`older` and `newer`: the neighbours in the tree's list of nodes."""

    def __len__(self) -> int:
        """The number of pages."""
        return self.pages

    @property
    def raw(self) -> bytes:
        """The tokens of the node's pages, 4 bytes each."""
        if not self.trimmed:
            self._trim()
        return self.run

    @property
    def chain(self) -> bytes:
        """The block hashes of the node's pages, 16 bytes each."""
        if not self.trimmed:
            self._trim()
        return self._chain

    def _trim(self) -> None:
        page_bytes = len(self.run) * KEY_BYTES // len(self._chain)
        self.run, self._chain = self.run[: self.pages * page_bytes], self._chain[: KEY_BYTES * self.pages]
        self.trimmed = True

    def first(self, page_bytes: int) -> bytes:
        """Returns the tokens of the first page, 4 bytes each: the node's key in its parent's `children`."""
        return self.run[:page_bytes]

    def end(self, pages: int, page_bytes: int) -> tuple[bytes, bytes]:
        """Returns `raw` and `chain` without the first `pages` pages."""
        stop = self.pages
        return self.run[pages * page_bytes : stop * page_bytes], self._chain[KEY_BYTES * pages : KEY_BYTES * stop]

    def cut(self, pages: int) -> None:
        """Keep the first `pages` pages. Parts are the caller's affair."""
        self.pages, self.trimmed = pages, False
        if 2 * KEY_BYTES * pages < len(self._chain):
            self._trim()

    def split(self, pages: int, page_bytes: int, points: Collection[str]) -> TreeNode:
        """Cut the node after `pages`; returns the new upper half. This node becomes the lower half.

        `points` names the components that hold one slot for a node's end: theirs stay with the lower half.
        """
        parent = self.parent
        assert parent is not None
        raw, chain = self.raw[: pages * page_bytes], self.chain[: pages * KEY_BYTES]
        upper = self._half(raw, chain, parent, self.start)
        parent.children[self.first(page_bytes)], parent.latest = upper, None
        self.run, self._chain = self.end(pages, page_bytes)
        self.pages -= pages
        self.start += pages
        self.parent = upper
        upper.children[self.first(page_bytes)] = self
        for part in self.all_parts:
            if part.component not in points:
                part.split(upper, pages)
        return upper

    def split_end(self, pages: int, page_bytes: int, points: Collection[str]) -> TreeNode:
        """Cut the node after `pages`; returns the new lower half. This node becomes the upper half.

        The cost grows with the pages of the lower half, not with those that stay. `points` as in `split`.
        """
        lower = self._half(*self.end(pages, page_bytes), self, self.start + pages)
        lower.children, lower.below, lower.busy_below = self.children, self.below, self.busy_below
        for child in lower.children.values():
            child.parent = lower
        self.children, self.below = {lower.first(page_bytes): lower}, [0, 0]
        self.latest = None
        self.cut(pages)
        for part in self.all_parts:
            if part.component not in points:
                part.split_end(lower, pages)
                continue
            lower.parts[part.tier][part.component] = part
            part.node = lower
            del self.parts[part.tier][part.component]
        return lower

    def _half(self, raw: bytes, chain: bytes, parent: TreeNode, start: int) -> TreeNode:
        """Returns a new node of a half, with what eviction policies look at: both halves were used alike."""
        half = TreeNode(raw, chain, parent, start=start, salt=self.salt, priority=self.priority)
        half.used, half.created, half.hits = self.used, self.created, self.hits
        return half

    # Counts of locked parts are kept in trees that are written back only, where a node that is on the device alone is
    # evicted together with everything that the host has below it.

    @property
    def all_parts(self) -> list[NodePart]:
        """The parts of every component in both tiers."""
        return [part for parts in self.parts for part in parts.values()]

    @property
    def locked_parts(self) -> int:
        """How many parts are locked, counted anew, in all tiers."""
        return sum(bool(part.locks) for part in self.all_parts)

    def count_locked(self) -> None:
        """Count one more locked part, in this node and in those above it. The caller has locked the part."""
        self.busy += 1
        above = self.parent
        fresh = self.busy == 1 and not self.busy_below
        while fresh and above is not None:
            above.busy_below += 1
            fresh = above.busy_below == 1 and not above.busy
            above = above.parent

    def count_unlocked(self) -> None:
        """Count one locked part less, in this node and in those above it. The caller has unlocked the part."""
        self.busy -= 1
        above = self.parent
        idle = not (self.busy or self.busy_below)
        while idle and above is not None:
            above.busy_below -= 1
            idle = not (above.busy or above.busy_below)
            above = above.parent

    @property
    def parent_key(self) -> bytes | None:
        """The block hash of the page before the first; None at the start of a prefix."""
        assert self.parent is not None
        return self.parent.chain[-KEY_BYTES:] or None

    def part(self, component: str) -> NodePart | None:
        """Returns the part of `component` in the fastest tier that has one; None where neither has."""
        device, host = self.parts
        part = device.get(component)
        return host.get(component) if part is None else part

    @property
    def keys(self) -> list[bytes]:
        """The block hash of each page."""
        chain = self.chain
        return [chain[at : at + KEY_BYTES] for at in range(0, len(chain), KEY_BYTES)]


def subtree(top: TreeNode) -> Iterator[TreeNode]:
    """Yields `top` and all its descendants, parents first."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


start_of = attrgetter("node.start")
"""Returns the number, in the sequence, of the first page of a part's node."""


def digests_of(parts: Sequence[NodePart]) -> list[int]:
    """Returns the digests of all `parts`, one part after the other."""
    digests = list[int]()
    for part in parts:
        digests += part._digests if len(part._digests) == part._count else part.digests
    return digests


@dataclass(eq=False, slots=True)
class NodeLock:
    """A token that keeps the named parts from eviction until `TreeLocks.unlock` gives it back.

    When a node is split, both halves of a locked part are in `parts`, in order. `TreeLocks.add` appends to them.
    """

    number: int
    owner: str
    parts: list[NodePart]

    def of(self, component: str) -> list[NodePart]:
        """Returns the locked parts of one component, in the order in which they were locked."""
        return [p for p in self.parts if p.component == component]

    def on_device(self, component: str) -> list[NodePart]:
        """Returns the locked parts of one component that are on the device, in the order of the sequence.

        That can differ from the order of locking: pages of a window may be loaded, and so locked, after others that
        follow them in the sequence.
        """
        device = Tier.DEVICE
        return sorted([p for p in self.parts if p.component == component and p.tier is device], key=start_of)


@dataclass(frozen=True, slots=True)
class PageOffer:
    """State that is offered to the tree: `lease` holds pages `first ..` of the sequence, with a digest for each.

    For a state component: one slot, which holds the snapshot after `first` pages.
    """

    first: int
    lease: Lease
    digests: Sequence[int]
