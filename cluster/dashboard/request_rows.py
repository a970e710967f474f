"""Records of the latest requests as the dashboard's frames have them: where the time of each went."""

from __future__ import annotations

from typing import Any

from twinpool.contracts.messages.request_record import RequestRecord

SHOWN = 16
"""Requests in a frame, the newest ones that the controller was told of."""
MAX_SPANS, MAX_EVENTS = 32, 12
TEXT_CHARS = 120


def request_row(record: RequestRecord) -> dict[str, Any]:
    """One request; times in seconds since it came. Spans that aren't `hidden` follow each other and add up to
    `total_s`."""
    return {
        "request_id": record.request_id,
        "router": record.router,
        "model": record.model,
        "tenant": record.tenant,
        "arrived": round(record.arrived, 3),
        "total_s": record.total_s,
        "first_token_s": record.first_token_s,
        "outcome": record.outcome,
        "well": not record.notable,
        "message": record.message[:TEXT_CHARS],
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": sum(record.cached_tokens.values()),
        "generated": record.generated,
        "attempts": record.attempts,
        "migrations": record.migrations,
        "retractions": record.retractions,
        "spans": [
            {
                "name": span.name,
                "start_s": span.start_s,
                "end_s": span.end_s,
                "worker": span.worker,
                "detail": span.detail[:TEXT_CHARS],
                "hidden": span.hidden,
            }
            for span in record.spans[:MAX_SPANS]
        ],
        "events": [
            {"at_s": event.at_s, "kind": event.kind, "worker": event.worker, "text": event.text[:TEXT_CHARS]}
            for event in record.events[:MAX_EVENTS]
        ],
    }
