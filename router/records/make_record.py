"""A choice's record, made of its draft once somebody wants it.

A draft (`RecordDraft`) is kept of every choice: most records are never asked for, and making one costs more than the
rest of a request's end.

**Clocks** (`LegClocks`). A worker tells the times of a leg from the leg's arrival there, which the router doesn't see.
The leg can't have arrived before it was sent, and not after the moment that each of its reports leaves for: when it
came here, less the latest time that it tells. A command may wait for the step that its worker computes, while reports
leave at once when a step ends; so a leg is placed as late as its reports allow. How much earlier it may have come is
said with the record.

**Spans** (`spans_of`) tell what the choice was doing from its arrival to its end, without gaps:

``tokenise``        the router reads the body and makes tokens of it
``queue``           no pair of workers can take it yet, or an attempt has failed and the next isn't placed
``prefill_queue``   sent to its prefill worker, and waiting there
``prefill``         the prompt is computed
``decode_queue``    the prompt is computed, and decode has no pages for it yet
``handover``        what of the transfer comes after the computation; what ran beside it is hidden (``transfer``)
``decode``          tokens are drawn
``retracted``       decode has taken it off the device for lack of memory
``move``            it stands still on its way to another decode worker
``answer``          its worker is done, and the router ends the answer

Where a worker was lost before it told of its leg, the span is what it was sent for. Each time is moved, where clocks
and delays contradict each other, between what came before it and the end of its attempt, which the router has seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role
from twinpool.contracts.messages.request_record import (
    RUNNING,
    USUAL,
    PlacementChoice,
    RecordEvent,
    RecordSpan,
    RequestRecord,
    asks_for,
)
from twinpool.contracts.messages.worker_events import LegReport
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.response_stream import ResponseStream
from twinpool.router.state.request_journal import JournalEntry, JournalKind
from twinpool.router.state.routed_request import RoutingPhase

ABANDONED = "abandoned"
"""The outcome of a choice whose client left, or that was of no use any more."""
RETRACTED = f": {ErrorKind.RETRACTED}: "
"""In the reason of a replay: decode had no memory for the attempt any more."""


@dataclass(slots=True, eq=False)
class RecordDraft:
    """One choice as its router knows it, at its end or while it runs. Times without another word are of the router's
    clock."""

    router: str
    model: str
    request_id: str
    answer_id: str
    client_id: str
    tenant: str
    trace_id: str
    parent_id: str
    """The client's span, of its trace."""
    sampled: bool
    """Whether its trace is recorded."""
    began: float
    """When the request came."""
    tokenised: float
    now: float
    """When it ended, or when somebody asked."""
    first_at: float
    """When the first token was delivered; 0: none was."""
    arrived: float
    """`began` in seconds since 1970."""
    outcome: str
    message: str
    prompt_tokens: int
    generated: int
    attempts: int
    migrations: int
    entries: Sequence[JournalEntry]
    choices: Sequence[tuple[float, PlacementChoice]]
    reports: Sequence[LegReport]
    left_out: int
    weights_version: str = ""
    audits: list[RecordEvent] = field(default_factory=list)
    """What came of audits of its answer, after its end."""

    @classmethod
    def of(
        cls,
        router: str,
        model: str,
        stream: ResponseStream,
        choice: ChoiceOutput,
        now: float,
        wall: float,
        *,
        ended: bool,
    ) -> RecordDraft:
        """What is known of a choice at `now`; `wall`: the same moment in seconds since 1970. `ended`: whether it is
        over; a choice that is over without an end of its own was abandoned."""
        r, trace = choice.request, stream.trace
        began = r.arrived - choice.tokenise_s
        outcome, message = _outcome(choice, ended)
        return cls(
            router,
            model,
            r.id,
            stream.id,
            stream.client_id,
            r.share.tenant,
            trace.trace_id,
            trace.parent_id,
            trace.sampled,
            began,
            r.arrived,
            now,
            choice.first_at,
            wall - (now - began),
            outcome,
            message,
            len(r.prompt),
            len(choice.tokens),
            r.attempts,
            r.migrations,
            r.journal.entries,
            r.journal.choices,
            r.progress,
            r.journal.left_out,
            r.weights,
        )

    @property
    def total_s(self) -> float:
        return self.now - self.began

    @property
    def first_s(self) -> float:
        """Seconds to the first token; to the end without one."""
        return (self.first_at or self.now) - self.began

    @property
    def retractions(self) -> int:
        notes = sum(note.kind == "retracted" for report in self.reports for note in report.notes)
        return notes + sum(e.kind is JournalKind.REPLAYED and RETRACTED in e.text for e in self.entries)

    @property
    def notable(self) -> bool:
        """As `RequestRecord.notable`."""
        return self.outcome not in USUAL or self.attempts > 1 or bool(self.migrations or self.retractions)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes, and its record."""
        named = sum(len(choice.candidates) for _, choice in self.choices)
        texts = sum(len(entry.text) for entry in self.entries) + len(self.message)
        return 2048 + 512 * len(self.entries) + 256 * len(self.choices) + 160 * named + texts

    def is_of(self, asked: str) -> bool:
        return asks_for(asked, self.request_id, self.answer_id, self.client_id)


def _outcome(choice: ChoiceOutput, ended: bool) -> tuple[str, str]:
    if choice.error is not None:
        return str(choice.error.error or ErrorKind.WORKER), choice.error.message
    if choice.finish is not None:
        return choice.finish, ""
    if ended:
        return ABANDONED, "the client left, or took the answer too slowly"
    if choice.request.phase is RoutingPhase.WAITING:
        return RUNNING, "it waits for workers"
    return RUNNING, ""


LegKey = tuple[int, Role]
"""A leg: its attempt, and the role."""


class LegClocks:
    """The arrivals of a request's legs at their workers, in seconds of the router's clock."""

    def __init__(self, entries: Iterable[JournalEntry]) -> None:
        sent: dict[LegKey, float] = {}
        latest: dict[LegKey, float] = {}
        for entry in entries:
            match entry.kind:
                case JournalKind.PLACED:
                    sent.update({(entry.attempt, role): entry.at for role in (Role.PREFILL, Role.DECODE)})
                case JournalKind.MOVE_PAUSED:
                    sent[entry.attempt, Role.DECODE] = entry.at
                case JournalKind.REPORT if entry.report is not None:
                    report, key = entry.report, (entry.attempt, entry.report.role)
                    told = max([0.0, *_instants(report.marks), *(note.at_s for note in report.notes)])
                    latest[key] = min(latest.get(key, math.inf), entry.at - told)
        self._at = {key: max(at, sent.get(key, -math.inf)) for key, at in latest.items()}
        self.uncertainty_s = max((self._at[key] - sent[key] for key in self._at if key in sent), default=0.0)
        """How much earlier a leg may have arrived than it is placed; the largest of all."""

    def time(self, key: LegKey, told_s: float) -> float:
        """When something happened that a leg tells; the leg must have reported."""
        return self._at[key] + told_s


def _instants(marks: dict[str, float]) -> list[float]:
    """The marks that are times; the others are durations."""
    return [seconds for name, seconds in marks.items() if name not in ("hidden", "exposed")]


UNTOLD = "its worker told nothing of it"


class Boundary(NamedTuple):
    """From `at` on the choice does what `name` says."""

    at: float
    name: str
    worker: str = ""
    detail: str = ""


@dataclass(slots=True)
class _Attempt:
    """What the journal has of one attempt, moves within it included."""

    placed: JournalEntry
    end: float
    entries: list[JournalEntry] = field(default_factory=list)

    def reports(self, role: Role) -> list[tuple[int, LegReport]]:
        """The reports of a role's legs, each with its attempt number."""
        return [(e.attempt, e.report) for e in self.entries if e.report is not None and e.report.role is role]


def spans_of(
    entries: Sequence[JournalEntry], clocks: LegClocks, began: float, arrived: float, end: float
) -> list[RecordSpan]:
    """The spans, hidden ones last, in seconds since `began`; all other times are of the router's clock. `arrived`: when
    its tokens were known."""
    boundaries = [Boundary(began, "tokenise"), Boundary(max(began, arrived), "queue")]
    hidden: list[RecordSpan] = []
    for attempt in _attempts(entries, end):
        boundaries += _within(attempt.placed.at, attempt.end, _of_attempt(attempt, clocks))
        hidden += _hidden(attempt, clocks, began)
        last = attempt.entries[-1] if attempt.entries else None
        if last is not None and last.kind is JournalKind.REPLAYED:
            boundaries.append(Boundary(attempt.end, "queue", detail=f"after: {last.text}"))
    times = [round(b.at - began, 6) for b in boundaries] + [round(end - began, 6)]
    shown = [
        RecordSpan(boundary.name, start, stop, boundary.worker, boundary.detail)
        for boundary, start, stop in zip(boundaries, times, times[1:], strict=False)
        if stop > start
    ]
    return [*_joined(shown), *hidden]


def _attempts(entries: Sequence[JournalEntry], end: float) -> Iterator[_Attempt]:
    current: _Attempt | None = None
    for entry in entries:
        if entry.kind in (JournalKind.PLACED, JournalKind.ADOPTED):
            if current is not None:
                current.end = entry.at  # The journal had no room for why it ended.
                yield current
            current = _Attempt(entry, end)
        elif current is not None:
            current.entries.append(entry)
            if entry.kind is JournalKind.REPLAYED:
                current.end = entry.at
                yield current
                current = None
    if current is not None:
        yield current


def _within(begin: float, end: float, boundaries: Sequence[Boundary]) -> Iterator[Boundary]:
    """The boundaries in their order, none before the one ahead of it and none after the end of the attempt."""
    at = begin
    for boundary in boundaries:
        at = min(end, max(at, boundary.at))
        yield boundary._replace(at=at)


def _joined(spans: Sequence[RecordSpan]) -> list[RecordSpan]:
    """The spans, those joined that say the same."""
    joined: list[RecordSpan] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and (last.name, last.worker, last.detail) == (span.name, span.worker, span.detail):
            joined[-1] = replace(joined[-1], end_s=span.end_s)
        else:
            joined.append(span)
    return joined


def _of_attempt(attempt: _Attempt, clocks: LegClocks) -> list[Boundary]:
    """What an attempt did, in order."""
    placed = attempt.placed
    decode_name = placed.workers.get(Role.DECODE, "")
    if placed.kind is JournalKind.ADOPTED:
        return [Boundary(placed.at, "decode", decode_name), *_decoding(attempt, clocks, decode_name)]
    prefill_name = placed.workers.get(Role.PREFILL, "")
    prefills = attempt.reports(Role.PREFILL)
    found = [Boundary(placed.at, "prefill_queue", prefill_name, "" if prefills else UNTOLD)]
    number = placed.attempt
    if prefills:
        found += _computed(number, prefills[0][1], clocks, decode_name or prefill_name)
    decodes = [report for k, report in attempt.reports(Role.DECODE) if k == number and "arrived" in report.marks]
    if decodes and decode_name:
        found += _arrived(number, decodes[0], clocks, decode_name, prefilled=found[-1].at)
    told = _decoding(attempt, clocks, decode_name)
    return [*found, *told]


def _computed(number: int, report: LegReport, clocks: LegClocks, after: str) -> list[Boundary]:
    """The prompt's queue and computation; `after`: where the request goes on."""
    key, marks = (number, Role.PREFILL), report.marks
    cached = ", ".join(f"{count} of {tier}" for tier, count in report.cached_by_tier.items() if count)
    detail = f"{report.computed_tokens} tokens computed" + (f", cached: {cached}" if cached else "")
    found = []
    if "queue" in marks:
        found.append(Boundary(clocks.time(key, marks["queue"]), "prefill", report.worker, detail))
    if "prefill" in marks:
        next_name = "handover" if after != report.worker else "decode"
        found.append(Boundary(clocks.time(key, marks["prefill"]), next_name, after))
    return found


def _arrived(number: int, report: LegReport, clocks: LegClocks, worker: str, prefilled: float) -> list[Boundary]:
    """The wait for decode's pages where it was longer than the computation, and the rest of the transfer."""
    key, marks, found = (number, Role.DECODE), report.marks, []
    sent = f"{report.transfer_bytes} bytes" + (f", {report.cached_tokens} tokens held" if report.cached_tokens else "")
    local = "exposed" not in marks
    granted = clocks.time(key, marks["grant"]) if "grant" in marks else prefilled
    if not local:
        if granted > prefilled:
            found.append(Boundary(prefilled, "decode_queue", worker))
        found.append(Boundary(max(prefilled, granted), "handover", worker, sent))
    found.append(Boundary(clocks.time(key, marks["arrived"]), "decode", worker))
    return found


def _decoding(attempt: _Attempt, clocks: LegClocks, worker: str) -> list[Boundary]:
    """Retractions, moves and the end of the computation, of all decode workers of an attempt."""
    found: list[Boundary] = []
    for number, report in attempt.reports(Role.DECODE):
        key = (number, Role.DECODE)
        for note in report.notes:
            if note.kind == "retracted":
                found.append(Boundary(clocks.time(key, note.at_s), "retracted", report.worker, f"{note.bytes} bytes"))
            elif note.kind == "resumed":
                found.append(Boundary(clocks.time(key, note.at_s), "decode", report.worker))
        if "done" in report.marks:
            found.append(Boundary(clocks.time(key, report.marks["done"]), "answer"))
    paused = False
    for entry in attempt.entries:
        if entry.kind is JournalKind.MOVE_PAUSED:
            found.append(Boundary(entry.at, "move", entry.worker))
            paused = True
        elif paused and entry.kind in (JournalKind.MOVED, JournalKind.MOVE_UNDONE):
            found.append(Boundary(entry.at, "decode", entry.worker))
            paused = False
    prefills = attempt.reports(Role.PREFILL)
    if not worker and prefills:  # Prefill answers alone.
        number, report = prefills[0]
        found.append(Boundary(clocks.time((number, Role.PREFILL), report.marks.get("prefill", 0.0)), "answer"))
    return sorted(found, key=lambda boundary: boundary.at)


def _hidden(attempt: _Attempt, clocks: LegClocks, began: float) -> Iterator[RecordSpan]:
    """The part of each transfer beside which the prompt was computed."""
    seen: set[int] = set()
    for number, report in attempt.reports(Role.DECODE):
        marks: Mapping[str, float] = report.marks
        if number in seen or "arrived" not in marks or not marks.get("hidden"):
            continue
        seen.add(number)
        stop = clocks.time((number, Role.DECODE), marks["arrived"]) - marks.get("exposed", 0.0)
        start = max(attempt.placed.at, stop - marks["hidden"])
        if attempt.end >= stop > start:
            times = round(start - began, 6), round(stop - began, 6)
            yield RecordSpan("transfer", *times, report.worker, f"{report.transfer_bytes} bytes", hidden=True)


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
        weights_version=draft.weights_version,
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
