"""The workers of a table in arrays, so that a choice among a thousand costs little more than one among ten.

A worker's row is made of its entry, and made anew before it is read when the entry has changed since: each assignment
to an attribute of an entry marks its row (`WorkerEntry.__setattr__`), and who changes what an entry only refers to, its
breaker or its prompts, says so (`WorkerEntry.touch`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from twinpool.contracts.ids import Role
from twinpool.router.state.circuit_breaker import CircuitState

if TYPE_CHECKING:
    from twinpool.router.state.worker_table import WorkerEntry, WorkerKey

FEW_ROWS = 16
"""Rows up to which one is entered after the other: arrays of so few cost more."""
UNKNOWN_ROOM = np.iinfo(np.int64).max
"""The headroom of a worker that has said nothing of its pages."""
_ROLES = {role: number for number, role in enumerate(Role)}
_ROW = np.dtype(
    [
        ("role", "i1"),
        ("serves", "?"),
        ("closed", "?"),
        ("handover", "i4"),
        ("positions", "i8"),
        ("refuses_until", "f8"),
        ("load", "i8"),
        ("whole_load", "i8"),
        ("turn", "i8"),
        ("headroom", "i8"),
        ("first_tokens", "i8"),
        ("worked_from", "f8"),
    ]
)


class WorkerColumns:
    """A row a worker, in the order of the table."""

    def __init__(self, entries: Iterable[WorkerEntry]) -> None:
        self.entries = list(entries)
        self.keys: list[WorkerKey] = [entry.key for entry in self.entries]
        self._stale = set(range(len(self.entries)))
        self._handovers: dict[str, int] = {}
        self._columns: dict[str, NDArray[Any]] = {
            name: np.zeros(len(self.entries), _ROW[name]) for name in _ROW.names or ()
        }
        for at, entry in enumerate(self.entries):
            entry.marks = (self._stale, at)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The column of a name, up to date: (workers,)."""
        if self._stale:
            self.follow()
        return self._columns[name]

    def follow(self) -> None:
        """Bring all columns up to date."""
        if not self._stale:
            return
        at = list(self._stale)
        self._stale.clear()
        if len(at) <= FEW_ROWS:
            for one in at:
                for column, value in zip(self._columns.values(), self._row(self.entries[one]), strict=True):
                    column[one] = value
            return
        rows = [self._row(self.entries[one]) for one in at]
        for name, values in zip(self._columns, zip(*rows, strict=True), strict=True):
            self._columns[name][at] = values

    def _row(self, entry: WorkerEntry) -> tuple[Any, ...]:
        headroom = entry.headroom
        return (
            _ROLES[entry.record.role],
            entry.linked and entry.status.state == "ready",
            entry.breaker.state is CircuitState.CLOSED,
            self._handovers.setdefault(entry.handover, len(self._handovers)),
            entry.record.fits.max_positions,
            entry.refuses_until,
            entry.load,
            entry.load + entry.others,
            entry.turn,
            UNKNOWN_ROOM if headroom is None else headroom,
            *entry.prompts.first_worked,
        )

    def able(self, role: Role, need: int, now: float) -> AbleWorkers:
        """The workers of `role` that could take a request of `need` positions now: breakers that are open admit a trial
        where no other worker can take it."""
        fitting = self["serves"] & (self["role"] == _ROLES[role])
        fitting &= (self["positions"] >= need) & (self["refuses_until"] <= now)
        closed = fitting & self["closed"]
        at = np.flatnonzero(closed)
        open_at = np.flatnonzero(fitting & ~closed).tolist()
        if open_at:
            trials = [one for one in open_at if self.entries[one].breaker.admits(now)]
            if not (len(at) or trials):
                trials = [one for one in open_at if self.entries[one].breaker.admits(now, needed=True)]
            at = np.sort(np.append(at, np.array(trials, np.intp)))
        return AbleWorkers(self, at)

    def count(self, role: Role) -> int:
        """How many workers of `role` there are, whatever their state."""
        return int(np.count_nonzero(self["role"] == _ROLES[role]))

    def refusals(self, role: Role, need: int, now: float) -> dict[str, list[int]]:
        """Why workers of `role` can't take a request of `need` positions now, with their places in the table; those
        behind an open breaker may be there although it admits a trial."""
        of_role, serves = self["role"] == _ROLES[role], self["serves"]
        small, refuses = self["positions"] < need, self["refuses_until"] > now
        reasons = {
            "not ready, or not linked": ~serves,
            f"too small for {need} positions": serves & small,
            "drains: it has just refused a request": serves & ~small & refuses,
            "its circuit breaker is open": serves & ~small & ~refuses & ~self["closed"],
        }
        return {reason: np.flatnonzero(of_role & rows).tolist() for reason, rows in reasons.items()}

    def codes(self, classes: Container[str]) -> list[int]:
        """The numbers of hand-over classes in the column `handover`."""
        return [code for name, code in self._handovers.items() if name in classes]

    @property
    def handovers(self) -> list[str]:
        """The names of all hand-over classes that were met, by number."""
        return list(self._handovers)


class AbleWorkers(Sequence["WorkerEntry"]):
    """Some workers of a table: a sequence of entries, of which `column` gives what they have as arrays."""

    def __init__(self, columns: WorkerColumns, at: NDArray[np.intp]) -> None:
        """`at`: their places in the table, (workers,)."""
        self.columns, self.at = columns, at

    @classmethod
    def of(cls, entries: Sequence[WorkerEntry]) -> AbleWorkers:
        """These entries, of whatever tables."""
        if isinstance(entries, AbleWorkers):
            return entries
        columns = WorkerColumns(())
        columns.entries, columns.keys = list(entries), [entry.key for entry in entries]
        columns._columns = {name: np.zeros(len(entries), column.dtype) for name, column in columns._columns.items()}
        columns._stale.update(range(len(entries)))
        return cls(columns, np.arange(len(entries)))

    def __len__(self) -> int:
        return len(self.at)

    def __bool__(self) -> bool:
        return len(self.at) > 0

    @overload
    def __getitem__(self, at: int) -> WorkerEntry: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[WorkerEntry]: ...
    def __getitem__(self, at: int | slice) -> WorkerEntry | Sequence[WorkerEntry]:
        if isinstance(at, slice):
            return AbleWorkers(self.columns, self.at[at])
        return self.columns.entries[int(self.at[at])]

    def __iter__(self) -> Iterator[WorkerEntry]:
        entries = self.columns.entries
        return (entries[at] for at in self.at.tolist())

    def column(self, name: str) -> NDArray[Any]:
        """What these workers have in the column `name`: (workers,)."""
        found: NDArray[Any] = self.columns[name].take(self.at)
        return found

    def classes(self) -> set[str]:
        """The hand-over classes of these workers."""
        self.columns.follow()
        names = self.columns.handovers
        if len(names) == 1 and len(self):
            return set(names)
        return {names[code] for code in np.unique(self.column("handover")).tolist()}

    def of_class(self, classes: Container[str]) -> AbleWorkers:
        """Those of the hand-over classes `classes`."""
        self.columns.follow()
        wanted = self.columns.codes(classes)
        if len(wanted) == len(self.columns.handovers):
            return self
        return AbleWorkers(self.columns, self.at[np.isin(self.column("handover"), wanted)])

    def where(self, wanted: Callable[[WorkerEntry], bool]) -> AbleWorkers:
        """Those that are wanted."""
        return AbleWorkers(
            self.columns, np.array([at for at in self.at.tolist() if wanted(self.columns.entries[at])], np.intp)
        )

    def least(self, *keys: NDArray[Any]) -> WorkerEntry:
        """The worker with the lowest first key; among equals with the lowest second one, and so on."""
        left = np.flatnonzero(keys[0] == keys[0].min())
        for key in keys[1:]:
            if len(left) == 1:
                break
            some = key.take(left)
            left = left[some == some.min()]
        return self[int(left[0])]
