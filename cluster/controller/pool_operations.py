"""What operators do to the pools: add, scale, restart and change workers, and drain and cordon workers and nodes.

Each operation changes the controller's table and returns the workers concerned; the controller carries it out by
grants, starts and kills. A worker leaves by drain always: nothing here ends one that serves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set

from twinpool.cluster.controller.controller_table import ControllerTable, occupant
from twinpool.cluster.controller.node_room import Occupant
from twinpool.cluster.controller.wanted_worker import WantedWorker, WorkerEvent, WorkerState, advance
from twinpool.cluster.controller.weights_changes import WeightsChanges
from twinpool.cluster.processes.restart_policy import RestartHistory
from twinpool.contracts.config.cluster_config import uneven
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import PAIR, Incarnation, Role, WorkerName
from twinpool.contracts.messages.pool_changes import (
    AddWorkers,
    CordonNode,
    DrainWorkers,
    LoadAdapter,
    OperatorChange,
    RestartWorker,
    ScalePools,
    SetRole,
    UncordonNode,
    UndrainWorkers,
    UnloadAdapter,
)
from twinpool.contracts.sampling_params import AdapterRef

MAX_WORKERS = 4096
"""The most rows of the table, those of workers that have left included."""
MAX_ADAPTERS = 1024
"""The most adapters that are served: routers are told all of them."""
ENOUGH = "its pool has enough workers"
"""Why a worker that was to start isn't started."""


class PoolOperations:
    """Operators' changes of one table. Every method raises `ConfigError`, having changed nothing, where it refuses."""

    def __init__(self, table: ControllerTable, weights: WeightsChanges) -> None:
        self._table, self._weights = table, weights

    # ------------------------------------------------------------ more and fewer workers

    def add(self, name: WorkerName, role: Role, node: str = "") -> None:
        """Add a worker, or bring back one that has left or is left dead; the next `tick` starts it.

        `node`: the one node that it is to run on; empty: any. Refused for a worker that is still wanted.
        """
        row = self._table.rows.get(name)
        if row is not None and row.wanted:
            raise ConfigError(f"there is already a worker {name}")
        self._check_bound([name])
        self._check_room([Occupant(name, role, only=node)])
        self._add(name, role, node)

    def _add(self, name: WorkerName, role: Role, node: str = "") -> None:
        """Add a worker that was checked."""
        table = self._table
        row = table.rows.get(name)
        if row is None:
            row = WantedWorker(name, role, Incarnation(0), RestartHistory(table.config), only=node)
            table.save(row)
            table.rows[name] = row
            table.changed(row)
        else:
            if row.role is not role:
                row.role, row.record = role, None
            row.only = node
            self._want(row)

    def add_some(self, role: Role, count: int, node: str = "") -> tuple[WorkerName, ...]:
        """Add `count` workers to a pool, under the lowest numbers that are free; returns their names."""
        if count < 1:
            raise ConfigError(f"at least 1 worker is added, got {count}")
        self._check_role(role)
        self._check_together(role, count)
        if node:
            self._check_place(node)
        names = self._free_names(role, count)
        self._check_bound(names)
        self._check_room([Occupant(name, role, only=node) for name in names])
        for name in names:
            self._add(name, role, node)
        return names

    def scale(self, counts: Mapping[Role, int], *, empty: bool = False) -> tuple[WorkerName, ...]:
        """Bring each pool to so many workers: start some, or have some drain and leave, those that serve last and the
        highest numbers first. Returns the workers that are started or told to leave. `empty`: a pool may be left
        without a worker."""
        for role, count in counts.items():
            self._check_role(role)
            if count < 0 or (count == 0 and not empty):
                raise ConfigError(f"{role} can't be scaled to {count}: each role needs a worker")
            if count > MAX_WORKERS:
                raise ConfigError(f"{role} can't be scaled to {count}: {MAX_WORKERS} workers are the most")
            self._check_together(role, count)
        pools = {role: self._staying(role) for role in counts}
        more = {
            role: self._free_names(role, count - len(pools[role]))
            for role, count in counts.items()
            if count > len(pools[role])
        }
        leave = {role: self._first_to_leave(pools[role], len(pools[role]) - count) for role, count in counts.items()}
        self._check_bound([name for names in more.values() for name in names])
        self._check_room(
            [Occupant(name, role) for role, names in more.items() for name in names],
            without=[row for rows in leave.values() for row in rows],
        )
        changed: list[WorkerName] = []
        for role in counts:
            for name in more.get(role, ()):
                self._add(name, role)
                changed.append(name)
            for row in leave[role]:
                self._send_away(row)
                changed.append(row.name)
        return tuple(changed)

    def _first_to_leave(self, staying: Sequence[WantedWorker], count: int) -> list[WantedWorker]:
        together = {row.name: set(self._table.sharers(row.name, row.role)) for row in staying}
        serve = {row.name: row.state is WorkerState.READY for row in staying}
        order = sorted(
            staying,
            key=lambda row: (
                all(serve.get(name, False) for name in together[row.name]),
                -max(map(_number, together[row.name])),
                -_number(row.name),
            ),
        )
        return order[: max(0, count)]

    def _check_together(self, role: Role, count: int) -> None:
        """Refuse a number of workers that leaves some without those that they share their experts with."""
        if refusal := uneven(role, count, self._table.room.together(role)):
            raise ConfigError(refusal)

    def more(self, role: Role, count: int) -> tuple[int, str]:
        """How many of `count` workers of a role more there is room for, and why not for all of them."""
        there = [occupant(row) for row in self._table.rows.values() if row.stays]
        return self._table.room.more(there, role, self._free_names(role, count))

    def give_up(self, name: WorkerName) -> None:
        """Take back the start of a worker that doesn't serve: it is not started again. Refused for one that serves."""
        row = self._row(name)
        if row.serves:
            raise ConfigError(f"{name} is {row.state}: it leaves by drain")
        self._send_away(row)

    def restart(self, name: WorkerName, keep: Iterable[Role] = ()) -> None:
        """Have a worker drain, leave and start again as its next incarnation; one that has left or is dead starts. So
        do those that it shares its experts with. `keep`: as for `drain`; routers have looked at the one worker."""
        named = self._row(name)
        group = self._table.sharers(named.name, named.role)
        rows = [self._table.rows[one] for one in group if one in self._table.rows]
        if len(rows) > 1:
            self._check_left(name, [row for row in rows if row.serves], set(keep))
        self._check_room([Occupant(row.name, row.role, only=row.only) for row in rows if not row.wanted])
        for row in rows:
            if row.state is WorkerState.STARTING:
                self._table.end_start(row, "an operator restarts it")
            elif row.serves:
                row.becomes = row.becomes or row.role
                row.drains = row.drains or row.state is WorkerState.READY
                self._table.saved(row)
            else:
                self._want(row)

    def change_role(self, name: WorkerName, role: Role, *, empty: bool = False) -> None:
        """Have a worker drain and come back in another role; it must be ready, and not the last that has its role or
        is to have it, unless `empty`. Routers have looked at that, each in a table that may be a moment old."""
        row = self._table.rows.get(name)
        if row is None or row.state is not WorkerState.READY:
            raise ConfigError(f"{name} is {row.state if row else 'unknown'}: only a ready worker can change its role")
        if Role.COLOCATED in (row.role, role):
            raise ConfigError(f"{name} is a {row.role} worker and can't become a {role} one: a colocated one has both")
        if row.role is role:
            raise ConfigError(f"{name} is a {role} worker already")
        if len(self._table.sharers(row.name, row.role)) > 1 or self._table.room.together(role) > 1:
            raise ConfigError(f"{name} can't become a {role} worker: workers that share their experts keep their role")
        if not empty:
            self._check_left(name, [row], {row.role})
        self._check_room([Occupant(name, role, only=row.only)], without=[row])
        row.becomes, row.drains = role, True
        self._table.saved(row)

    def make(self, change: OperatorChange) -> tuple[tuple[WorkerName, ...], str]:
        """Make an operator's change; returns the workers that it concerns, and what an operator has done in words,
        empty where none has. Raises `ConfigError` and `ValueError`."""
        match change:
            case SetRole():
                self.change_role(change.name, change.role, empty=change.empty)
                return (), f"an operator has {change.name} become a {change.role} worker"
            case DrainWorkers():
                return self.drain(change.target, change.keep), f"an operator drains {change.target}"
            case UndrainWorkers():
                return self.undrain(change.target), f"an operator has undrained {change.target}"
            case AddWorkers():
                workers = self.add_some(change.role, change.count, change.node)
                return workers, f"an operator has added {', '.join(workers)}" if change.by_operator else ""
            case ScalePools():
                sizes = ", ".join(f"{role} to {count}" for role, count in change.counts.items())
                return self.scale(change.counts, empty=change.empty), f"an operator has scaled {sizes}"
            case RestartWorker():
                self.restart(change.name, change.keep)
                return (), f"an operator restarts {change.name}"
            case CordonNode():
                return self.cordon(change.node), f"an operator has cordoned {change.node}"
            case UncordonNode():
                self.uncordon(change.node)
                return (), f"an operator has uncordoned {change.node}"
            case LoadAdapter():
                self.load_adapter(change.adapter, replace=change.replace)
                return (), f"the adapter {change.adapter.name} is served"
            case UnloadAdapter():
                self.unload_adapter(change.name)
                return (), f"the adapter {change.name} is served no more"
            case _:
                return (), self._weights.make(change)

    # ------------------------------------------------------------ adapters

    def load_adapter(self, adapter: AdapterRef, *, replace: bool = False) -> None:
        """Serve an adapter. Refused where another one has its name, unless it is to `replace` that, and where there are
        as many as there may be."""
        served = self._table.adapters
        before = served.get(adapter.name)
        if before is not None and before.digest != adapter.digest and not replace:
            raise ConfigError(f"another adapter is served as {adapter.name}: unload it first, or replace it")
        if before is None and len(served) >= MAX_ADAPTERS:
            raise ConfigError(f"{MAX_ADAPTERS} adapters are served already")
        self._table.save_adapters({**served, adapter.name: adapter})

    def unload_adapter(self, name: str) -> None:
        """Serve an adapter no more."""
        left = dict(self._table.adapters)
        if left.pop(name, None) is None:
            raise ConfigError(f"no adapter is served as {name[:80]!r}")
        self._table.save_adapters(left)

    # ------------------------------------------------------------ drains and cordons

    def drain(self, target: str, keep: Iterable[Role] = ()) -> tuple[WorkerName, ...]:
        """Have a worker leave, or cordon a node and have all its workers leave; returns the workers that are told.

        A worker that drains already isn't told again; a worker that is still starting on the node is started elsewhere,
        and is among those returned. `keep`: roles that mustn't be left without a worker. Routers have looked at that,
        as for a change of roles.
        """
        row = self._table.rows.get(WorkerName(target))
        leave = [row] if row is not None else list(self._table.on_node(self._node(target)))
        self._check_left(target, [row for row in leave if _is_told(row)], set(keep))
        elsewhere = self.cordon(target) if row is None else ()
        told = tuple(row.name for row in leave if self._tell_to_drain(row))
        return (*told, *elsewhere)

    def undrain(self, target: str) -> tuple[WorkerName, ...]:
        """Take back the drain of a worker, or of a node and its workers; returns the workers that are started again.

        A worker that still runs is no longer told to drain; the router undrains one that drains by now. Refused for a
        wanted worker that neither serves nor drains.
        """
        row = self._table.rows.get(WorkerName(target))
        if row is not None:
            if row.wanted and not row.serves:
                raise ConfigError(f"{target} is not draining; it is {row.state}")
            if others := [one.name for one in self._table.other_sharers(row) if one.leaves and one.becomes is not None]:
                raise ConfigError(
                    f"{target} restarts with {others[0]}, with which it shares its experts: wait for both"
                )
            return self._take_back([row])
        back = self._take_back(self._table.on_node(self._node(target)))
        self.uncordon(target)
        return back

    def cordon(self, target: str) -> tuple[WorkerName, ...]:
        """Place no worker on a node any more; those that serve there go on. Returns those that were starting there, and
        start elsewhere."""
        table = self._table
        table.nodes.cordon(self._node(target))
        table.save_cordons()
        return tuple(row.name for row in table.on_node(target) if table.end_start(row, "its node is cordoned"))

    def uncordon(self, target: str) -> None:
        """Let workers be placed on a node again."""
        table = self._table
        table.nodes.uncordon(self._node(target), table.every_node())
        for row in table.rows.values():
            if row.avoids and not row.node.host:  # It may wait for a place for as long as it must not be here.
                table.end_start(row, "a node was uncordoned")
        table.save_cordons()

    # ------------------------------------------------------------ inside

    def _row(self, name: str) -> WantedWorker:
        row = self._table.rows.get(WorkerName(name))
        if row is None:
            raise ConfigError(f"no worker is named {name!r}; workers: {', '.join(sorted(self._table.rows)) or 'none'}")
        return row

    def _node(self, name: str) -> str:
        if not self._table.is_node(name):
            raise ConfigError(f"no worker or node is named {name!r}; nodes: {self._table.known_nodes()}")
        return name

    def _check_left(self, target: str, leave: Sequence[WantedWorker], keep: Set[Role]) -> None:
        """Refuse that workers leave their roles, where one of the roles `keep` has no other worker that stays."""
        others = [row for row in self._table.rows.values() if row not in leave and row.stays]
        for role in sorted({row.role for row in leave} & keep - {row.becomes or row.role for row in others}):
            has = "is" if WorkerName(target) in self._table.rows else "has"
            raise ConfigError(f"{target} {has} the last {role} worker that stays; --force (force=true) has it leave")

    def _check_bound(self, names: Iterable[WorkerName]) -> None:
        """Refuse more rows than the table may have; `names`: workers that are to be added."""
        rows = self._table.rows
        new, room = sum(name not in rows for name in names), MAX_WORKERS - len(rows)
        if new > room:
            raise ConfigError(
                f"the table has {len(rows)} workers, those that have left included, and {MAX_WORKERS} at most: there "
                f"is room for {room} new names, not for {new}"
            )

    def _check_room(self, more: Sequence[Occupant], without: Sequence[WantedWorker] = ()) -> None:
        """Refuse workers that don't fit beside those that stay. `without`: workers whose place becomes free. The one
        check of all who add workers; who leaves may still be there, so a start may have to wait for that."""
        there = [
            occupant(row) for row in self._table.rows.values() if row.stays and not any(row is one for one in without)
        ]
        if more and (refusal := self._table.room.refusal(there, more)):
            raise ConfigError(refusal)

    def _staying(self, role: Role) -> list[WantedWorker]:
        """The workers of a role, or on their way to it, that are to go on."""
        return [row for row in self._table.rows.values() if row.stays and (row.becomes or row.role) is role]

    def _check_place(self, node: str) -> None:
        if not self._table.is_node(node):
            raise ConfigError(f"no node is named {node!r}; nodes: {self._table.known_nodes()}")
        if not self._table.nodes.free(node):
            raise ConfigError(f"node {node} is cordoned or takes no workers; uncordon it first")

    def _check_role(self, role: Role) -> None:
        """Refuse colocated workers beside two pools."""
        there = {row.role for row in self._table.rows.values()}
        if there and (role is Role.COLOCATED) != (Role.COLOCATED in there):
            pools = "colocated workers" if Role.COLOCATED in there else " and ".join(PAIR)
            raise ConfigError(f"this cluster has {pools}: it can't have {role} workers beside them")

    def _free_names(self, role: Role, count: int) -> tuple[WorkerName, ...]:
        """The lowest numbers of a role that no wanted worker has. Workers that have changed their role keep theirs."""
        taken = {row.name for row in self._table.rows.values() if row.wanted}
        most = count + self._table.room.together(role) * len(taken)
        numbers = (WorkerName(f"{role}-{number}") for number in range(most))
        free = (name for name in numbers if taken.isdisjoint(self._table.sharers(name, role)))
        return tuple(itertools.islice(free, count))

    def _send_away(self, row: WantedWorker) -> None:
        """Have a worker leave for good: by drain if it serves."""
        if row.serves:
            row.becomes, row.drains = None, True
            self._table.saved(row)
            return
        row.wanted, row.waits = False, ""
        if not self._table.end_start(row, ENOUGH):
            self._table.note(f"{row.name} isn't started: {ENOUGH}")
        if row.state is WorkerState.DEAD:  # Else alerts would tell of it for as long as the cluster lives.
            row.state = advance(row.state, WorkerEvent.UNWANTED)
            row.status = row.own_status()
        self._table.saved(row)

    def _tell_to_drain(self, row: WantedWorker) -> bool:
        """Have the next grant tell the worker to drain; returns whether it is ready and wasn't told before."""
        if not _is_told(row):
            return False
        row.drains = True
        self._table.saved(row)
        return True

    def _take_back(self, rows: Iterable[WantedWorker]) -> tuple[WorkerName, ...]:
        """Take back drains; returns the workers that had left or were left dead, and are started again."""
        back = []
        rows = list(rows)
        self._check_room(
            [Occupant(row.name, row.role, only=row.only) for row in rows if not row.stays],
        )
        for row in rows:
            if row.state is WorkerState.READY and row.drains:
                row.becomes = None  # The controller does so for a worker that drains by now.
            if row.wanted:
                row.drains = False
                self._table.saved(row)
            else:
                self._want(row)
                back.append(row.name)
        return tuple(back)

    def _want(self, row: WantedWorker) -> None:
        """Want a worker again that had left or was left dead, with a clean restart history."""
        if row.state is WorkerState.LEFT:
            row.state = advance(row.state, WorkerEvent.WANTED)
        row.wanted, row.drains, row.becomes = True, False, None
        row.restart_at = self._table.clock.now()
        row.restarts.forgive()
        row.status = row.own_status()
        self._table.saved(row)


def _is_told(row: WantedWorker) -> bool:
    """Whether a drain tells the worker anything new."""
    return row.state is WorkerState.READY and not row.drains


def _number(name: str) -> int:
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else 0
