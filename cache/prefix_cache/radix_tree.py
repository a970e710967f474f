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

It is made of parts, each on those before it:

    tree_accounts    roots, nodes and what hangs on them, with every count
    tree_evict       takes state out: to make room, in the order of `tree_eviction`, or because it is damaged
    tree_locks       who keeps which part
    tree_insert      takes finished state in
    radix_tree       matches, and locks what was matched
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from cache.memory.kv_cache_spec import PoolSetSpec
from cache.prefix_cache.token_prefix import TokenPrefix
from cache.prefix_cache.tree_accounts import TreeAccounts
from cache.prefix_cache.tree_check import check_tree
from cache.prefix_cache.tree_components import ReuseLevel, TreeComponent, components_of
from cache.prefix_cache.tree_evict import TreeEviction
from cache.prefix_cache.tree_eviction import POLICIES, EvictionOrder, EvictionPolicy
from cache.prefix_cache.tree_insert import PageOffers, insert
from cache.prefix_cache.tree_locks import TreeLocks
from cache.prefix_cache.tree_node import NodeLock, NodePart, Tier, TreeNode, start_of


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


class RadixTree:
    """The tree of one worker; see the module's prose. Salts keep strangers apart by having roots of their own.

    `accounts` has the nodes and what is counted of them, `locks` who keeps what, `eviction` takes state out.
    """

    def __init__(
        self, spec: PoolSetSpec, policy: EvictionPolicy = POLICIES["lru"], *, write_back: bool = False
    ) -> None:
        self.spec, self.write_back = spec, write_back
        self.components = components_of(spec)
        self.full = self.components[0].name
        order = EvictionOrder(self.components, policy)
        self.accounts = TreeAccounts(spec, self.components, order.offer, write_back=write_back)
        self.eviction = TreeEviction(self.accounts, order)
        self.locks = TreeLocks(self.accounts, self.eviction)

    def component(self, name: str) -> TreeComponent:
        """The component of a pool, by its name."""
        return self.accounts.by_name[name]

    # ------------------------------------------------------------ match

    def match(self, prefix: TokenPrefix) -> PrefixMatch:
        """The longest part of `prefix` that can be computed from. Changes nothing and locks nothing."""
        along, last = self.accounts.along(prefix)
        levels = [c.levels(along, last) for c in self.components]
        accepted = levels[0] if len(levels) == 1 else list(map(min, zip(*levels, strict=True)))
        tree = _reach(accepted, ReuseLevel.TREE)
        device = _reach(accepted[:tree], ReuseLevel.DEVICE)
        path, depth, device_depth = tuple(along[:tree]), _depth(along, last, tree), _depth(along, last, device)
        return PrefixMatch(prefix, path, depth, device_depth, path[:device], self.accounts.version)

    def walked(self, prefix: TokenPrefix) -> list[tuple[TreeNode, int]]:
        """Every node along `prefix`, accepted or not, each with how many of its pages match."""
        along, last = self.accounts.along(prefix)
        return [*((node, node.pages) for node in along[:-1]), *((node, last) for node in along[-1:])]

    # ------------------------------------------------------------ locks

    def lock(self, match: PrefixMatch, owner: str, *, tier: Tier = Tier.HOST) -> NodeLock:
        """Keep what computing from the anchor reads, on the device where it is there, else on the host.

        With `tier=DEVICE`, from the anchor that the device has alone.
        """
        assert match.version == self.accounts.version, "the tree has changed since the match: match again, then lock"
        path = list(match.path if tier is Tier.HOST else match.device_path)
        depth = match.depth if tier is Tier.HOST else match.device_depth
        over = path[-1].start + path[-1].pages - depth if path else 0
        if over:
            path[-1] = self.accounts.split(path[-1], len(path[-1]) - over)
        self._use(path)
        parts: list[NodePart] = []
        for component in self.components:
            name = component.name
            mine = [here[name] if name in here else host[name] for here, host in map(_parts, component.needs(path))]
            if name != self.full:
                mine = [part for each in mine for part in (each.node.parts[each.tier][self.full], each)]
            parts += mine
        return self.locks.keep(parts, owner)

    def hold(
        self, prefix: TokenPrefix, wanted: Mapping[str, range], owner: str, *, host: bool
    ) -> tuple[NodeLock, dict[str, Collection[int]]]:
        """Keep what the device has of page numbers `wanted`, component by component, wherever the anchor is.

        With `host`, what the host alone has is kept there. Returns the lock and the numbers that it keeps: of a
        hand-over these need not be sent. Of the full component only what follows from the start without a gap; a
        snapshot after `n` pages has the number `n - 1`.
        """
        path, last = self.accounts.along(prefix)
        if path and last < path[-1].pages:
            path[-1] = self.accounts.split(path[-1], last)
        self._use(path)
        full = self._unbroken(path, host)
        end = path[len(full) - 1].start + path[len(full) - 1].pages if full else 0
        parts: list[NodePart] = []
        held: dict[str, Collection[int]] = dict.fromkeys(self.accounts.by_name, range(0))
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
        return self.locks.keep(parts, owner), held

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
        self.accounts.tick += 1
        tick = self.accounts.tick
        for node in path:
            node.used = tick
            node.hits += 1

    # ------------------------------------------------------------ what comes and what is damaged

    def insert(self, prefix: TokenPrefix, offers: PageOffers, tier: Tier = Tier.DEVICE, priority: int = 0) -> int:
        """Give finished state to the tree; it takes what it doesn't hold in `tier` and leaves the rest in the leases.

        Tombstones heal, and what was evicted from the tier comes back, where whole nodes are offered with the digests
        that the tree knows. Returns the number of pages of `prefix` that the tree has in `tier` afterwards, counted
        from the start. What hangs on pages that neither the tree nor an offer has is not taken.
        """
        return insert(self.accounts, prefix, offers, tier, priority)

    def invalidate(self, prefix: TokenPrefix, page: int = 0) -> int:
        """Never again match page `page` of `prefix` nor anything below: its state was found damaged.

        Freed at once where nobody locks it, else with the last lock. Returns the number of pages invalidated.
        """
        for node, pages in self.walked(prefix):
            if node.start <= page < node.start + pages:
                if page > node.start:
                    self.accounts.split(node, page - node.start)
                return self.eviction.invalidate(node)
        return 0

    # ------------------------------------------------------------ the whole

    def check(self) -> list[str]:
        """Recompute links, ownership, counts, queues and locks from scratch; returns what doesn't hold."""
        return check_tree(self.accounts, self.locks, self.eviction)


_parts = attrgetter("parts")


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
