"""What the prefix tree is made of: nodes, the parts they hold, and locks.

A leaf is evicted from its end, often a page at a time, so cutting the end off a node costs what is cut and not what
stays: keys, digests and leases are cut by number first, and what was cut off them is dropped when they are read next,
or when less than half is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import Any

from cache.pool.page_allocator import Lease
from contracts.block_hash import KEY_BYTES


class Tier(IntEnum):
    """Where state is. Storage is content-addressed and outside the tree."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


IN_TREE = (Tier.DEVICE, Tier.HOST)

QueueEntry = list[Any]
"""A place in an eviction queue, see `cache.prefix_cache.tree_eviction.EvictionQueue`."""


NO_LOCKS: frozenset[NodeLock] = frozenset()


class NodePart:
    """What one component holds at one node in one tier: its own lease, and the digest of each page or slot in it."""

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
        """Who keeps it. Parts that are kept by the same mostly share one set."""
        self.entry: QueueEntry | None = None
        """Its place in the queue of what may be evicted."""
        self.stored = 0
        """Of a part on the host: how many of its first pages storage is known to have taken."""

    def __len__(self) -> int:
        return self.lease.count

    @property
    def digests(self) -> tuple[int, ...]:
        if len(self._digests) != self._count:
            self._digests = self._digests[: self._count]
        return self._digests

    @property
    def live(self) -> bool:
        """Whether its node still holds it."""
        return self.node.parts[self.tier].get(self.component) is self

    @property
    def queued(self) -> bool:
        return self.entry is not None

    def split(self, upper: TreeNode, pages: int) -> NodePart:
        """Hand the first `pages` pages, with all locks, to a new part of `upper`."""
        digests = self.digests
        lease = self.lease.split(pages, self.lease.owner)
        head = NodePart(upper, self.component, self.tier, lease, digests[:pages], self.locks)
        self._digests, self._count = digests[pages:], len(digests) - pages
        head.stored, self.stored = min(self.stored, pages), max(0, self.stored - pages)
        return head

    def split_end(self, lower: TreeNode, pages: int) -> NodePart:
        """Keep the first `pages` pages, and hand the others, with all locks, to a new part of `lower`."""
        digests = self._digests[pages : self._count]
        lease = self.lease.split(self.lease.count - pages, self.lease.owner, start=pages)
        end = NodePart(lower, self.component, self.tier, lease, digests, self.locks)
        end.stored = max(0, self.stored - pages)
        self._keep(pages)
        return end

    def cut(self, pages: int) -> None:
        """Keep the first `pages` pages, and give the others back."""
        self.lease.cut(pages)
        self._keep(pages)

    def _keep(self, pages: int) -> None:
        self.stored, self._count = min(self.stored, pages), pages
        if 2 * pages < len(self._digests):
            self._digests = self._digests[:pages]


class TreeNode:
    """A run of whole pages below its parent's, with what each component holds of it in each tier."""

    __slots__ = (
        "_chain", "below", "busy", "busy_below", "children", "created", "hits", "latest", "linked", "newer", "older",
        "pages", "parent", "parts", "priority", "run", "salt", "start", "trimmed", "used",
    )  # fmt: skip

    def __init__(
        self, raw: bytes, chain: bytes, parent: TreeNode | None, *, start: int = 0, salt: str = "", priority: int = 0
    ) -> None:
        self.run = raw
        """The tokens of its pages, and perhaps of pages behind them that were cut off: without those it is `raw`."""
        self._chain = chain
        self.pages = len(chain) // KEY_BYTES
        """How many of these are its own."""
        self.trimmed = True
        """False: what is behind them was cut off."""
        self.parent = parent
        self.children: dict[bytes, TreeNode] = {}
        """By the tokens of their first page."""
        self.latest: TreeNode | None = None
        """The child that was met last, if it is one still: most nodes have one, and it is found without a look-up."""
        self.parts: tuple[dict[str, NodePart], dict[str, NodePart]] = ({}, {})
        self.below = [0, 0]
        """Children that are in each tier."""
        self.start = start
        """The page number of its first page."""
        self.salt = salt
        """Under which it was inserted."""
        self.linked = True
        """Whether it can be matched: it hangs on a root, and neither it nor anything above was invalidated."""
        self.used = self.created = self.hits = 0
        self.priority = priority
        self.busy = self.busy_below = 0
        """Of a tree that is written back: parts of it that are locked, and children with such parts in or below."""
        self.older: TreeNode | None = None
        self.newer: TreeNode | None = None
        """Its neighbours in the tree's list of nodes."""

    def __len__(self) -> int:
        """Its pages."""
        return self.pages

    @property
    def raw(self) -> bytes:
        """The tokens of its pages, 4 bytes each."""
        if not self.trimmed:
            self._trim()
        return self.run

    @property
    def chain(self) -> bytes:
        """Block hashes of its pages, 16 bytes each."""
        if not self.trimmed:
            self._trim()
        return self._chain

    def _trim(self) -> None:
        page_bytes = len(self.run) * KEY_BYTES // len(self._chain)
        self.run, self._chain = self.run[: self.pages * page_bytes], self._chain[: KEY_BYTES * self.pages]
        self.trimmed = True

    def first(self, page_bytes: int) -> bytes:
        """The tokens of its first page: its key in its parent."""
        return self.run[:page_bytes]

    def end(self, pages: int, page_bytes: int) -> tuple[bytes, bytes]:
        """`raw` and `chain` from its page number `pages` on."""
        stop = self.pages
        return self.run[pages * page_bytes : stop * page_bytes], self._chain[KEY_BYTES * pages : KEY_BYTES * stop]

    def cut(self, pages: int) -> None:
        """Keep the first `pages` pages."""
        self.pages, self.trimmed = pages, False
        if 2 * KEY_BYTES * pages < len(self._chain):
            self._trim()

    def drop_head(self, pages: int, page_bytes: int) -> None:
        """Lose the first `pages` pages."""
        self.run, self._chain = self.end(pages, page_bytes)
        self.trimmed = True
        self.pages -= pages
        self.start += pages

    @property
    def parent_key(self) -> bytes | None:
        """Block hash of the page before its first; None at the start of a prefix."""
        assert self.parent is not None
        return self.parent.chain[-KEY_BYTES:] or None

    def part(self, component: str) -> NodePart | None:
        """In the fastest tier that has it."""
        device, host = self.parts
        part = device.get(component)
        return host.get(component) if part is None else part

    @property
    def keys(self) -> list[bytes]:
        chain = self.chain
        return [chain[at : at + KEY_BYTES] for at in range(0, len(chain), KEY_BYTES)]


def subtree(top: TreeNode) -> Iterator[TreeNode]:
    """`top` and all its descendants, parents first."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


start_of = attrgetter("node.start")
"""The page number of a part's first page."""


def digests_of(parts: Sequence[NodePart]) -> list[int]:
    """Of all of these, one part behind the other."""
    digests = list[int]()
    for part in parts:
        digests += part._digests if len(part._digests) == part._count else part.digests
    return digests


@dataclass(eq=False, slots=True)
class NodeLock:
    """Keeps parts where they are until it is given back, and names exactly what it keeps.

    Splits of nodes put both halves into it, in order; nothing else changes it.
    """

    number: int
    owner: str
    parts: list[NodePart]

    def of(self, component: str) -> list[NodePart]:
        """Its parts of one component, in the order in which they were locked."""
        return [p for p in self.parts if p.component == component]

    def on_device(self, component: str) -> list[NodePart]:
        """Those of them that are on the device, in the order of the sequence.

        A window's pages may be loaded in front of others that were on the device all along: these are locked later.
        """
        device = Tier.DEVICE
        return sorted([p for p in self.parts if p.component == component and p.tier is device], key=start_of)


@dataclass(frozen=True, slots=True)
class PageOffer:
    """State offered to the tree: `lease` holds pages `first ..` of the sequence, one digest each.

    Of a state component: one slot, the snapshot after `first` pages.
    """

    first: int
    lease: Lease
    digests: Sequence[int]
