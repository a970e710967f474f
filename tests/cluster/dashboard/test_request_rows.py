"""A request's row in a frame: every part of its record that the page shows, and no more than it has room for."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from twinpool.cluster.dashboard.cluster_frames import ClusterFrames, ClusterState
from twinpool.cluster.dashboard.frame_rows import MAX_EVENTS, MAX_SPANS, SHOWN, TEXT_CHARS, request_row
from twinpool.contracts.messages.request_record import RecordEvent, RecordSpan, RequestRecord

RECORD = RequestRecord(
    "ab-0", "ab", "mine", "router-1", "demo", "batch", 1_700_000_000.12345, 2.5, 0.75, "stop", message="m" * 500,
    prompt_tokens=100, cached_tokens={"device": 30, "host": 12}, generated=9, attempts=2, migrations=3, retractions=4,
    spans=(
        RecordSpan("prefill", 0.1, 0.6, "prefill-0", "d" * 500),
        RecordSpan("transfer", 0.2, 0.7, "decode-0", hidden=True),
    ),
    events=(RecordEvent(0.1, "placed", "prefill-0", "t" * 500),),
)  # fmt: skip


def test_a_row_is_its_record() -> None:
    assert request_row(RECORD) == {
        "request_id": "ab-0",
        "router": "router-1",
        "model": "demo",
        "tenant": "batch",
        "arrived": 1_700_000_000.123,
        "total_s": 2.5,
        "first_token_s": 0.75,
        "outcome": "stop",
        "well": False,
        "message": "m" * TEXT_CHARS,
        "prompt_tokens": 100,
        "cached_tokens": 42,
        "generated": 9,
        "attempts": 2,
        "migrations": 3,
        "retractions": 4,
        "spans": [
            {
                "name": "prefill",
                "start_s": 0.1,
                "end_s": 0.6,
                "worker": "prefill-0",
                "detail": "d" * TEXT_CHARS,
                "hidden": False,
            },
            {"name": "transfer", "start_s": 0.2, "end_s": 0.7, "worker": "decode-0", "detail": "", "hidden": True},
        ],
        "events": [{"at_s": 0.1, "kind": "placed", "worker": "prefill-0", "text": "t" * TEXT_CHARS}],
    }


@pytest.mark.parametrize(
    ("changes", "well"),
    [({}, True), ({"attempts": 2}, False), ({"migrations": 1}, False), ({"outcome": "timeout"}, False)],
)
def test_what_went_as_usual_is_well(changes: dict[str, object], well: bool) -> None:
    usual = replace(RECORD, attempts=1, migrations=0, retractions=0)
    assert request_row(replace(usual, **changes))["well"] is well


def test_a_row_and_a_frame_have_no_more_than_they_have_room_for() -> None:
    spans = tuple(RecordSpan(f"s{n}", n, n + 1) for n in range(100))
    events = tuple(RecordEvent(n, f"e{n}") for n in range(100))
    row = request_row(replace(RECORD, spans=spans, events=events))
    assert [span["name"] for span in row["spans"]] == [f"s{n}" for n in range(MAX_SPANS)]
    assert [event["kind"] for event in row["events"]] == [f"e{n}" for n in range(MAX_EVENTS)]
    frames = ClusterFrames("c", "boot", "b", 0.0)
    frames.take(ClusterState((), requests=[replace(RECORD, request_id=f"r{n}") for n in range(100)]), 1.0, 1.0)
    assert [one["request_id"] for one in frames.frame()["requests"]] == [f"r{n}" for n in range(SHOWN)]
