"""The keeper of an arena: it keeps the index true to the tree, and takes over the pages of an earlier incarnation.

Taking over begins with the records of the full pool. A record names its page's tokens, its block hash and that of the
page before. So a page has its place in the tree if its chain of parents begins at the start of a prefix and each block
hash follows from the one before. Runs without a branch become nodes. Pages of windows and states hang on the full page
that has their block hash; a node ends where they begin or end. Pages without a place are dropped and counted.

Until then the bytes of the pages are unproven. Their digests are computed again

- when they are loaded, before anything that was computed from them is committed, whatever `cache.verify` says;
- in between, a few at a time, so that damage is found before a request needs the page.

Pages that don't match are invalidated with all pages below them, like any other damage, and computed again. With
several ranks the index is the leader's, and a digest is over the parts of all ranks. So pages that a follower had not
yet copied when the leader died don't match either. That is no damage: each rank counts its copies, and where the counts
of a dead worker's ranks differ, pages that don't match count as torn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from twinpool.cache.arena.arena import Arena, ArenaRecord, SealedPage
from twinpool.cache.device.device_port import HOST, Device, PageSpanUse
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_accounts import TreeCursor
from twinpool.cache.prefix_cache.tree_node import NodePart, Tier, TokenPrefix, TreeNode
from twinpool.cache.swap.swap_storage import SwappedState
from twinpool.contracts.block_hash import KEY_BYTES, chain_on, chain_start
from twinpool.contracts.damage import DamageSite, log_damage

_log = logging.getLogger("twinpool.cache")

SLICE_BYTES = 1 << 20
"""Bytes of pages that one `poll` proves."""
_NODE_BYTES = 4096
"""The part of `SLICE_BYTES` that a node without unproven pages counts for."""
BUSY_SHARE = 50
"""While requests run, proving pages takes one part in so many of the time."""
SETTLED_S = 30.0
"""The seconds after which an incarnation counts as settled: the state that it took over hasn't harmed it."""
MAX_TAKEN = 3
"""Incarnations in a row that may take the same state over without settling; the next one drops the state."""


@dataclass
class _FoundPages:
    """A page of the full pool that was found in the index, with the other pools' records of the same block hash."""

    record: ArenaRecord
    beside: dict[str, ArenaRecord] = field(default_factory=dict)
    """Records of window and state pools, by pool."""
    children: list[_FoundPages] = field(default_factory=list)
    """Pages that follow this one."""
    used: int = 0
    """The highest sequence number of this page's record and those of all pages below it."""


class ArenaKeeper:
    """Keeps one arena for one tree and its host pools. `now` is in seconds."""

    def __init__(self, tree: RadixTree, host: PoolSet, arena: Arena, device: Device, now: Callable[[], float]) -> None:
        self._tree, self._host, self._arena, self._device, self._now = tree, host, arena, device, now
        self._unproven: dict[str, set[int]] = {pool.name: set() for pool in host.spec.pools}
        """Pages and slots, by pool, that were taken over and whose digests weren't computed again yet."""
        self._unindexed: set[tuple[str, int]] = set()
        """Pages and slots of the tree's host tier that have no record, as their salt is too long."""
        self._beside: dict[tuple[str, int], tuple[int, bytes, int]] = {}
        """Pages and slots of swapped out requests that have a record and aren't in the tree: by pool and index, the
        page number, block hash and digest."""
        self._adopting = False
        self._unfinished = False
        """Whether some rank of the dead worker had not carried out all copies whose pages the leader had sealed."""
        self._next = 0.0
        """The time before which no pages are proved while requests run."""
        self._settles: float | None = None
        """The time at which this incarnation counts as settled; None if it took nothing over, or has settled."""
        self._cursor: TreeCursor | None = None
        """The present walk through the tree; None between walks."""
        self._at: TreeNode | None = None
        """The node that the walk has reached."""
        self.counters = dict.fromkeys(
            ("arena_pages_adopted", "arena_pages_dropped", "arena_pages_damaged", "arena_records_torn"), 0.0
        )
        tree.accounts.observe_parts(self._part_changed)
        for pool, allocator in host.allocators.items():
            # Whoever leased an index: once its lease has ended, other operations may write there.
            allocator.observe_releases(partial(self._drop, pool))

    # ------------------------------------------------------------ the index follows the tree

    def _part_changed(self, part: NodePart, there: bool) -> None:
        """Record a part that came to the host tier in the index, and clear the records of an invalidated one."""
        if part.tier is not Tier.HOST or self._adopting:
            return
        pool, indices = part.component, part.lease.indices
        if there:
            if not self._arena.seal(pool, indices, self._sealed(part)):
                self._unindexed.update((pool, index) for index in indices)
            return
        self._drop(pool, indices)

    def _drop(self, pool: str, indices: Sequence[int]) -> None:
        self._arena.drop(pool, indices)
        self._unproven[pool].difference_update(indices)
        if self._unindexed or self._beside:
            for index in indices:
                self._unindexed.discard((pool, index))
                self._beside.pop((pool, index), None)

    def seal_swapped(self, swapped: SwappedState) -> None:
        """Record the host pages of a swapped out request in the index, for the next incarnation.

        These are the whole pages of its prefix, and its states only if they are at the end of a whole page. Does
        nothing where the pages have no digests.
        """
        if swapped.saved.digests is None:
            return
        prefix, whole = swapped.prefix, len(swapped.prefix)
        for pool, numbers in swapped.numbers.items():
            point = self._tree.component(pool).point
            if point and swapped.positions % prefix.page_tokens:
                continue
            first = whole - 1 if point else numbers.start
            count = min(1 if point else whole - first, len(numbers))
            if first < 0 or count < 1:
                continue
            indices, digests = swapped.saved.leases[pool].indices[:count], swapped.saved.digests[pool][:count]
            keys = prefix.chain[KEY_BYTES * first : KEY_BYTES * (first + count)]
            run = SealedPage(first, keys, digests)
            if pool == self._tree.full:
                above = prefix.key(first - 1) if first else b""
                raw = prefix.raw[first * prefix.page_bytes : (first + count) * prefix.page_bytes]
                run = SealedPage(first, keys, digests, above, raw, prefix.salt.encode())
            if self._arena.seal(pool, indices, run):
                for i, (index, digest) in enumerate(zip(indices, digests, strict=True)):
                    self._beside[pool, index] = (first + i, keys[KEY_BYTES * i : KEY_BYTES * (i + 1)], digest)

    def _sealed(self, part: NodePart) -> SealedPage:
        tree, node = self._tree, part.node
        start = node.start
        if tree.component(part.component).point:
            return SealedPage(start + len(node) - 1, node.chain[-KEY_BYTES:], part.digests)
        if part.component != tree.full:
            return SealedPage(start, node.chain, part.digests)
        salt = node.salt.encode()
        return SealedPage(start, node.chain, part.digests, node.parent_key or b"", node.raw, salt)

    # ------------------------------------------------------------ taking over

    def adopt(self, unfinished: bool = False) -> int:
        """Hang the pages that the arena's index names into the tree, which must be empty; returns the number of full
        pages.

        `unfinished`: some rank of the dead worker had not carried out all copies whose pages the leader had sealed.
        After `MAX_TAKEN` incarnations in a row that took the state over and didn't settle, the state is dropped.
        """
        arena, self._unfinished = self._arena, unfinished
        times = arena.taken + 1
        if times > MAX_TAKEN:
            _log.error("host memory was taken over %d times and none lived long with it: it is left", MAX_TAKEN)
            self.begin(arena.bond)
            return 0
        arena.take(times)
        self._settles = self._now() + SETTLED_S
        self._clear_nulls()
        found = {}
        for pool in self._unproven:
            found[pool], torn = arena.read(pool)
            self.counters["arena_records_torn"] += torn
        roots = _rooted(found, self._tree)
        self._adopting = True
        try:
            adopted = self._hang_all(roots)
        finally:
            self._adopting = False
        for pool, records in found.items():
            left = [record.index for record in records if record.index not in self._unproven[pool]]
            arena.drop(pool, left)
            self.counters["arena_pages_dropped"] += len(left)
        self.counters["arena_pages_adopted"] += adopted
        return adopted

    @property
    def bond(self) -> bytes:
        """The id that the arenas of all ranks have in common; empty where there is nothing to take over."""
        return self._arena.bond

    def take_copies(self) -> int:
        """Returns how many copies into this tier the leader has ordered, and sets the count to zero."""
        return self._arena.take_copies()

    def begin(self, bond: bytes) -> None:
        """Start with an empty index under a new bond, whatever the arena held before."""
        self._arena.begin(bond)
        self._clear_nulls()

    def _clear_nulls(self) -> None:
        """Zero the null pages of all ranks.

        A writer that was killed may have been anywhere, and one of another layout, as after a change of role, has had
        pages where the null pages are now.
        """
        self._host.zero({pool: (0,) for pool in self._unproven})

    def _hang_all(self, roots: list[_FoundPages]) -> int:
        newest = max((page.used for page in roots), default=0)
        runs = list(_runs(roots, {p.name for p in self._host.spec.pools if self._tree.component(p.name).point}))
        indices: dict[str, list[list[int]]] = {pool: [] for pool in self._unproven}
        for _, pages in runs:
            for pool, records in self._parts(pages):
                indices[pool].append([record.index for record in records])
        leases = {
            pool: iter(self._host.allocators[pool].take(wanted, f"adopted {pool}")) for pool, wanted in indices.items()
        }
        nodes: dict[int, TreeNode] = {}
        for above, pages in runs:
            parent = None if above is None else nodes[id(above)]
            raw = b"".join(page.record.tokens for page in pages)
            chain = b"".join(page.record.key for page in pages)
            # Ticks up to 0: all adopted nodes were used before any node that is inserted from now on.
            node = self._tree.accounts.graft(parent, pages[0].record.salt, raw, chain, pages[0].used - newest)
            nodes[id(pages[-1])] = node
            for pool, records in self._parts(pages):
                lease = next(leases[pool])
                self._unproven[pool].update(lease.indices)
                self._tree.accounts.attach(node, pool, Tier.HOST, lease, tuple(record.digest for record in records))
        return sum(len(pages) for _, pages in runs)

    def _parts(self, pages: list[_FoundPages]) -> Iterator[tuple[str, list[ArenaRecord]]]:
        """Yields the pools of which a node of these pages gets a part, the full pool first, and the part's records."""
        for component in self._tree.components:
            if component.name == self._tree.full:
                yield component.name, [page.record for page in pages]
            elif component.point and component.name in pages[-1].beside:
                yield component.name, [pages[-1].beside[component.name]]
            elif not component.point and component.name in pages[0].beside:
                yield component.name, [page.beside[component.name] for page in pages]

    # ------------------------------------------------------------ proving the pages that were taken over

    def unproven(self, part: NodePart) -> bool:
        """Whether a part of the host tier has pages whose digests weren't computed again since they were taken over."""
        mine = self._unproven[part.component]
        return bool(mine) and not mine.isdisjoint(part.lease.indices)

    def torn(self, part: NodePart, count: int) -> bool:
        """Whether `count` pages of a part that don't match are torn, not damaged: the part is unproven, and a rank was
        killed before it had carried out all copies. Counts and logs them, if so."""
        if not (self._unfinished and self.unproven(part)):
            return False
        _log.warning("a rank had not finished pages when it died", extra={"pool": part.component, "pages": count})
        self.counters["arena_records_torn"] += count
        return True

    def proved(self, part: NodePart) -> None:
        """All pages of this part have matched their digests."""
        self._unproven[part.component].difference_update(part.lease.indices)

    def poll(self, idle: bool) -> None:
        """Prove up to `SLICE_BYTES` of unproven pages. To be called once a round; `idle`: no request runs.

        While requests run, most calls return at once (`BUSY_SHARE`).
        """
        if self._settles is not None and self._now() >= self._settles:
            self._settles = None
            self._arena.take(0)
        if not any(self._unproven.values()):
            self._stop_looking()
            return
        began = self._now()
        if not idle and began < self._next:
            return
        if self._cursor is None:
            # Nodes are split and go meanwhile: pages left unproven after one walk are found in the next.
            self._cursor = self._tree.accounts.list.cursor()
            self._at = self._cursor.next()
        self._look(SLICE_BYTES)
        self._next = self._now() + BUSY_SHARE * (self._now() - began)

    def _stop_looking(self) -> None:
        if self._cursor is not None:
            self._cursor.close()
        self._cursor = self._at = None

    def _look(self, budget: int) -> None:
        while budget > 0 and self._cursor is not None:
            if self._at is None:
                self._stop_looking()
                return
            part = next((p for p in self._at.parts[Tier.HOST].values() if self.unproven(p)), None)
            if part is None:
                self._at = self._cursor.next()
                budget -= _NODE_BYTES
                continue
            unit = self._host.spec.unit_bytes(part.component)
            budget -= unit * self._prove(part, max(1, budget // unit))

    def _prove(self, part: NodePart, most: int) -> int:
        """Compute the digests of up to `most` unproven pages of a part, and invalidate those that don't match; returns
        how many pages it looked at."""
        tree, pool, size = self._tree, part.component, self._host.spec.page_tokens
        mine, start = self._unproven[pool], part.node.start
        at = [i for i, index in enumerate(part.lease.indices) if index in mine][:most]
        indices = [part.lease.indices[i] for i in at]
        if tree.component(pool).point:
            firsts = ends = [(start + len(part.node)) * size]
        else:
            firsts = [(start + i) * size for i in at]
            ends = [first + size for first in firsts]
        self._device.touch("prove", reads=[PageSpanUse(HOST, pool, indices)])
        digests = self._host.digest(pool, indices, firsts, ends)
        bad = [i for i, digest in zip(at, digests, strict=True) if digest != part.digests[i]]
        torn = bool(bad) and self.torn(part, len(bad))
        mine.difference_update(indices)
        if bad and part.node.linked:
            page = start + (len(part.node) - 1 if tree.component(pool).point else bad[0])
            if not torn:
                log_damage(_log, DamageSite.ARENA, pool=pool, pages=[start + i for i in bad], invalidated_from=page)
            tree.invalidate(_prefix_to(tree, part.node), page)
        self.counters["arena_pages_damaged"] += 0 if torn else len(bad)
        return len(at)

    # ------------------------------------------------------------ accounts

    def check(self) -> list[str]:
        """Check that the index names exactly the pages that the tree has on the host and may still match, and those of
        swapped out requests; returns a line for each thing that is wrong."""
        wanted: dict[str, dict[int, tuple[int, bytes, int]]] = {pool: {} for pool in self._unproven}
        for (pool, index), record in self._beside.items():
            wanted[pool][index] = record
        for node in self._tree.accounts.nodes():
            if not node.linked:
                continue
            for part in node.parts[Tier.HOST].values():
                run = self._sealed(part)
                for i, (index, digest) in enumerate(zip(part.lease.indices, part.digests, strict=True)):
                    if (part.component, index) not in self._unindexed:
                        key = run.keys[KEY_BYTES * i : KEY_BYTES * (i + 1)]
                        wanted[part.component][index] = (run.first + i, key, digest)
        out = []
        for pool, unproven in self._unproven.items():
            records, torn = self._arena.read(pool)
            found = {record.index: (record.number, record.key, record.digest) for record in records}
            if torn or found != wanted[pool]:
                differ = sorted(i for i in {*found, *wanted[pool]} if found.get(i) != wanted[pool].get(i))
                out.append(f"arena: {torn} records of {pool} torn, those of {differ} aren't what the tree has")
            strangers = unproven.difference(wanted[pool])
            if strangers:
                out.append(f"arena: {pool} pages {sorted(strangers)} are to be looked at, and not in the tree")
        return out


def _rooted(found: Mapping[str, list[ArenaRecord]], tree: RadixTree) -> list[_FoundPages]:
    """Returns the first pages of prefixes, each with all pages below it; pages without an unbroken chain of block
    hashes from a first page are left out."""
    pages: dict[bytes, _FoundPages] = {}
    for record in sorted(found[tree.full], key=lambda record: record.sequence):
        pages[record.key] = _FoundPages(record, used=record.sequence)
    for component in tree.components[1:]:
        for record in sorted(found[component.name], key=lambda record: record.sequence):
            page = pages.get(record.key)
            if page is not None and page.record.number == record.number:
                page.beside[component.name] = record
    roots: list[_FoundPages] = []
    for page in pages.values():
        record = page.record
        if record.number == 0:
            if _follows(chain_start(record.salt), record):
                roots.append(page)
            continue
        above = pages.get(record.parent)
        if above is not None and above.record.number + 1 == record.number and _follows(record.parent, record):
            above.children.append(page)
    _date(roots)
    return roots


def _follows(key: bytes, record: ArenaRecord) -> bool:
    """Whether the record's block hash is that of its tokens after a page with block hash `key`."""
    return chain_on(key, record.tokens, len(record.tokens)) == [record.key]


def _date(roots: list[_FoundPages]) -> None:
    """Set `used` of all pages: a page was used no earlier than the pages below it."""
    order, stack = [], list(roots)
    while stack:
        page = stack.pop()
        order.append(page)
        stack.extend(page.children)
    for page in reversed(order):
        page.used = max([page.used, *(child.used for child in page.children)])


def _runs(roots: list[_FoundPages], points: set[str]) -> Iterator[tuple[_FoundPages | None, list[_FoundPages]]]:
    """Yields the nodes to make, parents first: the page above (None at the start of a prefix) and the node's pages.

    A node ends at a branch, behind a page with a record of a pool in `points`, and where window records begin or end.
    """
    stack: list[tuple[_FoundPages | None, _FoundPages]] = [(None, root) for root in roots]
    while stack:
        above, page = stack.pop()
        run = [page]
        while len(page.children) == 1 and not (page.beside.keys() & points):
            (child,) = page.children
            if page.beside.keys() - points != child.beside.keys() - points:
                break
            run.append(child)
            page = child
        yield above, run
        stack += [(page, child) for child in page.children]


def _prefix_to(tree: RadixTree, node: TreeNode) -> TokenPrefix:
    """Returns the prefix that ends with `node`."""
    raw, chain, top = b"", b"", node
    while top.parent is not None:
        raw, chain, top = top.raw + raw, top.chain + chain, top.parent
    return TokenPrefix(raw, tree.spec.page_tokens, top.salt, chain)
