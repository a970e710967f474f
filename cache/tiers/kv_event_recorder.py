"""Tells the world what the tiers hold: changes of the tree and of storage become KV events.

Events speak of the full component: a prefix whose pages are in a tier, or for the device are on their way there from
the host. What is written to storage is told once, when the write is known to have succeeded; it isn't part of the
truth that a late joiner gets, and pages that storage evicts by itself aren't told: storage outlives this worker, and
whoever shares it may be the one who evicts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cache.prefix_cache.radix_tree import RadixTree
from cache.prefix_cache.token_prefix import token_ids
from cache.prefix_cache.tree_node import IN_TREE, Tier, TreeNode
from cache.tiers.kv_event_publisher import KVEventLog, KVEventPublisher
from contracts.block_hash import KEY_BYTES
from contracts.config.cache_config import EventsConfig
from contracts.messages.kv_events import BlockRemoved, BlockStored, KvEvent
from contracts.messages.kv_events import EventMedium as Medium

_RUN_PAGES = 64
"""Pages that one event of the truth tells of."""
_MEDIA = {Tier.DEVICE: Medium.DEVICE, Tier.HOST: Medium.HOST, Tier.STORAGE: Medium.STORAGE}


class KVEventRecorder:
    """Publishes one tree's changes. `now`: seconds since 1970. Raises `ConfigError` as `KVEventPublisher` does."""

    def __init__(self, tree: RadixTree, config: EventsConfig, now: Callable[[], float], rank: int) -> None:
        self._tree = tree
        self._log = KVEventLog()
        self.publisher = KVEventPublisher(config, self._log, now, rank, self._truth)
        tree.accounts.on_change = self.changed

    def changed(self, node: TreeNode, tier: Tier, there: bool) -> None:
        """The full state of `node` has come to `tier`, or gone from it."""
        self._log.emit(self._stored(node, tier) if there else BlockRemoved(_MEDIA[tier], tuple(node.keys)))

    def round(self) -> None:
        self.publisher.round()

    def close(self) -> None:
        self.publisher.close()

    def _stored(self, node: TreeNode, tier: Tier, first: int = 0, count: int | None = None) -> BlockStored:
        """Of its pages from `first` on, `count` of them or all."""
        stop = node.pages if count is None else first + count
        size = 4 * self._tree.spec.page_tokens
        raw, chain = node.raw[first * size : stop * size], node.chain
        keys = tuple(chain[KEY_BYTES * page : KEY_BYTES * (page + 1)] for page in range(first, stop))
        parent = chain[KEY_BYTES * (first - 1) : KEY_BYTES * first] if first else node.parent_key
        return BlockStored(_MEDIA[tier], parent, keys, tuple(token_ids(raw)), self._tree.spec.page_tokens, node.salt)

    def _truth(self) -> Iterator[KvEvent]:
        """All that the tiers hold, a few pages at a time, while it changes: what is there all the while is told.

        A node that is split goes on as its lower half; the upper one is new, and comes later.
        """
        cursor = self._tree.accounts.list.cursor()
        try:
            while (node := cursor.next()) is not None:
                number = node.start
                while node.linked and (number := max(number, node.start)) < node.start + node.pages:
                    first = number - node.start
                    count = min(_RUN_PAGES, node.pages - first)
                    held = [tier for tier in IN_TREE if self._tree.full in node.parts[tier]]
                    yield from [self._stored(node, tier, first, count) for tier in held]
                    number += count
        finally:
            cursor.close()
