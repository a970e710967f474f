"""What `twinpool explain` shows of a record that is made by hand."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from tests.cluster.router_stub import router_stub
from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.cli.operator.explain_command import explained
from twinpool.contracts.ids import Role
from twinpool.contracts.messages.request_record import (
    PlacementChoice,
    RecordEvent,
    RecordSpan,
    RefusedWorkers,
    RequestRecord,
    WorkerCandidate,
)

SPANS = (
    RecordSpan("waits", 0.0, 1.0),
    RecordSpan("prefill", 1.0, 3.0, "prefill-0"),
    RecordSpan("transfer", 2.0, 3.0, "decode-0", hidden=True),
    RecordSpan("decode", 3.0, 5.0, "decode-0", detail="paused"),
    RecordSpan("audit", 3.5, 5.0, "prefill-0", hidden=True),
)


def shown(outcome: str, spans: tuple[RecordSpan, ...] = SPANS, **changes: Any) -> list[str]:
    values: dict[str, Any] = {
        "arrived": 0.0, "total_s": 8.0, "first_token_s": 3.0, "client_id": "ours", "tenant": "", **changes
    }  # fmt: skip
    record = RequestRecord("r0", "r", router="router-0", model="demo", outcome=outcome, spans=spans, **values)
    console = Console(file=io.StringIO(), width=160, record=True)
    console.print(explained([record.as_json()]))
    return [" ".join(line.split()) for line in console.export_text().splitlines()]


def test_what_ran_beside_the_rest_is_no_part_of_the_sum() -> None:
    lines = shown("stop")
    assert "transfer decode-0 2.000 s 1.000 s beside" in lines
    assert "prefill prefill-0 1.000 s 2.000 s 25.0%" in lines
    assert "sum 5.000 s 62.5%" in lines


@pytest.mark.parametrize("spans", [SPANS, SPANS[:3]])
def test_what_a_running_request_does_is_what_nothing_ran_beside(spans: tuple[RecordSpan, ...]) -> None:
    does = "decode on decode-0 for 5.000 s (paused)" if len(spans) > 3 else "prefill on prefill-0 for 7.000 s"
    assert f"runs since 8.000 s: {does}; first token after 3.000 s" in shown("running", spans)
    assert "runs since 0.0 ms: it has only just come; no token was delivered" in shown(
        "running", (), total_s=0.0, first_token_s=None
    )


CHOICE = PlacementChoice(
    1.0,
    2,
    Role.DECODE,
    "decode-1",
    "sequences in flight",
    (WorkerCandidate("decode-1", 2.5, 16, 3), WorkerCandidate("decode-0", 4.0, 0, 4)),
    others=5,
    refused=(RefusedWorkers("it drains", 3, ("decode-7", "decode-8")), RefusedWorkers("no room", 1, ("decode-9",))),
)


def test_all_that_a_record_has_is_laid_out() -> None:
    lines = shown(
        "worker",
        message="its process ended",
        tenant="acme",
        trace_id="ab" * 16,
        prompt_tokens=64,
        cached_tokens={"host": 16, "device": 32, "storage": 0},
        generated=7,
        transfer_bytes=2_500_000,
        attempts=2,
        retractions=1,
        migrations=3,
        uncertainty_s=0.25,
        left_out=4,
        events=(RecordEvent(2.0, "replay", "", "prefill-0 was lost"), RecordEvent(3.0, "pause", "decode-0")),
        choices=(CHOICE, structs.replace(CHOICE, why="its session is there", candidates=(), others=0, refused=())),
    )
    assert lines[:4] == [
        "request r0 of acme, for demo, came to router-0 at 1970-01-01 00:00:00 UTC",
        f"x-request-id ours, trace {'ab' * 16}",
        "ended after 8.000 s (worker: its process ended); first token after 3.000 s",
        "64 prompt tokens (32 of device, 16 of host cached), 7 generated, 2.5 MB sent to decode, 2 attempts, "
        "1 retraction, 3 migrations",
    ]
    assert "replay router 2.000 s prefill-0 was lost" in lines
    assert "pause decode-0 3.000 s" in lines
    at = lines.index("attempt 2, decode: decode-1 of 7 that could, by sequences in flight")
    assert lines[at + 1 : at + 9] == [
        "* decode-1: cost 2.5, 3 in flight, holds 16 of its tokens",
        "decode-0: cost 4, 4 in flight, holds 0 of its tokens",
        "and 5 at a higher cost",
        "not decode-7, decode-8, …: it drains (3)",
        "not decode-9: no room (1)",
        "attempt 2, decode: decode-1 of 0 that could: its session is there",
        "Workers' times may lie up to 250.0 ms earlier: a router sees no command arrive.",
        "4 more things happened than a record holds.",
    ]


def test_what_a_record_does_not_have_takes_no_line() -> None:
    lines = shown("stop", (), client_id="", generated=1, transfer_bytes=999)
    assert lines[:3] == [
        "request r0, for demo, came to router-0 at 1970-01-01 00:00:00 UTC",
        "ended after 8.000 s (stop); first token after 3.000 s",
        "0 prompt tokens, 1 generated, 999 bytes sent to decode, 1 attempt",
    ]
    assert not [line for line in lines if "earlier" in line or "more things" in line or "attempt 2" in line]
    assert "0 prompt tokens, 0 generated, 1.5 kB sent to decode, 1 attempt" in shown("stop", transfer_bytes=1500)


def test_of_a_refused_request_the_numbers_are_shown_by_which_it_was() -> None:
    numbers = {"first_token_s": 2.25, "limit": 2.0}
    lines = shown("late", (), first_token_s=None, total_s=0.00005, refused_status=429, numbers=numbers)
    assert lines[2] == "refused after 50 us with 429 (late); it was placed nowhere"
    assert "first token s 2.25" in lines
    assert "limit 2" in lines
    assert not [line for line in lines if "generated" in line or "where the time went" in line]


def test_the_command_asks_for_one_request_by_any_id_and_shows_it_or_prints_it_as_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = RequestRecord("r0", "r", "a b/c", "router-0", "demo", "", 0.0, 1.0, None, "stop").as_json()
    with router_stub() as stub:
        stub.answer = lambda method, path: (200, {"records": [record]}) if path == ASKED else (404, {})  # type: ignore[method-assign]
        words = ["explain", "a b/c", "--url", stub.url]
        assert cli.run(command_line.parser().parse_args(words)) == 0
        assert "request r0, for demo" in capsys.readouterr().out
        assert cli.run(command_line.parser().parse_args([*words, "--json"])) == 0
        assert json.loads(capsys.readouterr().out) == [record]


ASKED = "/cluster/requests/a%20b%2Fc"
