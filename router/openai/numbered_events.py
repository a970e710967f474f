"""The numbering of a stream's events, for a client that may come back and have only the rest.

Each event's id says what the client has once it has the event: the number of events of each choice. An answer with a
key is fed to its writer token by token, however workers group them, so that its events are a function of its tokens
alone, and the same number is the same bytes at every router. Events of several choices may come in another order.
"""

from __future__ import annotations

from collections.abc import Iterator

from twinpool.router.openai.resume_headers import SeenEvents, event_id

END = b"\n\n"


class NumberedEvents:
    """The numbering of one stream. `seen`: what the client has already, which is left out."""

    def __init__(self, created: int, choices: int, seen: SeenEvents | None) -> None:
        self._created = created
        self._counts = [0] * choices
        self._seen = seen.counts if seen is not None else (0,) * choices

    def number(self, index: int, events: bytes | tuple[bytes, ...]) -> bytes:
        """Return the next events of a choice with their ids, those that the client hasn't seen."""
        whole = events if isinstance(events, bytes) else b"".join(events)
        return b"".join(self._new(index, whole))

    def _new(self, index: int, events: bytes) -> Iterator[bytes]:
        for event in events.split(END)[:-1]:
            self._counts[index] += 1
            if self._counts[index] > self._seen[index]:
                yield b"id: " + event_id(SeenEvents(self._created, self._told)).encode() + b"\n" + event + END

    @property
    def _told(self) -> tuple[int, ...]:
        """What the client has: of choices that come again, all that it had before."""
        return tuple(max(pair) for pair in zip(self._counts, self._seen, strict=True))
