"""Matching of stop strings in a text that comes in pieces.

The rule is stated on characters, so that it can't depend on where pieces are cut: the answer ends at the first
character that completes any stop string; if it completes several, the longest counts. Text that may be the beginning of
a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """The matcher of one choice's text against `stops`; `include` leaves the matched string in the text.

    `matched` is the stop string that was found, None until then.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take the next piece; returns the text that may be shown. After a match nothing more may be."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        buffer = self._held + text
        first: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0 and (first is None or (start + len(stop), start) < first[:2]):
                first = (start + len(stop), start, stop)
        if first is not None:
            end, start, self.matched = first
            self._held = ""
            return buffer[: end if self._include else start]
        keep = self._may_begin(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def skip(self, text: str) -> str:
        """Take a piece that isn't searched for stop strings; returns the held text followed by it."""
        held, self._held = self._held, ""
        return held + text

    def finish(self) -> str:
        """Return the held text, after the last piece."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, buffer: str) -> int:
        """Return the length of the longest suffix of `buffer` that is a proper prefix of a stop string."""
        for size in range(min(self._longest - 1, len(buffer)), 0, -1):
            tail = buffer[len(buffer) - size :]
            if any(len(stop) > size and stop.startswith(tail) for stop in self._stops):
                return size
        return 0
