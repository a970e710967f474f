"""The list of a tree's nodes, and cursors that walk it while it changes."""

from __future__ import annotations

from collections.abc import Iterator

from twinpool.cache.prefix_cache.nodes.tree_node import TreeNode


class NodeList:
    """All nodes that can be matched, in the order in which they were made; cursors walk it while it changes."""

    def __init__(self) -> None:
        self._first = self._last = TreeNode(b"", b"", None)
        """A sentinel before the oldest node; the newest node, or the sentinel when the list is empty."""
        self._cursors: set[TreeCursor] = set()
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
        for cursor in self._cursors:
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

    @property
    def cursors(self) -> set[TreeCursor]:
        return self._cursors


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
