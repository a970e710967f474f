"""Changes of what a whole cluster serves: other weights, caches that begin empty, pauses, and sleep.

Weights change in two phases. First every worker that serves reads the new ones beside those that it serves with, and
checks them; its heartbeats say so. One that can't ends the change, and so does time: then nothing was changed. Once all
have them, and of the same files, the ledger is written: from that moment on the cluster's weights are the new ones,
whoever dies. Then workers follow. Each that has others is told to drain, ends its requests with what it began them
with, leaves, and goes on in its process as its next incarnation, with the weights that lie ready; one that dies instead
starts with them. So a worker never computes with two versions, and what tells incarnations and fingerprints apart tells
versions apart: hand-overs, caches, tiers, streams.

A rolling change sends one worker away at a time, and waits until all are back. It doesn't wait for ever: once a worker
serves with the new weights, these can't be what keeps another one away, and who hasn't served for as long as a start
may take is gone on without. While none serves with them the change halts, and another one, the way back among them, may
take its place.

Nothing but the ledger's line says how far a change is, so a controller that was started again goes on with it: workers
that have other weights than the cluster's are brought to them at every tick. A flush is a change to the same weights,
and sleep a leave after which nothing starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from twinpool.cluster.controller.controller_table import ControllerTable
from twinpool.cluster.controller.wanted_worker import WantedWorker, WorkerState
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.cluster_view import ServedWeights
from twinpool.contracts.messages.leases import LeaseGrant
from twinpool.contracts.messages.pool_changes import (
    FlushCaches,
    PauseCluster,
    ServingChange,
    SleepCluster,
    UpdateWeights,
)
from twinpool.contracts.messages.stream_frames import WEIGHTS_SINCE
from twinpool.contracts.messages.worker_status import WorkerRecord
from twinpool.contracts.sampling_params import WeightsVersion

DIGEST_CHARS = 32
"""Characters of the digest that names weights which were given no name."""


IDLE_WAIT_S = 30.0
"""Seconds that requests have to end which come while the cluster falls asleep for want of them."""


class IdleWatch:
    """How long one table's workers have had nothing to do."""

    def __init__(self, table: ControllerTable) -> None:
        self._table = table
        self._busy_at = table.clock.now()
        """When a worker was last seen to have work, or the cluster not to be as it should, in seconds of the clock."""
        self._steps: dict[tuple[WorkerName, Incarnation], int] = {}
        """Steps that workers had made by the last look."""

    def over(self, now: float, *, settled: bool) -> bool:
        """Look at the workers; returns whether `cluster.sleep_after_s` has passed since they had something to do. What
        begins and ends between two heartbeats is seen by the steps that were made. `settled`: whether nothing is under
        way that a sleep would be in the way of."""
        steps = {
            (row.name, row.incarnation): row.status.steps for row in _serving(self._table) if row.status is not None
        }
        rows = [row for row in self._table.rows.values() if row.wanted]
        still = bool(rows) and all(_idle(row) for row in rows) and steps == self._steps
        self._steps = steps
        if not still or not settled:
            self._busy_at = now
        after_s = self._table.config.sleep_after_s
        return after_s > 0 and now >= self._busy_at + after_s


class WeightsChanges:
    """Changes of what one table's cluster serves."""

    def __init__(self, table: ControllerTable, wall: Callable[[], float]) -> None:
        """`wall`: seconds since 1970."""
        self._table, self._wall = table, wall
        self._prepare_by: float | None = None
        """When all workers must have read the pending weights, in seconds of the clock; None: not known yet."""
        self._unsettled = bool(table.served.weights.number)
        """Whether it has yet to be noted that all workers have the cluster's weights."""
        self._told: dict[tuple[WorkerName, Incarnation], float] = {}
        """When workers were told to leave for a change, in seconds of the clock."""
        self._away_since: dict[WorkerName, float] = {}
        """Since when wanted workers haven't served, in seconds of the clock."""
        self._idle = IdleWatch(table)

    # ------------------------------------------------------------ orders

    def make(self, change: ServingChange) -> str:
        """Make a change, or begin it; returns what an operator has done in words. Raises `ConfigError`, having changed
        nothing, where it refuses."""
        match change:
            case UpdateWeights():
                return self._begin(change)
            case FlushCaches():
                self._check_settled("flush caches")
                fresh = replace(self._served.weights, number=_next(self._served))
                self._change_to(fresh, tried=fresh.number, rolling=False, wait_s=change.wait_s, failed="")
                return "an operator flushes all caches"
            case PauseCluster():
                self._save(paused=change.paused)
                return f"an operator has {'paused' if change.paused else 'resumed'} the cluster"
            case SleepCluster():
                return self._sleep(change)

    def _begin(self, change: UpdateWeights) -> str:
        self._check_settled("change weights", rolling=True)
        if not change.path and not self._served.weights.path:
            raise ConfigError("the checkpoint's weights are what is served")
        if change.version and change.version == self._served.weights.version:
            raise ConfigError(f"version {change.version} is what is served: a version names one set of weights")
        if change.onto not in (None, self._served.weights.number):
            raise ConfigError("the weights have changed since a part of them was taken into these: push them again")
        serving = _serving(self._table)
        if not serving:
            raise ConfigError("no worker serves that could read the weights: wait until some do")
        for row in serving:
            if row.record is not None and row.record.stream and row.record.stream_protocol < WEIGHTS_SINCE:
                raise ConfigError(f"{row.name} can't change its weights by its build: upgrade it first")
        pending = WeightsVersion(_next(self._served), change.version, change.path)
        self._prepare_by = None
        asked = {"pending_rolling": change.rolling, "pending_wait_s": change.wait_s}
        self._save(pending=pending, tried=pending.number, failed="", **asked)
        return f"an operator changes the weights to {_source(change.path)}"

    def _sleep(self, change: SleepCluster) -> str:
        if change.demand and not (self._served.asleep and self._served.by_demand):
            return ""  # Another router was first, or an operator has put it to sleep.
        if change.level > 2:
            raise ConfigError(f"the levels of sleep are 1 and 2, and 0 wakes; got {change.level}")
        if change.level and change.level != self._served.asleep:
            self._check_settled("sleep")
        wait_s = change.wait_s if change.level else self._served.wait_s
        self._save(asleep=change.level, wait_s=wait_s, by_demand=False)
        if change.level:
            return f"an operator has put the cluster to sleep, level {change.level}"
        for row in _serving(self._table):
            if row.changes and not row.leaves and not self.is_behind(row):  # It was to leave once others had.
                row.changes = False
                self._table.saved(row)
        return "a request has woken the cluster" if change.demand else "it was woken"

    def _check_settled(self, what: str, *, rolling: bool = False) -> None:
        """Refuse a change while another one is under way. `rolling`: whether it may take the place of a rolling one."""
        served = self._served
        if served.pending is not None:
            source = _source(served.pending.path)
            raise ConfigError(f"can't {what}: a change to {source} is being prepared; wait for its end")
        if served.asleep:
            raise ConfigError(f"can't {what}: the cluster sleeps; wake it first (twinpool wake)")
        if (behind := self._behind()) and not (rolling and served.rolling):
            names = ", ".join(sorted(row.name for row in behind))
            raise ConfigError(
                f"can't {what}: the last change isn't through, {names} has still to follow; wait for its end, or if "
                "it is rolling and goes no further, change to other weights, or back (twinpool weights revert)"
            )

    # ------------------------------------------------------------ the passing of time

    def tick(self) -> None:
        """Go on with what is under way."""
        now = self._table.clock.now()
        away = [row.name for row in self._table.rows.values() if row.wanted and not row.serves]
        self._away_since = {name: self._away_since.get(name, now) for name in away}
        if self._served.pending is not None:
            self._tend(self._served.pending, now)
        settled = self._served.pending is None and not self._served.paused and not self._behind()
        if not self._served.asleep and self._idle.over(now, settled=settled):
            self._save(asleep=self._table.config.sleep_level, wait_s=IDLE_WAIT_S, by_demand=True)
            after_s = self._table.config.sleep_after_s
            self._table.note(f"no request for {after_s:g} s (cluster.sleep_after_s): it sleeps until one comes")
        if self._served.asleep:
            self._tell_all(_serving(self._table), now)
        else:
            self._follow(now)
        current = {(row.name, row.incarnation) for row in self._table.rows.values() if row.changes}
        self._told = {key: at for key, at in self._told.items() if key in current}

    def _tend(self, pending: WeightsVersion, now: float) -> None:
        """Look how far workers are with reading the pending weights: change to them, or give them up."""
        if self._prepare_by is None:
            self._prepare_by = now + self._table.config.start_timeout_s
        serving = _serving(self._table)
        ready = [row.status for row in serving if row.status is not None and row.status.prepared == pending.number]
        if refused := next((one for one in ready if one.unprepared), None):
            return self._give_up(f"{refused.name} can't take them: {refused.unprepared}")
        lacking = sorted({row.name for row in serving} - {one.name for one in ready})
        if ready and not lacking:
            digests = {one.prepared_digest: one.name for one in ready}
            if len(digests) > 1:
                return self._give_up(f"{' and '.join(sorted(digests.values()))} have read different files")
            digest = next(iter(digests))
            version = pending.version or digest[:DIGEST_CHARS]
            asked = {"rolling": self._served.pending_rolling, "wait_s": self._served.pending_wait_s}
            self._change_to(replace(pending, version=version, digest=digest), pending=None, **asked)
            return self._table.note(f"the weights are {version} now; workers change to them")
        if now >= self._prepare_by:
            self._give_up(
                f"{', '.join(lacking) or 'no worker that serves'} has not read them within "
                f"{self._table.config.start_timeout_s:g} s (cluster.start_timeout_s)"
            )
        return None

    def _give_up(self, reason: str) -> None:
        self._save(pending=None, failed=reason)
        self._table.note(f"the weights stay as they are: {reason}")

    def _follow(self, now: float) -> None:
        """Have workers with other weights than the cluster's change to them: all, or when rolling the next one."""
        behind = self._behind()
        if self._unsettled and not behind:
            self._unsettled = False
            self._save(since=self._wall())
        if self._served.pending is not None:
            return None
        if not self._served.rolling:
            return self._tell_all(behind, now)
        # Where some serve with the new weights, it isn't these that keep another one away.
        tried = any(not self.is_behind(row) for row in _serving(self._table))
        since = now - self._table.config.start_timeout_s if tried else float("-inf")
        missed = {name for name, away_since in self._away_since.items() if away_since <= since}
        rows = self._table.rows.values()
        under_way = [row for row in rows if row.wanted and not _settled(row) and row.name not in missed]
        if behind and not under_way:
            left = [row.role for row in behind]
            self._tell(max(behind, key=lambda row: (left.count(row.role), row.role is Role.PREFILL)), now)
        for row in behind:
            if row.changes or (row.leaves and row.becomes is row.role):  # An earlier controller has told it.
                self._tell(row, now)
        return None

    def _tell_all(self, rows: Sequence[WantedWorker], now: float) -> None:
        """Have these workers leave; routers send them nothing new at once. Decode workers drain when no prefill worker
        of these serves any more: one that drains refuses what a prefill worker may have begun already, and whose first
        token may have been told."""
        prefill = any(row.role is Role.PREFILL for row in rows)
        for row in rows:
            if row.role is Role.DECODE and prefill:
                self._told.setdefault((row.name, row.incarnation), now)
                if not row.changes:
                    row.changes = True
                    self._table.saved(row)
            else:
                self._tell(row, now)

    def _tell(self, row: WantedWorker, now: float) -> None:
        """Have a worker that serves drain, and go on as its next incarnation. One that leaves already goes where it was
        sent: to another role, or for good."""
        self._told.setdefault((row.name, row.incarnation), now)
        if row.changes and row.leaves:
            return
        row.changes = True
        if not row.leaves:
            row.becomes, row.drains = row.becomes or row.role, True
        self._table.saved(row)

    # ------------------------------------------------------------ what workers and routers are told

    def granted(self, row: WantedWorker, grant: LeaseGrant) -> LeaseGrant:
        """The grant with what is asked of its worker."""
        served, now = self._served, self._table.clock.now()
        read = _files(row.record) == (served.weights.path, served.weights.digest)
        prepare = served.pending if served.pending or read or not self.is_behind(row) else served.weights
        told = self._told.get((row.name, row.incarnation))
        hurry = row.changes and told is not None and now >= told + served.wait_s
        return replace(grant, prepare=prepare, hurry=hurry, paused=served.paused and not row.changes)

    def told(self) -> ServedWeights:
        """What routers are told."""
        return replace(self._served, behind=len(self._behind()))

    @property
    def of_a_start(self) -> WeightsVersion | None:
        """The weights that a worker which starts is to have; None: the checkpoint's."""
        weights = self._served.weights
        return weights if weights.number else None

    def keeps_process(self, row: WantedWorker) -> bool:
        """Whether the process of a worker that leaves is to go on with what it keeps in memory."""
        return self._served.asleep == 1 if self._served.asleep else self.is_behind(row)

    def is_behind(self, row: WantedWorker) -> bool:
        """Whether a worker has registered with other weights than the cluster's."""
        return row.record is not None and row.record.weights_number != self._served.weights.number

    # ------------------------------------------------------------ inside

    @property
    def _served(self) -> ServedWeights:
        return self._table.served

    def _change_to(self, weights: WeightsVersion, **changes: object) -> None:
        self._save(weights=weights, since=self._wall(), **changes)
        self._unsettled = True

    def _save(self, **changes: object) -> None:
        self._table.save_served(replace(self._served, **changes))

    def _behind(self) -> list[WantedWorker]:
        return [row for row in _serving(self._table) if self.is_behind(row)]


def _next(served: ServedWeights) -> int:
    """The number of the next change: no other, made or given up, has had it."""
    return max(served.tried, served.weights.number) + 1


def _serving(table: ControllerTable) -> list[WantedWorker]:
    return [row for row in table.rows.values() if row.serves]


def _files(record: WorkerRecord | None) -> tuple[str, str]:
    """The folder that a worker's weights are from, and the digest of its files; both empty: the checkpoint's."""
    weights = None if record is None else record.weights
    return ("", "") if weights is None else (weights.path, weights.digest)


def _source(path: str) -> str:
    """The place that weights come from, in words."""
    return path or "the checkpoint"


def _idle(row: WantedWorker) -> bool:
    """Whether a worker serves and has nothing to do, as its latest heartbeat says."""
    status = row.status
    return _settled(row) and status is not None and not (status.running or status.waiting or status.outgoing)


def _settled(row: WantedWorker) -> bool:
    """Whether a worker serves, and isn't about to leave."""
    return row.state is WorkerState.READY and not row.drains
