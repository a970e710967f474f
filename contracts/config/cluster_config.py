"""Configuration sections of the cluster and of fault injection, and the whole configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from twinpool.contracts.config.autoscaling_config import AutoscalingConfig
from twinpool.contracts.config.cache_config import CacheConfig, CacheOverride
from twinpool.contracts.config.router_config import AuditConfig, BatchConfig, RouterConfig, WatchConfig
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.config.worker_config import (
    AdaptersConfig,
    ColocateConfig,
    DecodeConfig,
    DisaggregationConfig,
    EngineConfig,
    PrefillConfig,
    TransferConfig,
)
from twinpool.contracts.ids import Role


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Where traces of requests are exported to, and how many."""

    endpoint: str = ""
    """URL to which routers send traces of requests, by OTLP over HTTP, such as http://collector:4318/v1/traces. Empty:
    none are made. Needs the package's extra `otel`. What else a collector wants, such as a header with a token, is read
    from OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_HEADERS) in the environment of `serve`."""
    ratio: float = 1.0
    """Share of the requests that are traced, of those whose client says nothing of it; a client that sends the header
    traceparent decides for its own."""
    queue: int = 2048
    """Requests whose traces may wait for the collector; further ones are dropped and counted."""
    timeout_s: float = 5.0
    """Seconds that the collector may take for one call, with all tries; then its traces are dropped and counted."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """What a cluster is launched with, where no flag says otherwise. None of it can be changed while it runs."""

    model: str = "demo"
    """What `--model` takes: a checkpoint folder, a GGUF file, a name on the Hugging Face Hub (org/name[@revision]),
    smollm2, or demo."""
    routers: int = 1
    """Number of routers, which share the port."""
    host: str = "127.0.0.1"
    """Address that the router listens on."""
    port: int = 8000
    """Port that the router listens on; 0 for any."""
    ray_address: str = ""
    """The Ray cluster to join (auto: the one on this machine); empty: a Ray of its own."""
    dashboard: bool = False
    """Start Ray's dashboard too."""


@dataclass(frozen=True, slots=True)
class PoolsConfig:
    prefill: int = 0
    """Number of prefill workers, as `serve --prefill`, which goes before it; 0: 1."""
    decode: int = 0
    """Number of decode workers, as `serve --decode`, which goes before it; 0: 1."""
    colocated: int = 0
    """Number of colocated workers instead of two pools, as `serve --colocate`, which goes before it; 0: two pools."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    controller_port: int = 0
    """Port of the controller, on the address that workers reach; 0: a free one, kept for the cluster's life."""
    name: str = ""
    """The cluster's name among those that keep their tables on the same server (`ledger`). Empty: a name of this run's
    own, which no controller on another machine knows."""
    ledger: str = ""
    """Where the controller's table outlives it: a file, or a Valkey or Redis server, as redis://host:6379/0, rediss://
    or unix:// (its password may be in TWINPOOL_LEDGER_PASSWORD instead). Empty: a file that goes with the run."""
    ledger_replicas: int = 0
    """Replicas of the ledger's server that must have a change of the table before anything is granted by it."""
    leader_lease_s: float = 3.0
    """A controller that could not renew its lease of the ledger for this long grants nothing, and a standby takes
    over."""
    standby_controllers: int = 0
    """Controllers that `serve` starts besides the first, on this machine: one of them takes over when it is silent."""
    controllers: str = ""
    """Controllers that others have started with the same `ledger` and `name` (`twinpool controller`), as host:port,
    several with commas: workers, routers and the supervisor try them in turn."""
    ray_storage: str = ""
    """A Valkey or Redis server, as redis://host:6379 or rediss://, where the Ray that `serve --detach` starts keeps its
    tables: its control store may die then, and no worker with it. Ray shows the password to all users of the machine.
    Empty: in memory."""
    heartbeat_s: float = 0.5
    """How often a worker renews its lease and reports its status."""
    lease_s: float = 10.0
    """A worker that could not renew its lease for this long stops sending, and the next incarnation is started."""
    start_timeout_s: float = 120.0
    """How long a worker may take from its start on a node to its first heartbeat. While no node has a place for it, its
    start is begun anew as often."""
    workers_per_core: int = 8
    """Processes of workers that a node takes for each of its cores; more are refused. 0: any number."""
    starts_at_once: int = 0
    """Workers that start at once on a node; others wait their turn, and who served before comes first. 0: half as many
    as it has cores, and two at least."""
    wait_for_nodes: bool = True
    """Whether workers may be added to a Ray that was joined (`--ray-address`) when no node of it has room for them:
    they wait for one to join, as Ray's autoscaler brings them. Off: they are refused, as on a Ray of our own."""
    sleep_after_s: float = 0.0
    """Seconds without a request after which all workers sleep, until one comes and wakes them
    (`router.wake_timeout_s`). 0: they never do by themselves."""
    sleep_level: int = 1
    """How they sleep then. 1: processes keep the weights in host memory; 2: processes end, and weights are read
    again."""
    stop_timeout_s: float = 25.0
    """Seconds that running answers have to end after Ctrl-C or SIGTERM, while new requests are refused; those that are
    left end with an error then, and `serve` itself within 6 s more. Without any it ends at once; one that is
    starting, within 1.5 s."""
    restart_limit: int = 20
    """Restarts of one worker within `restart_window_s` before it is left dead; of the router, before `serve` ends."""
    restart_window_s: float = 600.0
    """Seconds after which a death no longer counts for `restart_limit`."""
    stall_s: float = 60.0
    """A worker that has work and ended no step for this long is ended and started again. It has longer where its steps
    are long (four times its longest), and `start_timeout_s` for its first, in which kernels may have to be compiled."""
    nonfinite_rows: int = 3
    """A worker that computed so many rows whose logits aren't finite, within `nonfinite_window_s`, is ended and started
    again."""
    nonfinite_window_s: float = 60.0
    """Seconds within which `nonfinite_rows` counts."""
    host_memory_share: float = 0.25
    """Part of a node's free memory, measured before its workers start, that all their host tiers may take together;
    each worker gets the same multiple of its device pools. 0: no host tier but by `cache.host_bytes`."""
    host_memory_bytes: int = 0
    """The budget of a node's host tiers in bytes; 0: by `host_memory_share`."""
    host_pools: float = 4.0
    """No worker's part of the budget is larger than so many times its device pools."""
    ranks_over_hosts: bool = False
    """Whether the ranks of a worker (`prefill.tp`, `pp` and so on) may be on several nodes of a Ray that was joined: on
    one node where it has places for all of them, else on several. On CPUs."""
    rank_timeout_s: float = 30.0
    """A worker is ended when one of its ranks was silent for so many seconds in mid-step. While they load the model,
    `start_timeout_s` counts."""


@dataclass(frozen=True, slots=True)
class FaultsConfig:
    """Faults on purpose, for tests and rehearsals; all off."""

    stop_in_write: int = 0
    """n: the writer stops itself (SIGSTOP) in the middle of its n-th write of pages."""
    corrupt_page: int = 0
    """n: one byte of the n-th write of pages is flipped after it was sealed; a write of several pools counts once for
    each."""
    link_bytes_per_s: int = 0
    """n: a write of pages into memory of another worker takes a second for every n bytes longer; 0: no longer. For
    planes shm and local."""
    step_delay_s: float = 0.0
    """Each step takes so many seconds longer."""
    hang: str = ""
    """worker:n, several with commas: that worker's first incarnation hangs for ever after its n-th step."""
    proxy: str = ""
    """host:port of a relay that is asked for a detour to each of the workers' endpoints; workers then advertise the
    detours."""
    retract_every: int = 0
    """n: every n-th step of a decode worker retracts all its running requests; each runs a step before the next
    time."""


def section_of(role: Role) -> str:
    """Return the name of the configuration section of the workers of `role`."""
    return "colocate" if role is Role.COLOCATED else str(role)


def uneven(role: Role, count: int, size: int) -> str:
    """Why `count` workers of `role` can't share their experts, `size` each; empty where they can."""
    if count % size == 0:
        return ""
    could = " or ".join(str(number) for number in (count - count % size, count - count % size + size) if number)
    key = f"{section_of(role)}.dp={size}"
    return f"{count} {role} workers can't share their experts by {key}: their number is a multiple of it, as {could}"


@dataclass(frozen=True, slots=True)
class Config:
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    adapters: AdaptersConfig = field(default_factory=AdaptersConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    colocate: ColocateConfig = field(default_factory=ColocateConfig)
    disaggregation: DisaggregationConfig = field(default_factory=DisaggregationConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    autoscaling: AutoscalingConfig = field(default_factory=AutoscalingConfig)
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)

    def cache_for(self, role: Role) -> CacheConfig:
        """Return the cache section with the overrides of `role`."""
        override = self.override_for(role)
        changes = {f.name: v for f in dataclasses.fields(override) if (v := getattr(override, f.name)) is not None}
        return dataclasses.replace(self.cache, **changes)

    def override_for(self, role: Role) -> CacheOverride:
        """Return what `role` overrides of the cache section."""
        return self._section(role).cache

    def tp_for(self, role: Role) -> int:
        """Tensor-parallel ranks of a worker of `role`."""
        return self._section(role).tp

    def ep_for(self, role: Role) -> int:
        """Expert-parallel ranks of a worker of `role`: 1, or as many as it has ranks."""
        return self._section(role).ep

    def pp_for(self, role: Role) -> int:
        """Pipeline-parallel ranks of a worker of `role`: its stages."""
        return self._section(role).pp

    def dp_for(self, role: Role) -> int:
        """How many workers of `role` share their experts, each a data-parallel rank."""
        return self._section(role).dp

    def ranks_for(self, role: Role) -> int:
        """All ranks of a worker of `role`, each a process."""
        return self.tp_for(role) * self.pp_for(role)

    def over_hosts(self, role: Role) -> bool:
        """Whether the ranks of a worker of `role` may be on several nodes."""
        return self.cluster.ranks_over_hosts and self.ranks_for(role) > 1

    def _section(self, role: Role) -> PrefillConfig | DecodeConfig | ColocateConfig:
        match role:
            case Role.PREFILL:
                return self.prefill
            case Role.DECODE:
                return self.decode
            case Role.COLOCATED:
                return self.colocate

    def with_cache(self, role: Role, override: CacheOverride) -> Config:
        """Return the configuration with `override` as the overrides of `role`."""
        section = dataclasses.replace(self._section(role), cache=override)
        match section:
            case PrefillConfig():
                return dataclasses.replace(self, prefill=section)
            case DecodeConfig():
                return dataclasses.replace(self, decode=section)
            case ColocateConfig():
                return dataclasses.replace(self, colocate=section)

    @property
    def conditional(self) -> bool:
        """Whether decode workers may compute prompts themselves."""
        return self.disaggregation.mode == "conditional"

    def computes_prompts(self, role: Role) -> bool:
        """Whether a worker of `role` computes prompts, all or some."""
        return role is not Role.DECODE or self.conditional

    def no_images(self, positions: int) -> str:
        """Why workers of a model that sees take no images, as they are configured; empty where they do.

        `positions`: how many an image has that a step computes as a whole; 0: any step may end within one."""
        if self.engine.draft_model:
            return "engine.draft_model is set, whose layer would take what stands for an image for text"
        if self.engine.models != "native":
            return f"engine.models={self.engine.models} computes no images"
        for role in Role:
            if self.computes_prompts(role) and self.ranks_for(role) > 1:
                tp, pp = self.tp_for(role), self.pp_for(role)
                return f"{section_of(role)}.tp={tp}, pp={pp}: several ranks compute none; set both to 1"
        if (chunk := self.prefill.chunk_tokens) < positions:
            return f"prefill.chunk_tokens={chunk} is less than the {positions} positions of an image"
        return ""

    def with_local_prompts(self, role: Role) -> Config:
        """Return the configuration as both halves of a worker of `role` go by it that computes its own prompts: ranks
        and cache are the worker's."""
        tp, ep, pp, dp = self.tp_for(role), self.ep_for(role), self.pp_for(role), self.dp_for(role)
        cache = self.override_for(role)
        return dataclasses.replace(
            self,
            prefill=dataclasses.replace(self.prefill, tp=tp, ep=ep, pp=pp, dp=dp, cache=cache),
            decode=dataclasses.replace(self.decode, tp=tp, ep=ep, pp=pp, dp=dp, cache=cache),
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
