"""The reading of the configuration into frozen sections; bad values are refused here.

Values come from defaults, then a YAML file, then `--set section.key=value`. Keys under `prefill.cache` and
`decode.cache` override `cache` for that role. Unknown keys are refused by name.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from twinpool.contracts.config.autoscaling_config import autoscaling_conflicts
from twinpool.contracts.config.cluster_config import ClusterConfig, Config, TracingConfig, section_of
from twinpool.contracts.config.ledger_place import (
    NAME,
    check_ledger,
    check_ray_storage,
    controller_endpoints,
    ledger_file_conflicts,
    on_server,
)
from twinpool.contracts.config.router_config import read_sampling_defaults
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role
from twinpool.contracts.image_urls import UrlRules
from twinpool.contracts.outside_data import read_json, read_yaml

MAX_STANDBYS = 8
"""Standby controllers that `serve` may start: each looks for the leader several times a second."""


def load_config(path: Path | None = None, assignments: Iterable[str] = ()) -> Config:
    """Read the configuration from a YAML file and `section.key=value` assignments, in that order.

    Raises `ConfigError` for an unreadable file, an unknown key, or a value of the wrong type or range.
    """
    tree = {} if path is None else read_config_file(path)
    if "models" in tree:
        raise ConfigError(
            f"{path} has several models: serve, up and apply take that, and a file of one model is needed here"
        )
    wrong: list[str] = []
    for assignment in assignments:
        try:
            assign(tree, assignment)
        except ConfigError as error:
            wrong.append(str(error))
    return _checked(tree, wrong)


def read_config_file(path: Path) -> dict[str, Any]:
    """Read the sections of a YAML file, unchecked. Raises `ConfigError` where it holds none."""
    try:
        loaded = read_yaml(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"config file {path} is not YAML: {error}") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(f"config file {path} must hold sections, not a {type(loaded).__name__}")
    return loaded or {}


def config_from_dict(tree: Mapping[str, Any]) -> Config:
    """Build a `Config` from nested mappings; raises one `ConfigError` that names each key that is wrong."""
    return _checked(tree, [])


def _checked(tree: Mapping[str, Any], wrong: list[str]) -> Config:
    """Build and check a `Config`. Raises `ConfigError` with all that is wrong, `wrong` included, a line each.

    A key whose value can't be read has its default meanwhile, so what others need of it isn't judged.
    """
    unread: list[str] = []
    config: Config = _build(Config, tree, "", wrong, unread)
    wrong += [text for text in dict.fromkeys(_conflicts(config)) if not any(word in text for word in unread)]
    if not wrong:
        return config
    if len(wrong) == 1:
        raise ConfigError(wrong[0])
    raise ConfigError("\n  ".join([f"{len(wrong)} errors in the configuration:", *wrong]))


def read_config_json(path: Path | None) -> Config:
    """Read the whole configuration from a JSON file, as processes hand it to each other; without a path it is all
    defaults.

    Raises `ConfigError` for a file that can't be read or a key that is wrong.
    """
    if path is None:
        return Config()
    try:
        tree = read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the configuration {path}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"the configuration {path} must hold a JSON object")
    return config_from_dict(tree)


def _conflicts(config: Config) -> Iterator[str]:
    """What one key needs of another and lacks, with the keys' names."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", config.engine.device):
        yield (f"config key engine.device must be auto, cpu, cuda or cuda:N; got {config.engine.device!r:.40}")
    for role in Role:
        if (part := config.cache_for(role).device_share) > 1:
            yield f"config key cache.device_share is a share up to 1; got {part:g}"
    storage = config.cache.storage
    if storage.backend != "none" and not may_have_host_memory(config):
        yield (
            f"config key cache.storage.backend={storage.backend} needs host memory to read into and write from: "
            "set cache.host_bytes, or cluster.host_memory_share"
        )
    events = config.cache.events
    if events.replay_endpoint and not events.endpoint:
        yield (
            f"config key cache.events.replay_endpoint is {events.replay_endpoint}, but no events are published: set "
            "cache.events.endpoint too, such as tcp://127.0.0.1:5557"
        )
    for backend, key, value in (("file", "path", storage.path), ("redis", "url", storage.url)):
        if storage.backend == backend and not value:
            yield f"config key cache.storage.backend={backend} needs cache.storage.{key}"
    yield from _security_conflicts(config.security)
    yield from _tracing_conflicts(config.tracing)
    yield from _controller_conflicts(config.cluster)
    yield from ledger_file_conflicts(config.cluster.ledger, config.security)
    yield from _share_conflicts(config)
    for conflicts in (_adapter_conflicts, _folder_conflicts, _disaggregation_conflicts, _draft_conflicts):
        yield from conflicts(config)
    yield from autoscaling_conflicts(config.autoscaling)
    router = config.router
    try:
        read_sampling_defaults(router.sampling_defaults, {})
    except ConfigError as error:
        yield str(error)
    if router.max_timeout_s < router.request_timeout_s:
        yield (
            f"config key router.max_timeout_s={router.max_timeout_s:g} is below router.request_timeout_s="
            f"{router.request_timeout_s:g}: requests without a timeout of their own would exceed it"
        )
    try:
        UrlRules(router.image_urls, router.image_url_networks)
    except ValueError as error:
        yield f"config keys router.image_urls and router.image_url_networks: {error}"
    if router.body_buffer_bytes < router.max_body_bytes:
        yield (
            f"config key router.body_buffer_bytes={router.body_buffer_bytes} is below router.max_body_bytes="
            f"{router.max_body_bytes}: the largest body could never be received"
        )
    if config.decode.retract == "copy" and not may_have_host_memory(config, Role.DECODE, Role.COLOCATED):
        yield (
            "config key decode.retract=copy needs host memory to copy into: set cache.host_bytes or "
            "cluster.host_memory_share, or leave it at auto"
        )
    if config.cluster.sleep_level not in (1, 2):
        yield f"config key cluster.sleep_level is 1 or 2; got {config.cluster.sleep_level}"
    if config.pools.colocated and (config.pools.prefill or config.pools.decode):
        yield ("config key pools.colocated goes without pools.prefill and pools.decode: a cluster has either")
    if config.watch.window_tokens > 1024:
        yield f"config key watch.window_tokens must be at most 1024; got {config.watch.window_tokens}"
    if config.cache.strip_reasoning and not config.cache.reasoning_tokens:
        yield "config key cache.strip_reasoning needs cache.reasoning_tokens"


def _share_conflicts(config: Config) -> Iterator[str]:
    """Shares of more than there is: what is to leave something for others must be below 1."""
    at_most_1 = {
        "router.breaker_rate": config.router.breaker_rate,
        "decode.output_length_quantile": config.decode.output_length_quantile,
        "audit.fraction": config.audit.fraction,
        "tracing.ratio": config.tracing.ratio,
    }
    below_1 = {
        "prefill.short_share": config.prefill.short_share,
        "cluster.host_memory_share": config.cluster.host_memory_share,
        "watch.rare_share": config.watch.rare_share,
    }
    for key, share in at_most_1.items():
        if share > 1:
            yield f"config key {key} is a share, at most 1; got {share:g}"
    for key, share in below_1.items():
        if share >= 1:
            yield f"config key {key} is a share, below 1; got {share:g}"


def _listed(text: str) -> list[str]:
    """What is listed with commas."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _folder_conflicts(config: Config) -> Iterator[str]:
    """Folders that aren't absolute, or of no use to the models."""
    for key, roots in (("adapters.roots", config.adapters.roots), ("engine.weight_roots", config.engine.weight_roots)):
        for root in _listed(roots):
            if not root.startswith("/"):
                yield f"config key {key} takes absolute folders, several with commas; got {root!r:.200}"
    if _listed(config.engine.weight_roots) and config.engine.models != "native":
        yield "config key engine.weight_roots needs engine.models=native: transformers reads the checkpoint's own files"
    if config.batch.folder and not config.batch.folder.startswith("/"):
        yield f"config key batch.folder takes an absolute folder; got {config.batch.folder!r:.200}"


def _disaggregation_conflicts(config: Config) -> Iterator[str]:
    parts, page = config.disaggregation, config.cache_for(Role.DECODE).page_tokens
    if config.conditional and parts.step_tokens < page:
        yield (
            f"config key disaggregation.step_tokens={parts.step_tokens} is below decode's cache.page_tokens={page}: "
            "chunks of prompts end with pages, so a step must have room for one"
        )


def _draft_conflicts(config: Config) -> Iterator[str]:
    if config.decode.speculation == "draft_model" and not config.engine.draft_model:
        yield "config key decode.speculation=draft_model needs engine.draft_model, which says what is to draft"
    for section in ("decode", "colocate"):
        for key in ("tp", "pp"):
            size = getattr(getattr(config, section), key)
            if config.engine.draft_model and size > 1:
                yield (
                    f"config key engine.draft_model={config.engine.draft_model} needs {section}.{key}=1: what drafts "
                    f"runs on one rank; got {size}"
                )


def _adapter_conflicts(config: Config) -> Iterator[str]:
    adapters, names = config.adapters, set[str]()
    for entry in _listed(adapters.load):
        name, _, path = entry.partition("=")
        if not name.strip() or not path.strip().startswith("/"):
            yield f"config key adapters.load takes name=/absolute/folder, several with commas; got {entry!r:.200}"
        elif name.strip() in names:
            yield f"config key adapters.load names {name.strip()!r:.200} twice"
        names.add(name.strip())
    if adapters.used and config.engine.models != "native":
        yield "config key adapters needs engine.models=native: transformers' modules take no adapters"
    for key in ("tp", "pp"):
        several = [section_of(role) for role in Role if getattr(config, f"{key}_for")(role) > 1]
        if adapters.used and several:
            yield f"config key adapters needs workers of one rank each: set {several[0]}.{key}=1, or leave adapters out"


def _tracing_conflicts(tracing: TracingConfig) -> Iterator[str]:
    try:
        parts = urllib.parse.urlsplit(tracing.endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.path not in ("", "/")
    except ValueError:
        good = False
    if tracing.endpoint and not good:
        yield (
            "config key tracing.endpoint takes a URL with its path, such as http://collector:4318/v1/traces; "
            f"got {tracing.endpoint!r}"
        )


def _security_conflicts(security: SecurityConfig) -> Iterator[str]:
    together = ("tls_cert", "tls_key"), ("cluster_ca", "cluster_cert", "cluster_key"), ("ledger_cert", "ledger_key")
    for keys in together:
        missing = [key for key in keys if not getattr(security, key)]
        if missing and len(missing) < len(keys):
            yield f"config key security.{missing[0]} is missing: {' and '.join(keys)} go together"
    if security.admin_port > 65535:
        yield f"config key security.admin_port must be at most 65535; got {security.admin_port}"
    for origin in security.origins:
        if origin != "*" and not re.fullmatch(r"https?://[A-Za-z0-9._\-\[\]:]+", origin):
            yield (
                f"config key security.cors_origins takes origins like https://chat.example.com, or *; got {origin!r}"
            )


def may_have_host_memory(config: Config, *roles: Role) -> bool:
    """Whether any worker (of `roles`; none: of all) has a host tier, or may get one from the node's budget."""
    own = [role for role in Role if config.cache_for(role).host_bytes]
    if own:
        return bool(set(own) & set(roles or Role))
    return bool(config.cluster.host_memory_bytes or config.cluster.host_memory_share)


def assign(tree: dict[str, Any], assignment: str) -> None:
    """Set a key of nested sections as `section.key=value` says. Raises `ConfigError` for another text."""
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
    try:
        node[leaf] = read_yaml(text) if text else ""
    except ValueError as error:
        raise ConfigError(f"config key {key.strip()}: the value is not YAML: {error}") from None


def _build(cls: Any, tree: object, prefix: str, wrong: list[str], unread: list[str]) -> Any:
    """Build a section. What is wrong with it goes to `wrong`, and each key without a value that counts, by its last
    word, to `unread`; those have their defaults."""
    if not isinstance(tree, Mapping):
        wrong.append(f"config section {prefix or 'root'} must hold keys, got {tree!r}")
        unread.append(prefix.rpartition(".")[2])
        return cls()
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name, kind = f"{prefix}.{key}" if prefix else str(key), hints.get(key)
        if kind is None:
            wrong.append(f"unknown config key {name}{_meant(name, tree=value)}")
            unread.append(str(key))
        elif dataclasses.is_dataclass(kind):
            values[key] = _build(kind, value, name, wrong, unread)
        else:
            try:
                values[key] = _in_range(_coerce(kind, value, name), name)
            except ConfigError as error:
                wrong.append(str(error))
                unread.append(str(key))
    return cls(**values)


def _meant(name: str, tree: object) -> str:
    """What an unknown key, or a section of that name with `tree` in it, was probably meant to be, in words."""
    known = list(config_keys())
    under = [f"{name}.{leaf}" for leaf in tree] if isinstance(tree, Mapping) else []
    parent = name.rpartition(".")[0]
    for given in (name, *under):
        if close := _alike(given, known):
            return f"; did you mean {close}?"
    if parent:
        return f"; see the keys of {parent} in docs/configuration.md"
    return f"; the sections are {', '.join(field.name for field in dataclasses.fields(Config))}"


def _alike(name: str, known: Sequence[str]) -> str:
    """The key that is most like `name`: of the same section, else one of the same last word, else spelt alike."""
    parent, _, leaf = name.rpartition(".")
    beside = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    if close := difflib.get_close_matches(leaf, beside, n=1):
        return beside[close[0]]
    if same := [key for key in known if key.rpartition(".")[2] == leaf]:
        return " or ".join(same[:3])
    close = difflib.get_close_matches(name, [key for key in known if key != parent], n=1, cutoff=0.75)
    return close[0] if close else ""


def config_keys(cls: Any = Config, prefix: str = "") -> Iterator[str]:
    """All keys of the configuration, and its sections, with their sections' names."""
    for key, kind in typing.get_type_hints(cls).items():
        yield prefix + key
        if dataclasses.is_dataclass(kind):
            yield from config_keys(kind, f"{prefix}{key}.")


def _coerce(kind: Any, value: Any, name: str) -> Any:
    origin = typing.get_origin(kind)
    if origin is Literal:
        choices = typing.get_args(kind)
        if isinstance(value, bool) and (word := "on" if value else "off") in choices:
            value = word  # YAML takes both words for yes and no.
        if value not in choices:
            raise ConfigError(f"config key {name} must be one of {', '.join(map(str, choices))}; got {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (k for k in typing.get_args(kind) if k is not type(None))
        return _coerce(inner, value, name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(max(-_MAX_INT, min(value, _MAX_INT + 1)))  # What lies beyond is refused by its range.
    if type(value) is not kind:
        raise ConfigError(f"config key {name} must be {_NAMES[kind]}; got {value!r}")
    return value


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_MAY_BE_ZERO = {
    "engine.threads", "engine.context",
    "cache.device_tokens", "prefill.cache.device_tokens", "decode.cache.device_tokens",
    "cache.device_requests", "prefill.cache.device_requests", "decode.cache.device_requests",
    "cache.host_bytes", "prefill.cache.host_bytes", "decode.cache.host_bytes", "cache.prefetch.base_s",
    "colocate.cache.device_tokens", "colocate.cache.device_requests", "colocate.cache.host_bytes",
    "cache.prefetch.per_token_s", "cache.storage.ttl_s", "faults.stop_in_write", "faults.corrupt_page",
    "prefill.tenant_credit_tokens",
    "faults.step_delay_s", "faults.link_bytes_per_s", "router.replay_limit", "router.max_body_bytes",
    "router.max_prompt_logprobs", "router.max_routed_positions", "router.ttft_slo_ms", "decode.prefix_offer_bytes",
    "cluster.sleep_after_s", "cluster.controller_port", "cluster.ledger_replicas", "cluster.standby_controllers",
    "faults.retract_every", "launch.port", "security.admin_port", "audit.fraction", "audit.margin",
    "watch.repetition_tokens", "watch.rare_factor", "cluster.host_memory_share", "cluster.host_memory_bytes",
    "autoscaling.max_workers", "autoscaling.tolerance", "autoscaling.hold_s",
    "pools.prefill", "pools.decode", "pools.colocated", "cluster.workers_per_core", "cluster.starts_at_once",
    "batch.free_bytes", "batch.quiet_s", "decode.background_rows", "prefill.background_tokens",
    "prefill.background_rest_s", "decode.background_rest_s",
    "router.kept_records", "router.kept_refusals", "router.reported_records", "tracing.ratio",
}  # fmt: skip


_MAX = {"decode.max_batch_tokens": 65_536, "prefill.max_running": 65_536}
"""Rows of a step, beyond which planning its memory takes longer than anybody waits."""
_MAX_INT = 2**63 - 1


def _in_range(value: Any, name: str) -> Any:
    """A key's value: a number must be finite and positive, or zero or more for keys in `_MAY_BE_ZERO`, at most what
    `_MAX` says, and a page's size a power of two. Raises `ConfigError`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    if not value <= (most := _MAX.get(name, _MAX_INT)):  # Nor is that so of what is no number.
        raise ConfigError(f"config key {name} must be a number of at most {most:,}; got {value!s:.40}")
    if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        raise ConfigError(
            f"config key {name} must be {'0 or more' if name in _MAY_BE_ZERO else 'above 0'}; got {value!s:.40}"
        )
    if name.endswith(".page_tokens") and isinstance(value, int) and value & (value - 1):
        raise ConfigError(f"config key {name} must be a power of two; got {value}")
    return value


def _controller_conflicts(config: ClusterConfig) -> Iterator[str]:
    """What is wrong with the settings of controllers and their ledger, with the keys' names."""
    for check, value in ((check_ledger, config.ledger), (check_ray_storage, config.ray_storage)):
        try:
            check(value)
        except ConfigError as error:
            yield str(error)
    if config.name and not NAME.fullmatch(config.name):
        yield (f"config key cluster.name takes letters, digits, dots and dashes, 64 at most; got {config.name!r:.80}")
    others: tuple[str, ...] = ()
    try:
        others = controller_endpoints(config.controllers)
    except ConfigError as error:
        yield str(error)
    if others and not (on_server(config.ledger) and config.name):
        yield (
            "config key cluster.controllers needs cluster.ledger on a server and cluster.name: by these the "
            "controllers of several machines know who leads"
        )
    if config.ledger_replicas and not on_server(config.ledger):
        yield "config key cluster.ledger_replicas needs cluster.ledger on a server"
    if config.standby_controllers > MAX_STANDBYS:
        yield (
            f"config key cluster.standby_controllers must be at most {MAX_STANDBYS}; got {config.standby_controllers}"
        )
    several = bool(others) or config.standby_controllers > 0
    if several and config.leader_lease_s > config.lease_s / 2:
        yield (
            f"config key cluster.leader_lease_s={config.leader_lease_s:g} is more than half of cluster.lease_s="
            f"{config.lease_s:g}: workers would lose their leases before a standby takes over"
        )
