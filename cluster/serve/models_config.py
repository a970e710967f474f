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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinpool.cluster.models import read_model
from twinpool.cluster.processes.free_port import free_port
from twinpool.cluster.serve.preflight import ServeOptions, check_flags, with_settings
from twinpool.cluster.serve.security_check import absolute_paths, check_security, with_absolute_paths
from twinpool.cluster.serve.terminal import url_of
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.ledger_place import NAME, on_server
from twinpool.contracts.config.load_config import assign, config_from_dict, read_config_file
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.ids import Role
from twinpool.router.tracing.otlp_exporter import check_tracing

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


@dataclass(frozen=True, slots=True)
class ModelsPlan:
    """What `serve` will start for several models: checked, as far as that goes without looking at checkpoints."""

    options: ServeOptions
    """Of the endpoint."""
    configs: dict[str, Config]
    """By model; the first one leads. Of a detached run they are its state's, and change with it."""
    port: int

    @property
    def lead(self) -> Config:
        return next(iter(self.configs.values()))

    @property
    def url(self) -> str:
        """Where clients on this machine reach the routers."""
        return url_of(self.options.host, self.port, https=bool(self.lead.security.tls_cert))

    @property
    def operators(self) -> str:
        """Where operators on this machine do."""
        security = self.lead.security
        if not security.admin_port:
            return self.url
        return url_of(security.admin_host, security.admin_port, https=bool(security.tls_cert))


def plan_models(options: ServeOptions) -> ModelsPlan | None:
    """Read the configuration and check it; None where it isn't of several models. Raises `ConfigError`."""
    configs = {
        name: with_absolute_paths(config) for name, config in models_of(options.config, options.assignments).items()
    }
    if not configs:
        return None
    if "model" not in options.unset or len(options.unsized) < len(ServeOptions.of_file(Path()).unsized):
        raise ConfigError("--model, --prefill, --decode and --colocate are of one model: the file's `models` has them")
    lead = next(iter(configs.values()))
    endpoint = with_settings(dataclasses.replace(options, unsized=frozenset()), lead)
    check_flags(endpoint)
    check_security(lead.security, endpoint.host, endpoint.port, routers=endpoint.routers)
    check_tracing(lead.tracing)
    return ModelsPlan(endpoint, configs, free_port(endpoint.host, endpoint.port))


@dataclass(frozen=True, slots=True)
class ModelsChange:
    """What a file asks of a run of several models."""

    settings: dict[str, dict[str, Any]]
    """Of each model that stays, the settings that its cluster is given, with those alone that the file names."""
    added: dict[str, Config]
    removed: tuple[str, ...]


def change_of_models(path: Path, running: Mapping[str, Config]) -> ModelsChange:
    """Compare a file with a run. `running`: the configurations that the models were started with, by name.

    Raises `ConfigError` as `models_of` does, where no model stays, and for a file in which the endpoint isn't as it
    runs.
    """
    configs, tree = models_of(path), read_config_file(path)
    models = tree.pop(SECTION)
    if not configs.keys() & running.keys():
        raise ConfigError(
            f"{path} has none of the models that run ({', '.join(running)}), and one at least must stay: change them "
            "in two steps, or start all anew (twinpool down, then up)"
        )
    _check_endpoint(tree, running)
    added = {name: _from_anywhere(config) for name, config in configs.items() if name not in running}
    settings = {name: _settings_of(config, tree, models[name]) for name, config in configs.items() if name in running}
    return ModelsChange(settings, added, tuple(name for name in running if name not in configs))


def check_checkpoints(models: Mapping[str, Config], say: Callable[[str], None]) -> None:
    """Look at the models' checkpoints, which are fetched where they have to be; `say` is told what is. Raises
    `ConfigError`, naming the model that can't be served."""
    for name, config in models.items():
        try:
            read_model(config.launch.model, config.engine, say)
        except TwinpoolError as error:
            raise ConfigError(f"model {name}: {error}") from None


def _from_anywhere(config: Config) -> Config:
    """The configuration with absolute paths: who reads it may be in another folder."""
    config = with_absolute_paths(config)
    model = Path(config.launch.model).expanduser()
    if not model.exists():  # A name, or found missing by who starts it.
        return config
    return dataclasses.replace(config, launch=dataclasses.replace(config.launch, model=str(model.absolute())))


def _check_endpoint(tree: Mapping[str, Any], running: Mapping[str, Config]) -> None:
    """Raises `ConfigError` where the file says of the endpoint something else than what runs."""
    lead = next(iter(running.values())).to_dict()
    for section, keys in _OWN_OF_ENDPOINT.items():
        given = tree.get(section) or {}
        for key in [key for key in keys if key in given]:
            if given[key] != lead[section][key]:
                raise ConfigError(
                    f"config key {section}.{key} is of the endpoint and can't be changed from "
                    f"{lead[section][key]!r} to {given[key]!r} while it runs: it needs a new start of all models"
                )


def _settings_of(config: Config, tree: Mapping[str, Any], own: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a model's cluster is given of a file whose common part is `tree`."""
    merged = absolute_paths(_merged(tree, own or {}))
    for section, keys in _OWN_OF_ENDPOINT.items():
        if section in merged:
            merged[section] = {key: value for key, value in merged[section].items() if key not in keys}
    made = config.to_dict()
    for section, key in _MADE_HERE:
        if key in (merged.get(section) or {}):
            merged[section] = {**merged[section], key: made[section][key]}
    return merged


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
