"""The journal of one choice: what the router saw happen to it, and when, for its record.

Entries are facts, in order, by the router core's clock; `router.records.make_record` makes spans of them. The journal
is bounded: what comes after `MAX_ENTRIES` is counted and left out, and so is all but the first reports of a leg that
reports without end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from twinpool.contracts.ids import Role
from twinpool.contracts.messages.request_record import PlacementChoice
from twinpool.contracts.messages.worker_events import LegReport

MAX_ENTRIES = 128
MAX_CHOICES = 16
"""Choices of workers that are kept, the latest ones of attempts beyond that."""
TEXT_CHARS = 300


class JournalKind(StrEnum):
    PLACED = "placed"
    ADOPTED = "adopted"
    """A worker that had kept it goes on with it."""
    WAITS = "waits"
    """No workers can take it now."""
    FIRST_TOKEN = "first token"
    """Of an attempt."""
    REPORT = "report"
    REPLAYED = "replayed"
    MOVE_BEGUN = "move begun"
    MOVE_PAUSED = "move paused"
    MOVED = "moved"
    MOVE_UNDONE = "move undone"


class JournalEntry(NamedTuple):
    at: float
    kind: JournalKind
    attempt: int
    worker: str = ""
    text: str = ""
    workers: Mapping[Role, str] = {}
    """Of `PLACED` and `ADOPTED`."""
    report: LegReport | None = None
    """Of `REPORT`."""


class RequestJournal:
    """The journal of one choice; see the module's prose."""

    __slots__ = ("choices", "entries", "left_out")

    def __init__(self) -> None:
        self.entries: list[JournalEntry] = []
        self.choices: list[tuple[float, PlacementChoice]] = []
        """Who was chosen among whom, each with its time by the router core's clock."""
        self.left_out = 0

    def note(
        self,
        at: float,
        kind: JournalKind,
        attempt: int,
        worker: str = "",
        text: str = "",
        workers: Mapping[Role, str] = {},
        report: LegReport | None = None,
    ) -> None:
        if len(self.entries) >= MAX_ENTRIES:
            self.left_out += 1
            return
        if len(text) > TEXT_CHARS:
            text = text[: TEXT_CHARS - 1] + "…"
        self.entries.append(JournalEntry(at, kind, attempt, worker, text, workers, report))

    def waits(self, at: float, attempt: int, why: Callable[[], str]) -> None:
        """Note that the attempt waits for workers, once; `why` says which."""
        if not self.entries or self.entries[-1].kind is not JournalKind.WAITS:
            self.note(at, JournalKind.WAITS, attempt, text=why())

    def chose(self, at: float, choices: Sequence[PlacementChoice]) -> None:
        if len(self.choices) + len(choices) > MAX_CHOICES:
            del self.choices[: len(choices)]
        self.choices += [(at, choice) for choice in choices]
