"""What the tree asks of a component: how one pool's state hangs on nodes.

A *run* component (full, window) holds a page for every page of a node, a *point* component (state) one slot for the
node's end. The tree's core knows components by this interface alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import IntEnum

from cache.nodes import Node, Offer, Part


class Level(IntEnum):
    """Whether what was walked so far can be computed from: not, with the host's state too, with the device's alone."""

    NEITHER = 0
    TREE = 1
    DEVICE = 2


NEITHER, TREE, DEVICE = Level.NEITHER, Level.TREE, Level.DEVICE


class Component(ABC):
    """One pool's state in the tree, by the pool's name."""

    point = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def levels(self, path: Sequence[Node], last: int) -> list[Level]:
        """After each node of `path`: whether it can be computed from there, as far as this pool goes.

        Of the last node, only its first `last` pages are meant.
        """

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
        return None if self.point else part.split(upper, pages)

    def split_end(self, part: Part, lower: Node, pages: int) -> Part | None:
        """The same, where `lower` is the new one; returns what that gets. None: `part` goes there as it is."""
        return None if self.point else part.split_end(lower, pages)

    def check(self, part: Part) -> list[str]:
        """What is wrong with one part."""
        if not part.lease.live:
            return ["its lease has ended"]
        units = self.units(part.node)
        if len(part.lease) != units or len(part.digests) != units:
            return [f"{units} expected, {len(part.lease)} leased and {len(part.digests)} sealed"]
        return []


def there(node: Node, component: str) -> Level:
    """In which tiers `node` has state of `component`."""
    device, host = node.parts
    return DEVICE if component in device else TREE if component in host else NEITHER
