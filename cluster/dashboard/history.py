"""The dashboard's past: a row of numbers every few seconds for a quarter of an hour, and one a minute for hours."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

SAMPLE_S = 5.0
"""Seconds between two rows."""
KEPT_S = 900.0
MINUTE_S, MINUTES = 60.0, 360
"""What a row of the longer past is of, and how many are kept."""
COLUMNS = (
    "at",
    "requests_s",
    "tokens_s",
    "prompt_tokens_s",
    "hit_share",
    "bytes_s",
    "ttft_p50",
    "ttft_p99",
    "tpot_p50",
    "tpot_p99",
    "itl_p50",
    "itl_p99",
    "running",
    "queued",
    "cpu_workers",
    "cpu_routers",
    "pages_prefill",
    "pages_decode",
    "serving_prefill",
    "serving_decode",
)
"""`at` in seconds since 1970; percentiles in seconds; pages as the share that requests hold, and hits as the share
of prompt tokens; processors in use; None where unknown."""

WORST = frozenset({"ttft_p99", "tpot_p99", "itl_p99"})
"""Columns of which a minute has the worst; of the others it has the mean."""

Row = Mapping[str, float | None]


class History:
    """The latest rows."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float | None, ...]] = deque(maxlen=int(KEPT_S / SAMPLE_S))
        self._minutes: deque[tuple[float | None, ...]] = deque(maxlen=MINUTES)
        self._minute: list[tuple[float | None, ...]] = []
        """Rows of the minute that isn't over."""

    def add(self, row: Row) -> None:
        """Add a row; it must have every column."""
        values = tuple(row[name] for name in COLUMNS)
        self._rows.append(values)
        if self._minute and _minute_of(self._minute[0]) != _minute_of(values):
            self._minutes.append(_together(self._minute))
            self._minute = []
        self._minute.append(values)

    def columns(self) -> dict[str, list[float | None]]:
        """All rows, column by column, the oldest first."""
        return _columns(self._rows)

    def minutes(self) -> dict[str, list[float | None]]:
        """Whole minutes, likewise; `at` is the middle of each."""
        return _columns(self._minutes)


def _columns(rows: Sequence[tuple[float | None, ...]]) -> dict[str, list[float | None]]:
    return {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}


def _minute_of(row: tuple[float | None, ...]) -> int:
    at = row[0]
    assert at is not None
    return int(at // MINUTE_S)


def _together(rows: Sequence[tuple[float | None, ...]]) -> tuple[float | None, ...]:
    found: list[float | None] = [(_minute_of(rows[0]) + 0.5) * MINUTE_S]
    for name, values in zip(COLUMNS[1:], list(zip(*rows, strict=True))[1:], strict=True):
        known = [value for value in values if value is not None]
        if not known:
            found.append(None)
        else:
            found.append(max(known) if name in WORST else round(sum(known) / len(known), 4))
    return tuple(found)
