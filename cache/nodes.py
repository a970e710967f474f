"""What the prefix tree is made of: nodes, the parts they hold, and locks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from cache.leases import Lease
from cache.prefix import KEY_BYTES


class Tier(IntEnum):
    """Where state is. Storage is content-addressed and outside the tree."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


IN_TREE = (Tier.DEVICE, Tier.HOST)


@dataclass(eq=False, slots=True)
class Part:
    """What one component holds at one node in one tier: its own lease, and the digest of each page or slot in it."""

    node: Node
    component: str
    tier: Tier
    lease: Lease
    digests: tuple[int, ...]
    locks: set[Lock] = field(default_factory=set)
    queued: bool = False

    def __len__(self) -> int:
        return len(self.lease)

    @property
    def live(self) -> bool:
        """Whether its node still holds it."""
        return self.node.parts[self.tier].get(self.component) is self


@dataclass(eq=False, slots=True)
class Node:
    """A run of whole pages below its parent's, with what each component holds of it in each tier."""

    raw: bytes
    chain: bytes
    """Chain keys of its pages, 16 bytes each."""
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    """By the tokens of their first page."""
    parts: tuple[dict[str, Part], dict[str, Part]] = field(default_factory=lambda: ({}, {}))
    below: list[int] = field(default_factory=lambda: [0, 0])
    """Children that are in each tier."""
    used: int = 0
    created: int = 0
    hits: int = 0
    priority: int = 0
    salt: str = ""
    """Of a root."""

    def __len__(self) -> int:
        """Its pages."""
        return len(self.chain) // KEY_BYTES

    @property
    def parent_key(self) -> bytes | None:
        """Chain key of the page before its first; None at the start of a prefix."""
        assert self.parent is not None
        return self.parent.chain[-KEY_BYTES:] or None

    def part(self, component: str) -> Part | None:
        """In the fastest tier that has it."""
        return self.parts[Tier.DEVICE].get(component) or self.parts[Tier.HOST].get(component)

    @property
    def keys(self) -> list[bytes]:
        return [self.chain[at : at + KEY_BYTES] for at in range(0, len(self.chain), KEY_BYTES)]


@dataclass(eq=False, slots=True)
class Lock:
    """Keeps parts where they are until it is given back, and names exactly what it keeps.

    Splits of nodes put both halves into it, in order; nothing else changes it.
    """

    number: int
    owner: str
    parts: list[Part]

    def of(self, component: str) -> list[Part]:
        """Its parts of one component, in the order of the sequence."""
        return [p for p in self.parts if p.component == component]


@dataclass(frozen=True, slots=True)
class Offer:
    """State offered to the tree: `lease` holds pages `first ..` of the sequence, one digest each.

    Of a state component: one slot, the snapshot after `first` pages.
    """

    first: int
    lease: Lease
    digests: Sequence[int]
