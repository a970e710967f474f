"""Components: how one pool's state hangs on the nodes of the tree. The tree knows them by `TreeComponent` alone.

A *run* component (full, window) holds a page for every page of a node, a *point* component (state) one slot for the
node's end.

    full     full attention: every page up to the anchor must be there. A child is on the device only where its parent
             is, so what the device has of a path is found from the path's end
    window   sliding windows: the last pages before the anchor must be there; what lies further up may be gone. A node
             without a part is a *tombstone*: its pages were given back as the window moved on, or evicted. Inserting
             the same tokens again heals it
    state    recurrent state: a snapshot at exactly the anchor, copied on use and never shared for writing
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import IntEnum

from cache.memory.kv_cache_spec import PoolKind, PoolSetSpec
from cache.prefix_cache.tree_node import NodePart, PageOffer, Tier, TreeNode

# cache/prefix_cache/tree_components.py
# Recurrent state: a snapshot at exactly the anchor, copied on use and never shared for writing.


# cache/prefix_cache/tree_components.py
# What the tree asks of a component: how one pool's state hangs on nodes.
#
# A *run* component (full, window) holds a page for every page of a node, a *point* component (state) one slot for the
# node's end. The tree's core knows components by this interface alone.


def components_of(spec: PoolSetSpec) -> tuple[TreeComponent, ...]:
    """One component a pool, the full one first."""

    def make(name: str) -> TreeComponent:
        kind = spec.by_name[name].kind
        if kind is PoolKind.FULL:
            return FullComponent(name)
        return WindowComponent(name, spec.window_pages(name)) if kind is PoolKind.WINDOW else StateComponent(name)

    rest = [p.name for p in spec.pools if p is not spec.full]
    return tuple(make(name) for name in (spec.full.name, *rest))


class ReuseLevel(IntEnum):
    """Whether what was walked so far can be computed from: not, with the host's state too, with the device's alone."""

    NEITHER = 0
    TREE = 1
    DEVICE = 2


NEITHER, TREE, DEVICE = ReuseLevel.NEITHER, ReuseLevel.TREE, ReuseLevel.DEVICE


class TreeComponent(ABC):
    """One pool's state in the tree, by the pool's name."""

    point = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def levels(self, path: Sequence[TreeNode], last: int) -> list[ReuseLevel]:
        """After each node of `path`: whether it can be computed from there, as far as this pool goes.

        Of the last node, only its first `last` pages are meant.
        """

    @abstractmethod
    def needs(self, path: Sequence[TreeNode]) -> Iterable[TreeNode]:
        """The nodes of `path` whose state is read when computing from its end, in order."""

    def units(self, node: TreeNode) -> int:
        """Pages or slots that it holds of a whole node."""
        return 1 if self.point else len(node)

    def boundaries(self, offers: Sequence[PageOffer]) -> Iterable[int]:
        """Page numbers where nodes must end, so that what is offered fits whole nodes."""
        return [o.first for o in offers]

    def match_offer(self, offers: Sequence[PageOffer], start: int, end: int) -> tuple[PageOffer, int] | None:
        """The offer that has a node of pages `start .. end-1`, and where in its lease that begins."""
        for offer in offers:
            if self.point and offer.first == end:
                return offer, 0
            if not self.point and offer.first <= start and end <= offer.first + len(offer.digests):
                return offer, start - offer.first
        return None

    def split(self, part: NodePart, upper: TreeNode, pages: int) -> NodePart | None:
        """Cut `part` with its node, after `pages`; returns what the upper half keeps. A point stays at its end."""
        return None if self.point else part.split(upper, pages)

    def split_end(self, part: NodePart, lower: TreeNode, pages: int) -> NodePart | None:
        """The same, where `lower` is the new one; returns what that gets. None: `part` goes there as it is."""
        return None if self.point else part.split_end(lower, pages)

    def check(self, part: NodePart) -> list[str]:
        """What is wrong with one part."""
        if not part.lease.live:
            return ["its lease has ended"]
        units = self.units(part.node)
        if len(part.lease) != units or len(part.digests) != units:
            return [f"{units} expected, {len(part.lease)} leased and {len(part.digests)} sealed"]
        return []


def there(node: TreeNode, component: str) -> ReuseLevel:
    """In which tiers `node` has state of `component`."""
    device, host = node.parts
    return DEVICE if component in device else TREE if component in host else NEITHER


class FullComponent(TreeComponent):
    def levels(self, path: Sequence[TreeNode], last: int) -> list[ReuseLevel]:
        device = tree = len(path)
        while device and self.name not in path[device - 1].parts[Tier.DEVICE]:
            device -= 1
        for number in range(device, len(path)):
            if self.name not in path[number].parts[Tier.HOST]:
                tree = number
                break
        return [DEVICE] * device + [TREE] * (tree - device) + [NEITHER] * (len(path) - tree)

    def needs(self, path: Sequence[TreeNode]) -> Iterable[TreeNode]:
        return path


class StateComponent(TreeComponent):
    point = True

    def levels(self, path: Sequence[TreeNode], last: int) -> list[ReuseLevel]:
        levels = [there(node, self.name) for node in path]
        if path and last < path[-1].pages:
            levels[-1] = NEITHER
        return levels

    def needs(self, path: Sequence[TreeNode]) -> Iterable[TreeNode]:
        return path[-1:]


class WindowComponent(TreeComponent):
    """`reach`: the pages before a page boundary that a window reaches back into."""

    def __init__(self, name: str, reach: int) -> None:
        super().__init__(name)
        self.reach = reach

    def levels(self, path: Sequence[TreeNode], last: int) -> list[ReuseLevel]:
        # The last two: pages since the last tombstone.
        depth = device = tree = 0
        out = []
        for number, node in enumerate(path, 1):
            here, pages = there(node, self.name), node.pages if number < len(path) else last
            depth += pages
            device = device + pages if here is DEVICE else 0
            tree = tree + pages if here else 0
            enough = min(self.reach, depth)
            out.append(DEVICE if device >= enough else TREE if tree >= enough else NEITHER)
        return out

    def needs(self, path: Sequence[TreeNode]) -> Iterable[TreeNode]:
        needed: list[TreeNode] = []
        pages = 0
        for node in reversed(path):
            if pages >= self.reach:
                break
            needed.append(node)
            pages += len(node)
        return reversed(needed)
