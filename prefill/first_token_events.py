"""The events of a finished prompt for its router: prompt scores, the first token, and the leg's report."""

from __future__ import annotations

from contracts.ids import Role, WorkerName
from contracts.messages.worker_events import Event, LegReport, PromptScores, Tokens
from prefill.request import PrefillRequest


def first_token_events(request: PrefillRequest, worker: WorkerName) -> list[Event]:
    """Return the events in this order: prompt scores if asked for, the first token if one was drawn, the report."""
    submit, key = request.submit, (request.submit.request_id, request.submit.attempt)
    events: list[Event] = []
    if request.wants_scores:
        events.append(PromptScores(*key, tuple(request.scores)))
    if request.first is not None:
        logprobs = (request.first.logprob,) if request.first.logprob is not None else ()
        events.append(Tokens(*key, len(submit.tokens), (request.first.token,), logprobs))
    cached, marks = request.cached, dict(request.marks)
    tiers = {"device": cached.device, "host": cached.host, "storage": cached.storage}
    notes = tuple(request.notes)
    report = LegReport(
        *key, Role.PREFILL, worker, marks, cached.total, request.computed, cached_by_tier=tiers, notes=notes
    )
    return [*events, report]
