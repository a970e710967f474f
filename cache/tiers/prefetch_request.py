"""The prefetch of one request: its state, and which pages each component reads."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.prefix_cache.token_prefix import TokenPrefix
from twinpool.cache.prefix_cache.tree_components import TreeComponent, WindowComponent
from twinpool.cache.prefix_cache.tree_node import NodeLock
from twinpool.cache.storage.page_store import PendingResult
from twinpool.cache.storage.storage_backend import ObjectOutcome


class PrefetchStage(StrEnum):
    """The stages of a prefetch, see `cache.tiers.prefetch`."""

    PROBING = "probing"
    READING = "reading"
    OVER = "over"


@dataclass(eq=False)
class PrefetchBatch:
    """Pages (or a snapshot) of one component that are being read: page numbers, and the host pages for them, in the
    same order."""

    component: str
    pages: list[int]
    lease: Lease
    ticket: PendingResult[list[ObjectOutcome]]


@dataclass(eq=False)
class PrefetchRequest:
    """The prefetch of one request. Lengths are in pages from the start of `prefix`."""

    number: int
    owner: str
    """The request, for the log."""
    prefix: TokenPrefix
    began: float
    """Seconds, by the prefetcher's clock."""
    held: int
    """The length that the tree had when the prefetch began."""
    lock: NodeLock
    """Keeps, until the prefetch is released, the host parts that it builds on and those that it has brought."""
    stage: PrefetchStage = PrefetchStage.PROBING
    probe: PendingResult[list[bool]] | None = None
    probed: list[tuple[str, int]] = field(default_factory=list)
    """Component and page number of each answer of `probe`, in order."""
    target: int = 0
    """The length up to which pages are read."""
    batches: list[PrefetchBatch] = field(default_factory=list)
    unread: deque[tuple[str, list[int]]] = field(default_factory=deque)
    """Batches still to be read (component and page numbers): the storage queue has room for only so many at once."""
    arrived: dict[str, dict[int, tuple[Lease, int]]] = field(default_factory=dict)
    """By component and page number: the lease of the host page, and its digest."""
    stopped: bool = False
    """Whether the prefetch is to end with the pages that have come."""
    gained: int = 0
    """By how many pages the prefetch moved the tree's anchor on."""

    @property
    def over(self) -> bool:
        return self.stage is PrefetchStage.OVER


def reads_of(component: TreeComponent, held: int, length: int) -> range:
    """Returns the page numbers that a prefetch from `held` to `length` pages reads of a component; of a point
    component, the page that its snapshot follows."""
    if component.point:
        return range(length - 1, length)
    if isinstance(component, WindowComponent):
        return range(max(0, length - component.reach), length)
    return range(held, length)


def accepts(component: TreeComponent, there: set[int], held: int, length: int) -> bool:
    """Whether the page numbers in `there` hold all pages of a component that computing from `length` needs."""
    return there.issuperset(reads_of(component, held, length))
