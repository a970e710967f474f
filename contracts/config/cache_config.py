"""Configuration sections of the KV cache: tiers, prefetch, storage, events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class StorageConfig:
    backend: str = "none"
    """Storage for finished pages that outlives a worker: none, memory (of one process), file, redis, or a package's
    own."""
    path: str = ""
    """file: the folder, which workers of a host share; memory: a name by which workers of a process share it."""
    max_bytes: int = 16 * 1024**3
    """file and memory: bytes that storage may hold; the longest unused pages go first. A Redis server has its own
    limit."""
    url: str = ""
    """redis: the server, as redis://host:6379/0, rediss:// or unix://; Valkey servers work too."""
    ttl_s: int = 0
    """redis: pages expire this long after they were last written; 0: never."""
    timeout_s: float = 5.0
    """Seconds after which a storage operation gives up and counts as failed."""
    group_access: bool = False
    """file: the folder's group may read and write its files, for workers of several users; else only their owner
    may."""
    retry_s: float = 1.0
    """A page that storage did not take is offered again after so many seconds; the wait doubles each time, up to
    64-fold."""


@dataclass(frozen=True, slots=True)
class PrefetchConfig:
    policy: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    """When a request stops waiting for pages from storage: as soon as it could run, when all have come, or after a
    time."""
    base_s: float = 0.05
    """timeout: seconds that every request may wait."""
    per_token_s: float = 0.00002
    """timeout: seconds more for each token that storage has."""
    batch_pages: int = 32
    """Pages that are read from storage at once; each batch is usable as soon as it has come."""


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """KV events: the pages that come to a tier or go, published over ZMQ."""

    endpoint: str = ""
    """ZMQ endpoint to publish at, such as tcp://127.0.0.1:5557; port 0 picks a free one, other ports grow by the
    worker's index; empty: no events."""
    replay_endpoint: str = ""
    """ZMQ endpoint at which subscribers ask for batches that they missed; empty: none."""
    topic: str = "kv-events"
    """First frame of every message."""
    buffer_batches: int = 10_000
    """Batches kept for subscribers that ask, and, up to 1,024, queued for slow ones."""
    buffer_bytes: int = 64 * 1024**2
    """Bytes of the batches that are kept: a long prompt's batch is large."""
    public: bool = False
    """Allows endpoints off the loopback without `security.curve_key`: events carry the prompts' tokens to any
    subscriber."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    page_tokens: int = 16
    """Positions in a page, a power of two; the same for both roles."""
    device_tokens: int = 0
    """Positions that a worker's pools hold; 0: eight contexts, bounded by a quarter of free memory a worker; on a GPU
    as many as `cache.device_share` has room for, up to a context for each request that may run."""
    device_share: float = 0.9
    """The part of a GPU's memory that is for pools, of what is free after the weights; the rest is for what steps
    compute in. Ranks that share a GPU have equal parts of it."""
    device_requests: int = 0
    """Requests whose windows and recurrent states a worker holds at once; 0: all that it runs, or as many as fit."""
    prefix_reuse: bool = True
    """Workers keep finished pages in their prefix trees: prefill the pages that it computed, decode those that it
    generated."""
    verify: bool = True
    """Content tags of pages are checked wherever pages arrive."""
    eviction: Literal["lru", "lfu", "fifo", "priority", "slru"] = "lru"
    """Pages that a full tier evicts first: longest unused, least used, oldest, least urgent, or used only once."""
    host_bytes: int = 0
    """Host memory of each worker for pages that its device has no room for; 0: its part of the node's budget
    (`cluster.host_memory_share`). Where any role sets it, there is no budget, and a role that sets none has no host
    tier."""
    arena: Literal["auto", "none"] = "auto"
    """auto: where workers are processes, host memory lies with an agent on their node, and a worker that dies leaves it
    to its successor; none: it ends with the worker."""
    write_policy: Literal["through", "selective", "back"] = "through"
    """When pages are copied to the host: as soon as they are finished, once they were hit again, or when they are
    evicted."""
    write_hits: int = 2
    """selective: hits after which a page is copied."""
    load_back: Literal["auto", "always", "never"] = "auto"
    """Pages on the host are loaded where that is quicker than computing them again, by the rates measured here."""
    load_bytes: int = 1024**3
    """Bytes of loads under way at once; a load that exceeds it waits, unless nothing else is loading."""
    index_dtype: Literal["auto", "fp8"] = "auto"
    """Indexer keys of sparse attention: as the model computes them, or as float8 (e4m3) with a scale per token."""
    kv_dtype: Literal["auto", "fp8", "int8"] = "auto"
    """Keys, values and latents on CPUs: as the model computes them, or as float8 (e4m3) or int8 with a scale per token
    and head."""
    strip_reasoning: bool = False
    """Decode keeps no state of the model's reasoning before its answer."""
    reasoning_tokens: str = ""
    """strip_reasoning: ids of the tokens that open and close a reasoning span, as "151667,151668"."""
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    copy_chunk_bytes: int = 16 * 1024 * 1024
    """Copies between device and host memory go in pieces of this many bytes, or of one page where that is more."""


@dataclass(frozen=True, slots=True)
class CacheOverride:
    """The cache section for one role; None keeps the common value."""

    page_tokens: int | None = None
    device_tokens: int | None = None
    device_share: float | None = None
    device_requests: int | None = None
    prefix_reuse: bool | None = None
    verify: bool | None = None
    host_bytes: int | None = None
