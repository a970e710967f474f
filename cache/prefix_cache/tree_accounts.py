"""What the prefix tree holds: roots, nodes, and the parts that hang on them, counted by tier and component.

These are the books that everything else of the tree works on (`cache.prefix_cache.radix_tree`). Links, sizes and the
list of nodes are kept right where they change, and recomputed from scratch by `check`. Where a change may have left
state of a node to be evicted, whoever keeps the order of eviction is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cache.memory.kv_cache_spec import PoolSetSpec
from cache.pool.page_allocator import Lease
from cache.prefix_cache.lock_counts import count_unlocked, locked_parts
from cache.prefix_cache.node_list import NodeList
from cache.prefix_cache.token_prefix import TokenPrefix, common_pages
from cache.prefix_cache.tree_components import TreeComponent
from cache.prefix_cache.tree_node import IN_TREE, NodePart, Tier, TreeNode, subtree
from cache.prefix_cache.tree_split import new_lower, new_upper
from contracts.block_hash import TOKEN_BYTES

RestingSince = tuple[int, float]
"""How often storage has not taken a part, and the time before which it isn't asked again."""


class TreeAccounts:
    """The books of one tree; see the module's prose."""

    def __init__(
        self,
        spec: PoolSetSpec,
        components: Sequence[TreeComponent],
        idle: Callable[[TreeNode, Tier], None],
        *,
        write_back: bool,
    ) -> None:
        """`components`: the full one first. `idle` is told of a node and a tier where something may go by now."""
        self.components = components
        self.by_name = {c.name: c for c in components}
        self.full = components[0].name
        self.page_bytes = TOKEN_BYTES * spec.page_tokens
        self.write_back = write_back
        self.roots: dict[str, TreeNode] = {}
        """By salt."""
        self.graves: dict[TreeNode, None] = {}
        """What stands above invalidated nodes that somebody locks still, in the place of their parents."""
        self.list = NodeList()
        """Every node that can be matched: neither the roots nor what was invalidated."""
        self.sizes = {(tier, c.name): 0 for tier in IN_TREE for c in components}
        """Pages (or slots) held, by tier and component."""
        self.protected = dict.fromkeys(self.sizes, 0)
        """Those of them that locks keep."""
        self.unstored: dict[NodePart, RestingSince] = {}
        """Parts on the host of which storage is to have more than it is known to have, oldest first."""
        self.missed = 0
        """Pages (or slots) that left the host before storage had them."""
        self.tick = 0
        """Of the tree's own clock, by which nodes know when they were used."""
        self.version = 0
        """Another one after each change of what hangs where."""
        self.on_change: Callable[[TreeNode, Tier, bool], None] = lambda node, tier, there: None
        """Told when full state that can be matched has come to a tier (True), parents first, or gone from it: also
        when it was invalidated, whether or not it is locked still. Splits change nothing and aren't told."""
        self.on_part: Callable[[NodePart, bool], None] = lambda part, there: None
        """Told of every part of every tier that was hung on a node (True), and of each that was invalidated (False)."""
        self._silent = self.on_change
        self._idle = idle

    # ------------------------------------------------------------ look-ups

    def along(self, prefix: TokenPrefix) -> tuple[list[TreeNode], int]:
        """Every node along `prefix`, accepted or not, and how many pages of the last one match: all of the others'."""
        out: list[TreeNode] = []
        node, at, raw, size, pages = self.roots.get(prefix.salt), 0, prefix.raw, prefix.page_bytes, 0
        while node is not None:
            child = node.latest
            if child is None or not raw.startswith(child.run, at):
                child = node.children.get(raw[at : at + size])
                if child is None:
                    break
                node.latest = child
                if child.pages > 1 and not raw.startswith(child.run, at):
                    pages = common_pages(child.raw, raw, at, size)
                    if pages < child.pages:
                        out.append(child)
                        return out, pages
            out.append(child)
            node, pages = child, child.pages
            at += pages * size
        return out, pages

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
        return [top for grave in self.graves for top in grave.children.values()]

    # ------------------------------------------------------------ nodes

    def graft(self, parent: TreeNode | None, salt: str, raw: bytes, chain: bytes, used: int) -> TreeNode:
        """Hang a run of whole pages below `parent` (None: the root of `salt`), which has nothing that begins with its
        first page. It holds nothing yet: parts are to follow at once."""
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
        """Cut `node` after `pages`; returns the new upper half. The lower half stays the object it was."""
        upper = new_upper(node, pages, self.page_bytes, self.by_name)
        self._halved(upper, node, old=node, new=upper)
        return upper

    def split_end(self, node: TreeNode, pages: int) -> TreeNode:
        """Cut `node` after `pages`; returns the new lower half, and costs what that has."""
        lower = new_lower(node, pages, self.page_bytes, self.by_name)
        self._halved(node, lower, old=node, new=lower)
        return lower

    def _halved(self, upper: TreeNode, lower: TreeNode, *, old: TreeNode, new: TreeNode) -> None:
        """Count for both halves what was counted for `old`."""
        self.version += 1
        host, unstored = new.parts[Tier.HOST], self.unstored
        for name, part in old.parts[Tier.HOST].items():
            if part in unstored and name in host:
                unstored[host[name]] = unstored[part]
        if self.write_back:
            upper.busy, lower.busy = locked_parts(upper), locked_parts(lower)
            upper.busy_below = int(bool(lower.busy or lower.busy_below))
        if old.linked:
            self.list.append(new)
        new.linked = old.linked
        for tier in IN_TREE:
            upper.below[tier] = int(self.full in lower.parts[tier])
            self._idle(upper, tier)
            self._idle(lower, tier)

    def unlink(self, node: TreeNode) -> None:
        """Take a node away that holds nothing and has nothing below it. Idempotent."""
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
        """A root or a grave is gone with its last child."""
        if node.parent is None and not node.children:
            if self.roots.get(node.salt) is node:
                del self.roots[node.salt]
            self.graves.pop(node, None)

    # ------------------------------------------------------------ parts

    def attach(self, node: TreeNode, name: str, tier: Tier, lease: Lease, digests: tuple[int, ...]) -> NodePart:
        """Hang a part on a node that has none there, and tell."""
        part = self.hang(node, name, tier, lease, digests)
        if name == self.full:
            self.on_change(node, tier, True)
        return part

    def hang(self, node: TreeNode, name: str, tier: Tier, lease: Lease, digests: tuple[int, ...]) -> NodePart:
        """Hang a part on a node that has none there. Who hangs a full part tells `on_change`, parents first."""
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
        self.on_part(part, True)
        return part

    def detach(self, part: NodePart) -> None:
        """Take a part off its node, and give its lease back. Its place in the order of eviction is the caller's."""
        node, tier = part.node, part.tier
        assert not part.locks, "a locked part stays"
        self.version += 1
        if part.component == self.full:
            parent = node.parent
            assert parent is not None
            parent.below[tier] -= 1
            if not parent.below[tier]:
                self._idle(parent, tier)
            # What was invalidated is told as gone by then, and the same pages may have come anew since.
            if node.linked:
                self.on_change(node, tier, False)
        del node.parts[tier][part.component]
        if self.unstored.pop(part, None) is not None:
            self.missed += part.lease.count - part.stored
        self.sizes[tier, part.component] -= part.lease.count
        part.lease.release()

    def cut(self, node: TreeNode, tier: Tier, pages: int) -> None:
        """Keep the first `pages` pages of a leaf that is in `tier` alone, and give the others back."""
        self.version += 1
        if self.on_change is not self._silent and node.linked:
            raw, chain = node.end(pages, self.page_bytes)
            self.on_change(TreeNode(raw, chain, node, start=node.start + pages, salt=node.salt), tier, False)
        count = node.pages - pages
        for part in node.parts[tier].values():
            self.sizes[tier, part.component] -= count
            if self.unstored and part in self.unstored:
                self.missed += part.lease.count - max(part.stored, pages)
            part.cut(pages)
        node.cut(pages)

    # ------------------------------------------------------------ what was invalidated

    def bury(self, top: TreeNode) -> list[TreeNode]:
        """Take `top`, which can be matched, and all below it out of what can be, and tell that it has gone; returns
        these nodes, children first. They hang below a grave from now on."""
        self.version += 1
        nodes = list(subtree(top))[::-1]
        for node in nodes:
            for tier in IN_TREE:
                if self.full in node.parts[tier]:
                    self.on_change(node, tier, False)
                for part in node.parts[tier].values():
                    self.on_part(part, False)
                    self.unstored.pop(part, None)
            node.linked = False
            self.list.remove(node)
        self._move_to_grave(top)
        return nodes

    def _move_to_grave(self, top: TreeNode) -> None:
        parent, first = top.parent, top.first(self.page_bytes)
        assert parent is not None
        grave = TreeNode(b"", b"", None, start=top.start, salt=top.salt)
        grave.linked = False
        grave.children[first], top.parent = top, grave
        self.graves[grave] = None
        del parent.children[first]
        parent.latest = None
        if top.busy or top.busy_below:
            grave.busy_below = 1
            # As if the parent had been locked in its place, and isn't any more.
            parent.busy += 1
            parent.busy_below -= 1
            count_unlocked(parent)
        for tier in IN_TREE:
            there = int(self.full in top.parts[tier])
            grave.below[tier] += there
            parent.below[tier] -= there
            self._idle(parent, tier)
        self._drop_top(parent)
