"""The recorder of KV events: it turns changes of the tree and of storage into events, and publishes them.

Events are about the full component: a block is in a tier, or for the device is being loaded there from the host. Pages
that are written to storage are told once, when the write is known to have succeeded. They aren't part of the truth that
a late subscriber gets, and pages that storage evicts by itself aren't told: storage outlives this worker, and another
process that shares it may evict them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.token_prefix import token_ids
from twinpool.cache.prefix_cache.tree_node import IN_TREE, Tier, TreeNode
from twinpool.cache.tiers.kv_event_publisher import KVEventLog, KVEventPublisher
from twinpool.contracts.block_hash import KEY_BYTES
from twinpool.contracts.config.cache_config import EventsConfig
from twinpool.contracts.credentials.curve_file import CurvePair
from twinpool.contracts.messages.kv_events import BlockRemoved, BlockStored, KvEvent
from twinpool.contracts.messages.kv_events import EventMedium as Medium

_RUN_PAGES = 64
"""Pages in one event of the truth, at most."""
_MEDIA = {Tier.DEVICE: Medium.DEVICE, Tier.HOST: Medium.HOST, Tier.STORAGE: Medium.STORAGE}


class KVEventRecorder:
    """Publishes one tree's changes as KV events. It is the tree's observer of nodes.

    `now`: seconds since 1970. Raises `ConfigError` as `KVEventPublisher` does.
    """

    def __init__(
        self,
        tree: RadixTree,
        config: EventsConfig,
        now: Callable[[], float],
        rank: int,
        curve: CurvePair | None = None,
    ) -> None:
        self._tree = tree
        self._log = KVEventLog()
        self.publisher = KVEventPublisher(config, self._log, now, rank, self._truth, curve)
        tree.accounts.observe_nodes(self._node_changed)

    def _node_changed(self, node: TreeNode, tier: Tier, there: bool) -> None:
        """The full state of `node` has come to `tier`, or gone from it."""
        self._log.emit(self._stored(node, tier) if there else BlockRemoved(_MEDIA[tier], tuple(node.keys)))

    @property
    def endpoint(self) -> str:
        """Where the events are published."""
        return self.publisher.endpoint

    @property
    def replay_endpoint(self) -> str:
        """Where missed ones are asked for; empty: nowhere."""
        return self.publisher.replay_endpoint

    def round(self) -> None:
        self.publisher.round()

    def close(self) -> None:
        self.publisher.close()

    def _stored(self, node: TreeNode, tier: Tier, first: int = 0, count: int | None = None) -> BlockStored:
        """Returns the event for pages `first ..` of `node`: `count` of them, or all."""
        stop = node.pages if count is None else first + count
        size = 4 * self._tree.spec.page_tokens
        raw, chain = node.raw[first * size : stop * size], node.chain
        keys = tuple(chain[KEY_BYTES * page : KEY_BYTES * (page + 1)] for page in range(first, stop))
        parent = chain[KEY_BYTES * (first - 1) : KEY_BYTES * first] if first else node.parent_key
        return BlockStored(_MEDIA[tier], parent, keys, tuple(token_ids(raw)), self._tree.spec.page_tokens, node.salt)

    def _truth(self) -> Iterator[KvEvent]:
        """Yields events for the whole content of device and host, a few pages at a time, while it changes.

        Pages that are in a tier throughout are told. When the node at hand is split, its lower half is the same object
        and is told on; the upper half is a new node, and comes later.
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
