"""Who holds which blocks, by KV events. What indexers and routers of others read our events with is here."""

from router.kv_indexer.event_replay import KVEventReplay
from router.kv_indexer.kv_event_subscriber import KVEventSubscriber
from router.kv_indexer.kv_index import BlockEntry, KVIndex

__all__ = ["BlockEntry", "KVEventReplay", "KVEventSubscriber", "KVIndex"]
