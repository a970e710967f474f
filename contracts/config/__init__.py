"""The configuration: its sections, and the functions that read it. Other packages import these names from here."""

from twinpool.contracts.config.cache_config import CacheConfig, EventsConfig, PrefetchConfig, StorageConfig
from twinpool.contracts.config.cluster_config import ClusterConfig, Config, FaultsConfig
from twinpool.contracts.config.load_config import config_from_dict, load_config
from twinpool.contracts.config.router_config import AuditConfig, RouterConfig, WatchConfig
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.config.worker_config import DecodeConfig, EngineConfig, PrefillConfig, TransferConfig

__all__ = [
    "AuditConfig",
    "CacheConfig",
    "ClusterConfig",
    "Config",
    "DecodeConfig",
    "EngineConfig",
    "EventsConfig",
    "FaultsConfig",
    "PrefetchConfig",
    "PrefillConfig",
    "RouterConfig",
    "SecurityConfig",
    "StorageConfig",
    "TransferConfig",
    "WatchConfig",
    "config_from_dict",
    "load_config",
]
