"""Traces as they come out of a collector that others wrote: Rotel, which a wheel of PyPI carries.

A real cluster sends to it, it passes on to a plain server, and what is looked at is what that server got. Then the
collector is killed, and comes back, while the cluster serves.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.router.tracing.otlp_server import OtlpServer, attributes_of
from tests.soak.rotel import OutOfReach, Rotel, collector_binary
from tests.support.served_cluster import Serving, serving, until

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(600)]

PARENT = "b7ad6b7169203331"
STEP_S = 0.01
AWAY = 24
"""Requests that are answered while the collector is away."""
QUEUE = 4


@dataclass(frozen=True)
class World:
    """A collector between a cluster and a server of this test."""

    cluster: Serving
    collector: Rotel
    sink: OtlpServer

    def post(self, name: str, tokens: int = 20, prompt: int = 7, **more: Any) -> httpx.Response:
        """One request of the client `name`, which has a trace of its own; `prompt`: the token that it repeats."""
        body = self.cluster.body([prompt] * 40, max_tokens=tokens, **more)
        return httpx.post(f"{self.cluster.url}/v1/completions", json=body, timeout=60, headers=headers(name))

    def record(self, name: str) -> dict[str, Any]:
        done = self.cluster.twinpool("explain", name, "--json")
        assert done.returncode == 0, done.stderr
        (record,) = json.loads(done.stdout)
        return dict(record)

    def trace(self, trace_id: str) -> tuple[Span, list[tuple[str, Span]]]:
        """The root of a trace and its other spans, each with its process, once they are out of the collector."""

        def found() -> list[tuple[str, Span]]:
            return [(process, span) for process, span in self.sink.spans() if span.trace_id.hex() == trace_id]

        until(lambda: bool(found()), f"the trace {trace_id} to come out of the collector")
        spans = found()
        (root,) = [span for _, span in spans if span.kind == Span.SPAN_KIND_SERVER]
        return root, [(process, span) for process, span in spans if span is not root]

    def outcomes(self) -> dict[str, int]:
        """What became of traces, as /metrics has it."""
        names = ("exported", "failed", "dropped")
        return {name: int(self.cluster.metric("twinpool_traces_total", outcome=name)) for name in names}

    def lines(self, word: str) -> list[tuple[str, dict[str, Any]]]:
        """The log lines of all processes with a word in them, each with its process."""
        folder = Path(next(line for line in self.cluster.lines if " logs " in line).split()[-1])
        return [
            (file.stem, json.loads(line))
            for file in sorted(folder.glob("*.log"))
            for line in file.read_text().splitlines()
            if word in line
        ]

    def said(self, event: str) -> list[dict[str, Any]]:
        """The router's log lines of an event."""
        return [line for process, line in self.lines(event) if process == "router"]


def trace_of(name: str) -> str:
    """A client's trace id: its name in hex digits."""
    return name.encode().hex().rjust(32, "0")


def headers(name: str) -> dict[str, str]:
    return {"X-Request-Id": name, "traceparent": f"00-{trace_of(name)}-{PARENT}-01"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    base = tmp_path_factory.mktemp("collector")
    try:
        binary = collector_binary()
    except (OutOfReach, OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"the collector Rotel can't be had here: {error}")
    with OtlpServer() as sink:
        collector = Rotel(binary, base, sink.base)
        collector.start()
        sections = {
            "tracing": {"endpoint": collector.url, "timeout_s": 3, "queue": QUEUE},
            # Steps take their time, so that a request can be cut short or come too late.
            "faults": {"step_delay_s": STEP_S, "corrupt_page": 1},
            "decode": {"speculation": "off"},
        }
        try:
            with serving(
                "demo", base, "--prefill", "1", "--decode", "1", sections=sections, ready_within=120
            ) as running:
                yield World(running, collector, sink)
        finally:
            collector.kill()


def adds_up(root: Span, children: Sequence[tuple[str, Span]], record: dict[str, Any]) -> None:
    """A trace is whole: no span without its parent, none outside it, no time that none of them explains."""
    known = {root.span_id} | {span.span_id for _, span in children}
    assert len(known) == 1 + len(children)
    assert {span.parent_span_id for _, span in children} == {root.span_id} <= known
    lasted = root.end_time_unix_nano - root.start_time_unix_nano
    assert lasted == pytest.approx(record["total_s"] * 1e9, rel=0.01)
    assert root.start_time_unix_nano == pytest.approx(record["arrived"] * 1e9, abs=2000)
    for _, span in children:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    shown = [span for _, span in children if not attributes_of(span.attributes)["twinpool.hidden"]]
    took = sum(span.end_time_unix_nano - span.start_time_unix_nano for span in shown)
    assert took == pytest.approx(lasted, rel=0.01)
    ordered = sorted(children, key=lambda one: one[1].start_time_unix_nano)
    wanted = sorted(record["spans"], key=lambda span: span["start_s"])
    assert [(span.name, process) for process, span in ordered] == [
        (span["name"], span["worker"] or record["router"]) for span in wanted
    ]


def test_log_lines_of_all_processes_and_spans_lead_to_each_other_by_the_requests_id(world: World) -> None:
    """The first hand-over arrives damaged, of which decode has a word in its log."""
    answer = world.post("damaged", prompt=8)
    assert answer.status_code == 200, answer.text
    root, children = world.trace(trace_of("damaged"))
    adds_up(root, children, world.record("damaged"))
    told = attributes_of(root.attributes)
    assert told["twinpool.attempts"] > 1
    # From a span to the lines: all spans have the one id, and a process's lines have it.
    request_id, answer_id = told["twinpool.request_id"], told["gen_ai.response.id"]
    assert {attributes_of(span.attributes)["twinpool.request_id"] for _, span in children} == {request_id}
    lines = world.lines(answer_id)
    assert {process for process, _ in lines} >= {"router", "decode-0"}, lines
    assert "state damage" in {line["event"] for process, line in lines if process == "decode-0"}, lines
    for process, line in lines:
        # From a line to its trace: by what it says of its request, among all that came out of the collector.
        named = line.get("request_id") or line["room"].split("/")[0]
        found = {
            span.trace_id.hex()
            for _, span in world.sink.spans()
            if named in (attributes_of(span.attributes)["twinpool.request_id"], answer_id)
        }
        assert found >= {trace_of("damaged")}, (process, line)
        if named == request_id:
            assert found == {trace_of("damaged")}
    assert {line["trace_id"] for process, line in lines if process == "router" and "trace_id" in line} == {
        trace_of("damaged")
    }


def test_a_trace_of_each_request_comes_out_of_a_collector_and_is_whole(world: World) -> None:
    answer = world.post("whole")
    assert answer.status_code == 200, answer.text
    record = world.record("whole")
    root, children = world.trace(trace_of("whole"))
    assert (record["trace_id"], root.parent_span_id.hex()) == (trace_of("whole"), PARENT)
    adds_up(root, children, record)
    assert {process for process, _ in children} == {record["router"], "prefill-0", "decode-0"}
    assert {span.name for _, span in children} >= {"tokenise", "prefill", "handover", "decode", "answer"}
    for process, span in children:
        assert attributes_of(span.attributes).get("twinpool.worker", record["router"]) == process
    told = attributes_of(root.attributes)
    finish = told.pop("gen_ai.response.finish_reasons")
    assert [one.string_value for one in finish.values] == ["length"]
    assert told == {
        "gen_ai.provider.name": "twinpool",
        "gen_ai.request.model": world.cluster.model,
        "gen_ai.response.model": world.cluster.model,
        "gen_ai.response.id": answer.json()["id"].removeprefix("cmpl-"),
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 20,
        "twinpool.request_id": record["request_id"],
        "twinpool.client_id": "whole",
        "twinpool.outcome": "length",
        "twinpool.attempts": 1,
        "twinpool.migrations": 0,
        "twinpool.retractions": 0,
        "twinpool.transfer_bytes": record["transfer_bytes"],
        "twinpool.uncertainty_s": pytest.approx(record["uncertainty_s"]),
        "twinpool.first_token_s": pytest.approx(record["first_token_s"]),
    }
    assert record["transfer_bytes"] > 0 < record["first_token_s"]
    assert root.status.code == Status.STATUS_CODE_UNSET


def test_a_streamed_request_without_a_client_s_trace_has_one_of_its_own(world: World) -> None:
    body = world.cluster.body([9] * 30, max_tokens=12, stream=True)
    url, ours = f"{world.cluster.url}/v1/completions", {"X-Request-Id": "streamed"}
    with httpx.stream("POST", url, json=body, timeout=60, headers=ours) as response:
        assert list(response.iter_lines())[-2] == "data: [DONE]"
    record = world.record("streamed")
    root, children = world.trace(record["trace_id"])
    assert root.parent_span_id == b""
    adds_up(root, children, record)
    told = attributes_of(root.attributes)
    assert (told["gen_ai.usage.output_tokens"], told["twinpool.outcome"]) == (12, "length")


def test_a_request_that_its_client_leaves_has_a_trace_that_says_so(world: World) -> None:
    body = world.cluster.body([7] * 40, max_tokens=2000, stream=True)
    url = f"{world.cluster.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60, headers=headers("left")) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number == 10:
                break
    root, children = world.trace(trace_of("left"))
    adds_up(root, children, world.record("left"))
    told = attributes_of(root.attributes)
    assert told["twinpool.outcome"] == "abandoned"
    assert 0 < told["gen_ai.usage.output_tokens"] < 2000
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert "client left" in root.status.message


def test_a_request_that_fails_has_a_trace_with_its_error(world: World) -> None:
    answer = world.post("late", tokens=1000, timeout=0.5)
    assert answer.status_code == 504, answer.text
    root, children = world.trace(trace_of("late"))
    adds_up(root, children, world.record("late"))
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert root.status.message == f"deadline: {answer.json()['error']['message']}"
    assert attributes_of(root.attributes)["twinpool.outcome"] == "deadline"


def test_a_collector_that_dies_and_comes_back_costs_traces_and_no_answers(world: World) -> None:
    asked = 5
    until(lambda: world.outcomes()["exported"] == asked, "the traces of the other tests to be exported")
    world.collector.kill()
    answers = world.cluster.complete_all([[5, number % 50 + 1] * 20 for number in range(AWAY)], max_tokens=8)
    assert [len(answer.tokens) for answer in answers] == [8] * AWAY

    def counted() -> bool:
        now = world.outcomes()
        return now["failed"] + now["dropped"] == AWAY and now["exported"] == asked

    until(counted, "each trace to be counted as lost")
    assert world.outcomes()["dropped"] > 0, "more came than may wait"
    assert world.outcomes()["failed"] > 0
    world.collector.start()
    assert world.post("again").status_code == 200
    root, children = world.trace(trace_of("again"))
    adds_up(root, children, world.record("again"))
    until(lambda: world.outcomes()["exported"] == asked + 1, "the trace to be counted as exported")
    for event in ("traces not taken by the collector", "traces dropped", "traces exported again"):
        assert len(world.said(event)) == 1, (event, world.said(event))
    (again,) = world.said("traces exported again")
    assert (again["failed"], again["dropped"]) == (world.outcomes()["failed"], world.outcomes()["dropped"])
    assert world.cluster.metric("twinpool_traces_waiting") == 0
