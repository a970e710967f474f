"""What a change of each setting of a running cluster takes: the one table of it.

A setting is named by its key, or with all keys below a section that have no line of their own. The effects:

- *live*: it takes effect without any worker starting again;
- *rolls*: workers of some roles read it when they start, so these are restarted one by one;
- *routers*: routers read it when they start, so each is replaced by one that takes its port over;
- *controllers*: so do they and the controllers, which are ended and started again without anybody's notice;
- *new cluster*: it can't be changed while the cluster runs. Several parts must have it alike, or workers with the old
  and the new value could never hand over to each other (layout and numerics of `contracts.messages.fingerprint`), so
  that a pool could not be restarted one by one without losing requests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role


class Effect(StrEnum):
    """What it takes until a change of a setting is in effect."""

    LIVE = "live"
    ROLLS = "rolls"
    ROUTERS = "routers"
    CONTROLLERS = "controllers"
    NEW_CLUSTER = "new cluster"


@dataclass(frozen=True, slots=True)
class SettingEffect:
    effect: Effect
    roles: tuple[Role, ...] = ()
    """Whose workers start again; only for `ROLLS`."""
    reason: str = ""
    """Why it needs a new cluster, in words; only for `NEW_CLUSTER`."""


_LIVE = SettingEffect(Effect.LIVE)
_ALL = SettingEffect(Effect.ROLLS, tuple(Role))
_PREFILL = SettingEffect(Effect.ROLLS, (Role.PREFILL, Role.COLOCATED))
_DECODE = SettingEffect(Effect.ROLLS, (Role.DECODE, Role.COLOCATED))
_COLOCATED = SettingEffect(Effect.ROLLS, (Role.COLOCATED,))


def _new(reason: str) -> SettingEffect:
    return SettingEffect(Effect.NEW_CLUSTER, reason=reason)


_PAIRS = _new("workers with the old and the new value can't hand over to each other")
_ROUTERS = SettingEffect(Effect.ROUTERS)
_CONTROLLERS = SettingEffect(Effect.CONTROLLERS)
_MODE = _new("routers and decode workers must have the same, and they start one after the other")
_CONTEXT = _new("routers and workers must have the same, and they start one after the other")
_WHERE = _new("clients were told it when the cluster started")
_SERVICES = _new("the controller and the supervisor read it when they start")
_SOCKETS = _new("both ends of a connection must have it, and open connections have the old value")
_EVENTS = _new("who follows KV events was told where when the cluster started")
_ADAPTERS = _new("routers and workers must have the same; twinpool adapters loads and drops adapters while they serve")
_WEIGHT_ROOTS = _new("it says from where weights may be taken, which only the starter may")
_STORAGE = _new("it says where pages of prompts are kept and who may read them, which only the starter may")
_BATCHES = _new("it says where clients' files are kept, which only the starter may")
_RANKS = _new("cards and places of a node are dealt by it when the cluster starts")
_LAUNCH = _new("the cluster was launched with it")

EFFECTS: Mapping[str, SettingEffect] = {
    "launch": _LAUNCH,
    "pools": _LIVE,
    "prefill": _PREFILL,
    "prefill.tp": _RANKS,
    "prefill.ep": _RANKS,
    "prefill.pp": _RANKS,
    "prefill.dp": _RANKS,
    "prefill.cache": SettingEffect(Effect.ROLLS, (Role.PREFILL,)),
    "prefill.cache.page_tokens": _PAIRS,
    "decode": _DECODE,
    "decode.tp": _RANKS,
    "decode.ep": _RANKS,
    "decode.pp": _RANKS,
    "decode.dp": _RANKS,
    "decode.kept_answer_s": _ALL,
    "decode.cache": SettingEffect(Effect.ROLLS, (Role.DECODE,)),
    "decode.cache.page_tokens": _PAIRS,
    "colocate": _COLOCATED,
    "colocate.tp": _RANKS,
    "colocate.ep": _RANKS,
    "colocate.pp": _RANKS,
    "colocate.dp": _RANKS,
    "colocate.cache.page_tokens": _PAIRS,
    "adapters": _ADAPTERS,
    "adapters.max_loaded": _ALL,
    "cache": _ALL,
    "cache.page_tokens": _PAIRS,
    "cache.index_dtype": _PAIRS,
    "cache.kv_dtype": _PAIRS,
    "cache.events": _EVENTS,
    "cache.storage.backend": _STORAGE,
    "cache.storage.path": _STORAGE,
    "cache.storage.url": _STORAGE,
    "cache.storage.group_access": _STORAGE,
    "engine": _ALL,
    "engine.activations": _PAIRS,
    "engine.context": _CONTEXT,
    "engine.draft_model": _PAIRS,
    "engine.dtype": _PAIRS,
    "engine.models": _PAIRS,
    "engine.weights": _PAIRS,
    "engine.weight_roots": _WEIGHT_ROOTS,
    "engine.attention": _PAIRS,
    "engine.numerics": _PAIRS,
    "engine.numerics_class": _PAIRS,
    "engine.device": _PAIRS,
    "disaggregation": _ROUTERS,
    "disaggregation.mode": _MODE,
    "disaggregation.step_tokens": _MODE,
    "transfer": _ALL,
    "transfer.plane": _PAIRS,
    "transfer.link_timeout_s": _SOCKETS,
    "transfer.control_frame_bytes": _SOCKETS,
    "router": _ROUTERS,
    "router.served_model_name": _WHERE,
    "router.kv_index": _SERVICES,
    "batch": _ROUTERS,
    "batch.folder": _BATCHES,
    "security": _SOCKETS,
    "audit": _ROUTERS,
    "audit.chunk_tokens": _PREFILL,
    "audit.margin": _PREFILL,
    "watch": _ROUTERS,
    "tracing": _ROUTERS,
    "autoscaling": _CONTROLLERS,
    "autoscaling.enabled": _SERVICES,
    "cluster": _SERVICES,
    "cluster.workers_per_core": _LIVE,
    "cluster.starts_at_once": _LIVE,
    "cluster.wait_for_nodes": _LIVE,
    "cluster.nonfinite_rows": _ALL,
    "cluster.nonfinite_window_s": _ALL,
    "cluster.ranks_over_hosts": _RANKS,
    "cluster.rank_timeout_s": _ALL,
    "cluster.host_memory_share": _ALL,
    "cluster.host_memory_bytes": _ALL,
    "cluster.host_pools": _ALL,
    "faults": _ALL,
    "faults.proxy": _SOCKETS,
}


def entry_of(key: str) -> str:
    """The entry of `EFFECTS` that a key goes by: its own, or that of the nearest section above. Raises `KeyError` where
    the table has none."""
    name = key
    while name not in EFFECTS:
        name, dot, _ = name.rpartition(".")
        if not dot:
            raise KeyError(key)
    return name


def effect_of(key: str) -> SettingEffect:
    """What a change of the setting `key` takes."""
    return EFFECTS[entry_of(key)]


def services_of(key: str) -> str:
    """Which services are replaced with a change of `key`; empty: none."""
    effect = effect_of(key).effect
    return effect.value if effect in (Effect.ROUTERS, Effect.CONTROLLERS) else ""


def routers_digest(config: Config) -> str:
    """Digest of all settings that routers read when they start, and that can be changed."""
    return _digest([_read_by(Effect.ROUTERS, config), _read_by(Effect.CONTROLLERS, config)])


def controllers_digest(config: Config) -> str:
    """Digest of all settings that controllers read when they start, and that can be changed."""
    return _digest([_read_by(Effect.CONTROLLERS, config)])


def _read_by(effect: Effect, config: Config) -> dict[str, Any]:
    return {key: value for key, value in settings_of(config).items() if effect_of(key).effect is effect}


def roles_of(key: str, config: Config) -> tuple[Role, ...]:
    """The roles whose workers start again with a change of `key`: those that read it when they start. A decode worker
    that computes prompts reads what a prefill and a colocated worker do, but for their ranks and caches."""
    roles, (section, *rest) = effect_of(key).roles, key.split(".")
    own = section in ("prefill", "colocate", "audit") and "cache" not in rest
    if roles and own and config.conditional and Role.DECODE not in roles:
        return (*roles, Role.DECODE)
    return roles


def settings_of(config: Config) -> dict[str, Any]:
    """Every setting with its value, by key such as ``prefill.cache.host_bytes``."""
    return dict(_leaves(config.to_dict(), ""))


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def merged(config: Config, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of `config` with the keys of `settings` in place of its own, unchecked. Raises `ConfigError` where a
    section is given a single value."""
    return _merge(config.to_dict(), settings, "")


def _merge(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    tree = dict(old)
    for key, value in new.items():
        there = tree.get(key)
        if isinstance(there, dict):
            if not isinstance(value, Mapping):
                raise ConfigError(f"config section {prefix}{key} must hold keys, got {value!r:.40}")
            tree[key] = _merge(there, value, f"{prefix}{key}.")
        else:
            tree[key] = value
    return tree


def settings_digest(config: Config, role: Role, share: object = None) -> str:
    """Digest of all that a worker of `role` is started with: the settings that roll its role, and its `share` of its
    node (a dataclass) where that is the same wherever it starts."""
    read = {key: value for key, value in settings_of(config).items() if role in roles_of(key, config)}
    share_tree = dataclasses.asdict(share) if dataclasses.is_dataclass(share) and not isinstance(share, type) else None
    return _digest([read, share_tree])


def _digest(tree: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(tree, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()
