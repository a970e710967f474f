"""The accounts of the prefix tree: roots, nodes, and the parts that hang on them, counted by tier and component.

All other modules of the tree work on these accounts (`cache.prefix_cache.radix_tree`). Links, sizes and the list of
nodes are updated with every change, and recomputed from scratch by `check_tree`. After a change that may have made
state of a node evictable, the eviction order is told through the callback `idle`. One observer of nodes and one of
parts are told when state comes to a tier or goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.prefix_cache.tree_components import TreeComponent
from twinpool.cache.prefix_cache.tree_node import IN_TREE, NodePart, Tier, TokenPrefix, TreeNode, common_pages, subtree
from twinpool.contracts.block_hash import TOKEN_BYTES

RestingSince = tuple[int, float]
"""How often storage has not taken a part, and the time (seconds) before which the part isn't offered again."""


NodeObserver = Callable[[TreeNode, Tier, bool], None]
"""An observer of nodes that can be matched, tier by tier (KV events are made from its calls).

It is called with a node, a tier, and whether the full state of the node has come to that tier (True) or gone from it
(False). State comes parents first. Invalidated state counts as gone at once, even while it is still locked. A split
changes nothing and isn't reported. For `Tier.STORAGE` only True is reported.
"""
PartObserver = Callable[[NodePart, bool], None]
"""An observer of the parts of every component in every tier: called with a part that was hung on its node (True) or
invalidated (False). An evicted part isn't reported."""


class TreeAccounts:
    """The accounts of one tree; see the module's prose."""

    def __init__(
        self,
        spec: PoolSetSpec,
        components: Sequence[TreeComponent],
        idle: Callable[[TreeNode, Tier], None],
        *,
        write_back: bool,
    ) -> None:
        """`components`: the full one first. `idle` is called with a node and a tier in which a part may have become
        evictable."""
        self.components = components
        self.by_name = {c.name: c for c in components}
        self.full = components[0].name
        self._points = [c.name for c in components if c.point]
        self.page_bytes = TOKEN_BYTES * spec.page_tokens
        self.write_back = write_back
        self.roots: dict[str, TreeNode] = {}
        """Root nodes, by salt. A root holds no pages."""
        self.invalid_roots: dict[TreeNode, None] = {}
        """Nodes without pages that stand in for the parents of invalidated nodes, as long as those are still
        locked."""
        self.list = NodeList()
        """Every node that can be matched: neither roots nor invalidated nodes."""
        self.sizes = {(tier, c.name): 0 for tier in IN_TREE for c in components}
        """Pages (or slots) held, by tier and component."""
        self.protected = dict.fromkeys(self.sizes, 0)
        """Pages (or slots) held that are locked, by tier and component."""
        self.unstored: dict[NodePart, RestingSince] = {}
        """Parts on the host with pages that are to be in storage and aren't known to be, oldest first."""
        self.missed = 0
        """Pages (or slots) that left the host before storage had them."""
        self.tick = 0
        """The tree's own clock, by which nodes record when they were used."""
        self.version = 0
        """Grows with every change of parts, every split and every invalidation."""
        self._node_observer: NodeObserver | None = None
        self._part_observer: PartObserver | None = None
        self._idle = idle

    # ------------------------------------------------------------ observers

    def observe_nodes(self, observer: NodeObserver) -> None:
        """Call `observer` with every change from now on. There can be only one."""
        assert self._node_observer is None
        self._node_observer = observer

    def observe_parts(self, observer: PartObserver) -> None:
        """Call `observer` with every change from now on. There can be only one."""
        assert self._part_observer is None
        self._part_observer = observer

    def tell(self, node: TreeNode, tier: Tier, there: bool) -> None:
        """Tell the observer of nodes that full state has come to `tier` or gone; coming nodes are told parents
        first."""
        if self._node_observer is not None:
            self._node_observer(node, tier, there)

    # ------------------------------------------------------------ look-ups

    def along(self, prefix: TokenPrefix) -> tuple[list[TreeNode], int]:
        """Returns every node along `prefix`, from the root down, and how many pages of the last one match.

        Of the other nodes all pages match. Components aren't asked whether they accept a node.
        """
        out: list[TreeNode] = []
        node, at, raw, size, pages = self.roots.get(prefix.salt), 0, prefix.raw, prefix.page_bytes, 0
        while node is not None:
            child = latest = node.latest
            if child is None or not raw.startswith(child.run, at):
                child = node.children.get(raw[at : at + size])
                if child is None:
                    break
                node.latest = child
                if child.pages > 1 and (child is latest or not raw.startswith(child.run, at)):
                    pages = common_pages(child.raw, raw, at, size)
                    if pages < child.pages:
                        out.append(child)
                        return out, pages
            out.append(child)
            node, pages = child, child.pages
            at += pages * size
        return out, pages

    def nodes(self) -> Iterator[TreeNode]:
        """Yields every node except the roots, invalidated ones included."""
        for root in self.roots.values():
            for child in root.children.values():
                yield from subtree(child)
        for top in self.invalidated:
            yield from subtree(top)

    @property
    def invalidated(self) -> list[TreeNode]:
        """The uppermost nodes of invalidated subtrees that still hold state."""
        return [top for root in self.invalid_roots for top in root.children.values()]

    # ------------------------------------------------------------ nodes

    def graft(self, parent: TreeNode | None, salt: str, raw: bytes, chain: bytes, used: int) -> TreeNode:
        """Hang a new node of whole pages below `parent` (None: the root of `salt`), and return it.

        `parent` must not have a child that begins with the same page. `used` is the tick of the node's insertion. The
        node has no parts yet: the caller hangs them at once.
        """
        above = self._root(salt) if parent is None else parent
        start = 0 if parent is None else parent.start + parent.pages
        node = TreeNode(raw, chain, above, start=start, salt=salt)
        node.used = node.created = used
        first = node.first(self.page_bytes)
        assert first not in above.children, "what the tree has already is inserted, not grafted"
        above.children[first] = node
        self.list.append(node)
        return node

    def _root(self, salt: str) -> TreeNode:
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = TreeNode(b"", b"", None, salt=salt)
        return root

    def split(self, node: TreeNode, pages: int) -> TreeNode:
        """Cut `node` after `pages`; returns the new upper half. `node` becomes the lower half."""
        upper = node.split(pages, self.page_bytes, self._points)
        self._halved(upper, node, old=node, new=upper)
        return upper

    def split_end(self, node: TreeNode, pages: int) -> TreeNode:
        """Cut `node` after `pages`; returns the new lower half. `node` becomes the upper half.

        The cost grows with the pages of the lower half, not with those that `node` keeps.
        """
        lower = node.split_end(pages, self.page_bytes, self._points)
        self._halved(node, lower, old=node, new=lower)
        return lower

    def _halved(self, upper: TreeNode, lower: TreeNode, *, old: TreeNode, new: TreeNode) -> None:
        """Update the counts and the list of nodes after a split: `new` is the half that was cut off `old`."""
        self.version += 1
        host, unstored = new.parts[Tier.HOST], self.unstored
        for name, part in old.parts[Tier.HOST].items():
            if part in unstored and name in host:
                unstored[host[name]] = unstored[part]
        if self.write_back:
            upper.busy, lower.busy = upper.locked_parts, lower.locked_parts
            upper.busy_below = int(bool(lower.busy or lower.busy_below))
        if old.linked:
            self.list.append(new)
        new.linked = old.linked
        for tier in IN_TREE:
            upper.below[tier] = int(self.full in lower.parts[tier])
            self._idle(upper, tier)
            self._idle(lower, tier)

    def unlink(self, node: TreeNode) -> None:
        """Remove a node that has no parts and no children. Idempotent."""
        parent, first = node.parent, node.first(self.page_bytes)
        if parent is None or parent.children.get(first) is not node:
            return
        del parent.children[first]
        parent.latest = None
        if node.linked:
            node.linked = False
            self.list.remove(node)
        self._drop_top(parent)

    def _drop_top(self, node: TreeNode) -> None:
        """Remove a root, or an invalid root, that has lost its last child."""
        if node.parent is None and not node.children:
            if self.roots.get(node.salt) is node:
                del self.roots[node.salt]
            self.invalid_roots.pop(node, None)

    # ------------------------------------------------------------ parts

    def attach(self, node: TreeNode, name: str, tier: Tier, lease: Lease, digests: tuple[int, ...]) -> NodePart:
        """Hang a part on a node that lacks it in `tier`, and tell the observer of nodes; returns the part."""
        part = self.hang(node, name, tier, lease, digests)
        if name == self.full:
            self.tell(node, tier, True)
        return part

    def hang(self, node: TreeNode, name: str, tier: Tier, lease: Lease, digests: tuple[int, ...]) -> NodePart:
        """Hang a part on a node that lacks it in `tier`; returns the part.

        The caller that hangs full parts calls `tell` for their nodes afterwards, parents first.
        """
        assert name not in node.parts[tier], f"{name} is there already"
        self.version += 1
        part = node.parts[tier][name] = NodePart(node, name, tier, lease, digests)
        self.sizes[tier, name] += lease.count
        if name == self.full:
            assert node.parent is not None
            node.parent.below[tier] += 1
            self._idle(node.parent, tier)
        for there in IN_TREE:
            self._idle(node, there)
        if self._part_observer is not None:
            self._part_observer(part, True)
        return part

    def detach(self, part: NodePart) -> None:
        """Take an unlocked part off its node, and release its lease. The caller removes it from the eviction
        order."""
        node, tier = part.node, part.tier
        assert not part.locks, "a locked part stays"
        self.version += 1
        if part.component == self.full:
            parent = node.parent
            assert parent is not None
            parent.below[tier] -= 1
            if not parent.below[tier]:
                self._idle(parent, tier)
            # An invalidated node was told as gone when it was invalidated, and the same pages may have come anew since.
            if node.linked:
                self.tell(node, tier, False)
        del node.parts[tier][part.component]
        if self.unstored.pop(part, None) is not None:
            self.missed += part.lease.count - part.stored
        self.sizes[tier, part.component] -= part.lease.count
        part.lease.release()

    def cut(self, node: TreeNode, tier: Tier, pages: int) -> None:
        """Keep the first `pages` pages of a leaf that is in `tier` alone, and release the others."""
        self.version += 1
        if node.linked and self._node_observer is not None:
            raw, chain = node.end(pages, self.page_bytes)
            self.tell(TreeNode(raw, chain, node, start=node.start + pages, salt=node.salt), tier, False)
        count, unstored = node.pages - pages, self.unstored
        for part in node.parts[tier].values():
            self.sizes[tier, part.component] -= count
            if unstored and part in unstored:
                self.missed += part.lease.count - max(part.stored, pages)
            part.cut(pages)
        node.cut(pages)

    # ------------------------------------------------------------ invalidation

    def detach_subtree(self, top: TreeNode) -> list[TreeNode]:
        """Make `top`, which can be matched, and all nodes below it unmatchable, and tell the observers that their
        state has gone.

        Returns these nodes, children first. They keep their parts, and hang below an invalid root from now on.
        """
        self.version += 1
        nodes = list(subtree(top))[::-1]
        for node in nodes:
            for tier in IN_TREE:
                if self.full in node.parts[tier]:
                    self.tell(node, tier, False)
                for part in node.parts[tier].values():
                    if self._part_observer is not None:
                        self._part_observer(part, False)
                    self.unstored.pop(part, None)
            node.linked = False
            self.list.remove(node)
        self._move_to_invalid_root(top)
        return nodes

    def _move_to_invalid_root(self, top: TreeNode) -> None:
        parent, first = top.parent, top.first(self.page_bytes)
        assert parent is not None
        invalid_root = TreeNode(b"", b"", None, start=top.start, salt=top.salt)
        invalid_root.linked = False
        invalid_root.children[first], top.parent = top, invalid_root
        self.invalid_roots[invalid_root] = None
        del parent.children[first]
        parent.latest = None
        if top.busy or top.busy_below:
            invalid_root.busy_below = 1
            # As if the parent had been locked in its place, and isn't any more.
            parent.busy += 1
            parent.busy_below -= 1
            parent.count_unlocked()
        for tier in IN_TREE:
            there = int(self.full in top.parts[tier])
            invalid_root.below[tier] += there
            parent.below[tier] -= there
            self._idle(parent, tier)
        self._drop_top(parent)


class NodeList:
    """All nodes that can be matched, in the order in which they were made; cursors walk it while it changes."""

    def __init__(self) -> None:
        self._first = self._last = TreeNode(b"", b"", None)
        """A sentinel before the oldest node; the newest node, or the sentinel when the list is empty."""
        self.cursors: set[TreeCursor] = set()
        """Walks that weren't closed yet."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[TreeNode]:
        """Oldest first. The list must not change meanwhile; use a `cursor` where it may."""
        node = self._first.newer
        while node is not None:
            yield node
            node = node.newer

    def append(self, node: TreeNode) -> None:
        node.older, node.newer = self._last, None
        self._last.newer = self._last = node
        self._count += 1

    def remove(self, node: TreeNode) -> None:
        older, newer = node.older, node.newer
        assert older is not None, "it is in the list"
        for cursor in self.cursors:
            if cursor.last is node:
                cursor.last = older
        older.newer = newer
        if newer is None:
            self._last = older
        else:
            newer.older = older
        node.older = node.newer = None
        self._count -= 1

    def cursor(self) -> TreeCursor:
        """Returns a cursor that begins with the oldest node. The caller must close it."""
        return TreeCursor(self, self._first)


class TreeCursor:
    """A walk through a tree's nodes that may be interrupted.

    It visits all nodes that exist throughout the walk, and those that are made meanwhile: also new halves of nodes that
    were split.
    """

    def __init__(self, nodes: NodeList, first: TreeNode) -> None:
        self._nodes = nodes
        self.last: TreeNode = first
        """The node that was visited last, or the one before it where that was removed."""
        nodes.cursors.add(self)

    def next(self) -> TreeNode | None:
        """Returns the next node; None where there is none yet (one that is added later can still be visited)."""
        node = self.last.newer
        if node is not None:
            self.last = node
        return node

    def close(self) -> None:
        """Idempotent."""
        self._nodes.cursors.discard(self)
