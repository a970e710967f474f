"""The command `twinpool upgrade`: have a detached cluster go on in another build, while it serves.

First the supervisor, and with it the controller, the KV index and the routers of this machine; then the workers, one by
one, by drains that take their running answers to others. Each worker's row says which build it runs, so the same
command goes on with what an earlier one has left, and does nothing once all is of that build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cli.admin_client import POLL_S, AdminClient, CommandRefused, RouterAway
from cli.rolling_restart import RollingRestart
from cluster.processes.run_file import RunFile
from cluster.serve.supervisor_upgrade import CheckedBuild, replace_supervisor, services_build

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

    @property
    def nothing(self) -> bool:
        return self.services == self.build and not self.old

    def lines(self) -> list[str]:
        """What will be done, in words."""
        found = []
        if self.services != self.build:
            found.append(f"supervisor, controller and routers: {self.services or 'another build'} -> {self.build}")
        if self.old:
            found.append(f"restarts one by one: {', '.join(self.old)}")
        return found


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
        self._timeout_s, self._force = timeout_s, force
        self._rolling = RollingRestart(operator, say, timeout_s=timeout_s, force=force)

    def plan(self) -> UpgradePlan:
        """What is to be done now."""
        rows = self._operator.rows()
        ready = [row for row in rows if row["state"] in ("ready", "unreachable")]
        return UpgradePlan(
            build=self._build.build,
            services=services_build(self._run),
            old={row["name"]: row["role"] for row in ready if self._is_old(row)},
            serving={role: sum(row["role"] == role for row in ready) for role in {row["role"] for row in ready}},
            starting=[row["name"] for row in rows if row["state"] == "starting"],
        )

    def run(self, plan: UpgradePlan) -> float:
        """Do it, saying a line as each part has; returns the seconds. Raises `CommandRefused` and `UpgradeRefused` with
        what isn't done."""
        began = self._operator.clock()
        if not self._force:
            self._rolling.await_others(self._pools)
        if plan.services != plan.build:
            replace_supervisor(self._build, self._run, self._operator.sleep)
            self._say(f"the supervisor, the controller and the routers are of build {plan.build}")
            self._await_router()
        self._rolling.run(self.plan, f"build {plan.build}: it starts from {self._build.python}")
        return self._operator.clock() - began

    def _pools(self) -> tuple[dict[str, str], dict[str, int]]:
        plan = self.plan()
        return plan.old, plan.serving

    def left(self) -> str:
        """What an interrupted run has left to be done, in words."""
        try:
            rest = "; ".join(self.plan().lines()) or "nothing"
        except RouterAway as error:
            return f"what is left can't be said: {error}"
        return f"left to do: {rest}. The same command goes on with it"

    def _is_old(self, row: Mapping[str, Any]) -> bool:
        return row.get("build") != self._build.build and not self._rolling.stale(row)

    def _await_router(self) -> None:
        """Wait until a router of the new build answers operators."""
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
