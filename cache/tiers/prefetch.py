"""Prefetch, storage to host: pages of a queued request's prefix are read from storage to the host before it runs.

    PROBING   storage is asked which pages it has beyond the tree's anchor
    READING   pages of every pool are read into host memory, batch by batch, up to the length that was found
    OVER      the stop policy or the last batch ended it: pages that have come are in the tree, the others given up

A prefetch of some length is complete when every pool's pages have come: of the full pool each page, of a window the
last pages before the end, all or nothing, of a state the snapshot at the end. If only some pages have come, the tree
gets the longest prefix that all components accept. If nothing is found, the prefetch is over at once, and its request
doesn't wait.

Host parts that a prefetch builds on, and those that it has brought, are locked until its request releases it.
Otherwise other requests would evict them in between, and the request would have waited only to compute them after all.
Device parts are not locked: a waiting request must never hold pages that running requests need.

Storage threads write into host memory that the prefetch leases: no lease is released before its ticket is done.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_components import TreeComponent, WindowComponent
from twinpool.cache.prefix_cache.tree_node import NodeLock, PageOffer, Tier, TokenPrefix
from twinpool.cache.storage.page_store import PageStore, PendingResult
from twinpool.cache.storage.storage_backend import ObjectOutcome
from twinpool.cache.tiers.backup import HostBackup
from twinpool.contracts.config.cache_config import PrefetchConfig
from twinpool.contracts.damage import DamageSite, log_damage
from twinpool.contracts.errors import CapacityError
from twinpool.contracts.messages.rank_orders import StoredPage


class PrefetchStage(StrEnum):
    """The stages of a prefetch, see the module's prose."""

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


_log = logging.getLogger("twinpool.cache")

_IN_LINE = 128
"""Reads of all prefetches that wait or run at once, of the 256 that may wait in the storage queue: it refuses more."""


class Prefetcher:
    """Prefetches into one tree's host pools. `now` is in seconds.

    The class has more than twenty methods, one for each step in a prefetch's life: all work on one list of active
    prefetches, and each step may be a prefetch's last.
    """

    def __init__(
        self,
        tree: RadixTree,
        host: PoolSet,
        page_store: PageStore,
        config: PrefetchConfig,
        now: Callable[[], float],
        backup: HostBackup,
    ) -> None:
        self._tree, self._host, self._page_store = tree, host, page_store
        self._config, self._now, self._backup = config, now, backup
        self._active: list[PrefetchRequest] = []
        self._unreleased: set[int] = set()
        self._number = 0
        self._polled = -math.inf
        self.counters = {"pages_prefetched": 0.0, "pages_damaged_in_storage": 0.0, "prefetch_pages_dropped": 0.0}

    def __len__(self) -> int:
        return len(self._active)

    @property
    def locks(self) -> int:
        """The number of the tree's locks that prefetches hold."""
        return len(self._unreleased)

    def leased(self, component: str) -> int:
        """Returns how many host pages (or slots) prefetches lease."""
        return sum(
            sum(len(b.lease) for b in p.batches if b.component == component)
            + sum(len(lease) for lease, _ in p.arrived.get(component, {}).values())
            for p in self._active
        )

    def start(self, prefix: TokenPrefix, owner: str = "") -> PrefetchRequest | None:
        """Begin to prefetch the pages of `prefix` that the tree lacks. The caller must `release` the prefetch.

        Returns None for a prefix without pages; where the tree lacks none, the prefetch is over at once. Pages that
        only the device has are backed up to the host, since pages from storage hang below them.
        """
        if not len(prefix):
            return None
        # Pages from storage hang below those of the tree, so these must be on the host as well.
        self._backup.save(self._tree.match(prefix).path)
        held = self._tree.match(prefix).depth
        self._number += 1
        lock = self._tree.locks.keep((), f"prefetch {self._number}")
        prefetch = PrefetchRequest(self._number, owner, prefix, self._now(), held, lock)
        self._unreleased.add(prefetch.number)
        self._keep(prefetch)
        if held == len(prefix):
            prefetch.stage = PrefetchStage.OVER
            return prefetch
        for component in self._tree.components:
            first = held
            if isinstance(component, WindowComponent):
                first = max(0, held - component.reach)
            prefetch.probed += [(component.name, page) for page in range(first, len(prefix))]
        prefetch.probe = self._page_store.exists([(pool, prefix.key(page)) for pool, page in prefetch.probed])
        self._active.append(prefetch)
        return prefetch

    def _keep(self, prefetch: PrefetchRequest) -> None:
        """Lock the host parts that computing from the tree's anchor reads, unless the prefetch was released."""
        if prefetch.number not in self._unreleased:
            return
        path = self._tree.match(prefetch.prefix).path
        for component in self._tree.components:
            for node in component.needs(path):
                here = node.parts[Tier.HOST]
                for name in (self._tree.full, component.name):
                    if name in here:
                        self._tree.locks.add(prefetch.lock, here[name])

    def release(self, prefetch: PrefetchRequest) -> None:
        """Stop the prefetch and give back its lock: its request has locked the pages itself, or is gone. Idempotent."""
        if not prefetch.over:
            self.stop(prefetch)
        self._unreleased.discard(prefetch.number)
        self._tree.locks.unlock(prefetch.lock)

    # ------------------------------------------------------------ progress

    def may_run(self, prefetch: PrefetchRequest) -> bool:
        """Whether the request need not wait for its prefetch any longer. By the stop policy, asking may stop it."""
        if prefetch.over:
            return True
        policy = self._config.policy
        if policy == "best_effort" or (policy == "timeout" and self._now() >= self._due(prefetch)):
            self.stop(prefetch)
        return prefetch.over

    def deadline(self, prefetch: PrefetchRequest) -> float | None:
        """Returns when `may_run` is to be asked although no page arrives, in seconds by the prefetcher's clock.

        None when the prefetch is over or has no timeout. Also None when that time had passed by the last `poll`: the
        worker has had a round to act on it, so the request waits for something else, or for storage threads that still
        write into its pages.
        """
        if prefetch.over or self._config.policy != "timeout":
            return None
        due = self._due(prefetch)
        return due if due > self._polled else None

    def _due(self, prefetch: PrefetchRequest) -> float:
        tokens = prefetch.target * prefetch.prefix.page_tokens
        return prefetch.began + self._config.base_s + self._config.per_token_s * tokens

    def stop(self, prefetch: PrefetchRequest) -> None:
        """End the prefetch with the pages that have come. It is over once no storage thread writes for it."""
        prefetch.stopped = True
        self._advance(prefetch)

    def poll(self) -> None:
        """Take in the answers of storage, and begin further reads. To be called once a round."""
        self._polled = self._now()
        for prefetch in list(self._active):
            self._advance(prefetch)

    def _advance(self, prefetch: PrefetchRequest) -> None:
        if prefetch.stage is PrefetchStage.PROBING:
            self._probe(prefetch)
        if prefetch.stage is PrefetchStage.READING:
            self._collect(prefetch)

    def _probe(self, prefetch: PrefetchRequest) -> None:
        assert prefetch.probe is not None
        if prefetch.stopped:
            prefetch.probe.cancel()
        if not prefetch.probe.done:
            return
        there: dict[str, set[int]] = {}
        for (component, page), found in zip(prefetch.probed, prefetch.probe.result(), strict=True):
            if found:
                there.setdefault(component, set()).add(page)
        prefetch.target = self._longest(prefetch, {} if prefetch.stopped else there, len(prefetch.prefix))
        prefetch.stage = PrefetchStage.READING
        if prefetch.target > prefetch.held:
            # Backups to the host that were in flight when the prefetch began may have ended since.
            self._keep(prefetch)
            self._read(prefetch, there)

    def _longest(self, prefetch: PrefetchRequest, there: Mapping[str, set[int]], limit: int) -> int:
        """Returns the length, up to `limit`, of the longest prefix that every component accepts.

        `there`: by component, the page numbers that there are beyond the tree's.
        """
        full = there.get(self._tree.full, set())
        length = prefetch.held
        while length < limit and length in full:
            length += 1
        while length > prefetch.held:
            if all(accepts(c, there.get(c.name, set()), prefetch.held, length) for c in self._tree.components[1:]):
                return length
            length -= 1
        return prefetch.held

    def _read(self, prefetch: PrefetchRequest, there: Mapping[str, set[int]]) -> None:
        for component in self._tree.components:
            wanted = sorted(there.get(component.name, set()) & set(reads_of(component, prefetch.held, prefetch.target)))
            step = self._config.batch_pages
            prefetch.unread += [(component.name, wanted[at : at + step]) for at in range(0, len(wanted), step)]
        self._submit_some(prefetch)

    def _submit_some(self, prefetch: PrefetchRequest) -> None:
        """Begin to read as many of the unread batches as the storage queue has room for."""
        while prefetch.unread and sum(len(p.batches) for p in self._active) < _IN_LINE:
            component, pages = prefetch.unread.popleft()
            if not self._submit(prefetch, component, pages):
                # The component's later batches are of no use without this one.
                prefetch.unread = deque(rest for rest in prefetch.unread if rest[0] != component)

    def _submit(self, prefetch: PrefetchRequest, component: str, pages: list[int]) -> bool:
        allocator = self._host.allocators[component]
        if len(pages) > allocator.free:
            self._tree.eviction.evict(Tier.HOST, component, len(pages) - allocator.free)
        try:
            lease = allocator.lease(len(pages), f"prefetch {component}")
        except CapacityError:
            return False
        firsts, ends = self._positions(component, pages)
        wanted = [
            StoredPage(component, prefetch.prefix.key(page), at, first, end)
            for page, at, first, end in zip(pages, lease.indices, firsts, ends, strict=True)
        ]
        prefetch.batches.append(PrefetchBatch(component, pages, lease, self._page_store.fetch(wanted)))
        return True

    def _collect(self, prefetch: PrefetchRequest) -> None:
        for batch in list(prefetch.batches):
            if prefetch.stopped:
                batch.ticket.cancel()
            if batch.ticket.done:
                prefetch.batches.remove(batch)
                self._sort(prefetch, batch)
        if prefetch.stopped:
            prefetch.unread.clear()
        self._submit_some(prefetch)
        if not prefetch.batches and not prefetch.unread:
            self._end(prefetch)

    def _sort(self, prefetch: PrefetchRequest, batch: PrefetchBatch) -> None:
        """Keep the pages of a batch that match the digest they were stored with, and release the others."""
        outcomes = batch.ticket.result()
        found = [i for i, outcome in enumerate(outcomes) if outcome.ok]
        pages, indices = [batch.pages[i] for i in found], [batch.lease.indices[i] for i in found]
        digests = dict(zip(found, self._digests(batch.component, pages, indices), strict=True))
        mine = prefetch.arrived.setdefault(batch.component, {})
        for i in reversed(range(len(batch.pages))):
            lease = batch.lease.split(1, batch.lease.owner, start=i)
            good = digests.get(i) == outcomes[i].digest
            if outcomes[i].verdict == "damaged" or (i in digests and not good):
                self.counters["pages_damaged_in_storage"] += 1
                why, page = outcomes[i].reason or "it isn't what was stored", batch.pages[i]
                pages = [page, page + 1]
                log_damage(
                    _log, DamageSite.STORAGE, request_id=prefetch.owner, pool=batch.component, pages=pages, what=why
                )
            if good:
                mine[batch.pages[i]] = (lease, outcomes[i].digest)
            else:
                lease.release()
        batch.lease.release()

    def _digests(self, component: str, pages: Sequence[int], indices: Sequence[int]) -> list[int]:
        firsts, ends = self._positions(component, pages)
        return self._host.digest(component, indices, firsts, ends)

    def _positions(self, component: str, pages: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the first and the end position of each page (or of the state at its end), as digests take them."""
        size = self._host.spec.page_tokens
        ends = [(page + 1) * size for page in pages]
        return (ends if self._tree.component(component).point else [end - size for end in ends]), ends

    def _end(self, prefetch: PrefetchRequest) -> None:
        arrived = {name: set(pages) for name, pages in prefetch.arrived.items()}
        length = self._longest(prefetch, arrived, prefetch.target)
        if length > prefetch.held:
            prefetch.gained = self._insert(prefetch, length)
        for pages in prefetch.arrived.values():
            for lease, _ in pages.values():
                lease.release()
        prefetch.arrived.clear()
        self._keep(prefetch)
        prefetch.stage = PrefetchStage.OVER
        self._active.remove(prefetch)
        self.counters["pages_prefetched"] += prefetch.gained
        self.counters["prefetch_pages_dropped"] += max(0, length - prefetch.held - prefetch.gained)

    def _insert(self, prefetch: PrefetchRequest, length: int) -> int:
        """Insert the pages that a prefix of `length` needs into the tree; returns by how many pages its anchor moved
        on."""
        offers: dict[str, list[PageOffer]] = {}
        for component in self._tree.components:
            arrived = prefetch.arrived.get(component.name, {})
            taken = [(page, *arrived.pop(page)) for page in reads_of(component, prefetch.held, length)]
            if taken:
                first = taken[0][0] + 1 if component.point else taken[0][0]
                lease = self._host.allocators[component.name].join([lease for _, lease, _ in taken], "prefetched")
                offers[component.name] = [PageOffer(first, lease, [digest for _, _, digest in taken])]
        prefix = prefetch.prefix.head(length)
        before = self._tree.match(prefix).depth
        self._tree.insert(prefix, offers, Tier.HOST)
        for (offer,) in offers.values():
            offer.lease.release()
        return max(0, self._tree.match(prefix).depth - before)

    def check(self) -> list[str]:
        over = sum(p.over for p in self._active)
        return [f"{over} prefetches are over and still held"] if over else []

    def close(self) -> None:
        """Give up all prefetches. The storage queue must have been closed, so that no thread writes any more."""
        for prefetch in self._active:
            for batch in prefetch.batches:
                assert batch.ticket.done, "the storage queue closes first"
                batch.lease.release()
            for pages in prefetch.arrived.values():
                for lease, _ in pages.values():
                    lease.release()
            prefetch.batches, prefetch.arrived, prefetch.stage = [], {}, PrefetchStage.OVER
            prefetch.unread.clear()
            self.release(prefetch)
        self._active.clear()
