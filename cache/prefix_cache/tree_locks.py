"""The locks on parts of the prefix tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twinpool.cache.prefix_cache.nodes.lock_counts import count_locked, count_unlocked
from twinpool.cache.prefix_cache.nodes.tree_node import NO_LOCKS, NodeLock, NodePart
from twinpool.cache.prefix_cache.tree_accounts import TreeAccounts
from twinpool.cache.prefix_cache.tree_eviction import TreeEviction


class TreeLocks:
    """The locks of one tree. A locked part isn't evicted; an invalidated part is freed with its last lock."""

    def __init__(self, accounts: TreeAccounts, eviction: TreeEviction) -> None:
        self._accounts, self._eviction = accounts, eviction
        self.locked: set[NodeLock] = set()
        self._number = 0

    def __len__(self) -> int:
        """The number of locks that weren't given back yet."""
        return len(self.locked)

    def keep(self, parts: Iterable[NodePart], owner: str) -> NodeLock:
        """Lock exactly these parts; returns the lock, which `unlock` gives back.

        Copies lock the parts that they read or write. A part that occurs twice is locked once. `owner` is for logs.
        """
        self._number += 1
        lock = NodeLock(self._number, owner, [])
        self.locked.add(lock)
        self._add(lock, parts)
        return lock

    def add(self, lock: NodeLock, part: NodePart) -> None:
        """Lock `part` with `lock` as well. Does nothing where `lock` keeps it already."""
        self._add(lock, (part,))

    def _add(self, lock: NodeLock, parts: Iterable[NodePart]) -> None:
        accounts, mine = self._accounts, lock.parts
        alone, first, shared = frozenset((lock,)), len(mine), False
        before = after = NO_LOCKS
        for part in parts:
            locks = part.locks
            if locks is NO_LOCKS:
                part.locks = alone
            else:
                if locks is not before:
                    if lock in locks:
                        continue
                    before, after = locks, locks | alone
                part.locks, shared = after, True
            mine.append(part)
        added = mine[first:]
        fresh = [part for part in added if part.locks is alone] if shared else added
        self._protect(fresh, 1)
        for part in fresh if accounts.write_back else ():
            count_locked(part.node)
        offer = self._eviction.order.offer
        for part in added if len(accounts.components) > 1 else ():
            # Where full state is locked, the other parts of the node may be evicted alone.
            if len(part.node.parts[part.tier]) > 1:
                offer(part.node, part.tier)

    def unlock(self, lock: NodeLock) -> None:
        """Give back the parts that `lock` keeps. Idempotent."""
        if lock not in self.locked:
            return
        self.locked.remove(lock)
        accounts, order = self._accounts, self._eviction.order
        write_back, several = accounts.write_back, len(accounts.components) > 1
        free, ends = list[NodePart](), list[NodePart]()
        before = after = NO_LOCKS
        for part in lock.parts:
            if part.locks is not before:
                before, after = part.locks, (part.locks - {lock}) or NO_LOCKS
            part.locks = after
            if not after:
                free.append(part)
                if write_back:
                    count_unlocked(part.node)
            if several or not part.node.below[part.tier]:
                ends.append(part)
        self._protect(free, -1)
        for part in ends:
            order.offer(part.node, part.tier)
            order.refresh(part.node, part.tier)
        gone = [part.node for part in lock.parts if not part.node.linked] if accounts.invalid_roots else ()
        lock.parts.clear()
        for node in gone:
            self._eviction.drop_invalidated(node)

    def _protect(self, parts: Sequence[NodePart], sign: int) -> None:
        """Count `parts` as locked (`sign` 1), or as no longer locked (-1)."""
        left, protected = len(parts), self._accounts.protected
        for tier, name in protected:
            if left:
                counts = [part.lease.count for part in parts if part.tier is tier and part.component == name]
                protected[tier, name] += sign * sum(counts)
                left -= len(counts)
