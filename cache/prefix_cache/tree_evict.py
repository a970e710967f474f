"""Eviction and invalidation: how state leaves the prefix tree."""

from __future__ import annotations

from collections.abc import Callable

from cache.prefix_cache.tree_accounts import TreeAccounts
from cache.prefix_cache.tree_eviction import EvictionOrder
from cache.prefix_cache.tree_node import IN_TREE, NodePart, Tier, TreeNode, subtree

SpillNode = Callable[[TreeNode], bool]
"""Asked before a node that is on the device alone would go; True: it is being written elsewhere, leave it."""


class TreeEviction:
    """Takes state out of one tree: to make room, or because it is damaged. `order` says what goes next."""

    def __init__(self, accounts: TreeAccounts, order: EvictionOrder) -> None:
        self._accounts = accounts
        self.order = order
        self._points = any(c.point for c in accounts.components)

    def evictable(self, component: str, tier: Tier = Tier.DEVICE) -> int:
        """Pages (or slots) that no lock keeps."""
        return self._accounts.sizes[tier, component] - self._accounts.protected[tier, component]

    def evict(self, tier: Tier, component: str, count: int, spill: SpillNode | None = None) -> int:
        """Free up to `count` pages (or slots) of `component` from `tier`; returns how many. Locked parts stay.

        A full part goes with everything that its leaf holds there; a window or a state alone where its node has more
        below it. `spill` is asked before a node that is nowhere else goes, which takes along what hangs below it: where
        anything of that is locked, it goes once it was spilled and not before.
        """
        freed = coming = 0
        order, full = self.order, self._accounts.full
        queue = order.queues[tier, component]
        spared: list[NodePart] = []
        while freed + coming < count:
            part = queue.pop(order.may_go)
            if part is None:
                break
            node = part.node
            if order.goes_alone(part):
                freed += len(part)
                self._detach(part)
                continue
            last = tier is Tier.DEVICE and full not in node.parts[Tier.HOST]
            if last and spill is not None and (spill(node) or not order.may_go(part)):
                # All of it is being saved, or as much as there was room for: what is locked by that goes later.
                spared.append(part)
                coming += len(part)
                continue
            if last and node.busy_below:
                queue.forget(part)  # A save without room for it has queued it again.
                spared.append(part)
                continue
            spare = node.pages - (count - freed)
            if spare > 0 and component == full and not (self._points and self._has_point(node)):
                freed += self._drop_end(node, tier, spare)
                order.offer(node, tier)
                continue
            freed += len(part)
            self._drop_leaf(node, tier)
        for part in spared:
            order.offer(part.node, tier)
        return freed

    def _has_point(self, node: TreeNode) -> bool:
        return any(self._accounts.by_name[name].point for parts in node.parts for name in parts)

    def _detach(self, part: NodePart) -> None:
        self._accounts.detach(part)
        self.order.forget(part)

    def _drop_end(self, node: TreeNode, tier: Tier, pages: int) -> int:
        """Take all but the first `pages` pages of a leaf out of `tier`; returns how many those were."""
        count = node.pages - pages
        if node.parts[Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE]:
            self._drop_leaf(self._accounts.split_end(node, pages), tier)
            return count
        self._drop_children(node)
        self._accounts.cut(node, tier, pages)
        return count

    def _drop_leaf(self, node: TreeNode, tier: Tier) -> None:
        """Take everything of a leaf out of `tier`, and the node with it if it is nowhere else."""
        for part in list(node.parts[tier].values()):
            self._detach(part)
        if not any(node.parts):
            self._drop_children(node)
            self._accounts.unlink(node)

    def _drop_children(self, node: TreeNode) -> None:
        """Take all that hangs below a node out of every tier."""
        if not node.children:
            return
        for below in list(subtree(node))[:0:-1]:
            for tier in IN_TREE:
                for part in list(below.parts[tier].values()):
                    self._detach(part)
            self._accounts.unlink(below)

    # ------------------------------------------------------------ invalidation

    def invalidate(self, node: TreeNode) -> int:
        """Never again match `node` nor anything below it: its state was found damaged.

        Freed at once where nobody locks it, else with the last lock. Returns the number of pages invalidated: none
        where it was invalidated already.
        """
        if not node.linked or node.parent is None:
            return 0
        nodes = self._accounts.bury(node)
        count = sum(gone.pages for gone in nodes)
        for gone in nodes:
            self.drop_invalidated(gone)
        return count

    def clear(self) -> int:
        """Invalidate everything; returns the number of pages."""
        roots = list(self._accounts.roots.values())
        return sum(self.invalidate(child) for root in roots for child in list(root.children.values()))

    def drop_invalidated(self, node: TreeNode) -> None:
        """Free what nobody locks of an invalidated node, and the node with what is above it where nothing is left."""
        for tier in IN_TREE:
            if not any(p.locks for p in node.parts[tier].values()):
                for part in list(node.parts[tier].values()):
                    self._detach(part)
        while not node.children and not any(node.parts) and node.parent is not None:
            self._accounts.unlink(node)
            node = node.parent
