"""Several models in one configuration file: the section `models`, by name what each has otherwise than the rest.

    models:
      small: {launch: {model: demo}, pools: {decode: 2}}
      chat: {launch: {model: smollm2}}

Each model gets a whole configuration: the file's, with its own keys in their place. Its name is what clients ask for;
`router.served_model_name` of its own adds further ones. What belongs to the endpoint, which all of them share, can't
differ: it is refused in a model's part, by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from twinpool.cluster.serve.security_check import absolute_paths
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.ledger_place import NAME, on_server
from twinpool.contracts.config.load_config import assign, config_from_dict, read_config_file
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role

SECTION = "models"
MAX_MODELS = 64
OF_THE_ENDPOINT = (
    *("launch.routers", "launch.host", "launch.port", "launch.ray_address", "launch.dashboard"),
    *("security", "tracing", "batch", "cluster.stop_timeout_s", "cluster.controllers"),
    *("router.body_buffer_bytes", "router.max_connections", "router.header_timeout_s", "router.body_timeout_s"),
    *("router.body_bytes_per_s", "router.write_timeout_s"),
)
"""Keys and sections that a model's part can't have: all models have the same."""


def models_of(path: Path | None, assignments: Iterable[str] = ()) -> dict[str, Config]:
    """Read the configurations of a file's models, by name; empty where it has no section `models`.

    `assignments`: as of `load_config`. Raises `ConfigError` as `load_config` does, naming the model, and for a section
    that several models can't have.
    """
    tree = {} if path is None else read_config_file(path)
    if SECTION not in tree:
        return {}
    for assignment in assignments:
        assign(tree, assignment)
    models = tree.pop(SECTION)
    if not isinstance(models, Mapping) or not 1 <= len(models) <= MAX_MODELS:
        raise ConfigError(f"config section {SECTION} must hold 1 to {MAX_MODELS} models by name, each with its keys")
    found = {}
    for name, own in models.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigError(f"config section {SECTION}: a model's name is {NAME.pattern}; got {name!r:.80}")
        found[name] = _config_of(name, tree, {} if own is None else own)
    _check_together(found)
    return found


def settings_of_models(path: Path, running: Mapping[str, Config]) -> dict[str, dict[str, Any]]:
    """Of each model of a file the settings that its cluster is given, with those alone that the file names. `running`:
    the configurations that the models were started with, by name.

    Raises `ConfigError` as `models_of` does, for a file of other models than those that run, and for one in which the
    endpoint isn't as it runs.
    """
    configs, tree = models_of(path), read_config_file(path)
    models = tree.pop(SECTION)
    for what, names in (
        ("lacks models that run", running.keys() - configs),
        ("has models that don't run", configs.keys() - running),
    ):
        if names:
            raise ConfigError(
                f"{path} {what}: {', '.join(sorted(names))}. A model is added or removed by a new start of all"
            )
    lead = next(iter(running.values())).to_dict()
    for section, keys in _OWN_OF_ENDPOINT.items():
        given = tree.get(section) or {}
        for key in [key for key in keys if key in given]:
            if given[key] != lead[section][key]:
                raise ConfigError(
                    f"config key {section}.{key} is of the endpoint and can't be changed from "
                    f"{lead[section][key]!r} to {given[key]!r} while it runs: it needs a new start of all models"
                )
    found = {}
    for name, config in configs.items():
        merged = absolute_paths(_merged(tree, models[name] or {}))
        for section, keys in _OWN_OF_ENDPOINT.items():
            if section in merged:
                merged[section] = {key: value for key, value in merged[section].items() if key not in keys}
        made = config.to_dict()
        for section, key in _MADE_HERE:
            if key in (merged.get(section) or {}):
                merged[section] = {**merged[section], key: made[section][key]}
        found[name] = merged
    return found


_OWN_OF_ENDPOINT = {
    "launch": ("routers", "host", "port", "ray_address", "dashboard"),
    "security": ("admin_port",),
}
"""Keys that are the routers' alone: a model's cluster has values of its own."""
_MADE_HERE = (("router", "served_model_name"), ("cluster", "name"), ("cluster", "ledger"))
"""Keys that a model's cluster has otherwise than the file says."""


def _config_of(name: str, common: Mapping[str, Any], own: Any) -> Config:
    key = f"{SECTION}.{name}"
    if not isinstance(own, Mapping):
        raise ConfigError(f"config section {key} must hold keys, got {own!r:.40}")
    if wrong := [given for given in OF_THE_ENDPOINT if _has(own, given.split("."))]:
        raise ConfigError(
            f"config key {key}.{wrong[0]} is of the endpoint, which all models share: set {wrong[0]} beside {SECTION}"
        )
    try:
        config = config_from_dict(_merged(common, own))
    except ConfigError as error:
        raise ConfigError(f"model {name}: {error}") from None
    cluster, router = config.cluster, config.router
    others = [other.strip() for other in router.served_model_name.split(",")]
    names = dict.fromkeys([name, *filter(None, others)])
    if cluster.name:
        cluster = dataclasses.replace(cluster, name=f"{cluster.name}.{name}")
    if cluster.ledger and not on_server(cluster.ledger):
        cluster = dataclasses.replace(cluster, ledger=f"{cluster.ledger}.{name}")
    router = dataclasses.replace(router, served_model_name=", ".join(names))
    return dataclasses.replace(config, cluster=cluster, router=router)


def _check_together(configs: Mapping[str, Config]) -> None:
    """Check what several models say together. Raises `ConfigError`."""
    for name, config in configs.items():
        for text in _not_for_several(config):
            raise ConfigError(f"model {name}: {text}")
    for what, values in (
        ("served as", [(other, name) for name, config in configs.items() for other in _names(config)]),
        (
            "controlled at port",
            [(port, name) for name, one in configs.items() if (port := one.cluster.controller_port)],
        ),
    ):
        seen: dict[Any, str] = {}
        for value, name in values:
            if value in seen:
                raise ConfigError(f"models {seen[value]} and {name} are both {what} {value}")
            seen[value] = name


def _not_for_several(config: Config) -> Iterator[str]:
    if config.transfer.plane == "local":
        yield "transfer.plane=local runs one model in one process: leave it out"
    if config.cluster.controllers:
        yield "cluster.controllers: controllers of others are one model's; leave it out"


def _names(config: Config) -> list[str]:
    return [name.strip() for name in config.router.served_model_name.split(",")]


def _has(tree: Mapping[str, Any], words: list[str]) -> bool:
    """Whether a tree has the key, or something of the section, that `words` lead to."""
    node: Any = tree
    for word in words:
        if not isinstance(node, Mapping) or word not in node:
            return False
        node = node[word]
    return True


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    tree = dict(common)
    for key, value in own.items():
        there = tree.get(key)
        tree[key] = _merged(there, value) if isinstance(there, Mapping) and isinstance(value, Mapping) else value
    return tree


def places_of(config: Config) -> int:
    """The number of processes that compute for a model's first workers: ranks, over all of them."""
    pools = config.pools
    sizes = {Role.PREFILL: pools.prefill or 1, Role.DECODE: pools.decode or 1}
    if pools.colocated:
        sizes = {Role.COLOCATED: pools.colocated}
    return sum(count * config.ranks_for(role) for role, count in sizes.items())
