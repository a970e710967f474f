"""The autoscaler: brings the pools to what the load needs, through the operations that operators have too.

What is decided is in `cluster.autoscaling`; here the table becomes their inputs, and their decisions become operations.
It starts workers, has them leave by drain (which migrates what runs), and has them change their role; it ends none.

- *Operators come first.* After one has added, scaled, drained, undrained a worker or changed its role, both pools are
  left alone for `autoscaling.hold_s`; then the autoscaler goes on from the sizes that there are. Cordons and drains of
  nodes don't hold it: what leaves a node may be started elsewhere, and nothing on the node.
- *A start that fails ends nothing.* It is taken back, and the pool doesn't grow for a while, longer each time. A worker
  that was to change its role comes back in its old one. A start without a place is given up after
  `autoscaling.start_wait_s`, or as soon as it isn't needed any more.
- *It survives its controller.* Which starts and drains are its own, and that an operator holds it, is in the ledger;
  the load is measured anew, so that nobody leaves before a whole `shrink_window_s` was observed.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from twinpool.cluster.autoscaling.load_window import LatencyTotals, LoadWindow, PoolState, WorkerLoad
from twinpool.cluster.autoscaling.pool_damping import (
    CancelStarts,
    ChangeRole,
    GrowPool,
    ShrinkPool,
    SizingChange,
    SizingRules,
    whole_groups,
)
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.wanted_worker import WantedWorker, WorkerState
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import PAIR, Role, WorkerName
from twinpool.contracts.messages.router_report import (
    AutoscalerView,
    LatencyCounts,
    LatencyTarget,
    PoolSizing,
    SizingDecision,
)
from twinpool.contracts.outside_data import read_json

DECISIONS_KEPT = 16
COUNTERS = ("grown", "shrunk", "role_changes", "starts_failed", "starts_given_up", "holds")


@dataclass(slots=True)
class OwnStart:
    """A start that the autoscaler has ordered and that hasn't succeeded yet."""

    was: Role | None
    """The role that the worker had before; None for one more worker."""
    since: float
    deaths: int


class Autoscaler:
    """The autoscaler of one controller; on the controller's loop."""

    def __init__(self, core: Controller, clock: Clock, config: Config) -> None:
        self._core, self._table, self._clock = core, core.table, clock
        self._config = config.autoscaling
        self._window = LoadWindow(self._config.window_s)
        self._totals = LatencyTotals()
        self._together = config.dp_for
        """How many workers of a role share their experts."""
        self._rules = SizingRules(self._config, config.cache_for(Role.DECODE).page_tokens, self._together)
        self._next = clock.now()
        self._starts: dict[WorkerName, OwnStart] = {}
        self._sent: set[WorkerName] = set()
        """Workers that it has told to leave and that haven't left yet."""
        self._held_until = -1.0
        self._decisions: deque[tuple[float, str]] = deque(maxlen=DECISIONS_KEPT)
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._no_room: set[Role] = set()
        """Pools of which it was said that there is no room for all that they need."""
        self._pause = ""
        """Why nothing is decided; empty while something may be."""
        self._take_up()
        self._gone = {row.name for row in self._table.rows.values() if self._leaves(row)}
        """Workers that leave or have left, by which those that begin to are seen."""

    def _take_up(self) -> None:
        """Go on from what an earlier controller's autoscaler has kept. Raises `ConfigError` where it can't be read."""
        if not self._table.autoscaler:
            return
        now = self._clock.now()
        try:
            kept = read_json(self._table.autoscaler)
            for name, was in kept["starts"].items():
                self._starts[WorkerName(name)] = OwnStart(Role(was) if was else None, now, 0)
            self._sent = {WorkerName(name) for name in kept["sent"]}
            if kept["held"]:
                self._held_until = now + self._config.hold_s
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"the ledger holds an autoscaler that this version can't read: {error!r}") from None

    def _keep(self) -> None:
        kept: dict[str, Any] = {
            "starts": {name: start.was for name, start in self._starts.items()},
            "sent": sorted(self._sent),
            "held": self._clock.now() < self._held_until,
        }
        self._table.save_autoscaler(json.dumps(kept))

    # ------------------------------------------------------------ what it hears

    def report(self, router: str, counts: LatencyCounts) -> None:
        """Take in what a router has counted since its start."""
        self._totals.report(router, counts)

    def hold(self, what: str) -> None:
        """Leave both pools alone for `hold_s`: an operator has changed one. `what`: how, in words."""
        now = self._clock.now()
        self._held_until = now + self._config.hold_s
        self._counts["holds"] += 1
        for role in PAIR:
            self._rules.pools[role].changed(now)
        # The operator takes over: what was begun goes on, and is no longer the autoscaler's to take back.
        self._starts.clear()
        self._gone = {row.name for row in self._table.rows.values() if self._leaves(row)}
        self._decide(f"leaves the pools alone for {self._config.hold_s:g} s: {what}")
        self._keep()

    # ------------------------------------------------------------ the passing of time

    def tick(self) -> None:
        """Do what is due; to be called about every 100 ms. Raises as the ledger does."""
        now = self._clock.now()
        self._note_drains()
        if now < self._next:
            return
        self._next = now + self._config.period_s
        self._pause = self._unfit()
        if self._pause:
            return
        self._settle_starts(now)
        pools = {role: self._pool(role) for role in PAIR}
        load = self._window.take(now, [self._load(row) for row in self._ready()], self._totals.total)
        room = {role: self._room(role) for role in PAIR}
        fits = {role: fit for role, (fit, why) in room.items() if why}
        for change in self._rules.decide(now, pools, load, held=now < self._held_until, fits=fits):
            self._apply(change, now)
        self._say_no_room({role: why for role, (_, why) in room.items() if why})
        self._keep()

    def _room(self, role: Role) -> tuple[int, str]:
        """How many workers more of a role there is room for, of as many as it grows by at a time, and why not for all
        of them."""
        size = self._together(role)
        return self._core.pools.more(role, whole_groups(max(size, self._config.grow_step), size))

    def _say_no_room(self, short: dict[Role, str]) -> None:
        """Have it seen, once, where a pool needs workers that there is no room for. `short`: the pools that can't grow
        by a whole step, each with why."""
        self._no_room &= short.keys()
        for role in self._rules.unfit.keys() - self._no_room:
            self._decide(f"{role}: it needs more ({self._rules.needs[role].why}), and {short[role]}")
            self._no_room.add(role)

    def _unfit(self) -> str:
        """Why nothing can be decided now; empty where something can."""
        if not self._core.can_start:
            return "the cluster ends" if self._core.shutting_down else "nobody is there who starts workers"
        silent = [row.name for row in self._ready() if row.status is None or not row.status.pages_total]
        return f"{', '.join(silent[:4])} hasn't told its load yet" if silent else ""

    def _ready(self) -> list[WantedWorker]:
        """Workers that serve and are to go on."""
        ready = WorkerState.READY
        return [r for r in self._table.rows.values() if r.state is ready and not r.drains and r.role in PAIR]

    def _load(self, row: WantedWorker) -> WorkerLoad:
        status = row.status
        assert status is not None, "those that haven't told their load are waited for"
        counters = status.counters
        retracted = counters.get("retracted", 0.0)
        return WorkerLoad(
            row.name,
            row.incarnation,
            row.role,
            row.counters_at,
            status.running,
            status.pages_total,
            status.pages_free,
            status.prompt_tokens,
            computed=counters.get("prompt_tokens_computed", 0.0),
            generated=counters.get("tokens_generated", 0.0),
            compute_rate=counters.get("compute_tokens_per_s", 0.0),
            retractions=counters.get("retractions", 0.0),
            retracted=retracted,
            ungranted=status.ungranted,
            granted=max(0, status.waiting - status.ungranted - round(retracted)),
        )

    def _pool(self, role: Role) -> PoolState:
        rows = self._table.rows.values()
        own = [row for row in rows if row.role is role and row.becomes in (None, role) and row.wanted]
        coming = [row for row in rows if row.becomes is role and row.role is not role]
        restarting = [row for row in own if row.serves and row.becomes is role]
        starting = [row for row in own if row.state is WorkerState.STARTING]
        queued = [row for row in own if row.waits_its_turn]
        return PoolState(
            role,
            ready=sum(row.state is WorkerState.READY and not row.drains for row in own),
            starting=sum(not row.waits for row in starting) + len(coming) + len(restarting) + len(queued),
            unplaced=sum(row.waits_for_place for row in own),
            dead=sum(row.state is WorkerState.DEAD for row in own if not (row.waits_for_place or row.waits_its_turn)),
            leaving=sum(row.role is role and row.serves and (row.drains or self._leaves(row)) for row in rows),
        )

    @staticmethod
    def _leaves(row: WantedWorker) -> bool:
        return row.state in (WorkerState.DRAINING, WorkerState.LEFT) or (row.drains and row.serves)

    def _note_drains(self) -> None:
        """See workers begin to leave that the autoscaler hasn't told to: an operator, or who ends their processes, has.

        One that leaves because its node is drained holds nothing up, and neither does one that only starts again.
        """
        rows = self._table.rows
        gone = {row.name for row in rows.values() if self._leaves(row)}
        new, self._gone = gone - self._gone, gone
        for name in sorted(new):
            row = rows[name]
            if row.becomes is None and name not in self._sent and not self._core.table.cordoned(row):
                self.hold(f"{name} was drained")
        if left := {name for name in self._sent if name not in rows or not rows[name].serves}:
            self._sent -= left
            self._keep()

    def _settle_starts(self, now: float) -> None:
        """See which of its own starts have succeeded, failed, or waited for too long."""
        for name, start in list(self._starts.items()):
            if name not in self._starts:  # It was given up with one that it was to share its experts with.
                continue
            row = self._table.rows.get(name)
            if row is None or not row.wanted:
                self._starts.pop(name)
                if row is not None and row.state is WorkerState.DEAD:
                    self._failed(row, start, now, f"failed ({row.last_reason})")
            elif row.becomes is not None:
                start.since = now  # It drains yet.
            elif row.state is WorkerState.READY:
                self._starts.pop(name)
                self._rules.pools[row.role].started()
            elif row.restarts.deaths > start.deaths:
                self._starts.pop(name)
                self._failed(row, start, now, f"failed ({row.last_reason})")
            elif row.waits_its_turn:
                start.since = now
            elif _is_placeless(row) and now >= start.since + self._config.start_wait_s:
                self._starts.pop(name)
                self._counts["starts_given_up"] += 1
                self._failed(row, start, now, f"found no place within {self._config.start_wait_s:g} s")

    def _failed(self, row: WantedWorker, start: OwnStart, now: float, why: str) -> None:
        """Take a start back, and let the pool rest."""
        role, back = row.role, ""
        pause = self._rules.pools[role].failed(now)
        self._counts["starts_failed"] += 1
        for one in (row, *self._table.other_sharers(row)):  # None of them serves without it.
            self._starts.pop(one.name, None)
            if one.wanted and one.serves:
                self._sent.add(one.name)
                self._core.pools.drain(one.name)
            elif one.wanted:
                self._give_up(one.name)
        if start.was is not None and start.was is not role:
            back = self._bring_back(row.name, start.was)
        self._decide(f"{role}: the start of {row.name} {why}{back}; it does not grow for {pause:g} s")

    def _bring_back(self, name: WorkerName, role: Role) -> str:
        """Have a worker whose change of role came to nothing back in the role that it had; returns that in words."""
        try:
            self._core.pools.add(name, role)
        except ConfigError as error:
            return f"; it doesn't come back for {role}: {error}"
        return f"; it comes back for {role}"

    def _give_up(self, name: WorkerName) -> None:
        """Take back the start of a worker; that it is gone then is no operator's drain."""
        self._core.pools.give_up(name)
        self._gone.add(name)

    # ------------------------------------------------------------ what it does

    def _apply(self, change: SizingChange, now: float) -> None:
        """Carry out one decision; where the controller refuses it, that is shown."""
        try:
            match change:
                case GrowPool():
                    self._grow(change, now)
                case ShrinkPool():
                    self._shrink(change)
                case CancelStarts():
                    self._cancel(change)
                case ChangeRole():
                    self._change_role(change, now)
        except ConfigError as error:
            self._decide(f"{change.role}: not changed: {error}")

    def _grow(self, change: GrowPool, now: float) -> None:
        before = self._size(change.role)
        names = self._core.pools.add_some(change.role, change.count)
        for name in names:
            self._starts[name] = OwnStart(None, now, self._table.rows[name].restarts.deaths)
        self._counts["grown"] += len(names)
        self._decide(f"{change.role} {before} -> {before + len(names)} ({', '.join(names)} starts): {change.why}")

    def _shrink(self, change: ShrinkPool) -> None:
        before = self._size(change.role)
        names = self._core.pools.scale({change.role: before - change.count})
        self._sent |= {name for name in names if self._table.rows[name].serves}
        self._gone |= self._sent
        self._counts["shrunk"] += len(names)
        self._decide(f"{change.role} {before} -> {before - len(names)} ({', '.join(names)} drains): {change.why}")

    def _cancel(self, change: CancelStarts) -> None:
        rows = self._table.rows.values()
        waiting = {
            row.name for row in rows if _is_placeless(row) and row.role is change.role and row.name in self._starts
        }
        groups = {self._table.sharers(name, change.role) for name in waiting}
        whole = sorted((group for group in groups if waiting.issuperset(group)), reverse=True)
        for name in [name for group in whole for name in group][: change.count]:
            start = self._starts.pop(name)
            self._give_up(name)
            back = ""
            if start.was is not None and start.was is not change.role:
                back = self._bring_back(name, start.was)
            self._counts["starts_given_up"] += 1
            self._decide(f"{change.role}: the start of {name} is given up{back}: {change.why}")

    def _change_role(self, change: ChangeRole, now: float) -> None:
        """Have the least busy worker of the other pool change."""
        others = [row for row in self._ready() if row.role is not change.role and row.becomes is None]
        if not others:
            return
        row = min(others, key=_work)
        was = row.role
        self._core.pools.change_role(row.name, change.role)  # First: where it is refused nothing else has changed.
        rows = self._table.rows
        waiting = sorted(name for name in self._starts if (one := rows.get(name)) and _is_placeless(one))
        for name in [name for name in waiting if rows[name].role is change.role][-1:]:
            self._starts.pop(name)  # It would take the place that becomes free.
            self._give_up(name)
        self._starts[row.name] = OwnStart(was, now, row.restarts.deaths)
        self._counts["role_changes"] += 1
        self._decide(f"{row.name} changes from {was} to {change.role}: {change.why}")

    def _size(self, role: Role) -> int:
        return sum(row.stays and (row.becomes or row.role) is role for row in self._table.rows.values())

    def _decide(self, text: str) -> None:
        """Have a decision seen: in the log, by the operator, and in the status."""
        self._decisions.appendleft((self._clock.now(), text))
        self._table.note(f"autoscaler: {text}")

    # ------------------------------------------------------------ what it shows

    @property
    def targets(self) -> tuple[LatencyTarget, ...]:
        """What it sizes the pools for."""
        share = self._config.attainment
        return (
            LatencyTarget("ttft", self._config.ttft_target_s, share, "autoscaling.ttft_target_s"),
            LatencyTarget("itl", self._config.itl_target_s, share, "autoscaling.itl_target_s"),
        )

    def view(self) -> AutoscalerView:
        now = self._clock.now()
        return AutoscalerView(
            pools=tuple(self._sizing(role, now) for role in PAIR),
            decisions=tuple(SizingDecision(now - at, text) for at, text in self._decisions),
            held_s=max(0.0, self._held_until - now),
            counters=dict(self._counts),
        )

    def _sizing(self, role: Role, now: float) -> PoolSizing:
        pool, need, damping = self._pool(role), self._rules.needs.get(role), self._rules.pools[role]
        why = self._pause or (need.why if need is not None else "nothing was measured yet")
        if damping.backs_off(now):
            why += "; a start has failed, it does not grow yet"
        if role in self._rules.unfit and not self._pause:
            why += f"; there is no room for more: {self._room(role)[1]}"
        workers = need.workers if need is not None and not self._pause else -1.0
        return PoolSizing(role, pool.ready, pool.wanted, damping.least, damping.most, workers, why)


def _is_placeless(row: WantedWorker) -> bool:
    """Whether a worker that is to start has no node yet."""
    return row.unplaced or row.waits_for_place


def _work(row: WantedWorker) -> tuple[int, int, str]:
    """What a worker has to do, by which the least busy one is found."""
    status = row.status
    return (status.prompt_tokens, status.running + status.waiting, row.name) if status else (0, 0, row.name)
