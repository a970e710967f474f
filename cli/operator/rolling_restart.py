"""Rolling restarts: workers of several pools drain and come back one by one, the next one once the one before serves.

The pools take turns, so that the same part of each is done at any time: where the workers that come back can't hand
over to those before them, either side has workers of each role.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from twinpool.cli.admin_client import POLL_S, SAY_EVERY_S, AdminClient, CommandRefused
from twinpool.cli.command_parser import FINE, print_line
from twinpool.cli.operator.cluster_rows import draining
from twinpool.cli.operator.pool_commands import follow, order, restart_path

REFUSED_S = 10.0
"""Seconds for which a restart that is refused is ordered again: a router may not know yet that another serves."""
OTHERS_S = 60.0
"""Seconds for which a role's only worker waits for another one that is on its way."""
COMING = ("starting", "dead", "draining")
"""States of workers that are on their way back."""


class Unfinished(Protocol):
    """What a rolling restart has left to do, by the workers' rows."""

    @property
    def old(self) -> Mapping[str, str]:
        """Workers that are to restart, with their roles."""

    @property
    def starting(self) -> list[str]:
        """Workers that are starting: whether they are to restart is known once they serve."""

    @property
    def leaving(self) -> list[str]:
        """Workers that are to restart and drain already, as an earlier command or an operator has told them to."""


def next_in_turn(old: Mapping[str, str], pools: Mapping[str, int]) -> str:
    """The worker that restarts next: of the pool of which the largest part is left, of equal ones the first.

    `pools`: workers of each role when the restarts began.
    """
    left = {role: sum(its == role for its in old.values()) / max(1, pools.get(role, 1)) for role in old.values()}
    role = max(left, key=lambda role: left[role])
    return next(name for name, its in old.items() if its == role)


def check_others_serve(old: Mapping[str, str], serving: Mapping[str, int]) -> None:
    """Refuse to restart a role's only worker. `serving`: workers of each role that serve, or will before the restarts.
    Raises `CommandRefused`."""
    for role in dict.fromkeys(old.values()):
        if serving.get(role, 0) < 2:
            name = next(name for name, its in old.items() if its == role)
            raise CommandRefused(
                f"{name} is the only {role} worker, and nobody could take its requests while it restarts: have "
                f"two (pools: {role}: 2, or twinpool add {role}), or say --force"
            )


def _coming(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """What is waited for of a worker that is on its way back, in words; `rows`: of all workers."""
    return draining(row, rows) if row["state"] == "draining" else f"waits for {row['name']}, which is {row['state']}"


class RollingRestart:
    """One rolling restart; a run that was interrupted is gone on with by another."""

    def __init__(self, operator: AdminClient, say: Callable[[str], None], *, timeout_s: float, force: bool) -> None:
        """`timeout_s`: for each worker. `force`: restart even the last worker of a role."""
        self._operator, self._say, self._timeout_s, self._force = operator, say, timeout_s, force
        self._restarted: dict[str, int] = {}
        """The incarnation of each worker before its restart."""

    def await_others(self, look: Callable[[], tuple[Mapping[str, str], Mapping[str, int]]]) -> None:
        """Wait until no role's only worker is to restart, while others are on their way. `look` returns the workers
        that are to restart, and how many of each role serve. One that drains is waited for like each worker's restart,
        one that starts for `OTHERS_S`. Raises `CommandRefused` where none comes."""
        began, said = self._operator.clock(), ""
        while True:
            rows = self._operator.rows()  # Before the look, since one may come between the two.
            coming = "; ".join(_coming(row, rows) for row in rows if row["state"] in COMING)
            drains = any(row["state"] == "draining" for row in rows)
            try:
                return check_others_serve(*look())
            except CommandRefused as error:
                waited, most = self._operator.clock() - began, self._timeout_s if drains else OTHERS_S
                if coming and waited >= most:
                    raise CommandRefused(f"{error}. After {most:g} s: {coming}") from None
                if not coming:
                    raise
                if coming != said:
                    self._say(coming)
                said = coming
                self._operator.sleep(POLL_S)

    def stale(self, row: Mapping[str, Any]) -> bool:
        """Whether a worker's row is of before its restart: the router doesn't know the next incarnation yet."""
        return int(row["incarnation"]) <= self._restarted.get(row["name"], 0)

    def run(self, look: Callable[[], Unfinished], lacks: str) -> None:
        """Restart until nothing is left to do, saying a line as each worker has. `lacks`: what a worker that comes back
        as it was doesn't have, for the reason. Raises `CommandRefused`."""
        waited_from = self._operator.clock()
        pools: dict[str, int] = {}
        while True:
            left = look()
            for role in left.old.values():
                pools[role] = max(pools.get(role, 0), sum(its == role for its in left.old.values()))
            if others := [name for name in left.old if name in self._restarted]:
                raise CommandRefused(f"{', '.join(others)} came back without {lacks}")
            if left.leaving:
                self._await_back(left.leaving)
                waited_from = self._operator.clock()
            elif left.old:
                self._restart(next_in_turn(left.old, pools))
                waited_from = self._operator.clock()
            elif not left.starting:
                return
            elif self._operator.clock() - waited_from >= self._timeout_s:
                raise CommandRefused(f"{', '.join(left.starting)} should serve, after {self._timeout_s:g} s")
            else:
                self._operator.sleep(POLL_S)

    def _await_back(self, names: Collection[str]) -> None:
        """Wait until workers that drain have come back, or have left for good; the next restart would find too few that
        serve. Raises `CommandRefused` with what they wait for."""
        began = said = self._operator.clock()
        while True:
            rows = self._operator.rows()
            coming = [row for row in rows if row["name"] in names and row["state"] in COMING]
            if not coming:
                return
            now, words = self._operator.clock(), "; ".join(_coming(row, rows) for row in coming)
            if now - began >= self._timeout_s:
                raise CommandRefused(f"not done after {self._timeout_s:g} s, and goes on: {words}")
            if now - said >= SAY_EVERY_S:
                said = now
                self._say(words)
            self._operator.sleep(POLL_S)

    def _restart(self, name: str) -> None:
        began = self._operator.clock()
        while True:
            try:
                workers = order(self._operator, restart_path(name), force="true" if self._force else "")
                break
            except CommandRefused:
                if self._operator.clock() - began >= REFUSED_S:
                    raise
                self._operator.sleep(POLL_S)
        self._restarted[name] = workers[0].incarnation
        self._say(f"{name} {workers[0].outcome}")
        follow(self._operator, workers, self._timeout_s, self._say)


class PlannedWork(Protocol):
    """What a command will do, as `plan` found it."""

    @property
    def nothing(self) -> bool: ...

    def lines(self) -> list[str]: ...


_P = TypeVar("_P", bound=PlannedWork)


class PlannedCommand(Protocol[_P]):
    """A command that says what it will do before it does it."""

    def plan(self) -> _P: ...

    def run(self, plan: _P) -> float: ...

    def left(self) -> str: ...


class CheckedCommand(PlannedCommand[_P], Protocol[_P]):
    """A command whose every refusal can be met before any of several begins."""

    def check(self) -> None:
        """Raise `CommandRefused` where it would be refused for what serves now."""


@dataclass(frozen=True)
class PlansOfModels:
    """What a command will do to each of several models."""

    plans: Mapping[str, PlannedWork]

    @property
    def nothing(self) -> bool:
        return all(plan.nothing for plan in self.plans.values())

    def lines(self) -> list[str]:
        return [f"{name}: {line}" for name, plan in self.plans.items() for line in plan.lines()]


class CommandOfModels(Generic[_P]):
    """A command on several models, one after the other, once none of them would refuse it."""

    def __init__(self, commands: Mapping[str, CheckedCommand[_P]]) -> None:
        self._commands = commands

    def plan(self) -> PlansOfModels:
        return PlansOfModels({name: command.plan() for name, command in self._commands.items()})

    def run(self, plan: PlansOfModels) -> float:
        """Do it; returns the seconds of all."""
        for command in self._commands.values():
            command.check()
        return self._run_each()

    def _run_each(self) -> float:
        seconds = 0.0
        for command in self._commands.values():
            if not (plan := command.plan()).nothing:
                seconds += command.run(plan)
        return seconds

    def left(self) -> str:
        return "; ".join(f"{name}: {command.left()}" for name, command in self._commands.items())


def say_of(model: str, line: str) -> None:
    """Print a line about one of several models."""
    print_line(f"{model}: {line}")


def carry_out(command: PlannedCommand[_P], nothing: str, *, dry_run: bool) -> int:
    """Say what a command will do, and do it unless this is a dry run. `nothing`: why there may be nothing to do."""
    plan = command.plan()
    for line in plan.lines():
        print_line(line)
    if plan.nothing:
        print_line(f"nothing to do: {nothing}")
    elif not dry_run:
        try:
            print_line(f"done after {command.run(plan):.1f} s")
        except KeyboardInterrupt:
            print_line(f"stopped; {command.left()}")
            raise
    return FINE
