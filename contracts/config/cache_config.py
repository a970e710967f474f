"""Sections of the KV cache: tiers, prefetch, storage, events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class StorageConfig:
    backend: str = "none"
    """Where finished pages outlive a worker: none, memory (of one process), file, redis, or what a package adds."""
    path: str = ""
    """file: the folder, which workers of a host share; memory: a name by which workers of a process share it."""
    max_bytes: int = 16 * 1024**3
    """file and memory: what may lie there; the longest unused goes first. A Redis server has its own limit."""
    url: str = ""
    """redis: the server, as redis://host:6379/0, rediss:// or unix://; Valkey is meant as well."""
    ttl_s: int = 0
    """redis: pages expire this long after they were last written; 0: never."""
    timeout_s: float = 5.0
    """An operation gives up after this long, and counts as failed."""
    group_access: bool = False
    """file: the folder's group may read and write what lies there, for workers of several users; else their owner."""
    retry_s: float = 1.0
    """What storage did not take is offered again after this long, then after twice as long, up to 64 times as long."""


@dataclass(frozen=True, slots=True)
class PrefetchConfig:
    policy: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    """When a request stops waiting for storage: at once when it could run, when all has come, or after some time."""
    base_s: float = 0.05
    """timeout: the wait that every request may take."""
    per_token_s: float = 0.00002
    """timeout: what each token that storage has adds to it."""
    batch_pages: int = 32
    """Pages that are read at once; what has come is used batch by batch."""


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """KV events: what each tier holds, published over ZMQ as it changes."""

    endpoint: str = ""
    """Where to publish, such as tcp://127.0.0.1:5557; port 0 picks a free one, other ports grow by the worker's index;
    empty: no events."""
    replay_endpoint: str = ""
    """Where subscribers ask for batches that they missed; empty: nowhere."""
    topic: str = "kv-events"
    """First frame of every message."""
    buffer_batches: int = 10_000
    """Batches kept for subscribers that ask, and, up to 1,024, queued for slow ones."""
    buffer_bytes: int = 64 * 1024**2
    """Bytes of those that are kept: a long prompt's batch is large."""
    public: bool = False
    """Allows endpoints off the loopback: events carry the prompts' tokens to whoever connects, without keys."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    page_tokens: int = 16
    """Positions in a page, a power of two; the same for both roles."""
    device_tokens: int = 0
    """Positions a worker's pool holds; 0: eight contexts, bounded by a quarter of free memory a worker."""
    device_requests: int = 0
    """Requests whose windows and recurrent states a worker holds at once; 0: all that it runs, or what fits."""
    prefix_reuse: bool = True
    """Workers keep finished pages in their prefix trees: prefill what it computed, decode what it generated."""
    verify: bool = True
    """Content tags are checked where pages arrive."""
    eviction: Literal["lru", "lfu", "fifo", "priority", "slru"] = "lru"
    """What goes first from a full tier: longest unused, least used, oldest, least urgent, or seen only once."""
    host_bytes: int = 0
    """Host memory of each worker for pages that its device has no room for; 0: its part of the node's budget
    (`cluster.host_memory_share`). Set for any role, there is no budget, and a role without has no host tier."""
    arena: Literal["auto", "none"] = "auto"
    """auto: where workers are processes, host memory lies with an agent on their node, and a worker that dies leaves it
    to its successor; none: it ends with the worker."""
    write_policy: Literal["through", "selective", "back"] = "through"
    """Pages are copied to the host as soon as they are finished, once they were hit again, or when they must go."""
    write_hits: int = 2
    """selective: hits after which pages are copied."""
    load_back: Literal["auto", "always", "never"] = "auto"
    """Pages on the host are loaded where that is quicker than computing them again, by the rates measured here."""
    load_bytes: int = 1024**3
    """Loads under way at once; what exceeds it waits, unless nothing else is loading."""
    index_dtype: Literal["auto", "fp8"] = "auto"
    """Keys by which sparse attention selects: as the model computes them, or as float8 (e4m3) with a scale a token."""
    strip_reasoning: bool = False
    """Decode keeps no state of what the model thought before its answer."""
    reasoning_tokens: str = ""
    """strip_reasoning: ids of the tokens that open and close a reasoning span, as "151667,151668"."""
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    copy_chunk_bytes: int = 16 * 1024 * 1024
    """Moves between device and host memory go in pieces of this many bytes, or of one page where that is more."""


@dataclass(frozen=True, slots=True)
class CacheOverride:
    """The cache section for one role; None keeps the common value."""

    page_tokens: int | None = None
    device_tokens: int | None = None
    device_requests: int | None = None
    prefix_reuse: bool | None = None
    verify: bool | None = None
    host_bytes: int | None = None
