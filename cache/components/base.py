"""What the tree asks of a component: how one pool's state hangs on nodes.

A *run* component (full, window) holds a page for every page of a node, a *point* component (state) one slot for the
node's end. The tree's core knows components by this interface alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cache.nodes import Node, Offer, Part


@dataclass(frozen=True, slots=True)
class Accepts:
    """Whether what was walked so far can be computed from, with the device's state alone or with the host's too."""

    device: bool
    tree: bool


class Walk(ABC):
    """One component's view of one path from the root down."""

    @abstractmethod
    def step(self, node: Node, pages: int) -> Accepts:
        """Go on through the first `pages` pages of `node`."""


class Component(ABC):
    """One pool's state in the tree, by the pool's name."""

    point = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def walk(self) -> Walk: ...

    @abstractmethod
    def needs(self, path: Sequence[Node]) -> Iterable[Node]:
        """The nodes of `path` whose state is read when computing from its end, in order."""

    def units(self, node: Node) -> int:
        """Pages or slots that it holds of a whole node."""
        return 1 if self.point else len(node)

    def boundaries(self, offers: Sequence[Offer]) -> Iterable[int]:
        """Page numbers where nodes must end, so that what is offered fits whole nodes."""
        return [o.first for o in offers]

    def match_offer(self, offers: Sequence[Offer], start: int, end: int) -> tuple[Offer, int] | None:
        """The offer that has a node of pages `start .. end-1`, and where in its lease that begins."""
        for offer in offers:
            if self.point and offer.first == end:
                return offer, 0
            if not self.point and offer.first <= start and end <= offer.first + len(offer.digests):
                return offer, start - offer.first
        return None

    def split(self, part: Part, upper: Node, pages: int) -> Part | None:
        """Cut `part` with its node, after `pages`; returns what the upper half keeps. A point stays at its end."""
        if self.point:
            return None
        lease = part.lease.split(pages, part.lease.owner)
        head = Part(upper, part.component, part.tier, lease, part.digests[:pages], set(part.locks))
        part.digests = part.digests[pages:]
        return head

    def check(self, part: Part) -> list[str]:
        """What is wrong with one part."""
        if not part.lease.live:
            return ["its lease has ended"]
        units = self.units(part.node)
        if len(part.lease) != units or len(part.digests) != units:
            return [f"{units} expected, {len(part.lease)} leased and {len(part.digests)} sealed"]
        return []


def accepts(device: bool, tree: bool) -> Accepts:
    """The value, without making one: a match asks at every node."""
    return _BOTH if device and tree else _TREE if tree else _DEVICE if device else NEITHER


NEITHER = Accepts(False, False)
_BOTH, _TREE, _DEVICE = Accepts(True, True), Accepts(False, True), Accepts(True, False)


def there(node: Node, component: str) -> Accepts:
    """In which tiers `node` has state of `component`."""
    device, host = node.parts
    return _BOTH if component in device else _TREE if component in host else NEITHER
