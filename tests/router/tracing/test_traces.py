"""Traces as a collector gets them: decoded by OpenTelemetry's own definitions of its protocol, on a plain server.

What a collector may do to the router is played by senders that hang, refuse and raise.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, serving
from tests.router.records.test_record_reports import draft
from tests.router.tracing.otlp_server import OtlpServer, attributes_of
from twinpool.contracts.config.cluster_config import Config, TracingConfig
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.messages.request_record import RecordEvent
from twinpool.router.openai.request_headers import NO_TRACE, TraceContext, read_traceparent
from twinpool.router.tracing import otlp_exporter
from twinpool.router.tracing.otlp_exporter import MAX_AT_ONCE, TraceExporter, TraceSampling, TraceSpan

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def collecting(security: dict[str, Any] | None = None, **tracing: Any) -> Iterator[tuple[OtlpServer, Server]]:
    """A router that sends its traces; `security` and `tracing`: what its settings have of these sections."""
    with OtlpServer() as collector:
        tree = {"tracing": {"endpoint": collector.url, **tracing}, "security": security or {}}
        config = config_from_dict(tree)
        with serving(FakeCluster(1, 1), config=config) as server:
            yield collector, server


def test_one_trace_tells_of_all_processes_and_its_spans_add_up_to_the_request() -> None:
    with collecting() as (collector, server):
        answer = server.post(
            "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4}, traceparent=f"00-{TRACE}-{PARENT}-01"
        )
        assert answer.status_code == 200
        root = collector.root(TRACE)
        (record,) = server.client.get(f"/cluster/requests/{answer.json()['id']}").json()["records"]
    assert record["trace_id"] == TRACE
    assert root.parent_span_id.hex() == PARENT
    assert root.kind == Span.SPAN_KIND_SERVER
    told = attributes_of(root.attributes)
    assert (told["gen_ai.request.model"], told["gen_ai.response.id"]) == ("demo", record["answer_id"])
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 4)
    assert told["twinpool.outcome"] == "length"
    assert [event.name for event in root.events] == [event["kind"] for event in record["events"]]
    assert root.start_time_unix_nano == pytest.approx(record["arrived"] * 1e9, abs=2000)
    children = [(process, span) for process, span in collector.spans() if span.parent_span_id == root.span_id]
    assert {span.trace_id.hex() for _, span in collector.spans()} == {TRACE}
    # The fakes make their times up, and a decode that would end after its answer is cut off.
    assert {process for process, _ in children} >= {"router", "prefill-0"}
    assert [
        (span.name, process) for process, span in sorted(children, key=lambda one: one[1].start_time_unix_nano)
    ] == [(span["name"], span["worker"] or "router") for span in record["spans"]]
    took = sum(span.end_time_unix_nano - span.start_time_unix_nano for _, span in children)
    assert took == pytest.approx(root.end_time_unix_nano - root.start_time_unix_nano, rel=0.01)


def test_a_client_decides_for_its_own_request_and_the_ratio_for_the_rest() -> None:
    with collecting(ratio=0.0) as (collector, server):
        body = {"prompt": [5, 6, 7], "max_tokens": 2}
        server.post("/v1/completions", body, traceparent=f"00-{TRACE[::-1]}-{PARENT}-00")
        server.post("/v1/completions", body)
        server.post("/v1/completions", body, traceparent=f"00-{TRACE}-{PARENT}-01")
        collector.root(TRACE)
        assert len([span for _, span in collector.spans() if span.name == "request demo"]) == 1
        traces = server.service.records._traces
        server.wait_until(lambda: traces is not None and traces.exported == 1)
        text = server.client.get("/metrics").text
    assert 'twinpool_traces_total{outcome="exported"} 1.0' in text
    sampling = TraceSampling(0.25, random.Random(1))
    contexts = [sampling.decided(NO_TRACE) for _ in range(2000)]
    assert len({context.trace_id for context in contexts}) == 2000
    assert 400 < sum(context.sampled for context in contexts) < 600
    # As OpenTelemetry's own sampler decides, by the trace's id alone.
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    sampler = TraceIdRatioBased(0.25)
    for context in contexts[:200]:
        decision = sampler.should_sample(None, int(context.trace_id, 16), "a request").decision
        assert decision.is_sampled() is context.sampled


def test_an_error_is_the_status_of_its_trace() -> None:
    with collecting() as (collector, server):
        server.call(server.cluster["decode-0"].die)
        server.call(server.cluster["prefill-0"].die)
        answer = server.post(
            "/v1/completions", {"prompt": [5], "max_tokens": 4, "timeout": 0.3}, traceparent=f"00-{TRACE}-{PARENT}-01"
        )
        assert answer.status_code >= 500
        root = collector.root(TRACE)
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert "deadline" in root.status.message
    assert attributes_of(root.attributes)["twinpool.outcome"] == "deadline"


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (f"00-{TRACE}-{PARENT}-01", TraceContext(TRACE, PARENT, True)),
        (f" 00-{TRACE}-{PARENT}-00 ", TraceContext(TRACE, PARENT, False)),
        (f"01-{TRACE}-{PARENT}-03-what-a-later-version-adds", TraceContext(TRACE, PARENT, True)),
        (f"00-{TRACE}-{PARENT}-01-more", NO_TRACE),
        (f"ff-{TRACE}-{PARENT}-01", NO_TRACE),
        (f"00-{'0' * 32}-{PARENT}-01", NO_TRACE),
        (f"00-{TRACE}-{'0' * 16}-01", NO_TRACE),
        (f"00-{TRACE.upper()}-{PARENT}-01", NO_TRACE),
        (f"00-{TRACE}-{PARENT}", NO_TRACE),
        ("", NO_TRACE),
    ],
)
def test_a_traceparent_is_read_as_the_standard_has_it(header: str, found: TraceContext) -> None:
    assert read_traceparent(header) == found


class Sender:
    """A collector's other end, as a test wants it. Implements `router.tracing.otlp_exporter.SpanSender`."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self.taken = True
        self.go, self.began, self.ended = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)
        self.raises = False

    def send(self, spans: Sequence[TraceSpan]) -> bool:
        self.began.release()
        self.go.wait(60)
        try:
            if self.raises:
                raise RuntimeError("an exporter's bug")
            self.sent.append([span.attributes["twinpool.request_id"] for span in spans if span.name == "request demo"])
            return self.taken
        finally:
            self.ended.release()

    def close(self) -> None:
        self.sent.append(["closed"])


def exporter(sender: Sender, queue: int = 2048) -> TraceExporter:
    return TraceExporter(sender, TracingConfig("http://there/v1/traces", queue=queue), lambda: random.Random(1))


def traced(number: int, **changes: Any) -> Any:
    made = draft(number)
    made.trace_id, made.parent_id, made.sampled = f"{number + 1:032x}", PARENT, True
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_collector_that_hangs_costs_no_request_anything_but_its_trace() -> None:
    sender = Sender()
    traces = exporter(sender, queue=3)
    traces.add(traced(0))
    assert sender.began.acquire(timeout=60)
    for number in range(1, 9):
        traces.add(traced(number))
    assert (traces.dropped, traces.exported) == (5, 0)
    traces.add(traced(20, sampled=False))
    traces.add(traced(1, audits=[RecordEvent(9.0, "audited")]))  # Which comes to every listener again.
    traces.close(0.0)
    traces.add(traced(21))
    assert traces.dropped == 6, "nothing is taken any more"
    sender.go.set()
    traces._thread.join(60)
    assert sender.sent == [["r0-0"], ["r1-0", "r2-0", "r3-0"], ["closed"]]
    assert (traces.exported, traces.failed) == (4, 0)


def test_a_collector_that_refuses_and_an_exporter_that_fails_are_counted_and_traces_go_on() -> None:
    sender = Sender()
    sender.go.set()
    traces = exporter(sender)
    for taken, raises in ((False, False), (True, True), (True, False)):
        sender.taken, sender.raises = taken, raises
        traces.add(traced(len(sender.sent)))
        assert sender.ended.acquire(timeout=60)
        sender.began.acquire(timeout=60)
    traces.close(10.0)
    assert (traces.exported, traces.failed, traces.dropped) == (1, 2, 0)
    shown = {sample.labels["outcome"]: sample.value for family in traces.families() for sample in family.samples
             if "outcome" in sample.labels}  # fmt: skip
    assert shown == {"exported": 1, "failed": 2, "dropped": 0}


def test_lost_traces_are_told_once_until_the_collector_takes_some_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sender = Sender()
    traces = exporter(sender, queue=1)
    number = 0
    for taken in (False, False, True, True, False):
        sender.taken = taken
        traces.add(traced(number := number + 1))
        assert sender.began.acquire(timeout=60)
        for _ in range(3):  # One waits, two are dropped.
            traces.add(traced(number := number + 1))
        sender.go.set()
        assert sender.ended.acquire(timeout=60)
        assert sender.ended.acquire(timeout=60)
        assert sender.began.acquire(timeout=60)
        sender.go.clear()
    sender.go.set()
    traces.close(10.0)
    assert (traces.exported, traces.failed, traces.dropped) == (4, 6, 10)
    said = [record.getMessage().partition(":")[0] for record in caplog.records if "traces" in record.getMessage()]
    lost = ["traces dropped", "traces not taken by the collector"]
    # What the collector takes while others are being dropped ends that spell; the next drop is told again.
    assert said[:3] == [*lost, "traces exported again"]
    assert (said.count("traces not taken by the collector"), said[-2:]) == (2, lost)


def test_so_many_traces_go_in_one_call() -> None:
    sender = Sender()
    traces = exporter(sender)
    traces.add(traced(0))
    assert sender.began.acquire(timeout=60)
    for number in range(1, MAX_AT_ONCE + 3):
        traces.add(traced(number))
    sender.go.set()
    traces.close(10.0)
    assert [len(one) for one in sender.sent[:-1]] == [1, MAX_AT_ONCE, 2]


def test_without_the_packages_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    otlp_exporter.check_tracing(TracingConfig())
    with pytest.raises(ConfigError, match=r"pip install 'twinpool\[otel\]'"):
        otlp_exporter.check_tracing(TracingConfig("http://there/v1/traces"))


@pytest.mark.parametrize(
    "endpoint", ["collector:4318", "http://collector:4318", "ftp://collector/v1/traces", "http:///x"]
)
def test_an_endpoint_that_is_no_url_with_a_path_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        config_from_dict({"tracing": {"endpoint": endpoint}})
    with pytest.raises(ConfigError, match=r"tracing\.ratio"):
        config_from_dict({"tracing": {"ratio": 1.5}})
    assert Config().tracing.endpoint == ""
