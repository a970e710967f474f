"""Inserting finished state: which nodes a prefix needs, which offered state each node takes, and how tombstones heal.

Nodes end where offers begin or end, so that whole nodes take whole runs. A node takes a component's offered state as
its part in a tier on three conditions: it has no such part yet, its full state is in that tier or comes with it, and
the offered digests are those that the tree knows from the other tier (if it has the part there).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import attrgetter

from twinpool.cache.prefix_cache.token_prefix import TokenPrefix
from twinpool.cache.prefix_cache.tree_accounts import TreeAccounts
from twinpool.cache.prefix_cache.tree_node import PageOffer, Tier, TreeNode
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
