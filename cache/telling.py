"""Tells the world what the tiers hold: changes of the tree and of storage become KV events.

Events speak of the full component: a prefix whose pages are in a tier, or for the device are on their way there from
the host. What is written to storage is told once, when the write is known to have succeeded; it isn't part of the
truth that a late joiner gets, and pages that storage evicts by itself aren't told: storage outlives this worker, and
whoever shares it may be the one who evicts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cache.event_publisher import Publisher
from cache.events import EventLog, KvEvent, Removed, Stored
from cache.events import Tier as Medium
from cache.nodes import IN_TREE, Node, Tier
from cache.prefix import token_ids
from cache.tree import PrefixTree
from contracts.config import EventsConfig

_MEDIA = {Tier.DEVICE: Medium.DEVICE, Tier.HOST: Medium.HOST, Tier.STORAGE: Medium.STORAGE}


class Teller:
    """Publishes one tree's changes. `now`: seconds since 1970. Raises `ConfigError` as `Publisher` does."""

    def __init__(self, tree: PrefixTree, config: EventsConfig, now: Callable[[], float], rank: int) -> None:
        self._tree = tree
        self._log = EventLog()
        self.publisher = Publisher(config, self._log, now, rank, self._truth)
        tree.on_change = self.changed

    def changed(self, node: Node, tier: Tier, there: bool) -> None:
        """The full state of `node` has come to `tier`, or gone from it."""
        self._log.emit(self._stored(node, tier) if there else Removed(_MEDIA[tier], tuple(node.keys)))

    def round(self) -> None:
        self.publisher.round()

    def close(self) -> None:
        self.publisher.close()

    def _stored(self, node: Node, tier: Tier) -> Stored:
        tokens = tuple(token_ids(node.raw))
        salt = self._tree.salt(node)
        return Stored(_MEDIA[tier], node.parent_key, tuple(node.keys), tokens, self._tree.spec.page_tokens, salt)

    def _truth(self) -> Iterator[KvEvent]:
        for node in self._tree.nodes():
            if self._tree.linked(node):
                for tier in IN_TREE:
                    if self._tree.full in node.parts[tier]:
                        yield self._stored(node, tier)
