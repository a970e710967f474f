"""The dashboard's past: a row of numbers every few seconds, for the last quarter of an hour."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

SAMPLE_S = 5.0
"""Seconds between two rows."""
KEPT_S = 900.0
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
    "pages_prefill",
    "pages_decode",
    "serving_prefill",
    "serving_decode",
)
"""`at` in seconds since 1970; percentiles in seconds; pages as the share that requests hold, and hits as the share
of prompt tokens; None where unknown."""

Row = Mapping[str, float | None]


class History:
    """The latest rows."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float | None, ...]] = deque(maxlen=int(KEPT_S / SAMPLE_S))

    def add(self, row: Row) -> None:
        """Add a row; it must have every column."""
        self._rows.append(tuple(row[name] for name in COLUMNS))

    def columns(self) -> dict[str, list[float | None]]:
        """All rows, column by column, the oldest first."""
        return {name: [row[index] for row in self._rows] for index, name in enumerate(COLUMNS)}
