"""The configuration: frozen sections, units in the names, bad values refused where they are read.

Values come from defaults, then a YAML file, then `--set section.key=value`. Keys under `prefill.cache` and
`decode.cache` override `cache` for that role. Unknown keys are refused by name.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from contracts.errors import ConfigError
from contracts.ids import Role


@dataclass(frozen=True, slots=True)
class EngineConfig:
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: the checkpoint's own."""
    attention: Literal["auto", "torch", "native", "triton"] = "auto"
    """auto: triton on an NVIDIA GPU; on a CPU native, kernels compiled by g++ where there is one; else torch."""
    threads: int = 0
    """Threads a worker computes with; 0: cores divided by workers."""
    numerics: Literal["invariant", "fast"] = "invariant"
    """invariant: a row's result depends on its own sequence alone, never on the batch or on chunk ends."""
    numerics_class: Literal["auto", "x86-64-v3", "x86-64-v4"] = "auto"
    """The instructions that a worker's kernels and libraries keep to. auto: all that its machine has. A level: no more
    than it has, so that unlike machines compute the same bits; a machine that can't run it refuses to start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the CPU, as long as data planes register host memory only; cuda is refused until then."""


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
    """Where to publish, such as tcp://127.0.0.1:5557; port 0 picks a free one, other ports grow by the seat's rank;
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
    move_chunk_bytes: int = 16 * 1024 * 1024
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


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    chunk_tokens: int = 512
    """Token budget of a prefill step; longer prompts take several steps."""
    short_share: float = 0.25
    """The part of a step's token budget that prompts with less to compute than the oldest one come first in; the oldest
    has the rest, so it is never slowed down by more."""
    max_running: int = 32
    """Requests computed at the same time."""
    share_tokens: int = 4096
    """A prompt that is being computed leaves its finished pages to the cache every so many tokens, before it is whole:
    no more than these are computed again when its worker dies."""
    tp: int = 1
    """Tensor-parallel ranks of a worker, each a process with its share of the heads; 1, 2, 4, as the heads divide."""
    cache: CacheOverride = field(default_factory=CacheOverride)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    max_batch_tokens: int = 64
    """Token budget of a decode step: one a running request."""
    metadata_slots: int = 128
    """Hand-overs that can be under way at once."""
    move_pause_s: float = 5.0
    """A stream that is handed to another worker stands still for this long at most; then it goes on where it was."""
    move_chunk_bytes: int = 8 * 1024 * 1024
    """What a worker writes of a request that it hands on between two steps of the others."""
    move_ahead_bytes: int = 1024 * 1024
    """Of a request with more state than this, finished pages are copied ahead, while it runs, before it is moved."""
    offer_bytes: int = 256 * 1024 * 1024
    """What a worker that leaves offers of its prefix tree to the others, the hottest prefixes first; 0: nothing."""
    tp: int = 1
    """As `prefill.tp`; the two may differ."""
    retract: Literal["auto", "copy", "recompute"] = "auto"
    """What becomes of the state of a request that must leave the device for others: copied to host memory and back, or
    computed again by prefill; auto: what is quicker by the rates measured so far."""
    retract_limit: int = 3
    """A request that was retracted this often comes back only with pages for its whole answer, and leaves no more."""
    prompt_wait_s: float = 10.0
    """A request whose prompt another one is just receiving waits for that one this long at most, and then shares its
    pages instead of receiving them too."""
    first_answer_tokens: int = 512
    """What an answer is expected to come to before eight have ended: many requests ask for the rest of the context, and
    hardly any takes it."""
    growth_quantile: float = 0.75
    """A request is admitted with room for the answer that this share of recent ones, as far along as it, stayed within;
    1: for the longest of them."""
    cache: CacheOverride = field(default_factory=CacheOverride)


@dataclass(frozen=True, slots=True)
class TransferConfig:
    plane: Literal["local", "shm", "zmq"] = "shm"
    """local: all in one process; shm: the writer writes into the reader's memory; zmq: TCP."""
    room_timeout_s: float = 60.0
    """Longest silence of a room before it is failed."""
    link_timeout_s: float = 10.0
    """A connection between workers, or between router and worker, on which nothing was heard for this long is cut."""
    connect_timeout_s: float = 10.0
    """How long prefill may take to answer a decode worker that it has not met yet."""
    peer_forget_s: float = 60.0
    """A peer whom nobody could reach for this long is forgotten, with all that was kept for it; it says hello again."""
    most_peers: int = 1024
    """Workers that one worker hands over to at the same time; more are refused."""
    control_frame_bytes: int = 1024 * 1024
    """The longest control message or notice that is taken in: a grant has about ten bytes a page, a notice thirty."""
    frame_bytes: int = 4 * 1024 * 1024
    """zmq: the longest frame of pages that is taken in, or one page where that is more; longer writes are split."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    max_queue: int = 1024
    """Requests in the house; more get 429."""
    default_max_tokens: int = 512
    """For completions that name no limit; a chat without one may use what is left of the context."""
    max_prompt_logprobs: int = 32_768
    """Log-probabilities of prompt tokens (echo with logprobs) that one request may ask for, over all its choices."""
    served_model_name: str = ""
    """Names under which clients ask for the model, separated by commas; answers carry the first. Empty: the folder's
    name, of a Hugging Face snapshot the repository's."""
    request_timeout_s: float = 600.0
    """From its arrival a request has this long before it ends with an error, unless its `timeout` says otherwise."""
    max_timeout_s: float = 3600.0
    """The longest `timeout` that a request may name."""
    replay_limit: int = 8
    """Attempts after the first before a request is failed."""
    moves_at_once: int = 4
    """Requests that one decode worker hands to others at the same time."""
    worker_wait_s: float = 60.0
    """How long a request waits for a worker of a role to come (back)."""
    breaker_window_s: float = 30.0
    """What a worker did within this time decides whether it is trusted with more."""
    breaker_failures: int = 5
    """So many failures within the window, at least, before a worker is left alone for a while."""
    breaker_rate: float = 0.6
    """And at least this share of what it was given within the window."""
    breaker_open_s: float = 5.0
    """How long it is left alone; then one request tries it. Doubles with each trial that fails, up to eight times."""
    stall_s: float = 30.0
    """/health fails when work waits and nothing has advanced for this long."""
    max_body_bytes: int = 0
    """Larger bodies are refused with 413; 0: 1 MiB and 32 bytes for each position of the context, at most 64 MiB."""
    body_buffer_bytes: int = 64 * 1024 * 1024
    """Memory for bodies that are being received, of all clients; a body's first 64 KiB don't count. More get 503."""
    max_connections: int = 4096
    """Clients' connections, at most three quarters of the descriptors that the process may open. For another one the
    one that waits longest without a request is closed; when none waits, only the health endpoints answer."""
    header_timeout_s: float = 10.0
    """From the first byte of a request until its headers must be whole."""
    body_timeout_s: float = 20.0
    """How long a body may take, besides a second for every `body_bytes_per_s` that have come."""
    body_bytes_per_s: int = 65_536
    """The least rate at which a long body must come."""
    write_timeout_s: float = 60.0
    """A client that takes nothing of its answer for this long is cut off."""
    stream_keepalive_s: float = 15.0
    """A stream that has nothing to say for this long gets a comment line, so that proxies don't take it for dead."""
    reader_processes: int = 2
    """Processes that parse, render and tokenise bodies above 2 KiB; of several, one is kept free for those under
    256 KiB. They start when they are first needed."""
    reader_timeout_s: float = 30.0
    """A body that takes a reader longer than this is refused, and the reader ended."""
    reader_memory_bytes: int = 2 * 1024**3
    """Memory that a reader may take for one body beyond what it has at its start."""
    client_buffer_events: int = 4096
    """Undelivered stream events of a slow client before its request is cancelled."""


@dataclass(frozen=True, slots=True)
class AuditConfig:
    fraction: float = 0.01
    """Share of finished answers that idle prefill workers compute again from their tokens alone; 0: none."""
    queue_answers: int = 64
    """Answers that wait for an idle worker; when there are more, the oldest are left out."""
    chunk_tokens: int = 128
    """Positions of an audit's step: a request that comes waits for one such step at most."""
    margin: float = 0.25
    """numerics: fast: a token counts as damaged only where every logit would have to be off by more than this."""
    timeout_s: float = 120.0
    """An audit that a worker has not answered for this long is left out."""


@dataclass(frozen=True, slots=True)
class WatchConfig:
    repetition_tokens: int = 0
    """A stream that has repeated a piece of itself for this many tokens is flagged; 0: not watched."""
    repetition_period: int = 64
    """Longest piece that is looked for; it counts as repeated from its third time on."""
    rare_factor: float = 0.0
    """A stream with this many times as many rare tokens as the model's usual is flagged; 0: not watched."""
    rare_share: float = 0.05
    """Rare are the tokens that the model has said least lately and that together make up this share of it."""
    window_tokens: int = 64
    """The last tokens of a stream whose rare ones are counted; at most 1024."""
    warm_up_tokens: int = 100_000
    """Tokens of a model before its usual rate is known: until then no stream is flagged for its rare tokens."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    heartbeat_s: float = 0.5
    """How often a worker renews its lease and reports its status."""
    lease_s: float = 10.0
    """A worker that could not renew for this long stops sending; its successor gets the next incarnation."""
    start_timeout_s: float = 120.0
    """How long a worker may take from its start to its first heartbeat."""
    restart_limit: int = 20
    """Restarts of one worker within `restart_window_s` before it is left dead; of the router, before `serve` ends."""
    restart_window_s: float = 600.0
    """Deaths longer ago are forgotten."""
    stall_s: float = 60.0
    """A worker that has work and ended no step for this long is ended and started again: more where its steps are long
    (four times its longest), and `start_timeout_s` for its first, in which kernels may have to be compiled."""
    nonfinite_rows: int = 3
    """A worker that computed so many rows whose logits are no finite numbers, within `nonfinite_window_s`, is ended and
    started again."""
    nonfinite_window_s: float = 60.0
    """See `nonfinite_rows`."""
    host_memory_share: float = 0.25
    """Part of a node's free memory, measured before its workers start, that all their host tiers may take together;
    each worker gets the same multiple of its device pools. 0: no host tier but what `cache.host_bytes` says."""
    host_memory_bytes: int = 0
    """That budget in bytes; 0: by `host_memory_share`."""
    host_pools: float = 4.0
    """No worker's part of the budget is larger than so many times its device pools."""
    rank_timeout_s: float = 30.0
    """A rank of a worker that was silent for this long in mid-step ends the worker."""


@dataclass(frozen=True, slots=True)
class FaultsConfig:
    """Faults on purpose, for tests and rehearsals; all off."""

    stop_in_write: int = 0
    """n: the writer stops itself (SIGSTOP) in the middle of its n-th write of pages."""
    corrupt_page: int = 0
    """n: one byte of the n-th write of pages is flipped after it was sealed; one of several pools counts for each."""
    step_delay_s: float = 0.0
    """Each step takes this much longer."""
    hang: str = ""
    """worker:n, several with commas: that worker's first start hangs for ever after its n-th step."""
    proxy: str = ""
    """host:port of a relay that is asked for a detour to each of the workers' endpoints, which they advertise then."""
    retract_every: int = 0
    """n: every n-th step of a decode worker retracts all that it runs; each takes a step before the next time."""


@dataclass(frozen=True, slots=True)
class Config:
    engine: EngineConfig = field(default_factory=EngineConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)

    def cache_for(self, role: Role) -> CacheConfig:
        """The cache section with the overrides of `role`."""
        override = self.prefill.cache if role is Role.PREFILL else self.decode.cache
        changes = {f.name: v for f in dataclasses.fields(override) if (v := getattr(override, f.name)) is not None}
        return dataclasses.replace(self.cache, **changes)

    def tp_for(self, role: Role) -> int:
        """Tensor-parallel ranks of a worker of `role`."""
        return self.prefill.tp if role is Role.PREFILL else self.decode.tp

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load_config(path: Path | None = None, assignments: Iterable[str] = ()) -> Config:
    """Read the configuration from a YAML file and `section.key=value` assignments, in that order.

    Raises `ConfigError` for an unreadable file, an unknown key, or a value of the wrong type or range.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read config file {path}: {error.strerror}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"config file {path} is not YAML: {' '.join(str(error).split())}") from None
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"config file {path} must hold sections, not a {type(loaded).__name__}")
        tree = loaded or {}
    for assignment in assignments:
        _assign(tree, assignment)
    return config_from_dict(tree)


def config_from_dict(tree: Mapping[str, Any]) -> Config:
    """Build a `Config` from nested mappings; raises `ConfigError` naming the key that is wrong."""
    config: Config = _build(Config, tree, "")
    _check_ranges(config)
    _check_together(config)
    return config


def _check_together(config: Config) -> None:
    """What one key needs of another."""
    storage = config.cache.storage
    if storage.backend != "none" and not may_have_host_memory(config):
        raise ConfigError(
            f"config key cache.storage.backend={storage.backend} needs host memory to read into and write from: "
            "set cache.host_bytes, or cluster.host_memory_share"
        )
    events = config.cache.events
    if events.replay_endpoint and not events.endpoint:
        raise ConfigError(
            f"config key cache.events.replay_endpoint is {events.replay_endpoint}, but no events are published: set "
            "cache.events.endpoint too, such as tcp://127.0.0.1:5557"
        )
    for backend, key, value in (("file", "path", storage.path), ("redis", "url", storage.url)):
        if storage.backend == backend and not value:
            raise ConfigError(f"config key cache.storage.backend={backend} needs cache.storage.{key}")
    router = config.router
    if router.max_timeout_s < router.request_timeout_s:
        raise ConfigError(
            f"config key router.max_timeout_s={router.max_timeout_s:g} is below router.request_timeout_s="
            f"{router.request_timeout_s:g}: requests without a timeout of their own would exceed it"
        )
    if router.body_buffer_bytes < router.max_body_bytes:
        raise ConfigError(
            f"config key router.body_buffer_bytes={router.body_buffer_bytes} is below router.max_body_bytes="
            f"{router.max_body_bytes}: the largest body could never be received"
        )
    if router.breaker_rate > 1:
        raise ConfigError(f"config key router.breaker_rate is a share of 1; got {router.breaker_rate:g}")
    if config.prefill.short_share >= 1:
        raise ConfigError(f"config key prefill.short_share is a share, below 1; got {config.prefill.short_share:g}")
    if config.decode.growth_quantile > 1:
        raise ConfigError(f"config key decode.growth_quantile is a share up to 1; got {config.decode.growth_quantile}")
    if config.decode.retract == "copy" and not may_have_host_memory(config, Role.DECODE):
        raise ConfigError(
            "config key decode.retract=copy needs host memory to copy into: set cache.host_bytes or "
            "cluster.host_memory_share, or leave it at auto"
        )
    if config.cluster.host_memory_share >= 1:
        share = config.cluster.host_memory_share
        raise ConfigError(f"config key cluster.host_memory_share is a share of free memory, below 1; got {share:g}")
    if config.audit.fraction > 1:
        raise ConfigError(f"config key audit.fraction is a share, at most 1; got {config.audit.fraction:g}")
    if config.watch.rare_share >= 1:
        raise ConfigError(f"config key watch.rare_share is a share, below 1; got {config.watch.rare_share:g}")
    if config.watch.window_tokens > 1024:
        raise ConfigError(f"config key watch.window_tokens must be at most 1024; got {config.watch.window_tokens}")
    if config.cache.strip_reasoning and not config.cache.reasoning_tokens:
        raise ConfigError("config key cache.strip_reasoning needs cache.reasoning_tokens")


def may_have_host_memory(config: Config, *roles: Role) -> bool:
    """Whether any worker (of these roles) has a host tier, or may get one of the node's budget."""
    own = [role for role in Role if config.cache_for(role).host_bytes]
    if own:
        return bool(set(own) & set(roles or Role))
    return bool(config.cluster.host_memory_bytes or config.cluster.host_memory_share)


def _assign(tree: dict[str, Any], assignment: str) -> None:
    key, separator, text = assignment.partition("=")
    if not separator:
        raise ConfigError(f"--set takes section.key=value, got {assignment!r}")
    *sections, leaf = key.strip().split(".")
    if not sections or not leaf:
        raise ConfigError(f"--set takes section.key=value, got {assignment!r}")
    node = tree
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(f"config key {section} is a value, not a section")
        node = child
    node[leaf] = yaml.safe_load(text) if text else ""


def _build(cls: Any, tree: object, prefix: str) -> Any:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"config section {prefix or 'root'} must hold keys, got {tree!r}")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if key not in hints:
            close = difflib.get_close_matches(str(key), hints, n=1)
            hint = f"; did you mean {prefix + '.' if prefix else ''}{close[0]}?" if close else ""
            raise ConfigError(f"unknown config key {name}{hint}")
        kind = hints[key]
        values[key] = _build(kind, value, name) if dataclasses.is_dataclass(kind) else _coerce(kind, value, name)
    return cls(**values)


def _coerce(kind: Any, value: Any, name: str) -> Any:
    origin = typing.get_origin(kind)
    if origin is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise ConfigError(f"config key {name} must be one of {', '.join(map(str, choices))}; got {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (k for k in typing.get_args(kind) if k is not type(None))
        return _coerce(inner, value, name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"config key {name} must be {_NAMES[kind]}; got {value!r}")
    return value


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_MAY_BE_ZERO = {
    "engine.threads", "cache.device_tokens", "prefill.cache.device_tokens", "decode.cache.device_tokens",
    "cache.device_requests", "prefill.cache.device_requests", "decode.cache.device_requests",
    "cache.host_bytes", "prefill.cache.host_bytes", "decode.cache.host_bytes", "cache.prefetch.base_s",
    "cache.prefetch.per_token_s", "cache.storage.ttl_s", "faults.stop_in_write", "faults.corrupt_page",
    "faults.step_delay_s", "router.replay_limit", "router.max_body_bytes", "router.max_prompt_logprobs",
    "decode.offer_bytes",
    "faults.retract_every", "audit.fraction", "audit.margin",
    "watch.repetition_tokens", "watch.rare_factor", "cluster.host_memory_share", "cluster.host_memory_bytes",
}  # fmt: skip


def _check_ranges(node: Any, prefix: str = "") -> None:
    """Every number is positive, those in `_MAY_BE_ZERO` zero or more; page sizes are powers of two."""
    for f in dataclasses.fields(node):
        name, value = f"{prefix}{f.name}", getattr(node, f.name)
        if dataclasses.is_dataclass(value):
            _check_ranges(value, name + ".")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
                raise ConfigError(
                    f"config key {name} must be {'0 or more' if name in _MAY_BE_ZERO else 'above 0'}; got {value}"
                )
            if f.name == "page_tokens" and isinstance(value, int) and value & (value - 1):
                raise ConfigError(f"config key {name} must be a power of two; got {value}")
