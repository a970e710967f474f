"""The headers by which a client comes back for an answer: ``Idempotency-Key`` and ``Last-Event-ID``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from twinpool.contracts.errors import RequestError

KEY_HEADER, SEEN_HEADER = "Idempotency-Key", "Last-Event-ID"
MAX_KEY_CHARS = 255
MAX_RESUMED_CHOICES = 128
"""Choices that a streamed request with a key may have: each event's id has a number for each."""
_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}", re.ASCII)
_SEEN = re.compile(rf"(0|[1-9][0-9]{{0,11}})-([0-9]{{1,9}}(?:\.[0-9]{{1,9}}){{0,{MAX_RESUMED_CHOICES - 1}}})", re.ASCII)


@dataclass(frozen=True, slots=True)
class SeenEvents:
    """What a client has of a stream, by the id of the last event that it got."""

    created: int
    """When the answer was created, in seconds since 1970."""
    counts: tuple[int, ...]
    """The events that it has of each choice; those behind the last choice's end count as the first choice's."""


@dataclass(frozen=True, slots=True)
class ResumeHeaders:
    """A request's key, and what its client has of the answer; None: nothing."""

    key: str
    seen: SeenEvents | None


def read_resume_headers(key: str, last_event_id: str) -> ResumeHeaders | None:
    """Return what the two headers say, empty where they are missing; None without a key. Raises `RequestError`."""
    if not key:
        if last_event_id:
            raise RequestError(f"{SEEN_HEADER} needs the {KEY_HEADER} with which the answer was asked for")
        return None
    if not _KEY.fullmatch(key):
        raise RequestError(f"{KEY_HEADER} must be 1 to {MAX_KEY_CHARS} visible ASCII characters without spaces")
    if not last_event_id:
        return ResumeHeaders(key, None)
    found = _SEEN.fullmatch(last_event_id)
    if found is None:
        raise RequestError(f"{SEEN_HEADER} must be the id of an event of this answer")
    return ResumeHeaders(key, SeenEvents(int(found[1]), tuple(map(int, found[2].split(".")))))


def event_id(seen: SeenEvents) -> str:
    """Return the id of the event with which a client has got this much."""
    return f"{seen.created}-{'.'.join(map(str, seen.counts))}"
