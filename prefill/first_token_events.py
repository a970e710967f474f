"""The events of a prompt for its router: once it is finished prompt scores, the first token and the leg's report, and
the report alone where it is given up before that."""

from __future__ import annotations

from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.messages.worker_events import Event, LegReport, PromptScores, Tokens
from twinpool.prefill.request import PrefillRequest


def first_token_events(request: PrefillRequest, worker: WorkerName) -> list[Event]:
    """Return the events in this order: prompt scores if asked for, the first token if one was drawn, the report."""
    submit, key = request.submit, (request.submit.request_id, request.submit.attempt)
    events: list[Event] = []
    if request.wants_scores:
        events.append(PromptScores(*key, tuple(request.scores)))
    if request.first is not None:
        logprobs = (request.first.logprob,) if request.first.logprob is not None else ()
        events.append(Tokens(*key, len(submit.tokens), (request.first.token,), logprobs))
    return [*events, _report(request, worker)]


def unfinished_report(request: PrefillRequest, worker: WorkerName) -> LegReport | None:
    """Return the report of a prompt that is given up; None where it has been reported, or nothing was done for it."""
    done = request.computed or request.cached.total
    return _report(request, worker) if done and "prefill" not in request.marks else None


def _report(request: PrefillRequest, worker: WorkerName) -> LegReport:
    key = (request.submit.request_id, request.submit.attempt)
    cached, marks = request.cached, dict(request.marks)
    tiers = {"device": cached.device, "host": cached.host, "storage": cached.storage}
    notes = tuple(request.notes)
    return LegReport(
        *key, Role.PREFILL, worker, marks, cached.total, request.computed, cached_by_tier=tiers, notes=notes
    )
