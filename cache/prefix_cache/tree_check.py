"""The check of the prefix tree's invariants, recomputed from scratch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from twinpool.cache.prefix_cache.eviction_policy import EvictionOrder, TreeEviction, TreeLocks
from twinpool.cache.prefix_cache.tree_accounts import TreeAccounts
from twinpool.cache.prefix_cache.tree_node import IN_TREE, NodePart, Tier, TreeNode, subtree
from twinpool.contracts.block_hash import KEY_BYTES


def check_tree(tree: TreeAccounts, locks: TreeLocks, eviction: TreeEviction) -> list[str]:
    """Check one tree; returns a line for each violated invariant, none when all hold."""
    nodes = list(tree.nodes())
    found = [line for node in nodes for line in _node(tree, node)]
    found += _links(tree)
    found += _sizes(tree, nodes)
    found += _locks(tree, locks, nodes)
    found += _queues(tree, eviction.order, nodes)
    found += _busy(tree, nodes)
    hosted = {id(part) for node in tree.list for part in node.parts[Tier.HOST].values()}
    if any(id(part) not in hosted for part in tree.unstored):
        found.append("tree: what is to be stored is no longer on the host")
    return found


def _parts(nodes: list[TreeNode]) -> Iterator[NodePart]:
    return (part for node in nodes for tier in IN_TREE for part in node.parts[tier].values())


def _node(tree: TreeAccounts, node: TreeNode) -> Iterator[str]:
    name = f"tree node of {len(node)} pages"
    if not len(node) or len(node.raw) != len(node) * tree.page_bytes:
        yield f"{name}: its key has {len(node.raw)} bytes"
    components = {c.name: c for c in tree.components}
    for tier in IN_TREE:
        for key, part in node.parts[tier].items():
            where = f"{name}: {key} on {tier.name.lower()}"
            if part.node is not node or part.tier is not tier or part.component != key:
                yield f"{where}: the part is another's"
            yield from (f"{where}: {line}" for line in components[key].check(part))
            other = node.parts[Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE].get(key)
            if other is not None and other.digests != part.digests:
                yield f"{where}: its digests differ from the other tier's"
        if node.parts[tier] and tree.full not in node.parts[tier]:
            yield f"{name}: {sorted(node.parts[tier])} on {tier.name.lower()} without {tree.full}"


def _links(tree: TreeAccounts) -> Iterator[str]:
    stack = [(root, True) for root in tree.roots.values()] + [(root, False) for root in tree.invalid_roots]
    size = tree.page_bytes
    for salt, root in tree.roots.items():
        if root.parent is not None or any(root.parts) or root.salt != salt:
            yield "tree: a root has a parent, state or another's salt"
        if not root.children:
            yield f"tree: nothing is left under the salt {salt!r}"
    linked = {id(node) for root in tree.roots.values() for child in root.children.values() for node in subtree(child)}
    if linked != {id(node) for node in tree.list} or len(tree.list) != len(linked):
        yield f"tree: {len(linked)} nodes can be matched, {len(tree.list)} are in the list of them"
    while stack:
        node, live = stack.pop()
        below = [0, 0]
        for first, child in node.children.items():
            stack.append((child, live))
            if child.parent is not node or child.raw[:size] != first or child.linked is not live:
                yield f"tree node of {len(node)} pages: a child is linked wrongly"
            place = child.start if node.parent is None and not live else node.start + node.pages
            if child.start != place or child.salt != node.salt:
                yield f"tree node of {len(node)} pages: a child says that it is elsewhere"
            for tier in IN_TREE:
                below[tier] += tree.full in child.parts[tier]
                strict = tier is Tier.DEVICE or not tree.write_back
                inside = live and node.parent is not None
                if strict and inside and tree.full in child.parts[tier] and tree.full not in node.parts[tier]:
                    yield f"tree node of {len(node)} pages: a child is on {tier.name.lower()} and it isn't"
        if node.latest is not None and not any(node.latest is child for child in node.children.values()):
            yield f"tree node of {len(node)} pages: the child that was met last is none of it any more"
        if below != node.below:
            yield f"tree node of {len(node)} pages: {below} children in the tiers, it counts {node.below}"
        if live and node.parent is not None and not any(node.parts):
            yield f"tree node of {len(node)} pages: it is in no tier"
        if node.parent is not None and len(node.chain) % KEY_BYTES:
            yield f"tree node of {len(node)} pages: its block hashes are cut"


def _sizes(tree: TreeAccounts, nodes: list[TreeNode]) -> Iterator[str]:
    sizes: Counter[tuple[Tier, str]] = Counter()
    protected: Counter[tuple[Tier, str]] = Counter()
    for part in _parts(nodes):
        sizes[part.tier, part.component] += len(part.lease)
        protected[part.tier, part.component] += len(part.lease) if part.locks else 0
    for key in tree.sizes:
        if sizes[key] != tree.sizes[key] or protected[key] != tree.protected[key]:
            counted = f"counted {tree.sizes[key]} and {tree.protected[key]}"
            yield f"tree: {key[1]} on {key[0].name.lower()}: {sizes[key]}, {protected[key]} of them locked, {counted}"


def _locks(tree: TreeAccounts, locks: TreeLocks, nodes: list[TreeNode]) -> Iterator[str]:
    held: dict[int, set[int]] = {}
    for lock in locks.locked:
        for part in lock.parts:
            held.setdefault(id(part), set()).add(lock.number)
    for part in _parts(nodes):
        if {lock.number for lock in part.locks} != held.pop(id(part), set()):
            yield f"tree: {part.component} of {len(part)}: its locks differ from the tokens that hold it"
        full = part.node.parts[part.tier].get(tree.full)
        if part.locks and full is not None and not full.locks:
            yield f"tree: {part.component} on {part.tier.name.lower()} is locked and its node's {tree.full} isn't"
    if held:
        yield "tree: a token holds parts that are no longer in the tree"


def _queues(tree: TreeAccounts, order: EvictionOrder, nodes: list[TreeNode]) -> Iterator[str]:
    queued = {id(p) for queue in order.queues.values() for p in queue.parts()}
    invalidated = {id(n) for top in tree.invalidated for n in subtree(top)}
    parts = {id(part) for part in _parts(nodes)}
    for (tier, name), queue in order.queues.items():
        where = f"tree: the queue of {name} on {tier.name.lower()}"
        yield from (f"{where}: {line}" for line in queue.check())
        strangers = sum(id(part) not in parts for part in queue.parts())
        if strangers:
            yield f"{where} holds {strangers} parts that have left the tree"
    for part in _parts(nodes):
        if part.queued != (id(part) in queued):
            yield f"tree: {part.component} of {len(part)}: it is queued or not, and says otherwise"
        whole = id(part.node) not in invalidated and tree.full in part.node.parts[part.tier]
        if whole and order.may_go(part) and not part.queued:
            yield f"tree: {part.component} of {len(part)} on {part.tier.name.lower()} may go and isn't queued"


def _busy(tree: TreeAccounts, nodes: list[TreeNode]) -> Iterator[str]:
    """Recount the locked parts in and below each node (`busy`, `busy_below`), which a written-back tree counts."""
    tops = [*tree.roots.values(), *tree.invalid_roots]
    own: dict[int, int] = {}
    # Whether any part is locked in a node or below it; children are computed before their parents.
    inside: dict[int, bool] = {}
    for node in reversed([*tops, *nodes]):
        own[id(node)] = sum(bool(p.locks) for parts in node.parts for p in parts.values())
        inside[id(node)] = bool(own[id(node)]) or any(inside[id(child)] for child in node.children.values())
    for node in (*tops, *nodes):
        below = sum(inside[id(child)] for child in node.children.values())
        wanted = (own[id(node)], below) if tree.write_back else (0, 0)
        if (node.busy, node.busy_below) != wanted:
            yield f"tree node of {len(node)} pages: {wanted} are locked in and below it, it counts otherwise"
