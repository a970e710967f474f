"""The pools of a model by kind, and how many pages or slots of each a request leases at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSetSpec


@dataclass(frozen=True, slots=True)
class PoolKinds:
    """Names of a model's pools, by kind."""

    full: str
    paged: tuple[str, ...]
    """Pools with block tables: the full pool and the window pools."""
    windows: Mapping[str, int]
    """Window pools, each with the most pages of it that one request holds at once."""
    states: tuple[str, ...]
    """Pools of recurrent states, in slots."""

    @classmethod
    def of(cls, spec: PoolSetSpec, stride: int) -> PoolKinds:
        """`stride`: positions beyond the committed length that launched steps of one request write at most."""
        return cls(
            spec.full.name,
            tuple(p.name for p in spec.pools if p.kind is not PoolKind.STATE),
            {p.name: spec.window_hold(p.name, stride) for p in spec.pools if p.window_tokens},
            tuple(p.name for p in spec.pools if p.kind is PoolKind.STATE),
        )

    def needs(self, pages: Mapping[str, int]) -> dict[str, int]:
        """Return what a request leases to get `pages` new pages, by pool.

        Of a window pool at most what the request ever holds at once, of each state pool one slot.
        """
        needs = {pool: min(count, self.windows.get(pool, count)) for pool, count in pages.items()}
        return needs | dict.fromkeys(self.states, 1)
