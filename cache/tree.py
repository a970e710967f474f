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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cache.components.base import Component, Level
from cache.nodes import Lock, Node, Offer, Part, Tier
from cache.prefix import KEY_BYTES, Prefix, common_pages
from cache.tree_check import check_tree
from cache.tree_state import TreeState

Offers = Mapping[str, Sequence[Offer]]
"""What is offered to the tree, by component."""


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree holds of a prefix. Depths are in pages."""

    prefix: Prefix
    path: tuple[Node, ...]
    """Nodes from the root to the anchor; of the last one, perhaps only its first pages."""
    depth: int
    """Of the anchor, counting what is on the host too."""
    device_depth: int
    """Of the anchor, counting what is on the device alone."""
    device_path: tuple[Node, ...]
    version: int
    """Of the tree when it was matched: what has changed since may not be locked by it."""


class PrefixTree(TreeState):
    """See the module's prose. One tree a seat; salts keep strangers apart by having roots of their own."""

    # ------------------------------------------------------------ match

    def match(self, prefix: Prefix) -> Match:
        """The longest part of `prefix` that can be computed from. Changes nothing and locks nothing."""
        walked = self.walked(prefix)
        levels = [c.levels(walked) for c in self.components]
        accepted = levels[0] if len(levels) == 1 else list(map(min, zip(*levels, strict=True)))
        tree = _reach(accepted, Level.TREE)
        device = _reach(accepted[:tree], Level.DEVICE)
        path = tuple([node for node, _ in walked[:tree]])
        return Match(prefix, path, _depth(walked, tree), _depth(walked, device), path[:device], self._version)

    def walked(self, prefix: Prefix) -> list[tuple[Node, int]]:
        """Every node along `prefix` with how many of its pages match, accepted or not."""
        out: list[tuple[Node, int]] = []
        node, at, raw, size = self.roots.get(prefix.salt), 0, prefix.raw, prefix.page_bytes
        while node is not None:
            child = node.children.get(raw[at : at + size])
            if child is None:
                break
            pages = child.pages
            if pages > 1 and not raw.startswith(child.raw, at):
                out.append((child, common_pages(child.raw, raw, at, size)))
                break
            out.append((child, pages))
            node, at = child, at + pages * size
        return out

    # ------------------------------------------------------------ locks

    def lock(self, match: Match, owner: str, *, tier: Tier = Tier.HOST) -> Lock:
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
        parts: dict[Part, None] = {}
        for component in self.components:
            name, beside = component.name, component.name != self.full
            for node in component.needs(path):
                device, host = node.parts
                part = device[name] if name in device else host[name]
                if beside:
                    parts[node.parts[part.tier][self.full]] = None
                parts[part] = None
        return self.keep(parts, owner)

    def hold(
        self, prefix: Prefix, wanted: Mapping[str, range], owner: str, *, host: bool
    ) -> tuple[Lock, dict[str, set[int]]]:
        """Keep what the device has of page numbers `wanted`, component by component, wherever the anchor is.

        With `host`, what the host alone has is kept there. Returns the lock and the numbers that it keeps: of a
        hand-over these need not be sent. Of the full component only what follows from the start without a gap; a
        snapshot after `n` pages has the number `n - 1`.
        """
        path = [node if pages == len(node) else self._split(node, pages) for node, pages in self.walked(prefix)]
        self._use(path)
        parts: dict[Part, None] = {}
        held: dict[str, set[int]] = {c.name: set() for c in self.components}
        full, unbroken = self.full, 0
        for node in path:
            device, kept = node.parts
            if full not in device and not (host and full in kept):
                break
            unbroken += 1
        for component in self.components:
            if component.name in wanted:
                found = self._of_use(component, path[:unbroken], wanted[component.name], host)
                for part, numbers in found:
                    if part.component != full:
                        parts[part.node.parts[part.tier][full]] = None
                    parts[part] = None
                    held[component.name].update(numbers)
        return self.keep(parts, owner), held

    def _of_use(
        self, component: Component, path: Sequence[Node], due: range, host: bool
    ) -> Iterator[tuple[Part, range]]:
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

    def _use(self, path: Sequence[Node]) -> None:
        self._tick += 1
        tick = self._tick
        for node in path:
            node.used = tick
            node.hits += 1

    # ------------------------------------------------------------ insert

    def insert(self, prefix: Prefix, offers: Offers, tier: Tier = Tier.DEVICE, priority: int = 0) -> int:
        """Give finished state to the tree; it takes what it doesn't hold in `tier` and leaves the rest in the leases.

        Tombstones heal, and what was evicted from the tier comes back, where whole nodes are offered with the digests
        that the tree knows. Returns the number of pages of `prefix` that the tree has in `tier` afterwards, counted
        from the start. What hangs on pages that neither the tree nor an offer has is not taken.
        """
        walked = self.walked(prefix)
        at = sum(pages for _, pages in walked)
        end = at
        for offer in offers.get(self.full, ()):
            if offer.first <= end:
                end = max(end, min(len(prefix), offer.first + len(offer.digests)))
        if not end:
            return 0
        self._tick += 1
        # The nodes' keys are the prefix's own as far as the tokens are the same: only new pages are hashed.
        if not prefix.knows(at):
            prefix.know(b"".join([node.chain for node, _ in walked])[: KEY_BYTES * at])
        path = self._path(prefix, walked, at, end, self._boundaries(offers), priority)
        # From the last node up: taking a run out of a lease moves only what lies behind it.
        plan = self._plan(path, offers, tier)
        for node, mine in reversed(plan):
            for component, offer, where in mine:
                self._take(node, component, tier, offer, where)
        for node, mine in plan:
            if any(component == self.full for component, _, _ in mine):
                self.on_change(node, tier, True)
        self._discard_empty(path)
        held, unbroken, full, tick = 0, True, self.full, self._tick
        for node in path:
            node.used = tick
            node.priority = max(node.priority, priority)
            unbroken = unbroken and full in node.parts[tier]
            held += node.pages if unbroken else 0
        return held

    def _boundaries(self, offers: Offers) -> set[int]:
        return {b for c in self.components for b in c.boundaries(offers.get(c.name, ()))}

    def _path(
        self, prefix: Prefix, walked: list[tuple[Node, int]], at: int, end: int, boundaries: set[int], priority: int
    ) -> list[Node]:
        """The nodes of pages `0 .. end-1`, made where there are none and split where one must end."""
        path = [node for node, _ in walked]
        if path and walked[-1][1] < len(path[-1]):
            path[-1] = self._split(*walked[-1])
        if end > at:
            parent = path[-1] if path else self._root(prefix.salt)
            raw = prefix.raw[at * prefix.page_bytes : end * prefix.page_bytes]
            node = Node(raw, prefix.chain[at * KEY_BYTES : end * KEY_BYTES], parent, start=at, salt=prefix.salt)
            node.used, node.created, node.priority = self._tick, self._tick, priority
            parent.children[raw[: prefix.page_bytes]] = node
            self.list.append(node)
            path.append(node)
        out: list[Node] = []
        cuts = sorted(boundaries, reverse=True)
        for node in path:
            while cuts and cuts[-1] <= node.start:
                cuts.pop()
            while cuts and cuts[-1] < node.start + node.pages:
                out.append(self._split(node, cuts.pop() - node.start))
            out.append(node)
        return out

    def _plan(self, path: list[Node], offers: Offers, tier: Tier) -> list[tuple[Node, list[tuple[str, Offer, int]]]]:
        """Decide from the root down what each node takes: component, offer, and where in its lease."""
        taken: list[tuple[Node, list[tuple[str, Offer, int]]]] = []
        unbroken, names = True, self._by_name.keys()
        for node in path:
            if node.parts[tier].keys() == names:
                continue
            start, stop = node.start, node.start + node.pages
            mine: list[tuple[str, Offer, int]] = []
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

    def _take(self, node: Node, name: str, tier: Tier, offer: Offer, where: int) -> None:
        units = self._by_name[name].units(node)
        lease = offer.lease.split(units, f"tree {name}", start=where)
        self._hang(node, name, tier, lease, tuple(offer.digests[where : where + units]))

    def _discard_empty(self, path: Sequence[Node]) -> None:
        for node in reversed(path):
            if node.children or any(node.parts):
                return
            self._unlink(node)

    def graft(self, parent: Node | None, salt: str, raw: bytes, chain: bytes, used: int) -> Node:
        """Hang a run of whole pages below `parent` (None: the root of `salt`), which has nothing that begins with its
        first page. It holds nothing yet: `attach` is to follow at once."""
        above = self._root(salt) if parent is None else parent
        start = 0 if parent is None else parent.start + parent.pages
        node = Node(raw, chain, above, start=start, salt=salt)
        node.used = node.created = used
        assert raw[: self._page_bytes] not in above.children, "what the tree has already is inserted, not grafted"
        above.children[raw[: self._page_bytes]] = node
        self.list.append(node)
        return node

    def _root(self, salt: str) -> Node:
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = Node(b"", b"", None, salt=salt)
        return root

    # ------------------------------------------------------------ evict

    def condemn(self, prefix: Prefix, page: int = 0) -> int:
        """Never again match page `page` of `prefix` nor anything below: its state was found damaged.

        Freed at once where nobody locks it, else with the last lock. Returns the number of pages condemned.
        """
        at = 0
        for node, pages in self.walked(prefix):
            if at <= page < at + pages:
                if page > at:
                    self._split(node, page - at)
                return self.condemn_node(node)
            at += pages
        return 0

    # ------------------------------------------------------------ the whole

    def check(self) -> list[str]:
        """Recompute links, ownership, counts, queues and locks from scratch; returns what doesn't hold."""
        return check_tree(self)


def _reach(accepted: Sequence[Level], least: Level) -> int:
    """How many nodes there are up to the last that is accepted."""
    for length in range(len(accepted), 0, -1):
        if accepted[length - 1] >= least:
            return length
    return 0


def _depth(walked: Sequence[tuple[Node, int]], length: int) -> int:
    """Pages of the first `length` nodes, as far as they match."""
    if not length:
        return 0
    node, pages = walked[length - 1]
    return node.start + pages
