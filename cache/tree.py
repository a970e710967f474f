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
        walks = [c.walk() for c in self.components]
        path: list[Node] = []
        depth = device_depth = at = 0
        length = device_length = 0
        for node, pages in self._along(prefix):
            path.append(node)
            at += pages
            device = tree = True
            for walk in walks:
                accepts = walk.step(node, pages)
                device, tree = device and accepts.device, tree and accepts.tree
            if tree:
                depth, length = at, len(path)
            if device:
                device_depth, device_length = at, len(path)
        return Match(prefix, tuple(path[:length]), depth, device_depth, tuple(path[:device_length]), self._version)

    def walked(self, prefix: Prefix) -> list[tuple[Node, int]]:
        """Every node along `prefix` with how many of its pages match, accepted or not."""
        return list(self._along(prefix))

    def _along(self, prefix: Prefix) -> Iterator[tuple[Node, int]]:
        node, at, raw, size = self.roots.get(prefix.salt), 0, prefix.raw, prefix.page_bytes
        while node is not None:
            child = node.children.get(raw[at : at + size])
            if child is None:
                return
            run = child.raw
            if not raw.startswith(run, at):
                yield child, common_pages(run, raw, at, size)
                return
            yield child, len(run) // size
            node, at = child, at + len(run)

    # ------------------------------------------------------------ locks

    def lock(self, match: Match, owner: str, *, tier: Tier = Tier.HOST) -> Lock:
        """Keep what computing from the anchor reads, on the device where it is there, else on the host.

        With `tier=DEVICE`, from the anchor that the device has alone.
        """
        assert match.version == self._version, "the tree has changed since the match: match again, then lock"
        path = list(match.path if tier is Tier.HOST else match.device_path)
        depth = match.depth if tier is Tier.HOST else match.device_depth
        over = sum(map(len, path)) - depth
        if over:
            path[-1] = self._split(path[-1], len(path[-1]) - over)
        self._use(path)
        parts: list[Part] = []
        for component in self.components:
            for node in component.needs(path):
                part = node.part(component.name)
                assert part is not None, f"{component.name} accepted a node without state"
                full = node.parts[part.tier][self.full]
                if part is not full and full not in parts:
                    parts.append(full)
                parts.append(part)
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
        parts: list[Part] = []
        held: dict[str, set[int]] = {c.name: set() for c in self.components}
        start = 0
        for node in path:
            if self.full not in node.parts[Tier.DEVICE] and not (host and self.full in node.parts[Tier.HOST]):
                break
            end = start + len(node)
            for component in self.components:
                numbers = range(end - 1, end) if component.point else range(start, end)
                of_use = held[component.name]
                chosen = set(numbers) & set(wanted.get(component.name, ()))
                part = node.part(component.name)
                if chosen and part is not None and (host or part.tier is Tier.DEVICE):
                    parts += [p for p in (node.parts[part.tier][self.full], part) if p not in parts]
                    of_use |= chosen
            start = end
        return self.keep(parts, owner), held

    def _use(self, path: Sequence[Node]) -> None:
        self._tick += 1
        for node in path:
            node.used = self._tick
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
        held, unbroken = 0, True
        for node in path:
            node.used, node.priority = self._tick, max(node.priority, priority)
            unbroken = unbroken and self.full in node.parts[tier]
            held += len(node) if unbroken else 0
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
            node = Node(raw, prefix.chain[at * KEY_BYTES : end * KEY_BYTES], parent, priority=priority)
            node.used = node.created = self._tick
            parent.children[raw[: prefix.page_bytes]] = node
            path.append(node)
        out, start, cuts = [], 0, sorted(boundaries)
        for node in path:
            stop = start + len(node)
            for cut in cuts:
                if start < cut < stop:
                    out.append(self._split(node, cut - start))
                    start = cut
            out.append(node)
            start = stop
        return out

    def _plan(self, path: list[Node], offers: Offers, tier: Tier) -> list[tuple[Node, list[tuple[str, Offer, int]]]]:
        """Decide from the root down what each node takes: component, offer, and where in its lease."""
        taken: list[tuple[Node, list[tuple[str, Offer, int]]]] = []
        start, unbroken = 0, True
        for node in path:
            stop = start + len(node)
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
            start = stop
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
        node = Node(raw, chain, above)
        node.used = node.created = used
        assert raw[: self._page_bytes] not in above.children, "what the tree has already is inserted, not grafted"
        above.children[raw[: self._page_bytes]] = node
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
