"""A choice's record, made of its draft."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from twinpool.contracts.ids import Role
from twinpool.contracts.messages.request_record import RUNNING, RecordEvent, RequestRecord
from twinpool.contracts.messages.worker_events import LegReport
from twinpool.router.records.leg_clocks import LegClocks
from twinpool.router.records.record_draft import RecordDraft
from twinpool.router.records.request_spans import spans_of
from twinpool.router.state.request_journal import JournalKind

WORDS = {
    JournalKind.FIRST_TOKEN: "of this attempt",
    JournalKind.MOVE_PAUSED: "it stands still",
}
"""Texts of entries that have none."""


def make_record(draft: RecordDraft) -> RequestRecord:
    clocks, began = LegClocks(draft.entries), draft.began
    events = sorted(_events(draft, clocks), key=lambda event: event.at_s)
    if draft.outcome != RUNNING:
        text = f"{draft.outcome}: {draft.message}" if draft.message else draft.outcome
        events.append(RecordEvent(round(draft.total_s, 6), "ended", text=text))
    prefill, decode = _latest(draft, Role.PREFILL), _latest(draft, Role.DECODE)
    return RequestRecord(
        request_id=draft.request_id,
        answer_id=draft.answer_id,
        client_id=draft.client_id,
        router=draft.router,
        model=draft.model,
        tenant=draft.tenant,
        arrived=round(draft.arrived, 6),
        total_s=round(draft.total_s, 6),
        first_token_s=round(draft.first_at - began, 6) if draft.first_at else None,
        outcome=draft.outcome,
        message=draft.message,
        prompt_tokens=draft.prompt_tokens,
        cached_tokens=dict(prefill.cached_by_tier) if prefill is not None else {},
        held_tokens=decode.cached_tokens if decode is not None else 0,
        generated=draft.generated,
        transfer_bytes=sum(report.transfer_bytes for report in draft.reports),
        attempts=draft.attempts,
        migrations=draft.migrations,
        retractions=draft.retractions,
        uncertainty_s=round(clocks.uncertainty_s, 6),
        trace_id=draft.trace_id,
        spans=tuple(spans_of(draft.entries, clocks, began, draft.tokenised, draft.now)),
        events=(*events, *draft.audits),
        choices=tuple(replace(one, at_s=round(at - began, 6)) for at, one in draft.choices),
        left_out=draft.left_out,
    )


def _latest(draft: RecordDraft, role: Role) -> LegReport | None:
    """The first report of the latest leg of a role that has reported: it says what was cached and held."""
    mine = [report for report in draft.reports if report.role is role]
    return next((report for report in mine if report.attempt == mine[-1].attempt), None)


def _events(draft: RecordDraft, clocks: LegClocks) -> Iterator[RecordEvent]:
    began = draft.began
    for entry in draft.entries:
        at_s = round(entry.at - began, 6)
        match entry.kind:
            case JournalKind.PLACED | JournalKind.ADOPTED:
                workers = ", ".join(f"{role} on {name}" for role, name in entry.workers.items())
                why = f"; decode computes the prompt: {entry.text}" if entry.text else ""
                yield RecordEvent(at_s, str(entry.kind), text=f"attempt {entry.attempt}: {workers}{why}")
            case JournalKind.REPORT if entry.report is not None:
                key = entry.attempt, entry.report.role
                for note in entry.report.notes:
                    at = min(draft.now, entry.at, clocks.time(key, note.at_s))
                    text = f"{note.bytes} bytes" if note.bytes else ""
                    text = f"{note.text} ({text})" if text and note.text else note.text or text
                    yield RecordEvent(round(max(0.0, at - began), 6), note.kind, entry.worker, text)
            case _:
                yield RecordEvent(at_s, str(entry.kind), entry.worker, entry.text or WORDS.get(entry.kind, ""))
