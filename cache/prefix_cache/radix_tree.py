"""The prefix tree: a radix tree over pages of tokens, whose nodes own the state of their run of pages.

    root --[page a, page b]--> node --[page c]--> leaf
                                  \\--[page d, page e]--> leaf

A node's key is a run of whole pages; children differ in their first page. At a node each *component* holds a part per
tier: the pages (or the slot) of its pool, with their digests. The tree's core names no component: it asks each
whether it accepts a path, what a lock must keep, and how a part splits.

The *anchor* of a match is the deepest node that every component accepts. Whatever is computed, locked or loaded
starts there and nowhere else. `match` changes nothing; `lock` keeps the parts that computing from the anchor reads,
in the tier that has them, and returns a token; only that token gives them back, and it names exactly what it keeps,
also after nodes were split.

Nodes own their indices through leases. What isn't locked may be evicted from a tier: a window's or state's part
alone where the node has something below it, else the whole leaf. A node that is in no tier any more is gone.

    always     device: a child is there only if its parent is; host: the same, unless the host is written back to
               other components only where full is, in the same tier
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from cache.prefix_cache.token_prefix import TokenPrefix, common_pages
from cache.prefix_cache.tree_accounts import TreeAccounts
from cache.prefix_cache.tree_check import check_tree
from cache.prefix_cache.tree_components import ReuseLevel, TreeComponent
from cache.prefix_cache.tree_node import NodeLock, NodePart, PageOffer, Tier, TreeNode, start_of
from contracts.block_hash import KEY_BYTES

PageOffers = Mapping[str, Sequence[PageOffer]]
"""What is offered to the tree, by component."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the tree holds of a prefix. Depths are in pages."""

    prefix: TokenPrefix
    path: tuple[TreeNode, ...]
    """Nodes from the root to the anchor; of the last one, perhaps only its first pages."""
    depth: int
    """Of the anchor, counting what is on the host too."""
    device_depth: int
    """Of the anchor, counting what is on the device alone."""
    device_path: tuple[TreeNode, ...]
    version: int
    """Of the tree when it was matched: what has changed since may not be locked by it."""


class RadixTree(TreeAccounts):
    """See the module's prose. One tree a worker; salts keep strangers apart by having roots of their own."""

    # ------------------------------------------------------------ match

    def match(self, prefix: TokenPrefix) -> PrefixMatch:
        """The longest part of `prefix` that can be computed from. Changes nothing and locks nothing."""
        along, last = self.along(prefix)
        levels = [c.levels(along, last) for c in self.components]
        accepted = levels[0] if len(levels) == 1 else list(map(min, zip(*levels, strict=True)))
        tree = _reach(accepted, ReuseLevel.TREE)
        device = _reach(accepted[:tree], ReuseLevel.DEVICE)
        path, depth, device_depth = tuple(along[:tree]), _depth(along, last, tree), _depth(along, last, device)
        return PrefixMatch(prefix, path, depth, device_depth, path[:device], self._version)

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

    def walked(self, prefix: TokenPrefix) -> list[tuple[TreeNode, int]]:
        """The same nodes, each with how many of its pages match."""
        along, last = self.along(prefix)
        return [*((node, node.pages) for node in along[:-1]), *((node, last) for node in along[-1:])]

    # ------------------------------------------------------------ locks

    def lock(self, match: PrefixMatch, owner: str, *, tier: Tier = Tier.HOST) -> NodeLock:
        """Keep what computing from the anchor reads, on the device where it is there, else on the host.

        With `tier=DEVICE`, from the anchor that the device has alone.
        """
        assert match.version == self._version, "the tree has changed since the match: match again, then lock"
        path = list(match.path if tier is Tier.HOST else match.device_path)
        depth = match.depth if tier is Tier.HOST else match.device_depth
        over = path[-1].start + path[-1].pages - depth if path else 0
        if over:
            path[-1] = self._split(path[-1], len(path[-1]) - over)
        self._use(path)
        parts: list[NodePart] = []
        for component in self.components:
            name = component.name
            mine = [here[name] if name in here else host[name] for here, host in map(_parts, component.needs(path))]
            if name != self.full:
                mine = [part for each in mine for part in (each.node.parts[each.tier][self.full], each)]
            parts += mine
        return self.keep(parts, owner)

    def hold(
        self, prefix: TokenPrefix, wanted: Mapping[str, range], owner: str, *, host: bool
    ) -> tuple[NodeLock, dict[str, Collection[int]]]:
        """Keep what the device has of page numbers `wanted`, component by component, wherever the anchor is.

        With `host`, what the host alone has is kept there. Returns the lock and the numbers that it keeps: of a
        hand-over these need not be sent. Of the full component only what follows from the start without a gap; a
        snapshot after `n` pages has the number `n - 1`.
        """
        path, last = self.along(prefix)
        if path and last < path[-1].pages:
            path[-1] = self._split(path[-1], last)
        self._use(path)
        full = self._unbroken(path, host)
        end = path[len(full) - 1].start + path[len(full) - 1].pages if full else 0
        parts: list[NodePart] = []
        held: dict[str, Collection[int]] = dict.fromkeys(self._by_name, range(0))
        for component in self.components:
            name, due = component.name, wanted.get(component.name, range(0))
            if name == self.full:
                parts += full[: bisect_left(full, due.stop, key=start_of)]
                held[name] = range(due.start, max(due.start, min(due.stop, end)))
                continue
            found = list(self._of_use(component, path[: len(full)], due, host))
            for part, _ in found:
                parts += (part.node.parts[part.tier][self.full], part)
            held[name] = {number for _, numbers in found for number in numbers}
        return self.keep(parts, owner), held

    def _unbroken(self, path: Sequence[TreeNode], host: bool) -> list[NodePart]:
        """The full component's parts along `path`, up to the first node that has none."""
        full = self.full
        out: list[NodePart] = []
        for node in path:
            device, kept = node.parts
            part = device.get(full)
            if part is None and host:
                part = kept.get(full)
            if part is None:
                break
            out.append(part)
        return out

    def _of_use(
        self, component: TreeComponent, path: Sequence[TreeNode], due: range, host: bool
    ) -> Iterator[tuple[NodePart, range]]:
        """Parts of one component that have pages (or the slot) of these numbers, and which of them."""
        name, point, first_due, stop_due = component.name, component.point, due.start, due.stop
        for node in path:
            device, kept = node.parts
            part = device.get(name)
            if part is None and host:
                part = kept.get(name)
            if part is not None:
                stop = node.start + node.pages
                start = stop - 1 if point else node.start
                start = max(start, first_due)
                stop = min(stop, stop_due)
                if start < stop:
                    yield part, range(start, stop)

    def _use(self, path: Sequence[TreeNode]) -> None:
        self._tick += 1
        tick = self._tick
        for node in path:
            node.used = tick
            node.hits += 1

    # ------------------------------------------------------------ insert

    def insert(self, prefix: TokenPrefix, offers: PageOffers, tier: Tier = Tier.DEVICE, priority: int = 0) -> int:
        """Give finished state to the tree; it takes what it doesn't hold in `tier` and leaves the rest in the leases.

        Tombstones heal, and what was evicted from the tier comes back, where whole nodes are offered with the digests
        that the tree knows. Returns the number of pages of `prefix` that the tree has in `tier` afterwards, counted
        from the start. What hangs on pages that neither the tree nor an offer has is not taken.
        """
        along, last = self.along(prefix)
        at = end = _depth(along, last, len(along))
        for offer in offers.get(self.full, ()):
            if offer.first <= end:
                end = max(end, min(len(prefix), offer.first + len(offer.digests)))
        if not end:
            return 0
        self._tick += 1
        # The nodes' keys are the prefix's own as far as the tokens are the same: only new pages are hashed.
        if not prefix.knows(at):
            prefix.know(b"".join([node.chain for node in along])[: KEY_BYTES * at])
        if along and last < along[-1].pages:
            along[-1] = self._split(along[-1], last)
        path = self._path(prefix, along, at, end, self._boundaries(offers), priority)
        # From the last node up: taking a run out of a lease moves only what lies behind it.
        plan = self._plan(path, offers, tier)
        for node, mine in reversed(plan):
            for component, offer, where in mine:
                self._take(node, component, tier, offer, where)
        for node, mine in plan:
            if any(component == self.full for component, _, _ in mine):
                self.on_change(node, tier, True)
        self._discard_empty(path)
        tick, full, held = self._tick, self.full, 0
        for node in path:
            node.used = tick
            node.priority = max(node.priority, priority)
        for node in path:
            if full not in node.parts[tier]:
                break
            held = node.start + node.pages
        return held

    def _boundaries(self, offers: PageOffers) -> set[int]:
        return {b for c in self.components for b in c.boundaries(offers.get(c.name, ()))}

    def _path(
        self, prefix: TokenPrefix, path: list[TreeNode], at: int, end: int, boundaries: set[int], priority: int
    ) -> list[TreeNode]:
        """The nodes of pages `0 .. end-1`: `path` as far as page `at`, split where one must end, and the new ones."""
        if end > at:
            parent = path[-1] if path else self._root(prefix.salt)
            raw = prefix.raw[at * prefix.page_bytes : end * prefix.page_bytes]
            node = TreeNode(raw, prefix.chain[at * KEY_BYTES : end * KEY_BYTES], parent, start=at, salt=prefix.salt)
            node.used, node.created, node.priority = self._tick, self._tick, priority
            parent.children[raw[: prefix.page_bytes]] = node
            self.list.append(node)
            path.append(node)
        for cut in sorted(boundaries):
            number = bisect_right(path, cut, key=_node_start) - 1
            if number >= 0 and 0 < cut - path[number].start < path[number].pages:
                path.insert(number, self._split(path[number], cut - path[number].start))
        return path

    def _plan(
        self, path: list[TreeNode], offers: PageOffers, tier: Tier
    ) -> list[tuple[TreeNode, list[tuple[str, PageOffer, int]]]]:
        """Decide from the root down what each node takes: component, offer, and where in its lease."""
        taken: list[tuple[TreeNode, list[tuple[str, PageOffer, int]]]] = []
        unbroken, names = True, self._by_name.keys()
        for node in path:
            if node.parts[tier].keys() == names:
                continue
            start, stop = node.start, node.start + node.pages
            mine: list[tuple[str, PageOffer, int]] = []
            full_here = self.full in node.parts[tier]
            for component in self.components:
                name = component.name
                if name in node.parts[tier] or not (unbroken and (full_here or name == self.full)):
                    continue
                found = component.match_offer(offers.get(name, ()), start, stop)
                known = node.part(name)
                if found is None:
                    continue
                offer, where = found
                if known is not None and known.digests != tuple(offer.digests[where : where + component.units(node)]):
                    continue
                mine.append((name, offer, where))
                full_here = full_here or name == self.full
            if mine:
                taken.append((node, mine))
            unbroken = full_here or (self.write_back and tier is Tier.HOST)
        return taken

    def _take(self, node: TreeNode, name: str, tier: Tier, offer: PageOffer, where: int) -> None:
        units = self._by_name[name].units(node)
        lease = offer.lease.split(units, f"tree {name}", start=where)
        self._hang(node, name, tier, lease, tuple(offer.digests[where : where + units]))

    def _discard_empty(self, path: Sequence[TreeNode]) -> None:
        for node in reversed(path):
            if node.children or any(node.parts):
                return
            self._unlink(node)

    def graft(self, parent: TreeNode | None, salt: str, raw: bytes, chain: bytes, used: int) -> TreeNode:
        """Hang a run of whole pages below `parent` (None: the root of `salt`), which has nothing that begins with its
        first page. It holds nothing yet: `attach` is to follow at once."""
        above = self._root(salt) if parent is None else parent
        start = 0 if parent is None else parent.start + parent.pages
        node = TreeNode(raw, chain, above, start=start, salt=salt)
        node.used = node.created = used
        assert raw[: self._page_bytes] not in above.children, "what the tree has already is inserted, not grafted"
        above.children[raw[: self._page_bytes]] = node
        self.list.append(node)
        return node

    def _root(self, salt: str) -> TreeNode:
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = TreeNode(b"", b"", None, salt=salt)
        return root

    # ------------------------------------------------------------ evict

    def invalidate(self, prefix: TokenPrefix, page: int = 0) -> int:
        """Never again match page `page` of `prefix` nor anything below: its state was found damaged.

        Freed at once where nobody locks it, else with the last lock. Returns the number of pages invalidated.
        """
        at = 0
        for node, pages in self.walked(prefix):
            if at <= page < at + pages:
                if page > at:
                    self._split(node, page - at)
                return self.invalidate_node(node)
            at += pages
        return 0

    # ------------------------------------------------------------ the whole

    def check(self) -> list[str]:
        """Recompute links, ownership, counts, queues and locks from scratch; returns what doesn't hold."""
        return check_tree(self)


_node_start, _parts = attrgetter("start"), attrgetter("parts")


def _reach(accepted: Sequence[ReuseLevel], least: ReuseLevel) -> int:
    """How many nodes there are up to the last that is accepted."""
    for length in range(len(accepted), 0, -1):
        if accepted[length - 1] >= least:
            return length
    return 0


def _depth(along: Sequence[TreeNode], last: int, length: int) -> int:
    """Pages of the first `length` nodes, as far as they match."""
    if not length:
        return 0
    node = along[length - 1]
    return node.start + (last if length == len(along) else node.pages)
