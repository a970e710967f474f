"""Sections of the cluster and of faults on purpose; the whole configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from contracts.config.cache_config import CacheConfig
from contracts.config.router_config import AuditConfig, RouterConfig, WatchConfig
from contracts.config.worker_config import DecodeConfig, EngineConfig, PrefillConfig, TransferConfig
from contracts.ids import Role


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
