"""Swapped out state: the pages and slots of a request that was taken off the device, in host memory or on storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.cache.prefix_cache.nodes.token_prefix import TokenPrefix
from twinpool.cache.prefix_cache.nodes.tree_node import NodeLock
from twinpool.cache.swap.offload import OffloadedPages
from twinpool.contracts.state_table import StateTable


class SwapPlace(StrEnum):
    """Where swapped out state is."""

    SAVING = "saving"
    """On its way to host memory: the device's pages are pinned."""
    HOST = "host"
    STORING = "storing"
    """In host memory, on its way to storage."""
    STORED = "stored"
    """On storage alone: it has no leases of the host."""
    FETCHING = "fetching"
    """On its way from storage into host memory."""
    LOST = "lost"
    """Some of its pages are missing or damaged: the state is of no use."""
    GONE = "gone"
    """Dropped."""


class SwapEvent(StrEnum):
    SAVED = "saved"
    PUT = "put"
    STORED = "stored"
    REFUSED = "refused"
    FETCH = "fetch"
    FETCHED = "fetched"
    FAILED = "failed"
    DISCARD = "discard"


PLACES = StateTable[SwapPlace, SwapEvent](
    "swapped out state",
    {
        SwapPlace.SAVING: {
            SwapEvent.SAVED: SwapPlace.HOST,
            SwapEvent.FAILED: SwapPlace.LOST,
            SwapEvent.DISCARD: SwapPlace.GONE,
        },
        SwapPlace.HOST: {SwapEvent.PUT: SwapPlace.STORING, SwapEvent.DISCARD: SwapPlace.GONE},
        SwapPlace.STORING: {
            SwapEvent.STORED: SwapPlace.STORED,
            SwapEvent.REFUSED: SwapPlace.HOST,
            SwapEvent.DISCARD: SwapPlace.GONE,
        },
        SwapPlace.STORED: {SwapEvent.FETCH: SwapPlace.FETCHING, SwapEvent.DISCARD: SwapPlace.GONE},
        SwapPlace.FETCHING: {
            SwapEvent.FETCHED: SwapPlace.HOST,
            SwapEvent.FAILED: SwapPlace.LOST,
            SwapEvent.DISCARD: SwapPlace.GONE,
        },
        SwapPlace.LOST: {SwapEvent.DISCARD: SwapPlace.GONE},
    },
)
ON_HOST = (SwapPlace.SAVING, SwapPlace.HOST, SwapPlace.STORING, SwapPlace.FETCHING)
"""The places in which swapped out state has leases of the host."""


@dataclass(eq=False)
class SwappedState:
    """The state of one request after `positions` positions: of every pool what the next position needs.

    The request owns it until `SwapOut.drop`. The first `kept` pages of the full pool stay in the tree's host tier,
    where `above` locks them; everything else was copied into leases of its own.
    """

    owner: str
    prefix: TokenPrefix
    """The whole pages of these positions."""
    positions: int
    """The committed length at the swap-out: the state is that of exactly these tokens."""
    pages: int
    """Pages of all positions that the allocation was made for."""
    kept: int
    above: NodeLock
    numbers: Mapping[str, range]
    """By pool: the numbers of the pages (and of the slot) that were copied, in order."""
    saved: OffloadedPages
    digests: dict[str, dict[int, int]] = field(default_factory=dict)
    """Digests of whole pages by pool and page number: those sealed on the device; once settled, those copied too."""
    place: SwapPlace = SwapPlace.SAVING
    damage: dict[str, list[int]] = field(default_factory=dict)
    """The page numbers, by pool, that made the state `LOST` because their bytes aren't what was sealed."""
    storable: bool = True
    """False once storage has refused it."""

    def turn(self, turn: SwapEvent) -> None:
        """Change `place` by an event; raises `IllegalTransition` for one that `PLACES` doesn't have."""
        self.place = PLACES.next(self.place, turn)

    @property
    def nbytes(self) -> int:
        """Bytes that were copied."""
        return self.saved.nbytes

    @property
    def leases(self) -> int:
        """How many pages and slots of the host it holds, in all pools."""
        return sum(self.leased(pool) for pool in self.numbers)

    def leased(self, pool: str) -> int:
        """How many host pages or slots of `pool` it holds; 0 once they are released."""
        lease = self.saved.leases.get(pool)
        return len(lease) if lease is not None and lease.live else 0

    def check(self) -> list[str]:
        found = []
        for pool, numbers in self.numbers.items():
            due = len(numbers) if self.place in ON_HOST else 0
            if self.leased(pool) != due and not (self.place is SwapPlace.SAVING and self.saved.done):
                found.append(f"{self.owner}: it is {self.place} and has {self.leased(pool)} {pool} pages on the host")
        if len(self.prefix) != self.positions // self.prefix.page_tokens:
            found.append(
                f"{self.owner}: {self.positions} positions are swapped out under {len(self.prefix)} whole pages"
            )
        if sum(len(part) for part in self.above.parts) != self.kept:
            found.append(f"{self.owner}: {self.kept} of its pages are the tree's, its lock says otherwise")
        return found
