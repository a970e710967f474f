"""The spans of a request's trace as plain values: what OpenTelemetry is to be told of a record.

The root is the request at its router. Each span of the record is a child of it, in the name of the process that it
tells of; what happened is an event of the root. Attributes have the names of OpenTelemetry's conventions for generative
AI (``gen_ai.``) where these mean the same, and else ``twinpool.``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from twinpool.contracts.messages.request_record import USUAL, RequestRecord

NS = 1_000_000_000


class TraceSpanKind(Enum):
    SERVER = "server"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    name: str
    at_ns: int
    """Since 1970."""
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One span; times are nanoseconds since 1970."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    """0: it has no parent."""
    start_ns: int
    end_ns: int
    process: str
    """The worker or the router that it tells of."""
    kind: TraceSpanKind
    attributes: Mapping[str, Any]
    events: Sequence[TraceEvent] = ()
    error: str | None = None
    """What went wrong; None where nothing did."""


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A record that is to be a trace. `parent_id`: the client's span, 16 hex digits, or empty."""

    record: RequestRecord
    parent_id: str
    rng: random.Random = field(compare=False)


def trace_spans(source: TraceSource) -> list[TraceSpan]:
    """The spans of a record's trace, the root first."""
    record = source.record
    trace_id, start = int(record.trace_id, 16), round(record.arrived * NS)

    def at(seconds: float) -> int:
        return start + round(seconds * NS)

    def new_id() -> int:
        return source.rng.getrandbits(64) or 1

    root = TraceSpan(
        f"request {record.model}",
        trace_id,
        new_id(),
        int(source.parent_id, 16) if source.parent_id else 0,
        start,
        at(record.total_s),
        record.router,
        TraceSpanKind.SERVER,
        _attributes(record),
        [
            TraceEvent(event.kind, at(event.at_s), _without_empty(worker=event.worker, text=event.text))
            for event in record.events
        ],
        None if record.outcome in USUAL else f"{record.outcome}: {record.message}",
    )
    return [root] + [
        TraceSpan(
            span.name,
            trace_id,
            new_id(),
            root.span_id,
            at(span.start_s),
            at(span.end_s),
            span.worker or record.router,
            TraceSpanKind.INTERNAL,
            # By the request's id a span leads to the log lines of its process, and a log line to its trace.
            _without_empty(request_id=record.request_id, worker=span.worker, detail=span.detail)
            | {"twinpool.hidden": span.hidden},
        )
        for span in record.spans
    ]


def _attributes(record: RequestRecord) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.provider.name": "twinpool",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.answer_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.generated,
        "twinpool.request_id": record.request_id,
        "twinpool.outcome": record.outcome,
        "twinpool.attempts": record.attempts,
        "twinpool.migrations": record.migrations,
        "twinpool.retractions": record.retractions,
        "twinpool.transfer_bytes": record.transfer_bytes,
        "twinpool.uncertainty_s": record.uncertainty_s,
        **_without_empty(client_id=record.client_id, tenant=record.tenant),
        **{f"twinpool.cached_tokens.{tier}": count for tier, count in record.cached_tokens.items() if count},
    }
    if record.refused_status:
        found["http.response.status_code"] = record.refused_status
        found.update({f"twinpool.{name}": number for name, number in record.numbers.items()})
    if record.outcome in USUAL:
        found["gen_ai.response.finish_reasons"] = (record.outcome,)
    if record.first_token_s is not None:
        found["twinpool.first_token_s"] = record.first_token_s
    return found


def _without_empty(**texts: str) -> dict[str, Any]:
    return {f"twinpool.{name}": text for name, text in texts.items() if text}
