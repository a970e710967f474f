"""The KV index: which pages each tier of a worker holds, by block hash, as the worker's KV events say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from twinpool.contracts.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventMedium, KvEvent


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """The index's entry of a page: the hash of its parent (None: it begins a sequence) and its token ids."""

    parent: bytes | None
    tokens: tuple[int, ...]


@dataclass(slots=True)
class KVIndex:
    """The pages of each tier, by block hash."""

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
        """Forget the pages of one tier; None: of all."""
        for one in EventMedium if tier is None else (tier,):
            self.pages[one].clear()

    def _store(self, event: BlockStored) -> None:
        parent, step = event.parent, event.page_tokens
        for i, page in enumerate(event.hashes):
            self.pages[event.tier][page] = BlockEntry(parent, event.tokens[i * step : (i + 1) * step])
            parent = page
