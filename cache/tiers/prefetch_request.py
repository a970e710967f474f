"""One request's prefetch: its state, and what each component reads."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from cache.pool.page_allocator import Lease
from cache.prefix_cache.token_prefix import TokenPrefix
from cache.prefix_cache.tree_components import TreeComponent, WindowComponent
from cache.prefix_cache.tree_node import NodeLock
from cache.storage.page_store import PendingResult
from cache.storage.storage_backend import ObjectOutcome


class PrefetchStage(StrEnum):
    PROBING = "probing"
    READING = "reading"
    OVER = "over"


@dataclass(eq=False)
class PrefetchBatch:
    """Pages (or a snapshot) of one component under way: page numbers, and host memory for them."""

    component: str
    pages: list[int]
    lease: Lease
    ticket: PendingResult[list[ObjectOutcome]]


@dataclass(eq=False)
class PrefetchRequest:
    """One request's prefetch. Lengths are in pages from the start of its prefix."""

    number: int
    owner: str
    """Whose it is, for the log."""
    prefix: TokenPrefix
    began: float
    held: int
    """What the tree had when it began."""
    lock: NodeLock
    """Keeps on the host what it hangs on and what it has brought, until it is released."""
    stage: PrefetchStage = PrefetchStage.PROBING
    probe: PendingResult[list[bool]] | None = None
    probed: list[tuple[str, int]] = field(default_factory=list)
    target: int = 0
    """The length that it reads up to."""
    batches: list[PrefetchBatch] = field(default_factory=list)
    unread: deque[tuple[str, list[int]]] = field(default_factory=deque)
    """Pages, by component, that are read when others have come: storage's line has room for so many."""
    arrived: dict[str, dict[int, tuple[Lease, int]]] = field(default_factory=dict)
    """By component and page number: the page, and its digest."""
    stopped: bool = False
    gained: int = 0
    """Pages that the tree got from it."""

    @property
    def over(self) -> bool:
        return self.stage is PrefetchStage.OVER


def reads_of(component: TreeComponent, held: int, length: int) -> range:
    """The page numbers that a prefetch from `held` to `length` pages reads of a component."""
    if component.point:
        return range(length - 1, length)
    if isinstance(component, WindowComponent):
        return range(max(0, length - component.reach), length)
    return range(held, length)


def accepts(component: TreeComponent, there: set[int], held: int, length: int) -> bool:
    """Whether a component has what computing from `length` needs. Window parts are all or nothing."""
    return there.issuperset(reads_of(component, held, length))
