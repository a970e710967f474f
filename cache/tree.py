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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cache.components import Component, components_of
from cache.eviction import POLICIES, Policy, Queue
from cache.leases import Lease
from cache.nodes import IN_TREE, Lock, Node, Offer, Part, Tier
from cache.prefix import KEY_BYTES, Prefix, common_pages
from cache.registry import PoolSetSpec
from cache.tree_check import check_tree

Offers = Mapping[str, Sequence[Offer]]
"""What is offered to the tree, by component."""
Spill = Callable[[Node], bool]
"""Asked before a node that is on the device alone would go; True: it is being written elsewhere, leave it."""


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


class PrefixTree:
    """See the module's prose. One tree a seat; salts keep strangers apart by having roots of their own."""

    def __init__(self, spec: PoolSetSpec, policy: Policy = POLICIES["lru"], *, write_back: bool = False) -> None:
        self.spec = spec
        self.components = components_of(spec)
        self.full = self.components[0].name
        self.write_back = write_back
        self.roots: dict[str, Node] = {}
        self.locked: set[Lock] = set()
        self.condemned: list[Node] = []
        self.queues = {(t, c.name): Queue(policy) for t in IN_TREE for c in self.components}
        self.sizes = dict.fromkeys(self.queues, 0)
        """Pages (or slots) held, by tier and component."""
        self.protected = dict.fromkeys(self.queues, 0)
        """Those of them that locks keep."""
        self.on_change: Callable[[Node, Tier, bool], None] = lambda node, tier, there: None
        """Told when a node's full state has come to a tier (True) or gone from it."""
        self._by_name = {c.name: c for c in self.components}
        self._tick = 0
        self._version = 0
        self._number = 0

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

    def hold(self, prefix: Prefix, wanted: Mapping[str, range], owner: str) -> tuple[Lock, dict[str, set[int]]]:
        """Keep what the device has of page numbers `wanted`, component by component, wherever the anchor is.

        Returns the lock and the numbers that it keeps: of a hand-over these need not be sent. Of the full component
        only what follows from the start without a gap; a snapshot after `n` pages has the number `n - 1`.
        """
        path = [node if pages == len(node) else self._split(node, pages) for node, pages in self.walked(prefix)]
        self._use(path)
        parts: list[Part] = []
        held: dict[str, set[int]] = {c.name: set() for c in self.components}
        start = 0
        for node in path:
            here = node.parts[Tier.DEVICE]
            if self.full not in here:
                break
            end = start + len(node)
            for component in self.components:
                numbers = range(end - 1, end) if component.point else range(start, end)
                of_use = held[component.name]
                chosen = set(numbers) & set(wanted.get(component.name, ()))
                if component.name in here and chosen:
                    parts += [p for p in (here[self.full], here[component.name]) if p not in parts]
                    of_use |= chosen
            start = end
        return self.keep(parts, owner), held

    def keep(self, parts: Sequence[Part], owner: str) -> Lock:
        """Lock exactly these parts: for moves, which must not lose what they read or write."""
        self._number += 1
        lock = Lock(self._number, owner, [])
        self.locked.add(lock)
        for part in parts:
            self.add(lock, part)
        return lock

    def add(self, lock: Lock, part: Part) -> None:
        """Keep `part` too, once: it was loaded for whom the lock is."""
        if lock in part.locks:
            return
        if lock in part.locks:
            return
        if not part.locks:
            self.protected[part.tier, part.component] += len(part)
        part.locks.add(lock)
        lock.parts.append(part)
        if len(part.node.parts[part.tier]) > 1:
            # Where full state is kept, the rest of the node may go alone.
            self._queue(part.node, part.tier)

    def unlock(self, lock: Lock) -> None:
        """Give back what `lock` keeps. Idempotent."""
        if lock not in self.locked:
            return
        self.locked.remove(lock)
        for part in lock.parts:
            part.locks.discard(lock)
            if not part.locks:
                self.protected[part.tier, part.component] -= len(part)
        for part in lock.parts:
            self._queue(part.node, part.tier)
            if self.write_back:
                self._queue_above(part.node)
        lock.parts.clear()
        self.condemned = [node for node in self.condemned if not self._bury(node)]

    def touch(self, match: Match) -> None:
        """Count a use of what was matched, without locking it."""
        self._use(match.path)

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
        for node, mine in reversed(self._plan(path, offers, tier)):
            for component, offer, where in mine:
                self._take(node, component, tier, offer, where)
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
        self.attach(node, name, tier, lease, tuple(offer.digests[where : where + units]))

    def attach(self, node: Node, name: str, tier: Tier, lease: Lease, digests: tuple[int, ...]) -> Part:
        """Hang a part on a node that has none there."""
        assert name not in node.parts[tier], f"{name} is there already"
        self._version += 1
        part = node.parts[tier][name] = Part(node, name, tier, lease, digests)
        self.sizes[tier, name] += len(lease)
        if name == self.full:
            assert node.parent is not None
            node.parent.below[tier] += 1
            self._queue(node.parent, tier)
            self.on_change(node, tier, True)
        for there in IN_TREE:
            self._queue(node, there)
        return part

    def _discard_empty(self, path: Sequence[Node]) -> None:
        for node in reversed(path):
            if node.children or any(node.parts):
                return
            self._unlink(node)

    @property
    def _page_bytes(self) -> int:
        return 4 * self.spec.page_tokens

    def _root(self, salt: str) -> Node:
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = Node(b"", b"", None, salt=salt)
        return root

    def _split(self, node: Node, pages: int) -> Node:
        """Cut `node` after `pages`; returns the new upper half. The lower half stays the object it was."""
        parent, size = node.parent, pages * self._page_bytes
        assert parent is not None
        self._version += 1
        upper = Node(node.raw[:size], node.chain[: pages * KEY_BYTES], parent)
        upper.used, upper.created, upper.hits, upper.priority = node.used, node.created, node.hits, node.priority
        upper.children[node.raw[size : size + self._page_bytes]] = node
        if parent.children.get(node.raw[: self._page_bytes]) is node:
            parent.children[node.raw[: self._page_bytes]] = upper
        else:
            self.condemned[self.condemned.index(node)] = upper
        node.raw, node.chain, node.parent = node.raw[size:], node.chain[pages * KEY_BYTES :], upper
        for tier in IN_TREE:
            for component in self.components:
                part = node.parts[tier].get(component.name)
                head = None if part is None else component.split(part, upper, pages)
                if part is None or head is None:
                    continue
                upper.parts[tier][component.name] = head
                for lock in part.locks:
                    lock.parts.insert(lock.parts.index(part), head)
            upper.below[tier] = int(self.full in node.parts[tier])
        for tier in IN_TREE:
            self._queue(upper, tier)
            self._queue(node, tier)
        return upper

    # ------------------------------------------------------------ evict

    def evict(self, tier: Tier, component: str, count: int, spill: Spill | None = None) -> int:
        """Free up to `count` pages (or slots) of `component` from `tier`; returns how many. Locked parts stay.

        A full part goes with everything that its leaf holds there; a window or a state alone where its node has more
        below it. `spill` is asked before a node that is nowhere else goes.
        """
        freed = coming = 0
        queue = self.queues[tier, component]
        spared: list[Part] = []
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
            if last and spill is not None and spill(node):
                spared.append(part)
                coming += len(part)
                continue
            spare = len(node) - (count - freed)
            if spare > 0 and component == self.full and not self._has_point(node):
                self._queue(self._split(node, spare), tier)
            freed += len(part)
            self._drop_leaf(node, tier)
        for part in spared:
            self._queue(part.node, tier)
        return freed

    def evictable(self, component: str, tier: Tier = Tier.DEVICE) -> int:
        """Pages (or slots) that no lock keeps."""
        return self.sizes[tier, component] - self.protected[tier, component]

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

    def condemn_node(self, node: Node) -> int:
        """`condemn` from the first page of `node` on; nothing happens when it is condemned already."""
        parent, first = node.parent, node.raw[: self._page_bytes]
        if not self.linked(node) or parent is None:
            return 0
        self._version += 1
        del parent.children[first]
        for tier in IN_TREE:
            parent.below[tier] -= int(self.full in node.parts[tier])
            self._queue(parent, tier)
        count = sum(map(len, subtree(node)))
        self.condemned.append(node)
        self.condemned = [n for n in self.condemned if not self._bury(n)]
        return count

    def component(self, name: str) -> Component:
        return self._by_name[name]

    def linked(self, node: Node) -> bool:
        """Whether `node` can be matched: it hangs on a root, and nothing above it was condemned."""
        while node.parent is not None:
            if node.parent.children.get(node.raw[: self._page_bytes]) is not node:
                return False
            node = node.parent
        return True

    def salt(self, node: Node) -> str:
        """Under which salt it was inserted."""
        while node.parent is not None:
            node = node.parent
        return node.salt

    def start(self, node: Node) -> int:
        """The page number of its first page."""
        pages = 0
        while node.parent is not None:
            node = node.parent
            pages += len(node)
        return pages

    def clear(self) -> int:
        """Condemn everything; returns the number of pages."""
        count = 0
        for root in list(self.roots.values()):
            count += sum(self.condemn_node(child) for child in list(root.children.values()))
        return count

    def may_go(self, part: Part) -> bool:
        """Whether `part` is held by its node, and either it or its whole leaf is nobody's."""
        if not part.live or part.locks:
            return False
        return self._alone(part) or (self._leaf(part.node, part.tier) and self._free(part.node, part.tier))

    def _alone(self, part: Part) -> bool:
        """Whether it goes without the rest of its node: the node has more below it, or its full state is kept."""
        if part.component == self.full:
            return False
        full = part.node.parts[part.tier][self.full]
        return not self._leaf(part.node, part.tier) or bool(full.locks)

    def _leaf(self, node: Node, tier: Tier) -> bool:
        return not node.below[tier]

    def _free(self, node: Node, tier: Tier) -> bool:
        """Whether no lock keeps anything of it there, nor of what would go with it."""
        if any(p.locks for p in node.parts[tier].values()):
            return False
        orphans = node.children if tier is Tier.DEVICE and self.full not in node.parts[Tier.HOST] else {}
        return not any(
            p.locks for top in orphans.values() for n in subtree(top) for t in IN_TREE for p in n.parts[t].values()
        )

    def _has_point(self, node: Node) -> bool:
        return any(self._by_name[name].point for parts in node.parts for name in parts)

    def _queue(self, node: Node, tier: Tier) -> None:
        """Let what may go of a node be found by `evict`."""
        for part in node.parts[tier].values():
            if not part.queued and self.may_go(part):
                self.queues[tier, part.component].push(part)

    def _queue_above(self, node: Node) -> None:
        """A node that is on the device alone takes what hangs below it along, so it waits for that to be nobody's."""
        above = node
        while above.parent is not None and above.parent.parent is not None:
            above = above.parent
            self._queue(above, Tier.DEVICE)

    def _drop_leaf(self, node: Node, tier: Tier) -> None:
        """Take everything of a leaf out of `tier`, and the node with it if it is nowhere else."""
        for part in list(node.parts[tier].values()):
            self._detach(part)
        if not any(node.parts):
            for child in list(node.children.values()):
                self._drop_subtree(child)
            self._unlink(node)

    def _drop_subtree(self, top: Node) -> None:
        for node in reversed(list(subtree(top))):
            for tier in IN_TREE:
                for part in list(node.parts[tier].values()):
                    self._detach(part)
            self._unlink(node)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        if parent is not None and parent.children.get(node.raw[: self._page_bytes]) is node:
            del parent.children[node.raw[: self._page_bytes]]
            if parent.parent is None and not parent.children:
                self.roots = {salt: root for salt, root in self.roots.items() if root.children}

    def _detach(self, part: Part) -> None:
        node, tier = part.node, part.tier
        assert not part.locks, "a locked part stays"
        self._version += 1
        if part.component == self.full:
            parent = node.parent
            assert parent is not None
            if parent.children.get(node.raw[: self._page_bytes]) is node:
                parent.below[tier] -= 1
                self._queue(parent, tier)
            self.on_change(node, tier, False)
        del node.parts[tier][part.component]
        self.sizes[tier, part.component] -= len(part)
        part.lease.release()

    def _bury(self, top: Node) -> bool:
        """Free what nobody locks of a condemned node and below; whether that was all."""
        for node in reversed(list(subtree(top))):
            for tier in IN_TREE:
                if not any(p.locks for p in node.parts[tier].values()):
                    for part in list(node.parts[tier].values()):
                        self._detach(part)
            if not node.children and not any(node.parts) and node is not top:
                self._unlink(node)
        return not top.children and not any(top.parts)

    # ------------------------------------------------------------ the whole

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, condemned ones included."""
        for root in self.roots.values():
            for child in root.children.values():
                yield from subtree(child)
        for top in self.condemned:
            yield from subtree(top)

    @property
    def locks(self) -> int:
        return len(self.locked)

    def check(self) -> list[str]:
        """Recompute links, ownership, counts, queues and locks from scratch; returns what doesn't hold."""
        return check_tree(self)


def subtree(top: Node) -> Iterator[Node]:
    """`top` and all its descendants, parents first."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
