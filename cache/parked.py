"""What is left of a claim whose request was taken off the device: its state in host memory, in every pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cache.nodes import Lock
from cache.offload import Saved
from cache.prefix import Prefix


@dataclass(eq=False)
class Parked:
    """State after `positions` positions, of every pool what the next position needs. Owned by its request until
    `Seat.discard`.

    The first `kept` pages of the full pool are in the tree's host tier, which `above` keeps there; everything else was
    copied into leases of its own.
    """

    owner: str
    prefix: Prefix
    """The whole pages of its positions."""
    positions: int
    """The committed length when it was parked: the state of all these tokens, and of no other, is here."""
    pages: int
    """Pages of all positions that the claim was made for."""
    kept: int
    above: Lock
    numbers: Mapping[str, range]
    """By pool: the numbers of the pages (and of the slot) that were copied, in order."""
    saved: Saved
    digests: dict[str, dict[int, int]] = field(default_factory=dict)
    """Content tags of whole pages by pool and number: first those that were sealed on the device, then all."""
    released: bool = False

    @property
    def done(self) -> bool:
        """Whether the copy has ended, well or not: then the device's pages are nobody's any more."""
        return self.saved.done

    @property
    def nbytes(self) -> int:
        """Bytes that were copied."""
        return self.saved.nbytes

    def leased(self, pool: str) -> int:
        """Pages or slots of the host that it holds."""
        lease = self.saved.leases.get(pool)
        return len(lease) if lease is not None and lease.live else 0

    def check(self) -> list[str]:
        found = []
        for pool, numbers in self.numbers.items():
            if self.leased(pool) != len(numbers) and not (self.saved.done and not self.saved.complete):
                found.append(f"{self.owner}: {self.leased(pool)} {pool} pages on the host, {len(numbers)} were parked")
        if len(self.prefix) != self.positions // self.prefix.page_tokens:
            found.append(f"{self.owner}: {self.positions} positions are parked under {len(self.prefix)} whole pages")
        if sum(len(part) for part in self.above.parts) != self.kept:
            found.append(f"{self.owner}: {self.kept} of its pages are the tree's, its lock says otherwise")
        return found
