"""What a detached cluster is to the process that supervises it: kept in a file, so that the next such process goes on.

The file is JSON that only its owner can read: it has the cluster's secret and token. A supervisor of another build
reads it too: keys that a build doesn't know are left alone, and those that it lacks have the values below.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from twinpool.cluster.assembly.node_shares import CardFacts, NodeFacts
from twinpool.cluster.processes.keeper import END_SECONDS, TAKEN_OVER
from twinpool.cluster.processes.process_ids import same_process
from twinpool.cluster.serve.preflight import ServeOptions, ServePlan, plan_again
from twinpool.cluster.serve.shutdown_signal import END_S
from twinpool.contracts.checkpoint.model_spec import read_model_spec, served_as
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role
from twinpool.contracts.outside_data import read_json

OPTIONS = ("model", "prefill", "decode", "colocate", "routers", "host", "port", "ray_address", "dashboard")
"""The options that matter after the start; the configuration has the rest."""


def plan_to_tree(plan: ServePlan) -> dict[str, Any]:
    """The plan as values that JSON takes: what it was given and what was measured, and nothing worked out.

    `plan_from_tree` works the rest out again, so that a supervisor of another build, whose classes differ, can take the
    cluster over. What can't be measured again is kept: memory that is free now is what the cluster itself leaves.
    """
    return {
        "options": {name: getattr(plan.options, name) for name in OPTIONS}
        | {"model": str(plan.spec.path), "config": plan.options.file},
        "given": plan.given.to_dict(),
        "port": plan.port,
        "source": plan.source,
        "device": plan.config.engine.device,
        "plane": plan.config.transfer.plane,
        "nodes": {node: _facts_to_tree(share.facts) for node, share in plan.shares.items()},
    }


def plan_from_tree(tree: dict[str, Any]) -> ServePlan:
    """Work a plan out again. Raises `ConfigError` where this build doesn't take what an earlier one was given,
    `CheckpointError` and `MemoryShort` as at the start, and `KeyError`, `TypeError` or `ValueError` for a tree that is
    none."""
    file = tree["options"].get("config")  # Earlier builds kept none.
    options = ServeOptions(**{name: tree["options"][name] for name in OPTIONS}, config=Path(file) if file else None)
    nodes = {node: _facts_from_tree(facts) for node, facts in tree["nodes"].items()}
    given = config_from_dict(tree["given"])
    read = read_model_spec(Path(options.model), given.engine.context, given.engine.draft_model)
    spec = served_as(read, given.router.served_model_name)
    chosen = {"device": tree["device"], "plane": tree["plane"], "source": tree.get("source", "")}
    return plan_again(options, spec, given, int(tree["port"]), nodes, **chosen)


def _facts_to_tree(facts: NodeFacts) -> dict[str, Any]:
    places = {str(role): count for role, count in facts.places.items()}
    return dataclasses.asdict(dataclasses.replace(facts, places={})) | {"places": places}


def _facts_from_tree(tree: dict[str, Any]) -> NodeFacts:
    cards = tuple(CardFacts(**{**card, "peers": tuple(card["peers"])}) for card in tree["cards"])
    places = {Role(role): int(count) for role, count in tree["places"].items()}
    return NodeFacts(**{**tree, "places": places, "cards": cards})


FORMAT = 3
"""Number of the file's format, and of the messages between the processes that it names: a build that reads another one
takes nothing over, as its processes could not talk with those that run. Streams were protobuf in 1, calls in 1 and 2;
all are msgpack from 3 on (`contracts.message_types`)."""
STATE_FILE = "cluster.state"
READY_FILE = "ready"
"""Made once the cluster serves: until then a supervisor that ends ends the cluster."""
KEEPER_PATIENCE_S = 4.0
"""How long beyond its own deadline the keeper waits for a supervisor that is to end."""
KEPT = ("secrets", "secret", "arena", "controller_port", "standby_ports", "ray", "ray_build", "marks", "report")
"""Fields that are kept as they are."""


class ServiceProcess(NamedTuple):
    """The process of a service."""

    pid: int
    started: int
    """Its start time (`process_ids.start_time`)."""
    build: str
    """The build that it runs."""


@dataclass
class ServicesState(ABC):
    """What one detached run's supervisors leave to the next one: which processes run as its services."""

    folder: Path
    """The folder of its sockets, ledger and Ray's files, which goes with it."""
    logs: Path
    secrets: dict[str, str] = field(default_factory=dict, repr=False, kw_only=True)
    """Secrets that the command's environment had, by variable."""
    secret: str = field(default="", repr=False, kw_only=True)
    """The cluster's secret, in hex; empty where there is none."""
    services: dict[str, ServiceProcess] = field(default_factory=dict, kw_only=True)
    """The latest process of each service."""
    marks: dict[str, str] = field(default_factory=dict, kw_only=True)
    """Build and settings of each router and controller, by name."""
    replaced: dict[str, ServiceProcess] = field(default_factory=dict, kw_only=True)
    """Routers that others replace and that finish their answers, and controllers that others are to replace, by name
    and mark."""
    rest: dict[str, Any] = field(default_factory=dict, repr=False, kw_only=True)
    """What other builds have in the file, as it is."""

    @abstractmethod
    def save(self) -> None:
        """Write the state, atomically: this process may be killed while it writes."""

    def _write(self, own: Mapping[str, Any], stop_timeout_s: float) -> None:
        """Write the file, with what a kind of run has of its `own`, and how long its supervisor may take to end."""
        tree = {
            **self.rest,
            "format": FORMAT,
            "logs": str(self.logs),
            "services": self.services,
            "replaced": self.replaced,
            **own,
        }
        fresh = self.folder / f"{STATE_FILE}.new"
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(tree, file)
        fresh.replace(self.folder / STATE_FILE)
        end_s = stop_timeout_s + END_S + KEEPER_PATIENCE_S
        (self.folder / END_SECONDS).write_text(f"{end_s:g}")

    @property
    def begun(self) -> bool:
        """Whether the cluster has served: this process takes over what runs of it."""
        return (self.folder / READY_FILE).exists()

    def taken_over(self) -> None:
        """Tell the keeper that this process has taken the cluster over."""
        (self.folder / TAKEN_OVER).write_text(str(os.getpid()))

    def mark_ready(self) -> None:
        (self.folder / READY_FILE).touch()

    def running(self, service: str) -> ServiceProcess | None:
        """The process of a service, None where none runs."""
        process = self.services.get(service)
        return process if process is not None and same_process(process.pid, process.started) else None

    def leaves(self, key: str, process: ServiceProcess) -> None:
        """Note a router or a controller that another one replaces, and that goes on until its answers are finished, or
        the other one is ready; `key` is its name and mark."""
        self.replaced[key] = process
        self.save()

    def stays(self, name: str, key: str, mark: str) -> None:
        """Take that back: the service of this name and mark goes on."""
        self.marks[name] = mark
        self.started(name, self.replaced.pop(key))

    @property
    def leaving(self) -> dict[str, ServiceProcess]:
        """Those that still run. What has ended is forgotten with the next `save`."""
        self.replaced = {key: one for key, one in self.replaced.items() if same_process(one.pid, one.started)}
        return dict(self.replaced)

    def started(self, service: str, process: ServiceProcess) -> None:
        """Note the process of a service that was started."""
        self.services[service] = process
        self.save()


def _read_tree(folder: Path) -> dict[str, Any]:
    """The file of a detached run. Raises `OSError`, and `ConfigError` where this build can't go on with it."""
    try:
        tree: dict[str, Any] = read_json((folder / STATE_FILE).read_text())
        if tree["format"] != FORMAT:
            raise ConfigError(
                f"the cluster's state has format {tree['format']} and this build reads {FORMAT}: end the cluster "
                "(twinpool down) and start it with this build, or go on with the other one"
            )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the cluster's state in {folder} can't be read: {error!r}") from None
    return tree


def _services_of(tree: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """The fields of `ServicesState` that aren't kept as they are. `known`: keys that the reader takes from the file."""
    known = {"format", "logs", "services", "replaced", *known}
    return {
        "services": {name: ServiceProcess(*mark) for name, mark in tree["services"].items()},
        "replaced": {key: ServiceProcess(*mark) for key, mark in tree.get("replaced", {}).items()},
        "rest": {key: value for key, value in tree.items() if key not in known},
    }


@dataclass
class DetachedState(ServicesState):
    """One detached cluster. Fields after `prepared` are filled in as it starts."""

    prepared: ServePlan
    arena: str = field(default="", repr=False)
    """The token of the arena agents, in hex; empty where there are none."""
    controller_port: int = 0
    standby_ports: list[int] = field(default_factory=list)
    """Of the controllers of this machine that stand by."""
    ray: str = ""
    """Where a Ray of our own is reached, ``host:port``; empty while there is none."""
    ray_build: str = ""
    """The Ray and the Python of the Ray that this cluster is on (`ray_cluster.ray_build`)."""
    report: str = ""
    """Where the routers of several models are told of this one (`RoutedModel`); empty: it has routers of its own."""

    @classmethod
    def load(cls, folder: Path) -> DetachedState:
        """Read a cluster's state, and work its plan out again. Raises `OSError`, `ConfigError` where this build can't
        go on with it, and as `plan_from_tree` does."""
        tree = _read_tree(folder)
        try:
            return cls(
                folder,
                Path(tree["logs"]),
                plan_from_tree(tree["plan"]),
                **_services_of(tree, {"plan", *KEPT}),
                **{key: tree[key] for key in KEPT if key in tree},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the cluster's state in {folder} can't be read: {error!r}") from None

    def save(self) -> None:
        own = {"plan": plan_to_tree(self.prepared), **{key: getattr(self, key) for key in KEPT}}
        self._write(own, self.prepared.config.cluster.stop_timeout_s)

    @property
    def ports(self) -> tuple[int, ...]:
        """Of the controllers of this machine, the first one first; none before they were chosen."""
        return (self.controller_port, *self.standby_ports) if self.controller_port else ()

    @ports.setter
    def ports(self, ports: tuple[int, ...]) -> None:
        self.controller_port, *self.standby_ports = ports


MODELS_KEPT = ("secrets", "secret", "marks", "free_bytes", "port", "cards", "carried_out", "trouble")
"""Fields of `ModelsState` that are kept as they are."""
ORDER_FILE = "models.order"


class ModelsOrder(msgspec.Struct, frozen=True):
    """Models that an operator's command adds to a detached run and removes from it: a file in the run's folder until
    its supervisor has carried it out. How far that is, `ModelsState` says."""

    token: str
    """Of this order alone."""
    added: dict[str, dict[str, Any]]
    """Their configurations, by name."""
    removed: tuple[str, ...]

    @classmethod
    def of(cls, added: Mapping[str, Config], removed: Sequence[str]) -> ModelsOrder:
        return cls(secrets.token_hex(8), {name: one.to_dict() for name, one in added.items()}, tuple(removed))

    @classmethod
    def read(cls, folder: Path) -> ModelsOrder | None:
        """The order that is to be carried out; None where there is none."""
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):  # Of another build, or none.
            return msgspec.json.decode((folder / ORDER_FILE).read_bytes(), type=cls)
        return None

    def write(self, folder: Path) -> None:
        """Give the order. Raises `FileExistsError` while an earlier one is being carried out."""
        fresh = folder / f"{ORDER_FILE}.{self.token}"
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(self))
        try:
            os.link(fresh, folder / ORDER_FILE)
        finally:
            fresh.unlink()


@dataclass
class ModelsState(ServicesState):
    """A detached run of several models: its routers, and the keeper of each model's own detached cluster."""

    options: ServeOptions
    """Of the endpoint."""
    port: int
    configs: dict[str, Config]
    """By model, as they were given when it began; the first one leads. Each model's cluster keeps its own from then
    on."""
    folders: dict[str, Path]
    """The folder of each model's cluster."""
    free_bytes: int = 0
    """This machine's memory that each model plans with that the run has begun with."""
    cards: dict[str, int] = field(default_factory=dict)
    """Of each model that is dealt GPUs the number of its first one."""
    carried_out: str = ""
    """The token of the latest order that is carried out (`ModelsOrder`)."""
    trouble: str = ""
    """What of it failed, in words."""

    @classmethod
    def load(cls, folder: Path) -> ModelsState:
        """Read a run's state. Raises as `DetachedState.load` does."""
        tree = _read_tree(folder)
        try:
            options, file = tree["options"], tree["options"]["config"]
            return cls(
                folder,
                Path(tree["logs"]),
                options=ServeOptions(**{name: options[name] for name in OPTIONS}, config=Path(file) if file else None),
                configs={name: config_from_dict(given) for name, given in tree["configs"].items()},
                folders={name: Path(place) for name, place in tree["models"].items()},
                **_services_of(tree, {"options", "configs", "models", *MODELS_KEPT}),
                **{key: tree[key] for key in MODELS_KEPT if key in tree},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the state of the models in {folder} can't be read: {error!r}") from None

    def save(self) -> None:
        own = {
            "options": {name: getattr(self.options, name) for name in OPTIONS} | {"config": self.options.file},
            "configs": {name: config.to_dict() for name, config in self.configs.items()},
            "models": {name: str(place) for name, place in self.folders.items()},
            **{key: getattr(self, key) for key in MODELS_KEPT},
        }
        self._write(own, next(iter(self.configs.values())).cluster.stop_timeout_s)


def models_in(folder: Path) -> dict[str, Path]:
    """The folders of the clusters of a detached run of several models, by model; empty where it serves one. Raises
    `OSError` and `ConfigError` where the run's file can't be read."""
    return {name: Path(place) for name, place in _read_tree(folder).get("models", {}).items()}
