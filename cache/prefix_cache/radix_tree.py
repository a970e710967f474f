"""The prefix tree: a radix tree over pages of tokens, whose nodes own the state of their run of pages.

    root --[page a, page b]--> node --[page c]--> leaf
                                  \\--[page d, page e]--> leaf

A node's key is a run of whole pages; children differ in their first page. At a node each *component* holds a part per
tier: the pages (or the slot) of its pool, with their digests. The tree's core names no component: it asks each
component whether it accepts a path, which nodes a lock must keep, and how a part splits.

The *anchor* of a match is the deepest node that every component accepts. Computing, locking and loading start there and
nowhere else. `match` changes nothing; `lock` keeps the parts that computing from the anchor reads, in the tier that has
them, and returns a token (`NodeLock`). Only that token gives the parts back, and it names exactly the parts that it
keeps, also after nodes were split.

Nodes own their indices through leases. Unlocked parts may be evicted from a tier: a window's or state's part alone
where the node has children in that tier, else all parts of the leaf. A node that no tier has any more is removed.

    always     device: a child is there only if its parent is; host: the same, unless the host is written back to
               other components only where full is, in the same tier

The package has these modules, each of which builds on those before it:

    tree_node        prefixes with their block hashes; nodes and their parts, which are cut in two together
    tree_components  how full, window and state pools hang on nodes
    tree_accounts    roots, nodes and parts, with every count
    eviction_policy  evicts state in the order of a policy, invalidates damaged state, and knows the locks
    radix_tree       matches prefixes, locks what was matched, and inserts finished state

Inserting: nodes end where offers begin or end, so that whole nodes take whole runs. A node takes a component's offered
state as its part in a tier on three conditions: it has no such part yet, its full state is in that tier or comes with
it, and the offered digests are those that the tree knows from the other tier (if it has the part there). So tombstones
heal.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.prefix_cache.eviction_policy import POLICIES, EvictionOrder, EvictionPolicy, TreeEviction, TreeLocks
from twinpool.cache.prefix_cache.tree_accounts import TreeAccounts
from twinpool.cache.prefix_cache.tree_check import check_tree
from twinpool.cache.prefix_cache.tree_components import ReuseLevel, TreeComponent, components_of
from twinpool.cache.prefix_cache.tree_node import (
    NodeLock,
    NodePart,
    PageOffer,
    Tier,
    TokenPrefix,
    TreeNode,
    start_of,
    token_ids,
)
from twinpool.contracts.block_hash import KEY_BYTES

PageOffers = Mapping[str, Sequence[PageOffer]]
"""State offered to the tree, by the component's name."""
_Taken = tuple[str, PageOffer, int]
"""A part that a node takes: the component, the offer, and where in the offer's lease it begins."""


def insert(accounts: TreeAccounts, prefix: TokenPrefix, offers: PageOffers, tier: Tier, priority: int) -> int:
    """See `RadixTree.insert`."""
    along, last = accounts.along(prefix)
    at = along[-1].start + last if along else 0
    end = _end(offers.get(accounts.full, ()), at, len(prefix))
    if not end:
        return 0
    accounts.tick += 1
    # The nodes' keys are the prefix's own as far as the tokens are the same: only new pages are hashed.
    if not prefix.knows(at):
        prefix.know(b"".join([node.chain for node in along])[: KEY_BYTES * at])
    if along and last < along[-1].pages:
        along[-1] = accounts.split(along[-1], last)
    path = _path(accounts, prefix, along, at, end, priority)
    _cut(accounts, path, offers)
    _take_all(accounts, _plan(accounts, path, offers, tier), tier)
    _discard_empty(accounts, path)
    tick = accounts.tick
    for node in path:
        node.used = tick
        if node.priority < priority:  # noqa: PLR1730 (a call a node is a tenth of an insertion into a deep path)
            node.priority = priority
    return _held(path, accounts.full, tier)


def _end(offers: Sequence[PageOffer], at: int, most: int) -> int:
    """Returns how many pages there are from the start without a gap: `at` in the tree, then those of `offers`.

    `offers` are of the full component; `most` bounds the result.
    """
    end = at
    for offer in offers:
        if offer.first <= end:
            end = max(end, min(most, offer.first + len(offer.digests)))
    return end


def _path(
    accounts: TreeAccounts, prefix: TokenPrefix, path: list[TreeNode], at: int, end: int, priority: int
) -> list[TreeNode]:
    """Returns the nodes of pages `0 .. end-1`: `path`, which ends at page `at`, and a new node for the rest."""
    if end > at:
        raw = prefix.raw[at * prefix.page_bytes : end * prefix.page_bytes]
        chain = prefix.chain[at * KEY_BYTES : end * KEY_BYTES]
        node = accounts.graft(path[-1] if path else None, prefix.salt, raw, chain, accounts.tick)
        node.priority = priority
        path.append(node)
    return path


def _cut(accounts: TreeAccounts, path: list[TreeNode], offers: PageOffers) -> None:
    """Split the nodes of `path` so that nodes end where offers begin or end; the new halves are put into `path`."""
    for cut in sorted({b for c in accounts.components for b in c.boundaries(offers.get(c.name, ()))}):
        number = bisect_right(path, cut, key=_node_start) - 1
        if number >= 0 and 0 < cut - path[number].start < path[number].pages:
            path.insert(number, accounts.split(path[number], cut - path[number].start))


def _plan(
    accounts: TreeAccounts, path: list[TreeNode], offers: PageOffers, tier: Tier
) -> list[tuple[TreeNode, list[_Taken]]]:
    """Decide, from the root down, which offered state each node takes."""
    taken: list[tuple[TreeNode, list[_Taken]]] = []
    unbroken, names, full = True, accounts.by_name.keys(), accounts.full
    for node in path:
        if node.parts[tier].keys() == names:
            continue
        start, stop = node.start, node.start + node.pages
        mine: list[_Taken] = []
        full_here = full in node.parts[tier]
        for component in accounts.components:
            name = component.name
            if name in node.parts[tier] or not (unbroken and (full_here or name == full)):
                continue
            found = component.match_offer(offers.get(name, ()), start, stop)
            known = node.part(name)
            if found is None:
                continue
            offer, where = found
            if known is not None and known.digests != tuple(offer.digests[where : where + component.units(node)]):
                continue
            mine.append((name, offer, where))
            full_here = full_here or name == full
        if mine:
            taken.append((node, mine))
        unbroken = full_here or (accounts.write_back and tier is Tier.HOST)
    return taken


def _take_all(accounts: TreeAccounts, plan: list[tuple[TreeNode, list[_Taken]]], tier: Tier) -> None:
    # From the last node up: taking a run out of a lease moves only the indices behind it.
    for node, mine in reversed(plan):
        for name, offer, where in mine:
            units = accounts.by_name[name].units(node)
            lease = offer.lease.split(units, f"tree {name}", start=where)
            accounts.hang(node, name, tier, lease, tuple(offer.digests[where : where + units]))
    for node, mine in plan:
        if any(name == accounts.full for name, _, _ in mine):
            accounts.tell(node, tier, True)


def _discard_empty(accounts: TreeAccounts, path: Sequence[TreeNode]) -> None:
    for node in reversed(path):
        if node.children or any(node.parts):
            return
        accounts.unlink(node)


def _held(path: Sequence[TreeNode], full: str, tier: Tier) -> int:
    """Returns how many pages of the full component are in `tier`, from the start without a gap."""
    held = 0
    for node in path:
        if full not in node.parts[tier]:
            break
        held = node.start + node.pages
    return held


_node_start = attrgetter("start")


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The part of a prefix that the tree holds, up to its anchor. Depths are in pages."""

    prefix: TokenPrefix
    path: tuple[TreeNode, ...]
    """Nodes from the root to the anchor, without the root; of the last one, perhaps only the first pages match."""
    depth: int
    """The anchor's depth, with state on the device and on the host."""
    device_depth: int
    """The anchor's depth with state on the device alone."""
    device_path: tuple[TreeNode, ...]
    """Nodes up to the anchor with state on the device alone."""
    version: int
    """The tree's version when it was matched. Once the tree has another one, the match can't be locked any more."""


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A hot prefix, with all its tokens from the first on."""

    tokens: tuple[int, ...]
    salt: str
    hits: int
    """The hits of the prefix's last node: how often the whole prefix was used."""


class RadixTree:
    """The prefix tree of one worker; see the module's prose. Each salt has a root of its own: nothing is shared
    between salts.

    `accounts` has the nodes and their counts, `locks` the locks, `eviction` evicts and invalidates. `write_back` says
    that the host is written back to: state is copied there when the device evicts it.
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
        """Returns the component of the pool `name`."""
        return self.accounts.by_name[name]

    # ------------------------------------------------------------ match

    def match(self, prefix: TokenPrefix) -> PrefixMatch:
        """Match `prefix`, up to the deepest point from which computing can go on. Changes nothing and locks nothing."""
        along, last = self.accounts.along(prefix)
        levels = [c.levels(along, last) for c in self.components]
        accepted = levels[0] if len(levels) == 1 else list(map(min, zip(*levels, strict=True)))
        tree = _reach(accepted, ReuseLevel.TREE)
        device = _reach(accepted[:tree], ReuseLevel.DEVICE)
        path, depth, device_depth = tuple(along[:tree]), _depth(along, last, tree), _depth(along, last, device)
        return PrefixMatch(prefix, path, depth, device_depth, path[:device], self.accounts.version)

    def walked(self, prefix: TokenPrefix) -> list[tuple[TreeNode, int]]:
        """Returns every node along `prefix` from the root down, whether or not components accept it, with how many
        of the node's pages match."""
        along, last = self.accounts.along(prefix)
        return [*((node, node.pages) for node in along[:-1]), *((node, last) for node in along[-1:])]

    # ------------------------------------------------------------ locks

    def lock(self, match: PrefixMatch, owner: str, *, tier: Tier = Tier.HOST) -> NodeLock:
        """Lock the parts that computing from the anchor reads: those on the device, and those on the host where the
        device lacks them.

        With `tier=DEVICE` the anchor is the one of the device alone. Splits the anchor's node where it matches in part.
        The tree must not have changed since the match. The caller gives the lock back with `locks.unlock`.
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
        """Lock the pages with numbers `wanted` (by component) that the device has, wherever the anchor is.

        With `host`, pages that the host alone has are locked there. Returns the lock and the page numbers that it
        keeps, by component: in a hand-over these need not be sent. Of the full component, only pages that follow from
        the start without a gap are kept; a snapshot after `n` pages has the number `n - 1`.
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
        """Returns the full component's parts along `path`, up to the first node that has none."""
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
        """Yields the parts of one component that have pages (or the slot) with numbers in `due`, and these numbers."""
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

    def hottest(self, component: str, pages: int) -> list[HotPrefix]:
        """Returns the hottest prefixes on the device, of at most `pages` pages of `component` in all: those with most
        hits first, then those used last.

        Shared pages are counted once. A node is chosen only below a chosen one, and is never hotter than it, so that
        chosen nodes always make up whole prefixes.
        """
        nodes = [n for n in self.accounts.list if component in n.parts[Tier.DEVICE]]
        chosen: dict[int, TreeNode] = {}
        for node in sorted(nodes, key=lambda n: (n.hits, n.used), reverse=True):
            assert node.parent is not None
            if len(node) <= pages and (node.parent.parent is None or id(node.parent) in chosen):
                chosen[id(node)] = node
                pages -= len(node)
        inner = {id(node.parent) for node in chosen.values()}
        ends = [node for key, node in chosen.items() if key not in inner]
        return [HotPrefix(tuple(token_ids(_raw(node))), node.salt, node.hits) for node in ends]

    # ------------------------------------------------------------ insert, invalidate

    def insert(self, prefix: TokenPrefix, offers: PageOffers, tier: Tier = Tier.DEVICE, priority: int = 0) -> int:
        """Give finished state to the tree. It takes the pages that it lacks in `tier` out of the offers' leases; the
        caller releases the rest.

        Tombstones heal, and evicted state comes back to `tier`, where an offer covers a whole node with the digests
        that the tree knows. State behind pages that neither the tree nor an offer has is not taken. Returns the number
        of full pages of `prefix` that the tree then has in `tier`, from the start without a gap.
        """
        return insert(self.accounts, prefix, offers, tier, priority)

    def invalidate(self, prefix: TokenPrefix, page: int = 0) -> int:
        """Never again match page number `page` of `prefix`, or a page below it: its state was found damaged.

        Unlocked state is freed at once, locked state with its last lock. Returns the number of pages invalidated; 0
        where the tree doesn't have the page.
        """
        for node, pages in self.walked(prefix):
            if node.start <= page < node.start + pages:
                if page > node.start:
                    self.accounts.split(node, page - node.start)
                return self.eviction.invalidate(node)
        return 0

    # ------------------------------------------------------------ the whole

    def check(self) -> list[str]:
        """Recompute links, ownership, counts, queues and locks from scratch; returns a line for each thing that is
        wrong."""
        return check_tree(self.accounts, self.locks, self.eviction)


_parts = attrgetter("parts")


def _reach(accepted: Sequence[ReuseLevel], least: ReuseLevel) -> int:
    """Returns how many nodes there are up to the last one that is accepted at `least` or better."""
    for length in range(len(accepted), 0, -1):
        if accepted[length - 1] >= least:
            return length
    return 0


def _depth(along: Sequence[TreeNode], last: int, length: int) -> int:
    """Returns how many pages of the first `length` nodes match; `last` is that number of the last node of `along`."""
    if not length:
        return 0
    node = along[length - 1]
    return node.start + (last if length == len(along) else node.pages)


def _raw(node: TreeNode) -> bytes:
    """Returns the tokens from the start of the sequence to the end of `node`, 4 bytes each."""
    raw: list[bytes] = []
    while node.parent is not None:
        raw.append(node.raw)
        node = node.parent
    return b"".join(reversed(raw))
