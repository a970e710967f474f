"""What `twinpool explain` shows of a record that is made by hand."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from twinpool.cli.operator.explain_command import explained
from twinpool.contracts.messages.request_record import RecordSpan, RequestRecord

SPANS = (
    RecordSpan("waits", 0.0, 1.0),
    RecordSpan("prefill", 1.0, 3.0, "prefill-0"),
    RecordSpan("transfer", 2.0, 3.0, "decode-0", hidden=True),
    RecordSpan("decode", 3.0, 5.0, "decode-0", detail="paused"),
    RecordSpan("audit", 3.5, 5.0, "prefill-0", hidden=True),
)


def shown(outcome: str, spans: tuple[RecordSpan, ...] = SPANS, **changes: Any) -> list[str]:
    values: dict[str, Any] = {"arrived": 0.0, "total_s": 8.0, "first_token_s": 3.0, **changes}
    record = RequestRecord("r0", "r", "ours", "router-0", "demo", "", outcome=outcome, spans=spans, **values)
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
