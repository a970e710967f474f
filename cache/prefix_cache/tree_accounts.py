"""What the prefix tree holds: nodes, their parts by tier, the locks on them, and what may be evicted.

The tree (`cache.prefix_cache.radix_tree`) decides where state hangs; this keeps the books. Every part is counted, every
lock names what it keeps, and every part that may go is in the queue of its tier and component: each is kept right where
it changes, and recomputed from scratch by `check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from cache.memory.kv_cache_spec import PoolSetSpec
from cache.pool.page_allocator import Lease
from cache.prefix_cache.tree_components import TreeComponent, components_of
from cache.prefix_cache.tree_eviction import POLICIES, EvictionPolicy, EvictionQueue
from cache.prefix_cache.tree_node import IN_TREE, NO_LOCKS, NodeList, NodeLock, NodePart, Tier, TreeNode
from contracts.block_hash import KEY_BYTES

SpillNode = Callable[[TreeNode], bool]
"""Asked before a node that is on the device alone would go; True: it is being written elsewhere, leave it."""


RestingSince = tuple[int, float]
"""How often storage has not taken a part, and the time before which it isn't asked again."""


class TreeAccounts:
    """The books of one tree; see the module's prose."""

    def __init__(
        self, spec: PoolSetSpec, policy: EvictionPolicy = POLICIES["lru"], *, write_back: bool = False
    ) -> None:
        self.spec = spec
        self.components = components_of(spec)
        self.full = self.components[0].name
        self.write_back = write_back
        self.roots: dict[str, TreeNode] = {}
        self.list = NodeList()
        """Every node that can be matched: neither the roots nor what was invalidated."""
        self.locked: set[NodeLock] = set()
        self._graves: dict[TreeNode, None] = {}
        """What stands above invalidated nodes that somebody locks still, in the place of their parents."""
        self.queues = {(t, c.name): EvictionQueue(policy) for t in IN_TREE for c in self.components}
        self.sizes = dict.fromkeys(self.queues, 0)
        """Pages (or slots) held, by tier and component."""
        self.protected = dict.fromkeys(self.queues, 0)
        """Those of them that locks keep."""
        self.on_change: Callable[[TreeNode, Tier, bool], None] = lambda node, tier, there: None
        """Told when full state that can be matched has come to a tier (True), parents first, or gone from it: also
        when it was invalidated, whether or not it is locked still. Splits change nothing and aren't told."""
        self.on_part: Callable[[NodePart, bool], None] = lambda part, there: None
        """Told of every part of every tier that was hung on a node (True), and of each that was invalidated (False)."""
        self.unstored: dict[NodePart, RestingSince] = {}
        """Parts on the host of which storage is to have more than it is known to have, oldest first."""
        self.missed = 0
        """Pages (or slots) that left the host before storage had them."""
        self._silent = self.on_change
        self._by_name = {c.name: c for c in self.components}
        self._points = any(c.point for c in self.components)
        self._tick = 0
        self._version = 0
        self._number = 0

    # ------------------------------------------------------------ what hangs where

    def component(self, name: str) -> TreeComponent:
        return self._by_name[name]

    def linked(self, node: TreeNode) -> bool:
        """Whether `node` can be matched: it hangs on a root, and nothing above it was invalidated."""
        return node.linked

    def salt(self, node: TreeNode) -> str:
        """Under which salt it was inserted."""
        return node.salt

    def start(self, node: TreeNode) -> int:
        """The page number of its first page."""
        return node.start

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the roots, invalidated ones included."""
        for root in self.roots.values():
            for child in root.children.values():
                yield from subtree(child)
        for top in self.invalidated:
            yield from subtree(top)

    @property
    def invalidated(self) -> list[TreeNode]:
        """The uppermost of the nodes that were invalidated and aren't gone yet."""
        return [top for grave in self._graves for top in grave.children.values()]

    @property
    def graves(self) -> list[TreeNode]:
        return list(self._graves)

    # ------------------------------------------------------------ locks

    def keep(self, parts: Iterable[NodePart], owner: str) -> NodeLock:
        """Lock exactly these parts: for moves, which must not lose what they read or write."""
        self._number += 1
        lock = NodeLock(self._number, owner, [])
        self.locked.add(lock)
        self._add(lock, parts)
        return lock

    def add(self, lock: NodeLock, part: NodePart) -> None:
        """Keep `part` too, once: it was loaded for whom the lock is."""
        self._add(lock, (part,))

    def _add(self, lock: NodeLock, parts: Iterable[NodePart]) -> None:
        mine, write_back, several = lock.parts, self.write_back, len(self.components) > 1
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
        for part in fresh if write_back else ():
            _occupy(part.node)
        for part in added if several else ():
            # Where full state is kept, the rest of the node may go alone.
            if len(part.node.parts[part.tier]) > 1:
                self._queue(part.node, part.tier)

    def unlock(self, lock: NodeLock) -> None:
        """Give back what `lock` keeps. Idempotent."""
        if lock not in self.locked:
            return
        self.locked.remove(lock)
        write_back, several = self.write_back, len(self.components) > 1
        free, ends = list[NodePart](), list[NodePart]()
        before = after = NO_LOCKS
        for part in lock.parts:
            if part.locks is not before:
                before, after = part.locks, (part.locks - {lock}) or NO_LOCKS
            part.locks = after
            if not after:
                free.append(part)
                if write_back:
                    _vacate(part.node)
            if several or not part.node.below[part.tier]:
                ends.append(part)
        self._protect(free, -1)
        for part in ends:
            self._queue(part.node, part.tier)
            self._refresh(part.node, part.tier)
        gone = [part.node for part in lock.parts if not part.node.linked] if self._graves else ()
        lock.parts.clear()
        for node in gone:
            self._drop_invalidated(node)

    def _protect(self, parts: Sequence[NodePart], sign: int) -> None:
        """Count these as locked, or as locked no more."""
        left = len(parts)
        for tier, name in self.protected:
            if left:
                counts = [part.lease.count for part in parts if part.tier is tier and part.component == name]
                self.protected[tier, name] += sign * sum(counts)
                left -= len(counts)

    @property
    def locks(self) -> int:
        return len(self.locked)

    # ------------------------------------------------------------ parts

    def attach(self, node: TreeNode, name: str, tier: Tier, lease: Lease, digests: tuple[int, ...]) -> NodePart:
        """Hang a part on a node that has none there, and tell."""
        part = self._hang(node, name, tier, lease, digests)
        if name == self.full:
            self.on_change(node, tier, True)
        return part

    def _hang(self, node: TreeNode, name: str, tier: Tier, lease: Lease, digests: tuple[int, ...]) -> NodePart:
        assert name not in node.parts[tier], f"{name} is there already"
        self._version += 1
        part = node.parts[tier][name] = NodePart(node, name, tier, lease, digests)
        self.sizes[tier, name] += lease.count
        if name == self.full:
            assert node.parent is not None
            node.parent.below[tier] += 1
            self._queue(node.parent, tier)
        for there in IN_TREE:
            self._queue(node, there)
        self.on_part(part, True)
        return part

    def _detach(self, part: NodePart) -> None:
        node, tier = part.node, part.tier
        assert not part.locks, "a locked part stays"
        self._version += 1
        if part.component == self.full:
            parent = node.parent
            assert parent is not None
            parent.below[tier] -= 1
            if not parent.below[tier]:
                self._queue(parent, tier)
            # What was invalidated is told as gone by then, and the same pages may have come anew since.
            if node.linked:
                self.on_change(node, tier, False)
        del node.parts[tier][part.component]
        self.queues[tier, part.component].forget(part)
        if self.unstored.pop(part, None) is not None:
            self.missed += part.lease.count - part.stored
        self.sizes[tier, part.component] -= part.lease.count
        part.lease.release()

    def _split(self, node: TreeNode, pages: int) -> TreeNode:
        """Cut `node` after `pages`; returns the new upper half. The lower half stays the object it was."""
        parent, page_bytes = node.parent, self._page_bytes
        assert parent is not None
        self._version += 1
        raw, chain = node.raw, node.chain
        upper = TreeNode(
            raw[: pages * page_bytes], chain[: pages * KEY_BYTES], parent, start=node.start, salt=node.salt
        )
        _like(upper, node)
        parent.children[node.first(page_bytes)], parent.latest = upper, None
        node.drop_head(pages, page_bytes)
        node.parent = upper
        upper.children[node.first(page_bytes)] = node
        for tier in IN_TREE:
            for part in list(node.parts[tier].values()):
                head = self._by_name[part.component].split(part, upper, pages)
                if head is None:
                    continue
                upper.parts[tier][part.component] = head
                upper.busy += bool(self.write_back and head.locks)
                for lock in part.locks:
                    lock.parts.insert(lock.parts.index(part), head)
                if part in self.unstored:
                    self.unstored[head] = self.unstored[part]
            upper.below[tier] = int(self.full in node.parts[tier])
        upper.busy_below = int(bool(node.busy or node.busy_below))
        if node.linked:
            self.list.append(upper)
        upper.linked = node.linked
        for tier in IN_TREE:
            self._queue(upper, tier)
            self._queue(node, tier)
        return upper

    def _split_end(self, node: TreeNode, pages: int) -> TreeNode:
        """Cut `node` after `pages`; returns the new lower half, and costs what that has."""
        page_bytes = self._page_bytes
        self._version += 1
        raw, chain = node.end(pages, page_bytes)
        lower = TreeNode(raw, chain, node, start=node.start + pages, salt=node.salt)
        _like(lower, node)
        lower.children, lower.below, lower.busy_below = node.children, node.below, node.busy_below
        for child in lower.children.values():
            child.parent = lower
        node.children, node.below = {lower.first(page_bytes): lower}, [0, 0]
        node.latest = None
        node.cut(pages)
        for tier in IN_TREE:
            for part in list(node.parts[tier].values()):
                end = self._by_name[part.component].split_end(part, lower, pages)
                if end is None:
                    lower.parts[tier][part.component] = part
                    part.node = lower
                    del node.parts[tier][part.component]
                    continue
                lower.parts[tier][part.component] = end
                for lock in part.locks:
                    lock.parts.insert(lock.parts.index(part) + 1, end)
                if part in self.unstored:
                    self.unstored[end] = self.unstored[part]
            node.below[tier] = int(self.full in lower.parts[tier])
        if self.write_back:
            node.busy, lower.busy = _busy(node), _busy(lower)
            node.busy_below = int(bool(lower.busy or lower.busy_below))
        if node.linked:
            self.list.append(lower)
        lower.linked = node.linked
        for tier in IN_TREE:
            self._queue(node, tier)
            self._queue(lower, tier)
        return lower

    @property
    def _page_bytes(self) -> int:
        return 4 * self.spec.page_tokens

    def _unlink(self, node: TreeNode) -> None:
        parent, first = node.parent, node.first(self._page_bytes)
        if parent is None or parent.children.get(first) is not node:
            return
        del parent.children[first]
        parent.latest = None
        if node.linked:
            node.linked = False
            self.list.remove(node)
        if not parent.children and self.roots.get(parent.salt) is parent:
            del self.roots[parent.salt]

    # ------------------------------------------------------------ eviction

    def evict(self, tier: Tier, component: str, count: int, spill: SpillNode | None = None) -> int:
        """Free up to `count` pages (or slots) of `component` from `tier`; returns how many. Locked parts stay.

        A full part goes with everything that its leaf holds there; a window or a state alone where its node has more
        below it. `spill` is asked before a node that is nowhere else goes, which takes along what hangs below it: where
        anything of that is locked, it goes once it was spilled and not before.
        """
        freed = coming = 0
        queue = self.queues[tier, component]
        spared: list[NodePart] = []
        while freed + coming < count:
            part = queue.pop(self.may_go)
            if part is None:
                break
            node = part.node
            if self._alone(part):
                freed += len(part)
                self._detach(part)
                continue
            last = tier is Tier.DEVICE and self.full not in node.parts[Tier.HOST]
            if last and spill is not None and (spill(node) or not self.may_go(part)):
                # All of it is being saved, or as much as there was room for: what is locked by that goes later.
                spared.append(part)
                coming += len(part)
                continue
            if last and node.busy_below:
                queue.forget(part)  # A save without room for it has queued it again.
                spared.append(part)
                continue
            spare = node.pages - (count - freed)
            if spare > 0 and component == self.full and not (self._points and self._has_point(node)):
                freed += self._drop_end(node, tier, spare)
                self._queue(node, tier)
                continue
            freed += len(part)
            self._drop_leaf(node, tier)
        for part in spared:
            self._queue(part.node, tier)
        return freed

    def evictable(self, component: str, tier: Tier = Tier.DEVICE) -> int:
        """Pages (or slots) that no lock keeps."""
        return self.sizes[tier, component] - self.protected[tier, component]

    def may_go(self, part: NodePart) -> bool:
        """Whether `part` is held by its node, and either it or all that its leaf holds there is nobody's."""
        if part.locks or not part.live:
            return False
        node, tier = part.node, part.tier
        if node.below[tier]:
            return part.component != self.full
        return not any(other.locks for other in node.parts[tier].values()) or self._alone(part)

    def _alone(self, part: NodePart) -> bool:
        """Whether it goes without the rest of its node: the node has more below it, or its full state is kept."""
        if part.component == self.full:
            return False
        node, tier = part.node, part.tier
        return bool(node.below[tier] or node.parts[tier][self.full].locks)

    def _has_point(self, node: TreeNode) -> bool:
        return any(self._by_name[name].point for parts in node.parts for name in parts)

    def _queue(self, node: TreeNode, tier: Tier) -> None:
        """Let what may go of a node be found by `evict`."""
        parts = node.parts[tier]
        if len(parts) == 1 and node.below[tier]:
            return  # Its full state, which something is built on.
        for part in parts.values():
            if part.entry is None and self.may_go(part):
                self.queues[tier, part.component].push(part)

    def _refresh(self, node: TreeNode, tier: Tier) -> None:
        """It was used, and goes later than its places in the queues say."""
        for part in node.parts[tier].values():
            if part.entry is not None:
                self.queues[tier, part.component].refresh(part)

    def _drop_end(self, node: TreeNode, tier: Tier, pages: int) -> int:
        """Take all but the first `pages` pages of a leaf out of `tier`; returns how many those were."""
        other = node.parts[Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE]
        count = node.pages - pages
        if other:
            self._drop_leaf(self._split_end(node, pages), tier)
            return count
        if node.children:
            for child in list(node.children.values()):
                self._drop_subtree(child)
        self._version += 1
        if self.on_change is not self._silent and node.linked:
            raw, chain = node.end(pages, self._page_bytes)
            self.on_change(TreeNode(raw, chain, node, start=node.start + pages, salt=node.salt), tier, False)
        for part in node.parts[tier].values():
            self.sizes[tier, part.component] -= count
            if self.unstored and part in self.unstored:
                self.missed += part.lease.count - max(part.stored, pages)
            part.cut(pages)
        node.cut(pages)
        return count

    def _drop_leaf(self, node: TreeNode, tier: Tier) -> None:
        """Take everything of a leaf out of `tier`, and the node with it if it is nowhere else."""
        for part in list(node.parts[tier].values()):
            self._detach(part)
        if not any(node.parts):
            if node.children:
                for child in list(node.children.values()):
                    self._drop_subtree(child)
            self._unlink(node)

    def _drop_subtree(self, top: TreeNode) -> None:
        for node in reversed(list(subtree(top))):
            for tier in IN_TREE:
                for part in list(node.parts[tier].values()):
                    self._detach(part)
            self._unlink(node)

    # ------------------------------------------------------------ condemnation

    def invalidate_node(self, node: TreeNode) -> int:
        """`invalidate` from the first page of `node` on; nothing happens when it is invalidated already."""
        parent, first = node.parent, node.first(self._page_bytes)
        if not node.linked or parent is None:
            return 0
        self._version += 1
        count = 0
        nodes = list(subtree(node))
        for gone in reversed(nodes):
            count += gone.pages
            for tier in IN_TREE:
                if self.full in gone.parts[tier]:
                    self.on_change(gone, tier, False)
                for part in gone.parts[tier].values():
                    self.on_part(part, False)
                    self.unstored.pop(part, None)
            gone.linked = False
            self.list.remove(gone)
        grave = TreeNode(b"", b"", None, start=node.start, salt=node.salt)
        grave.linked = False
        grave.children[first], node.parent = node, grave
        self._graves[grave] = None
        del parent.children[first]
        parent.latest = None
        for tier in IN_TREE:
            there = int(self.full in node.parts[tier])
            grave.below[tier] += there
            parent.below[tier] -= there
        if node.busy or node.busy_below:
            grave.busy_below = 1
            # As if the parent had been locked in its place, and isn't any more.
            parent.busy += 1
            parent.busy_below -= 1
            _vacate(parent)
        for tier in IN_TREE:
            self._queue(parent, tier)
        if not parent.children and self.roots.get(parent.salt) is parent:
            del self.roots[parent.salt]
        for gone in reversed(nodes):
            self._drop_invalidated(gone)
        return count

    def clear(self) -> int:
        """Condemn everything; returns the number of pages."""
        count = 0
        for root in list(self.roots.values()):
            count += sum(self.invalidate_node(child) for child in list(root.children.values()))
        return count

    def _drop_invalidated(self, node: TreeNode) -> None:
        """Free what nobody locks of a invalidated node, and the node with what is above it where nothing is left."""
        for tier in IN_TREE:
            if not any(p.locks for p in node.parts[tier].values()):
                for part in list(node.parts[tier].values()):
                    self._detach(part)
        while not node.children and not any(node.parts) and node.parent is not None:
            self._unlink(node)
            node = node.parent
        if node.parent is None and not node.children:
            self._graves.pop(node, None)


def _like(half: TreeNode, node: TreeNode) -> None:
    """Two halves were used alike."""
    half.used, half.created, half.hits, half.priority = node.used, node.created, node.hits, node.priority


def _busy(node: TreeNode) -> int:
    return sum(bool(part.locks) for parts in node.parts for part in parts.values())


def _occupy(node: TreeNode | None) -> None:
    """One part more of it is locked."""
    assert node is not None
    node.busy += 1
    fresh = node.busy == 1 and not node.busy_below
    while fresh and (node := node.parent) is not None:
        node.busy_below += 1
        fresh = node.busy_below == 1 and not node.busy


def _vacate(node: TreeNode | None) -> None:
    """One part less of it is locked."""
    assert node is not None
    node.busy -= 1
    idle = not (node.busy or node.busy_below)
    while idle and (node := node.parent) is not None:
        node.busy_below -= 1
        idle = not (node.busy or node.busy_below)


def subtree(top: TreeNode) -> Iterator[TreeNode]:
    """`top` and all its descendants, parents first."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
