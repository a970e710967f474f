"""The spans of one choice: a journal as what the choice was doing from its arrival to its end, without gaps.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from twinpool.contracts.ids import Role
from twinpool.contracts.messages.request_record import RecordSpan
from twinpool.contracts.messages.worker_events import LegReport
from twinpool.router.records.leg_clocks import LegClocks
from twinpool.router.state.request_journal import JournalEntry, JournalKind

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
        if joined and replace(joined[-1], end_s=span.end_s) == replace(span, start_s=joined[-1].start_s):
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
