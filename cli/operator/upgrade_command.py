"""The command `twinpool upgrade`: have a detached cluster go on in another build, while it serves.

First the supervisor, and with it the controller, the KV index and the routers of this machine; then the workers, one by
one, by drains that take their running answers to others. Each worker's row says which build it runs, so the same
command goes on with what an earlier one has left, and does nothing once all is of that build.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from twinpool.cli.admin_client import POLL_S, AdminClient, ClusterNotFound, CommandRefused, RouterAway, client_for
from twinpool.cli.command_parser import print_line
from twinpool.cli.operator.cluster_rows import between_builds, left_alone, routers_of
from twinpool.cli.operator.drain_command import check_timeout
from twinpool.cli.operator.rolling_restart import CommandOfModels, PlansOfModels, RollingRestart, carry_out, say_of
from twinpool.cluster.processes.run_folder import RunFile
from twinpool.cluster.serve.supervisor_upgrade import (
    CheckedBuild,
    check_build,
    interpreter_of,
    replace_supervisor,
    services_build,
)
from twinpool.contracts.errors import ConfigError

ROUTER_S = 30.0
"""Seconds in which a router of the new build must answer operators, once the supervisor has replaced it."""


@dataclass(frozen=True)
class UpgradePlan:
    """What is to be done, by the cluster's state and the workers' rows."""

    build: str
    services: str
    """The build of the services; empty where that isn't known."""
    old: dict[str, str]
    """Workers that serve and are of another build, with their roles."""
    serving: dict[str, int]
    """Workers of each role that serve."""
    starting: list[str]
    """Workers that are starting: which build they run is known once they serve."""
    leaving: list[str]
    """Workers of another build that drain already, as an earlier command has told them to."""
    routers: str = ""
    """What is said of routers of another build that nobody replaces."""

    @property
    def nothing(self) -> bool:
        return self.services == self.build and not self.old and not self.leaving

    def lines(self) -> list[str]:
        """What will be done, in words."""
        found = []
        if self.services != self.build:
            found.append(f"supervisor, controller and routers: {self.services or 'another build'} -> {self.build}")
        if self.old:
            found.append(f"restarts one by one: {', '.join(self.old)}")
        if self.leaving:
            found.append(f"waits for what drains already: {', '.join(self.leaving)}")
        return [*found, self.routers] if self.routers else found


class UpgradeCommand:
    """One run of the command."""

    def __init__(
        self,
        operator: AdminClient,
        run: RunFile,
        build: CheckedBuild,
        say: Callable[[str], None],
        *,
        timeout_s: float = 600.0,
        force: bool = False,
    ) -> None:
        """`timeout_s`: for each worker's restart: an answer that no other worker can go on with, since workers of the
        new build compute in another numerics class, is waited for so long. `force`: restart even the last worker of a
        role."""
        self._operator, self._run, self._build, self._say = operator, run, build, say
        self._timeout_s, self._force, self._said_apart = timeout_s, force, False
        self._rolling = RollingRestart(operator, say, timeout_s=timeout_s, force=force)

    def plan(self) -> UpgradePlan:
        """What is to be done now."""
        status = self._operator.status()
        rows = status["workers"]
        self._say_apart(rows)
        ready = [row for row in rows if row["state"] in ("ready", "unreachable")]
        return UpgradePlan(
            build=self._build.build,
            services=services_build(self._run),
            old={row["name"]: row["role"] for row in ready if self._is_old(row)},
            serving={role: sum(row["role"] == role for row in ready) for role in {row["role"] for row in ready}},
            starting=[row["name"] for row in rows if row["state"] == "starting"],
            leaving=[
                row["name"] for row in rows if row["state"] == "draining" and row.get("build") != self._build.build
            ],
            routers=left_alone(status.get("routers", []), "build", self._build.build),
        )

    def run(self, plan: UpgradePlan) -> float:
        """Do it, saying a line as each part has; returns the seconds. Raises `CommandRefused` and `UpgradeRefused` with
        what isn't done."""
        began = self._operator.clock()
        self.check()
        if plan.services != plan.build:
            replace_supervisor(self._build, self._run, self._operator.sleep)
            self._say(f"the supervisor, the controller and the routers are of build {plan.build}")
            self.await_router()
        try:
            self._rolling.run(self.plan, f"build {plan.build}: it starts from {self._build.python}")
        except CommandRefused as error:
            raise CommandRefused(f"{error}\n{self._advice()}") from None
        if left := left_alone(routers_of(self._operator), "build", plan.build):
            self._say(left)
        return self._operator.clock() - began

    def check(self) -> None:
        """Refuse to restart a role's only worker; one that is on its way is waited for. Raises `CommandRefused`."""
        if not self._force:
            self._rolling.await_others(self._pools)

    def _pools(self) -> tuple[dict[str, str], dict[str, int]]:
        plan = self.plan()
        return plan.old, plan.serving

    def _advice(self) -> str:
        """What an operator can do about an upgrade that isn't done, in words."""
        return (
            f"the cluster serves on, with workers of both builds; {self.left()}, and waits longer with --timeout (an "
            "answer ends after router.request_timeout_s or its own timeout). The way back is an upgrade to the build "
            "of before"
        )

    def left(self) -> str:
        """What an interrupted run has left to be done, in words."""
        try:
            rest = "; ".join(self.plan().lines()) or "nothing"
        except RouterAway as error:
            return f"what is left can't be said: {error}"
        return f"left to do: {rest}. The same command goes on with it"

    def _say_apart(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Say once that the workers of the two builds can't go on with each other's requests, as soon as that is
        known."""
        if self._said_apart or not (differ := between_builds(rows, self._build.build)):
            return
        self._said_apart = True
        self._say(
            f"the two builds can't go on with each other's requests ({differ}): answers end in the build that they "
            f"began in, and each worker's restart waits for its own, up to {self._timeout_s:g} s"
        )

    def _is_old(self, row: Mapping[str, Any]) -> bool:
        return row.get("build") != self._build.build and not self._rolling.stale(row)

    def await_router(self) -> None:
        """Wait until a router of the new build answers operators. Raises `CommandRefused`."""
        began = self._operator.clock()
        while True:
            try:
                build = self._operator.call("GET", "/cluster/status").get("router_build")
            except RouterAway:
                build = ""
            if build == self._build.build:
                return
            if self._operator.clock() - began >= ROUTER_S:
                raise CommandRefused(
                    f"the router at {self._run.url} is of build {build or 'another'} still: what is in front "
                    "of it, or another host, has one that this command doesn't replace; upgrade that one first"
                )
            self._operator.sleep(POLL_S)


class UpgradeOfModels(CommandOfModels[UpgradePlan]):
    """The upgrade of several models: each one's supervisor, then that of the routers, then each one's workers."""

    def __init__(
        self, commands: Mapping[str, UpgradeCommand], runs: Mapping[str, RunFile], run: RunFile, build: CheckedBuild
    ) -> None:
        """`runs`: of each model's cluster; `run`: of all."""
        super().__init__(commands)
        self._upgrades, self._runs, self._run, self._build = commands, runs, run, build

    def plan(self) -> PlansOfModels:
        services = services_build(self._run)
        routers = UpgradePlan(self._build.build, services, {}, {}, [], [])
        return PlansOfModels({**super().plan().plans, "routers": routers})

    def run(self, plan: PlansOfModels) -> float:
        began = time.monotonic()
        for command in self._upgrades.values():
            command.check()
        for name, run in [*self._runs.items(), ("the routers", self._run)]:
            if services_build(run) != self._build.build:
                replace_supervisor(self._build, run, time.sleep)
                print_line(f"{name}: the supervisor and its services are of build {self._build.build}")
        next(iter(self._upgrades.values())).await_router()
        self._run_each()
        return time.monotonic() - began


def upgrade(args: argparse.Namespace) -> int:
    from twinpool.cluster.serve.detached_state import models_in

    check_timeout(args.timeout)
    python = interpreter_of(args.python)
    operator, chosen = client_for(args.url, args.ca, args.model_name, changes=not args.dry_run)
    if chosen.run is None:
        raise ClusterNotFound(
            f"no cluster whose router is at {chosen.url} is running on this machine: upgrade it where it was started"
        )
    run = chosen.run
    build = check_build(python, run)
    nothing = f"all of the cluster is of build {build.build}"

    def command(operator: AdminClient, run: RunFile, say: Callable[[str], None]) -> UpgradeCommand:
        return UpgradeCommand(operator, run, build, say, timeout_s=args.timeout, force=args.force)

    if not (folders := models_in(Path(run.folder))):
        return carry_out(command(operator, run, print_line), nothing, dry_run=args.dry_run)
    if args.model_name:
        raise ConfigError("models are upgraded together with the routers that serve them: leave out --model-name")
    runs = {name: replace(run, folder=str(folder), logs=str(Path(run.logs) / name)) for name, folder in folders.items()}
    commands = {
        name: command(AdminClient.of_run(run, args.ca, name), own, partial(say_of, name)) for name, own in runs.items()
    }
    return carry_out(UpgradeOfModels(commands, runs, run, build), nothing, dry_run=args.dry_run)
