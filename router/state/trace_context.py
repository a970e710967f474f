"""The W3C trace context of a request: the header ``traceparent`` (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import re
from dataclasses import dataclass

TRACE_HEADER = "traceparent"
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
