"""The clusters of several models on one machine, a process each: started, taken over, kept alive, added and removed.

Each has its configuration in a file, its share of the machine's memory, cores and cards, and writes what routers are to
know of it (`SharedRouters`). One that dies too often stays away.

`apply` adds and removes models of a detached run by an order in the run's folder (`ModelsOrder`), which the supervisor
carries out while everything else goes on: first those that are removed end, once no router that still answers knows
them, as what they leave may be what the others need; then those that are added start, and routers are told of each once
it serves. One whose start fails isn't tried again, and the others are not held up by it. A supervisor that is killed
meanwhile leaves the order and the state to the next one.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from twinpool.cluster.assembly.node_shares import free_bytes
from twinpool.cluster.processes.free_port import free_port
from twinpool.cluster.processes.reaper import ReapedRun
from twinpool.cluster.processes.run_folder import RunFiles, new_folder
from twinpool.cluster.serve.detached_state import ORDER_FILE, ModelsOrder, ModelsState
from twinpool.cluster.serve.models_config import ModelsPlan, places_of
from twinpool.cluster.serve.router_services import SharedRouters
from twinpool.cluster.serve.service import STOP_S, PartFailed, Service, ServiceContext, ServiceFailed
from twinpool.contracts.build_id import build_id
from twinpool.contracts.config.cluster_config import Config, LaunchConfig
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.python_command import module_command

MODEL = tuple(module_command("twinpool.cluster.serve.model_cluster"))


class ModelService(Service):
    """The process of one model's cluster, or its keeper: ready once the cluster has told what routers are to know."""

    shared: SharedRouters

    def listening(self, timeout_s: float) -> bool:
        if (how := self.ended()) is not None:
            raise ServiceFailed(f"{self.name} could not start ({how})")
        return self.shared.report.exists()


def _dealt(config: Config) -> int:
    """The number of GPUs that a model is dealt."""
    return places_of(config) if ":" not in config.engine.device and config.engine.device != "cpu" else 0


class ModelClusters:
    """The processes of the models' clusters, and what these tell the routers that all of them share."""

    def __init__(
        self, plan: ModelsPlan, folder: RunFiles, context: ServiceContext, state: ModelsState | None,
        environment: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._plan, self._folder, self._context, self._state = plan, folder, context, state
        self._environment = environment
        self._cards: dict[str, int] = {} if state is None else state.cards
        """Of each model that is dealt GPUs the number of its first one."""
        self.services: dict[str, ModelService] = {}
        """By model."""
        self.away: set[str] = set()
        """Models that are not started again."""
        self.routed = folder.temporary / "models.json"
        """The file with what routers are started with."""
        self._order = ModelsOrder.read(folder.temporary) if state is not None else None
        """What is being carried out."""
        self._failed: dict[str, str] = {}
        """Models of the order that could not be added, and why."""
        self._told: dict[str, str] = {}
        """Of each model, the digest of the settings that the routers are to have of it."""
        self._confirmed: object = None
        """What was noted last of the routers' settings."""

    def start(self, *, begun: bool) -> None:
        """Start each model's process, or take it over where this run has `begun` already."""
        state = self._state
        free = self._free_bytes()
        for name in list(self._plan.configs):
            if begun and self._leaves(name) and state is not None and state.running(f"model-{name}") is None:
                self._forget(name)
                continue
            if not begun:
                self._write_settings(name)
            self._begin(name, free)

    def _files(self, name: str) -> tuple[Path, SharedRouters]:
        """The file of what the model's cluster begins with, and those between it and the routers."""
        return self._folder.logs / name / "settings.yaml", SharedRouters(self._folder.temporary / f"{name}.routed")

    def _write_settings(self, name: str) -> None:
        """Write what the model's cluster begins with; nothing is left of an earlier model of the name."""
        settings, shared = self._files(name)
        shared.clear()
        settings.parent.mkdir(exist_ok=True)
        settings.touch(mode=0o600)  # It may have the ledger's password.
        settings.write_text(yaml.safe_dump(self._of_cluster(self._plan.configs[name]).to_dict()))

    def _begin(self, name: str, free: int) -> None:
        """Start the model's process, or take it over. `free`: bytes of this machine's memory that it plans with."""
        state, (settings, shared) = self._state, self._files(name)
        arguments = [
            *("--config", str(settings), "--report", str(shared.report)),
            *("--within", str(self._folder.temporary), "--logs", str(settings.parent)),
            *("--free-bytes", str(free), "--models", str(len(self._plan.configs))),
            *("--first-card", str(self._first_card(name))),
            *(("--kept", str(state.folders[name])) if state is not None else ()),
        ]
        meanwhile = "the other models are served on" if state is None else "it serves on meanwhile"
        context = dataclasses.replace(self._context, config=self._plan.configs[name].cluster)
        service = ModelService(context, f"model-{name}", MODEL, arguments, self._environment, meanwhile=meanwhile)
        service.shared = shared
        if state is not None and (old := state.running(service.name)) is not None:
            service.adopt(old)
        else:
            service.start()
        self.services[name] = service

    def _first_card(self, name: str) -> int:
        """The number of the first GPU that the model is dealt: behind those of other models, or between them where
        there are enough."""
        cards, needed = self._cards, _dealt(self._plan.configs[name])
        if name not in cards and needed:
            taken = [(first, first + _dealt(self._plan.configs[other])) for other, first in cards.items()]
            cards[name] = next(
                start
                for start in sorted([0, *(end for _, end in taken)])
                if all(end <= start or start + needed <= first for first, end in taken)
            )
        return cards.get(name, 0)

    def _free_bytes(self) -> int:
        """This machine's memory for each model: what was free before the first one ran."""
        kept = self._state.free_bytes if self._state is not None else 0
        free = kept or free_bytes() // len(self._plan.configs)
        if self._state is not None:
            self._state.free_bytes = free
            self._state.save()
        return free

    def _of_cluster(self, config: Config) -> Config:
        """The configuration of a model's cluster: it listens for no client, and its controllers keep their port when it
        is started again."""
        launch = LaunchConfig(
            model=config.launch.model, port=0, ray_address=self._plan.options.ray_address or "", dashboard=False
        )
        cluster = config.cluster
        if not cluster.controller_port:
            cluster = dataclasses.replace(cluster, controller_port=free_port("127.0.0.1", 0))
        security = dataclasses.replace(config.security, admin_port=0)
        return dataclasses.replace(config, launch=launch, cluster=cluster, security=security)

    def tend(self) -> None:
        """Start models again that have died; one that does so too often stays away. Raises `PartFailed` where none is
        left."""
        for name, service in self.services.items():
            if name in self.away or self._leaves(name) or self._starts(name):
                continue
            if failed := service.tend():
                self._context.report(f"{failed}; model {name} stays away, the others are served on")
                self.away.add(name)
        if self.away >= self.services.keys() and self._order is None:
            raise PartFailed("no model is left that could be served")

    # ------------------------------------------------------------ what routers are told

    def news(self) -> bool:
        """Whether the routers are to have other settings of some model than they were told last."""
        return self._digests() != self._told

    def tell(self) -> str:
        """Write down for routers what the models say now; returns its digest."""
        self._told = self._digests()
        told = [service.shared.told() for name, service in self.services.items() if name in self._told]
        fresh = self.routed.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode([routed for routed in told if routed is not None]))
        fresh.replace(self.routed)
        return hashlib.blake2b(repr(sorted(self._told.items())).encode(), digest_size=4).hexdigest()

    def _digests(self) -> dict[str, str]:
        """Of each model, the digest of the settings that it says routers are to have. Of another build than this
        process's it counts only once a supervisor of that build begins: it comes to an upgrade last."""
        found = {}
        for name, service in self.services.items():
            routed, before = service.shared.told(), self._told.get(name)
            if self._leaves(name):
                continue
            if routed is not None and (routed.build == build_id() or before is None):
                found[name] = routed.digest
            elif before is not None:
                found[name] = before
        return found

    def confirm(self, stale: tuple[int, str]) -> None:
        """Tell the clusters how many routers read settings of before, and why that stays so, where it has changed."""
        if self._confirmed == (self._told, stale):
            return
        for name, service in self.services.items():
            service.shared.confirm(self._told.get(name, ""), *stale)
        self._confirmed = (self._told, stale)

    # ------------------------------------------------------------ models that are added and removed

    def change(self, *, settled: bool) -> bool:
        """Go on with what an operator has ordered, as far as that needs no waiting; returns whether it is carried out
        now. `settled`: whether every router that still answers has what it was told last."""
        state = self._state
        if state is None:
            return False
        order = self._order = self._order or ModelsOrder.read(state.folder)
        if order is None:
            return False
        settled = settled and not self.news()
        for name in [name for name in order.removed if name in self.services]:
            self._remove(name, settled=settled)
        if any(name in self.services for name in order.removed):
            return False
        fresh = [name for name in order.added if name not in self.services and name not in self._failed]
        if fresh:
            self._add({name: order.added[name] for name in fresh})
        starting = [name for name in order.added if self._starts(name)]
        for name in starting:
            if (how := self.services[name].ended()) is not None:
                self._fail(name, f"it could not start ({how}){self._context.last_words(f'model-{name}')}")
                self._forget(name)
        if starting or not settled:
            return False
        state.carried_out = order.token
        state.trouble = "; ".join(f"model {name} is not added: {why}" for name, why in self._failed.items())
        state.save()
        (state.folder / ORDER_FILE).unlink(missing_ok=True)
        self._order, self._failed = None, {}
        return True

    def _leaves(self, name: str) -> bool:
        return self._order is not None and name in self._order.removed

    def _starts(self, name: str) -> bool:
        """Whether the model's first start is under way: it isn't repeated where it fails."""
        added = self._order is not None and name in self._order.added and name in self.services
        return added and self.services[name].shared.told() is None

    def _add(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        """Start models, by name and configuration; each plans with an equal part of what memory is free now."""
        state = self._state
        assert state is not None
        for name, tree in models.items():
            try:
                state.configs[name] = config_from_dict(tree)
            except ConfigError as error:  # Another build has given the order.
                self._fail(name, str(error))
                continue
            state.folders[name] = new_folder(within=state.folder)
            self._first_card(name)
            self._write_settings(name)
        state.save()
        free = free_bytes() // len(models)
        for name in [name for name in models if name not in self._failed]:
            self._context.report(f"model {name} is added")
            self._begin(name, free)

    def _fail(self, name: str, why: str) -> None:
        self._failed[name] = why
        self._context.report(f"model {name} is not added: {why}")

    def _remove(self, name: str, *, settled: bool) -> None:
        """End the model's cluster once no router asks it any more."""
        service = self.services[name]
        if service.ended() is not None:
            self._context.report(f"model {name} is removed")
            self._forget(name)
        elif settled and name not in self.away:
            self.away.add(name)
            service.terminate()

    def _forget(self, name: str) -> None:
        """End what is left of the model, and keep nothing of it but its logs."""
        assert self._state is not None
        if (service := self.services.pop(name, None)) is not None:
            service.stop(STOP_S)
            service.shared.clear()
        folder = self._state.folders.pop(name)
        ReapedRun(folder.name, str(folder)).end()
        self.away.discard(name)
        self._told.pop(name, None)
        for kept in (self._state.configs, self._state.cards, self._state.services):
            kept.pop(f"model-{name}" if kept is self._state.services else name, None)
        self._state.save()
