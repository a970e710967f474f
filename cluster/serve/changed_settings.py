"""The plan of a cluster whose settings an operator changes while it runs.

The keys that are given replace those that `serve` was given; the result is checked, and memory is divided anew, by the
same code as at the start and from what was measured then: memory that is free now is what the cluster itself leaves.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from typing import Any

from msgspec import structs

from twinpool.cluster.arena.local_agent import lends_host_memory
from twinpool.cluster.assembly.node_shares import MemoryShort
from twinpool.cluster.controller.node_room import Occupant
from twinpool.cluster.serve.preflight import ServePlan, check_tiers, plan_again
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.config.setting_effects import (
    Effect,
    effect_of,
    merged,
    roles_of,
    services_of,
    settings_digest,
    settings_of,
)
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.messages.pool_changes import ChangedSetting, SettingsAnswer, SettingsChange
from twinpool.contracts.outside_data import read_json

log = logging.getLogger("twinpool.serve")


class SettingsChanger:
    """Changes one plan on orders of the controller. Use it from one thread."""

    def __init__(
        self,
        plan: Callable[[], ServePlan],
        keep: Callable[[ServePlan], None],
        workers: Callable[[], list[tuple[WorkerName, Role]]],
        free: Callable[[], int],
        *,
        stale: Callable[[], tuple[int, str]],
        arenas: bool,
    ) -> None:
        """`plan` is the plan as it is, `keep` replaces it so that it outlives this process where the cluster does;
        `workers` are those that run, `free` the bytes of this machine's memory that are free now. `stale`: the number
        of services with older settings, and the obstacle to replacing them (`ClusterServices.stale`). `arenas`: whether
        agents that lend host memory were started."""
        self._plan, self._keep, self._workers, self._free, self._arenas = plan, keep, workers, free, arenas
        self._stale = stale

    def change(self, order: SettingsChange) -> SettingsAnswer:
        """Make a change, or say what it would do; what is refused changes nothing, and the answer says why."""
        before = self._plan()
        try:
            plan = replanned(before, order.settings)
            self._check_room(before, plan)
            changed = tuple(
                structs.replace(one, roles=tuple(role for role in one.roles if role in plan.wanted))
                for one in differences(before.given, plan.given)
            )
            if changed and not order.dry_run:
                self._keep(plan)
        except (TwinpoolError, OSError) as error:
            return SettingsAnswer(order.number, refusal=str(error) or type(error).__name__)
        except Exception as error:  # Our own bug, which must not end a cluster that serves.
            log.exception("a change of settings failed")
            return SettingsAnswer(order.number, refusal=f"it can't be made: {type(error).__name__}: {error!s:.200}")
        behind, trouble = self._stale()
        return SettingsAnswer(order.number, changed=changed, digests=digests(plan), behind=behind, trouble=trouble)

    def _check_room(self, before: ServePlan, plan: ServePlan) -> None:
        if lends_host_memory(plan.config) and not self._arenas:
            raise ConfigError(
                "this gives workers host memory, which no worker here has, so no agents that lend it were started "
                "(cache.host_bytes, cluster.host_memory_share, cache.arena): start a new cluster with it"
            )
        from twinpool.cluster.serve.memory_fit import cluster_room, max_bytes, shares_weights

        if shares_weights(plan.config) and not self._arenas:
            raise ConfigError(
                "engine.share_weights=on needs the nodes' agents, and this cluster was started without: start a new one"
            )
        if "" not in plan.shares:
            return
        there = [Occupant(name, role) for name, role in self._workers()]
        if refusal := cluster_room(plan).refusal((), there):
            raise MemoryShort(f"with this the workers that run don't fit any more: {refusal}")

        planned, more = set(plan.workers), 0
        for name, role in self._workers():
            if (name, role) not in planned:
                more += max_bytes(plan.here, plan.config, role) - max_bytes(before.here, before.config, role)
        if more > (free := self._free()):
            raise MemoryShort(
                f"the workers that were added since the start need about {more / 2**20:,.0f} MiB more with this, and "
                f"{free / 2**20:,.0f} MiB are free here: scale the pools down first, or set cache.device_tokens"
            )


def replanned(plan: ServePlan, settings: str) -> ServePlan:
    """`plan` with the keys of `settings` (JSON) in place of its own. Raises `ConfigError` naming the key that is wrong
    or can't be changed, and `MemoryShort`."""
    given = _given(plan.given, settings)
    if given == plan.given:
        return plan
    for one in differences(plan.given, given):
        effect = effect_of(one.key)
        if effect.effect is Effect.NEW_CLUSTER:
            raise ConfigError(
                f"config key {one.key} can't be changed from {one.before} to {one.after} while the cluster runs: "
                f"{effect.reason}. Leave it out, or start a new cluster with this file (twinpool serve --config)"
            )
    running = plan.config
    facts = {node: share.facts for node, share in plan.shares.items()}
    chosen = {"device": running.engine.device, "plane": running.transfer.plane, "source": plan.source}
    fresh = plan_again(plan.options, plan.spec, given, plan.port, facts, **chosen)
    config = dataclasses.replace(
        fresh.config,
        # These can't be changed, and `serve` has worked out already what they come to.
        security=running.security,
        cache=dataclasses.replace(given.cache, events=running.cache.events),
    )
    fresh = dataclasses.replace(fresh, config=config)
    if "" in fresh.shares:
        check_tiers(config, fresh.here)
    return fresh


def _given(before: Config, settings: str) -> Config:
    try:
        tree: Any = read_json(settings)
    except ValueError as error:
        raise ConfigError(f"the settings are not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"the settings must hold sections, not a {type(tree).__name__}")
    config = config_from_dict(merged(before, tree))
    # The sizes of pools are the table's: who scales them doesn't change what was given.
    return dataclasses.replace(config, pools=before.pools)


def differences(before: Config, after: Config) -> tuple[ChangedSetting, ...]:
    """The settings whose values differ."""
    old, new = settings_of(before), settings_of(after)
    return tuple(
        ChangedSetting(key, json.dumps(old[key]), json.dumps(new[key]), roles_of(key, after), services_of(key))
        for key in old
        if old[key] != new[key]
    )


def digests(plan: ServePlan) -> dict[Role, str]:
    """Digest of the settings that a worker of each role is started with."""
    return {role: digest_of(plan, role) for role in plan.wanted}


def digest_of(plan: ServePlan, role: Role) -> str:
    """Digest of the settings that a worker of `role` is started with. Where `serve` joins a Ray a worker's share is its
    node's, and counts for nothing here."""
    share = plan.here.sizes(role) if "" in plan.shares else None
    return settings_digest(plan.config, role, share)
