"""The timeline of a request: the field `twinpool` of an answer, which says where its time went.

Times are in seconds. ``tokenise``, ``queue``, ``transfer``, ``hidden`` and ``exposed`` are durations: what of the
transfer ran beside the computation of the prompt, and what came after it. ``first_token`` and ``total`` count from
the request's arrival at the router, and the marks of the prefill and decode legs from the leg's arrival at its worker.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from twinpool.contracts.ids import PAIR, Role
from twinpool.contracts.messages.worker_events import LegReport
from twinpool.router.openai.choice_output import ChoiceOutput


def timeline_of(choice: ChoiceOutput) -> dict[str, Any]:
    """Return the timeline, workers and counts of one choice, as JSON."""
    request = choice.request
    prefill = _last(request.progress, Role.PREFILL)
    decode = _last(request.progress, Role.DECODE)
    received = sum(p.transfer_bytes for p in request.progress)
    arrived = request.arrived - choice.tokenise_s
    placed = request.first_placed if request.first_placed is not None else request.arrived
    computed = {str(role): sum(p.computed_tokens for p in request.progress if p.role is role) for role in PAIR}
    return {
        "timeline": {
            "tokenise": round(choice.tokenise_s, 6),
            "queue": round(placed - request.arrived, 6),
            "prefill": dict(prefill.marks) if prefill else {},
            "transfer": _transfer_s(decode) if len(set(request.workers.values())) > 1 else None,
            "hidden": _mark(decode, "hidden"),
            "exposed": _mark(decode, "exposed"),
            "decode": dict(decode.marks) if decode else {},
            "first_token": round(choice.first_at - arrived, 6) if choice.first_at else None,
            "total": round(choice.ended_at - arrived, 6),
        },
        "prefill_worker": request.workers.get(Role.PREFILL),
        "decode_worker": request.workers.get(Role.DECODE),
        "local_prompt": request.local or None,
        "transfer_bytes": received,
        "cached_tokens": choice.cached_tokens,
        "cached_by_tier": dict(prefill.cached_by_tier) if prefill else {},
        "held_by_decode": decode.cached_tokens if decode else 0,
        "computed": computed,
        "attempts": request.attempts,
        "migrations": request.migrations,
    }


def _last(reports: list[LegReport], role: Role) -> LegReport | None:
    """Return the leg's reports of the last attempt that has one, merged into one; None without any."""
    mine = [p for p in reports if p.role is role]
    if not mine:
        return None
    mine = [p for p in mine if p.attempt == mine[-1].attempt]
    cached = sum(p.cached_tokens for p in mine)
    return replace(mine[-1], marks={k: v for p in mine for k, v in p.marks.items()}, cached_tokens=cached)


def _mark(leg: LegReport | None, name: str) -> float | None:
    return round(leg.marks[name], 6) if leg is not None and name in leg.marks else None


def _transfer_s(decode: LegReport | None) -> float | None:
    """From the grant of decode's pages to the arrival of the last one."""
    if decode and {"grant", "arrived"} <= decode.marks.keys():
        return round(decode.marks["arrived"] - decode.marks["grant"], 6)
    return None
