"""Components: how the state of one pool hangs on the nodes of the tree.

The tree's core knows components by the interface `TreeComponent` alone.

A *run* component (full, window) holds a page for every page of a node, a *point* component (state) one slot for the
node's end.

    full     full attention: every page up to the anchor must be there. A child is on the device only where its parent
             is, so the part of a path that the device has is found from the path's end
    window   sliding windows: the last pages before the anchor must be there; pages further up may be gone. A node
             without a part is a *tombstone*: its pages were released as the window moved on, or evicted. Inserting the
             same tokens again heals the tombstone
    state    recurrent state: a snapshot at exactly the anchor, copied on use and never shared for writing
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import IntEnum

from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSetSpec
from twinpool.cache.prefix_cache.tree_node import NodePart, PageOffer, Tier, TreeNode


def components_of(spec: PoolSetSpec) -> tuple[TreeComponent, ...]:
    """Returns one component a pool: the full one first, the others in the order of `spec.pools`."""

    def make(name: str) -> TreeComponent:
        kind = spec.by_name[name].kind
        if kind is PoolKind.FULL:
            return FullComponent(name)
        return WindowComponent(name, spec.window_pages(name)) if kind is PoolKind.WINDOW else StateComponent(name)

    rest = [p.name for p in spec.pools if p is not spec.full]
    return tuple(make(name) for name in (spec.full.name, *rest))


class ReuseLevel(IntEnum):
    """Whether computing can start at a point of a path.

    `NEITHER`: no; `TREE`: yes, once the host's state is loaded; `DEVICE`: yes, with the device's state alone.
    """

    NEITHER = 0
    TREE = 1
    DEVICE = 2


NEITHER, TREE, DEVICE = ReuseLevel.NEITHER, ReuseLevel.TREE, ReuseLevel.DEVICE


class TreeComponent(ABC):
    """One pool's state in the tree; `name` is the pool's name."""

    point = False
    """Whether a node holds one slot for its end instead of a page for each of its pages."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def levels(self, path: Sequence[TreeNode], last: int) -> list[ReuseLevel]:
        """Returns, for each node of `path`, whether computing can start at its end, as far as this pool goes.

        The path ends after the first `last` pages of its last node.
        """

    @abstractmethod
    def needs(self, path: Sequence[TreeNode]) -> Iterable[TreeNode]:
        """Returns the nodes of `path` whose state is read when computing from its end, from the root down."""

    def units(self, node: TreeNode) -> int:
        """Returns how many pages (or slots) a part of this component has at `node`."""
        return 1 if self.point else len(node)

    def boundaries(self, offers: Sequence[PageOffer]) -> Iterable[int]:
        """Returns the page numbers after which nodes must end, so that each offer fits whole nodes."""
        return [o.first for o in offers]

    def match_offer(self, offers: Sequence[PageOffer], start: int, end: int) -> tuple[PageOffer, int] | None:
        """Returns the offer that covers a node of pages `start .. end-1`, and where in its lease the node begins.

        None when no offer covers all of the node.
        """
        for offer in offers:
            if self.point and offer.first == end:
                return offer, 0
            if not self.point and offer.first <= start and end <= offer.first + len(offer.digests):
                return offer, start - offer.first
        return None

    def check(self, part: NodePart) -> list[str]:
        """Returns what is wrong with one part, a line each."""
        if not part.lease.live:
            return ["its lease has ended"]
        units = self.units(part.node)
        if len(part.lease) != units or len(part.digests) != units:
            return [f"{units} expected, {len(part.lease)} leased and {len(part.digests)} sealed"]
        return []


def there(node: TreeNode, component: str) -> ReuseLevel:
    """Returns the fastest tier in which `node` has state of `component`, as a level."""
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
    """Windows; `reach` is how many pages a window reaches back from a page boundary."""

    def __init__(self, name: str, reach: int) -> None:
        super().__init__(name)
        self.reach = reach

    def levels(self, path: Sequence[TreeNode], last: int) -> list[ReuseLevel]:
        # `device` and `tree` count the pages since the last node without state on the device, or in neither tier.
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
