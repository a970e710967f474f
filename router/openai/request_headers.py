"""The headers of a request for text.

``Idempotency-Key`` and ``Last-Event-ID`` are those by which a client comes back for an answer, ``traceparent`` is the
W3C trace context (https://www.w3.org/TR/trace-context/), and the others are Twinpool's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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


_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED = 1
"""The flag by which the caller says that it records the trace."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The trace that a request is of. All empty: of none."""

    trace_id: str = ""
    """32 hex digits."""
    parent_id: str = ""
    """The caller's span, 16 hex digits; empty where the trace begins here."""
    sampled: bool = False
    """Whether it is recorded."""


NO_TRACE = TraceContext()


def read_traceparent(header: str) -> TraceContext:
    """The context that a header says; `NO_TRACE` for none and, as the standard has it, for one that is malformed."""
    found = _HEADER.fullmatch(header.strip())
    if found is None:
        return NO_TRACE
    version, trace_id, parent_id, flags, more = found.groups()
    known = version != "ff" and (version != "00" or not more)  # Later versions may add fields.
    if not known or not int(trace_id, 16) or not int(parent_id, 16):
        return NO_TRACE
    return TraceContext(trace_id, parent_id, bool(int(flags, 16) & SAMPLED))


SLO_HEADER = "x-slo-ttft-ms"
"""The header by which a request names the milliseconds to its first token beyond which its answer is of no use."""
SESSION_HEADER = "x-session-id"
"""The header by which a request names its session."""
PREVIEW_HEADER = "x-twinpool-preview"
"""The header by which whoever chooses among routers asks what would become of a request."""


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """The headers of one request for text, as far as the service needs them; by default there are none."""

    resume: ResumeHeaders | None = None
    """The request's key, and what its client has already; None: its client can't come back."""
    slo: str = ""
    session: str = ""
    trace: TraceContext = NO_TRACE
    timeline: bool = False
    """Whether it asks for the timeline in its answer."""
    preview: bool = False
    """Whether it asks what would become of it, in place of an answer."""


NO_HEADERS = RequestHeaders()


def read_request_headers(header: Callable[[bytes], str]) -> RequestHeaders:
    """Return a request's headers; `header` returns the value of one, empty where it is missing. Raises
    `RequestError`."""
    return RequestHeaders(
        read_resume_headers(header(b"idempotency-key"), header(b"last-event-id")),
        header(b"x-slo-ttft-ms"),
        header(b"x-session-id"),
        read_traceparent(header(b"traceparent")),
        header(b"x-twinpool-timeline") == "1",
        header(PREVIEW_HEADER.encode()) == "1",
    )
