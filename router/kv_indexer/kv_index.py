"""What each tier of a worker holds, by block hash, as its KV events tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from contracts.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventMedium, KvEvent


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """What the index knows of a page: its parent's hash and its token ids."""

    parent: bytes | None
    tokens: tuple[int, ...]


@dataclass(slots=True)
class KVIndex:
    """For each tier the pages that are in it, by hash."""

    pages: dict[EventMedium, dict[bytes, BlockEntry]] = field(
        default_factory=lambda: {tier: {} for tier in EventMedium}
    )

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Apply events in order; applying some of them again changes nothing."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for page in event.hashes:
                        self.pages[event.tier].pop(page, None)
                case AllBlocksCleared():
                    self.clear(event.tier)

    def clear(self, tier: EventMedium | None = None) -> None:
        """Forget a tier, or all."""
        for one in EventMedium if tier is None else (tier,):
            self.pages[one].clear()

    def _store(self, event: BlockStored) -> None:
        parent, step = event.parent, event.page_tokens
        for i, page in enumerate(event.hashes):
            self.pages[event.tier][page] = BlockEntry(parent, event.tokens[i * step : (i + 1) * step])
            parent = page
