"""The command `twinpool apply`: change a running cluster's settings and pool sizes, and follow that to its end.

The supervisor keeps the settings; this command restarts the workers that were started with others, one by one, as
`twinpool restart` does. Nothing but the workers' own rows says how far that is, so the same command goes on with what
an earlier one has left, and does nothing once all workers have the settings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.cli.admin_client import AdminClient, CommandRefused, RouterAway, client_for
from twinpool.cli.command_parser import print_line
from twinpool.cli.operator.cluster_rows import left_alone, routers_of, wanted_marks
from twinpool.cli.operator.drain_command import check_timeout
from twinpool.cli.operator.pool_commands import ROLES, follow, order
from twinpool.cli.operator.rolling_restart import CommandOfModels, PlansOfModels, RollingRestart, carry_out, say_of
from twinpool.cluster.processes.run_folder import RunFile
from twinpool.contracts.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.cluster.serve.detached_state import ModelsState
    from twinpool.cluster.serve.models_config import ModelsChange

POLL_S = 0.5
"""Seconds between two looks at whether services are replaced."""
AWAY_S = 60.0
"""How long calls may fail in a row while they are."""
SECTION = "models"
"""The section of a file of several models."""
LACKED = "the file's settings: see whether another operator has changed them, and apply again"
"""What a worker doesn't have that comes back as it was, and what to do about it."""


def read_settings(path: Path) -> dict[str, Any]:
    """Read a configuration file's sections, with the paths that `serve` makes absolute as it does.

    Raises `ConfigError` where the file can't be read; the supervisor checks the keys.
    """
    from twinpool.cluster.serve.security_check import absolute_paths
    from twinpool.contracts.config.load_config import read_config_file

    tree = absolute_paths(read_config_file(path))
    try:
        json.dumps(tree)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config file {path} holds a value that no key takes: {error}") from None
    return tree


@dataclass(frozen=True)
class ApplyPlan:
    """What is to be done, by the supervisor's answer and the workers' rows."""

    changed: list[dict[str, Any]]
    digests: dict[str, str]
    """Digest of the settings that a worker of each role is to have."""
    old: dict[str, str]
    """Workers that serve and have other settings, with their roles, in the order in which they restart."""
    sizes: dict[str, tuple[int, int]]
    """Workers that each pool has and is to have, where these differ."""
    serving: dict[str, int]
    """Workers of each role that serve."""
    starting: list[str]
    """Workers that are starting: what settings they have is known once they serve."""
    leaving: list[str]
    """Workers with other settings that drain already, as an earlier command has told them to."""
    behind: int = 0
    """Routers and controllers that have other settings still."""
    trouble: str = ""
    """Why some of them keep those, in words."""

    @property
    def nothing(self) -> bool:
        return not (self.changed or self.old or self.sizes or self.behind or self.leaving)

    def lines(self) -> list[str]:
        """What will be done, in words."""
        found = [f"{one['key']}: {one['before']} -> {one['after']}{_taken_up(one)}" for one in self.changed]
        found += [f"{role} workers: {now} -> {then}" for role, (now, then) in self.sizes.items()]
        if self.old:
            found.append(f"restarts one by one: {', '.join(self.old)}")
        if self.leaving:
            found.append(f"waits for what drains already: {', '.join(self.leaving)}")
        if self.behind and not self.changed:
            why = self.trouble or "they are being replaced"
            found.append(f"{self.behind} routers and controllers have other settings: {why}")
        return found


def _taken_up(one: Mapping[str, Any]) -> str:
    if one.get("by"):
        services = "routers and controllers" if one["by"] == "controllers" else "routers"
        return f" (by {services}, which are replaced one by one)"
    roles = one["roles"]
    return f" (by {' and '.join(role for role in roles)} workers as they start)" if roles else ""


class ApplyCommand:
    """One run of the command."""

    def __init__(
        self,
        operator: AdminClient,
        settings: Mapping[str, Any],
        say: Callable[[str], None],
        *,
        timeout_s: float = 600.0,
        force: bool = False,
    ) -> None:
        """`timeout_s`: for each step, a worker's restart or the pools' change of size. `force`: restart even the last
        worker of a role."""
        self._operator, self._settings, self._say = operator, settings, say
        self._timeout_s, self._force = timeout_s, force
        self._rolling = RollingRestart(operator, say, timeout_s=timeout_s, force=force)

    def plan(self) -> ApplyPlan:
        """What is to be done, having changed nothing. Raises `CommandRefused` where the settings are refused."""
        return self._plan(self._order(dry_run=True))

    def run(self, plan: ApplyPlan) -> float:
        """Do it, saying a line as each worker has; returns the seconds. Raises `CommandRefused` with what isn't done,
        and `ConfigError`."""
        began = self._operator.clock()
        self.check()
        if plan.changed:
            self._order(dry_run=False)
            self._say("the settings are changed")
        self._await_services()
        routers = routers_of(self._operator)
        if left := left_alone(routers, "settings", wanted_marks(routers)[1]):
            self._say(left)
        self._scale({role: then for role, (now, then) in plan.sizes.items() if then > now})
        self._rolling.run(self._unfinished, LACKED)
        self._scale({role: then for role, (now, then) in plan.sizes.items() if then < now})
        return self._operator.clock() - began

    def left(self) -> str:
        """What an interrupted run has left to be done, in words."""
        try:
            plan = self.plan()
        except (RouterAway, CommandRefused) as error:
            return f"what is left can't be said: {error}"
        rest = "; ".join(plan.lines()) or "nothing"
        return f"left to do: {rest}. The same command goes on with it"

    # ------------------------------------------------------------ inside

    def _order(self, *, dry_run: bool) -> dict[str, Any]:
        path = f"/cluster/apply{'?dry_run=true' * dry_run}"
        return self._operator.call("POST", path, json.dumps(self._settings).encode())

    def _plan(self, answer: Mapping[str, Any]) -> ApplyPlan:
        rows = self._operator.rows()
        digests: dict[str, str] = answer["digests"]
        serving = {role: sum(row["role"] == role and row["state"] == "ready" for row in rows) for role in digests}
        there = {role: sum(row["role"] == role and _counts(row) for row in rows) for role in digests}
        asked = self._settings.get("pools") or {}
        for role in ROLES:
            if asked.get(role) and role not in digests:
                raise CommandRefused(f"pools.{role}: this cluster has {' and '.join(digests)} workers; leave it out")
        sizes = {role: (there[role], asked[role]) for role in digests if asked.get(role, 0) not in (0, there[role])}
        return ApplyPlan(
            changed=answer["changed"],
            digests=digests,
            old={row["name"]: row["role"] for row in rows if self._is_old(row, digests)},
            sizes=sizes,
            serving=serving,
            starting=[row["name"] for row in rows if row["state"] == "starting"],
            leaving=[row["name"] for row in rows if row["state"] == "draining" and self._differs(row, digests)],
            behind=answer.get("behind", 0),
            trouble=answer.get("trouble", ""),
        )

    def _is_old(self, row: Mapping[str, Any], digests: Mapping[str, str]) -> bool:
        other = self._differs(row, digests)
        return other and not self._rolling.stale(row) and row["state"] in ("ready", "unreachable")

    @staticmethod
    def _differs(row: Mapping[str, Any], digests: Mapping[str, str]) -> bool:
        return row["role"] in digests and row.get("settings") != digests[row["role"]]

    def check(self) -> None:
        """Refuse to restart a role's only worker, before anything is changed; one that is on its way is waited for.
        Raises `CommandRefused`."""

        def look() -> tuple[dict[str, str], dict[str, int]]:
            plan = self.plan()
            asked = {role: plan.sizes.get(role, (0, 0))[1] for role in plan.serving}
            return plan.old, {role: max(now, asked[role]) for role, now in plan.serving.items()}

        if not self._force:
            self._rolling.await_others(look)

    def _await_services(self) -> None:
        """Wait until no router or controller has settings of before; calls fail while they are replaced. Raises
        `CommandRefused` where one keeps them."""
        began = heard = self._operator.clock()
        while True:
            try:
                plan = self._plan(self._order(dry_run=True))
            except (RouterAway, CommandRefused):
                if self._operator.clock() - heard > AWAY_S:
                    raise
                self._operator.sleep(POLL_S)
                continue
            heard = self._operator.clock()
            if not plan.behind:
                return
            if plan.trouble:
                raise CommandRefused(f"{plan.trouble}; what was changed stays changed")
            if heard - began > self._timeout_s:
                behind = f"{plan.behind} routers and controllers"
                raise CommandRefused(f"{behind} have settings of before after {self._timeout_s:g} s")
            self._operator.sleep(POLL_S)

    def _scale(self, counts: Mapping[str, int]) -> None:
        if counts:
            workers = order(self._operator, "scale", **{role: str(count) for role, count in counts.items()})
            for worker in workers:
                self._say(f"{worker.name} {worker.outcome}")
            follow(self._operator, workers, self._timeout_s, self._say)

    def _unfinished(self) -> ApplyPlan:
        plan = self._plan(self._order(dry_run=True))
        if plan.changed:
            raise CommandRefused("somebody else has changed the settings meanwhile: " + "; ".join(plan.lines()))
        return plan


def _counts(row: Mapping[str, Any]) -> bool:
    """Whether a worker is one of its pool's: it serves, or is on its way back."""
    return row["state"] in ("ready", "starting", "unreachable", "dead")


def apply(args: argparse.Namespace) -> int:
    if args.model_name and SECTION in read_settings(args.config):
        raise ConfigError(f"{args.config} has all models: leave out --model-name")
    operator, chosen = client_for(args.url, args.ca, args.model_name, changes=not args.dry_run)
    return apply_file(args, operator, chosen.run, args.ca)


def apply_file(args: argparse.Namespace, operator: AdminClient, run: RunFile | None, ca: str = "") -> int:
    """Apply the file's settings to a cluster. `run`: where it is one of this machine. `ca`: as of `AdminClient`."""
    check_timeout(args.timeout)

    def command(operator: AdminClient, settings: Mapping[str, Any], say: Callable[[str], None]) -> ApplyCommand:
        return ApplyCommand(operator, settings, say, timeout_s=args.timeout, force=args.force)

    nothing = "the cluster has these settings, and all workers were started with them"
    settings = read_settings(args.config)
    if SECTION not in settings:
        return carry_out(command(operator, settings, print_line), nothing, dry_run=args.dry_run)
    served, change = _change_of_models(args.config, run)
    commands = {
        name: command(AdminClient.of_run(served, ca, name), own, partial(say_of, name))
        for name, own in change.settings.items()
    }
    changed = ChangedModels(commands, change, Path(served.folder), operator, args.timeout)
    return carry_out(changed, nothing, dry_run=args.dry_run)


def _change_of_models(file: Path, run: RunFile | None) -> tuple[RunFile, ModelsChange]:
    """The run of several models, and what the file asks of it. Raises `ConfigError` where there is none, or the file
    changes what the endpoint has."""
    from twinpool.cluster.serve.detached_state import ModelsState, models_in
    from twinpool.cluster.serve.models_config import change_of_models, check_checkpoints

    if run is None or not run.folder:
        raise ConfigError(
            f"{file} has several models: apply all of it on the machine where they were launched with serve --detach, "
            "or one model's settings by a file of its own and --model-name"
        )
    running = models_in(Path(run.folder))
    if not running:
        raise ConfigError(f"{file} has several models, and {run.url} serves one: give it a file of one model")
    change = change_of_models(file, ModelsState.load(Path(run.folder)).configs)
    check_checkpoints(change.added, print_line)
    return run, change


@dataclass(frozen=True)
class ChangedModelsPlan(PlansOfModels):
    """What is to be done to a run of several models; `plans` are of those that stay."""

    change: ModelsChange

    @property
    def nothing(self) -> bool:
        return super().nothing and not (self.change.added or self.change.removed)

    def lines(self) -> list[str]:
        found = [f"{name}: is removed once its answers have ended" for name in self.change.removed]
        return found + [f"{name}: is added" for name in self.change.added] + super().lines()


class ChangedModels(CommandOfModels[ApplyPlan]):
    """The command on several models: some go and others come, then each that stays is changed."""

    def __init__(
        self,
        commands: Mapping[str, ApplyCommand],
        change: ModelsChange,
        folder: Path,
        operator: AdminClient,
        timeout_s: float,
    ) -> None:
        """`folder`: of the detached run."""
        super().__init__(commands)
        self._change, self._folder, self._operator, self._timeout_s = change, folder, operator, timeout_s

    def plan(self) -> ChangedModelsPlan:
        return ChangedModelsPlan(super().plan().plans, self._change)

    def _run_each(self) -> float:
        began = self._operator.clock()
        if self._change.added or self._change.removed:
            self._add_and_remove()
        seconds = self._operator.clock() - began
        return seconds + super()._run_each()

    def left(self) -> str:
        going_on = "models are added and removed as ordered, without this command; " if self._ordered else ""
        return going_on + super().left()

    @property
    def _ordered(self) -> bool:
        from twinpool.cluster.serve.detached_state import ModelsOrder

        return ModelsOrder.read(self._folder) is not None

    def _add_and_remove(self) -> None:
        """Order it, and wait until the run's supervisor has done so and routers know. Raises `CommandRefused`."""
        from twinpool.cluster.serve.detached_state import ModelsOrder

        order = ModelsOrder.of(self._change.added, self._change.removed)
        try:
            order.write(self._folder)
        except FileExistsError:
            raise CommandRefused(
                "an earlier command's models are still being added or removed; the log serve.out of the run says how "
                "far that is: apply again once they are"
            ) from None
        for name in order.removed:
            say_of(name, "is being removed")
        for name in order.added:
            say_of(name, "is being added")
        began, max_s = self._operator.clock(), self._timeout_s * (1 + len(order.added))
        while (state := self._state()).carried_out != order.token:
            if self._operator.clock() - began > max_s:
                raise CommandRefused(
                    f"models are not added and removed within {max_s:g} s; it goes on: see {state.logs / 'serve.out'}"
                )
            self._operator.sleep(POLL_S)
        if state.trouble:
            raise CommandRefused(state.trouble)

    def _state(self) -> ModelsState:
        from twinpool.cluster.serve.detached_state import ModelsState

        try:
            return ModelsState.load(self._folder)
        except FileNotFoundError:
            raise CommandRefused("the cluster has been ended meanwhile") from None
