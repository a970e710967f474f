"""Spans of made-up journals: without gaps, in order, and as long as the request, whatever workers told."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from twinpool.contracts.ids import RequestId, Role, WorkerName
from twinpool.contracts.messages.request_record import RecordSpan
from twinpool.contracts.messages.worker_events import LegNote, LegReport
from twinpool.router.records.make_record import UNTOLD, LegClocks, spans_of
from twinpool.router.state.request_journal import JournalEntry, JournalKind

P0, D0, D1 = WorkerName("prefill-0"), WorkerName("decode-0"), WorkerName("decode-1")


def placed(at: float, attempt: int, decode: str = D0) -> JournalEntry:
    return JournalEntry(at, JournalKind.PLACED, attempt, workers={Role.PREFILL: P0, Role.DECODE: decode})


def told(
    at: float, attempt: int, role: Role, worker: str, notes: tuple[LegNote, ...] = (), **marks: float
) -> JournalEntry:
    report = LegReport(RequestId("r-0"), attempt, role, WorkerName(worker), marks, notes=notes)
    return JournalEntry(at, JournalKind.REPORT, attempt, worker, report=report)


def spans(entries: list[JournalEntry], end: float) -> list[RecordSpan]:
    """Spans of a request that came at 100 and had tokens at 100.5."""
    found = spans_of(entries, LegClocks(entries), 100.0, 100.5, end)
    shown = [span for span in found if not span.hidden]
    assert shown[0].start_s == 0.0
    assert shown[-1].end_s == pytest.approx(end - 100.0)
    assert all(one.end_s == other.start_s for one, other in pairwise(shown)), "no gaps"
    assert all(span.end_s > span.start_s for span in found)
    return found


def names(found: list[RecordSpan]) -> list[tuple[str, float, str]]:
    return [(span.name, round(span.end_s, 3), span.worker) for span in found if not span.hidden]


def test_a_request_is_shown_where_it_was_retracted_moved_and_replayed() -> None:
    retracted = (LegNote("retracted", 3.0, 700), LegNote("resumed", 4.0, 700))
    found = spans(
        [
            placed(101.0, 0),
            # Its leg came at 101.2: the report left when its latest mark was, and came at once.
            told(102.0, 0, Role.PREFILL, P0, queue=0.3, prefill=0.8),
            told(102.5, 0, Role.DECODE, D0, grant=0.1, arrived=1.25, hidden=0.25, exposed=0.25),
            told(105.25, 0, Role.DECODE, D0, retracted),
            JournalEntry(106.0, JournalKind.MOVE_PAUSED, 1, D0),
            JournalEntry(107.0, JournalKind.MOVED, 1, D1),
            told(107.0, 1, Role.DECODE, D1, arrived=0.9),
            JournalEntry(108.0, JournalKind.REPLAYED, 1, "", "lost decode-1: killed"),
            placed(108.5, 2),
            told(109.5, 2, Role.PREFILL, P0, queue=0.2, prefill=0.7),
            told(110.0, 2, Role.DECODE, D0, grant=0.1, arrived=1.0, exposed=0.4),
            told(111.0, 2, Role.DECODE, D0, grant=0.1, arrived=1.0, exposed=0.4, done=2.0),
        ],
        111.25,
    )
    assert names(found) == [
        ("tokenise", 0.5, ""),
        ("queue", 1.0, ""),
        ("prefill_queue", 1.5, P0),
        ("prefill", 2.0, P0),
        ("handover", 2.5, D0),
        ("decode", 4.25, D0),
        ("retracted", 5.25, D0),
        ("decode", 6.0, D0),
        ("move", 7.0, D0),
        ("decode", 8.0, D1),
        ("queue", 8.5, ""),
        ("prefill_queue", 9.0, P0),
        ("prefill", 9.5, P0),
        ("handover", 10.0, D0),
        ("decode", 11.0, D0),
        ("answer", 11.25, ""),
    ]
    assert "lost decode-1" in next(span.detail for span in found if span.name == "queue" and span.detail)
    assert [(span.start_s, span.end_s) for span in found if span.hidden] == [(2.0, 2.25)]


def test_decodes_wait_for_pages_is_told_apart_from_the_transfer() -> None:
    entries = [
        placed(101.0, 0),
        told(102.0, 0, Role.PREFILL, P0, queue=0.0, prefill=1.0),
        told(104.0, 0, Role.DECODE, D0, grant=2.5, arrived=3.0, exposed=0.5),
    ]
    assert names(spans(entries, 105.0))[2:] == [
        ("prefill", 2.0, P0),
        ("decode_queue", 3.5, D0),
        ("handover", 4.0, D0),
        ("decode", 5.0, D0),
    ]


def test_of_a_worker_that_was_lost_without_a_word_it_is_said_that_nothing_was_told() -> None:
    entries = [placed(101.0, 0), JournalEntry(103.0, JournalKind.REPLAYED, 0, "", "lost prefill-0: killed")]
    found = spans(entries, 104.0)
    assert names(found) == [("tokenise", 0.5, ""), ("queue", 1.0, ""), ("prefill_queue", 3.0, P0), ("queue", 4.0, "")]
    assert found[2].detail == UNTOLD


def test_a_leg_is_placed_as_late_as_its_reports_allow_and_how_much_earlier_it_may_be_is_said() -> None:
    entries = [
        placed(101.0, 0),
        told(102.0, 0, Role.DECODE, D0, arrived=0.4),
        told(105.0, 0, Role.DECODE, D0, arrived=0.4, done=3.9),
    ]
    clocks = LegClocks(entries)
    assert clocks.time((0, Role.DECODE), 0.4) == pytest.approx(101.5), "1.1 by the later report, 0.6 is allowed by it"
    assert clocks.uncertainty_s == pytest.approx(0.1)


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_told_in_whatever_order_spans_have_no_gaps_and_add_up(seed: int) -> None:
    draw, at, entries = random.Random(seed), 101.0, list[JournalEntry]()
    for attempt in range(draw.randrange(8)):
        entries.append(placed(at, attempt))
        for _ in range(draw.randrange(6)):
            at += draw.choice([0.0, 0.3])
            marks = {name: draw.uniform(0, 3) for name in ("queue", "prefill", "grant", "arrived", "hidden", "exposed")}
            marks |= {"done": 9.0} if draw.random() < 0.2 else {}
            kept = {name: value for name, value in marks.items() if draw.random() < 0.7}
            notes = tuple(
                LegNote(draw.choice(["retracted", "resumed"]), draw.uniform(0, 3)) for _ in range(draw.randrange(3))
            )
            kind = draw.choice(
                [JournalKind.REPORT, JournalKind.MOVE_PAUSED, JournalKind.MOVED, JournalKind.MOVE_UNDONE]
            )
            if kind is JournalKind.REPORT:
                entries.append(told(at, attempt, draw.choice([Role.PREFILL, Role.DECODE]), D0, notes, **kept))
            else:
                entries.append(JournalEntry(at, kind, attempt, D1))
        if draw.random() < 0.8:
            entries.append(JournalEntry(at, JournalKind.REPLAYED, attempt, "", "why"))
    spans(entries, at + 0.5)
