"""The configuration: its sections, and the functions that read it. Other packages import these names from here."""

from contracts.config.cache_config import CacheConfig, EventsConfig, PrefetchConfig, StorageConfig
from contracts.config.cluster_config import ClusterConfig, Config, FaultsConfig
from contracts.config.load_config import config_from_dict, load_config
from contracts.config.router_config import AuditConfig, RouterConfig, WatchConfig
from contracts.config.security_config import SecurityConfig
from contracts.config.worker_config import DecodeConfig, EngineConfig, PrefillConfig, TransferConfig

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
