"""Requests that a real router refuses before it places them: what it says of them, and what a flood of them costs."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from rich.console import Console

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, router_config, serving
from tests.router.records.test_records_of_a_router import adds_up, records
from tests.router.service.test_ttft_slo import teach
from tests.router.tracing.otlp_server import attributes_of
from tests.router.tracing.test_traces import PARENT, TRACE, Sender, collecting, traced
from tests.support.served_cluster import ROOT
from twinpool.cli.credential_commands import new_key
from twinpool.cli.operator.explain_command import explained
from twinpool.contracts.config.cluster_config import Config, TracingConfig
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.key_file import TenantLimits, read_key_file, write_key_file
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.openai.request_headers import NO_TRACE, SLO_HEADER, TraceContext
from twinpool.router.records.kept_records import MESSAGE_CHARS, KeptRefusals, Refusal, RefusedRequest
from twinpool.router.tracing.otlp_exporter import TraceExporter

PATH = "/v1/completions"
ASK = {"prompt": [5, 6, 7], "max_tokens": 4}


def refused(server: Server, status: int, code: str, body: Any = ASK, **headers: str) -> dict[str, Any]:
    """The record of a request that must be refused."""
    answer = server.post(PATH, body, **{"X-Request-Id": "ours"}, **headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "ours"), answer.text
    one = records(server, "ours")[-1]
    assert (one["refused_status"], one["outcome"]) == (status, code)
    assert one["message"] == answer.json()["error"]["message"]
    assert (one["client_id"], one["answer_id"], one["attempts"]) == ("ours", "", 0)
    assert next(event["kind"] for event in one["events"]) == "refused"
    assert records(server, one["request_id"]) == [one]
    adds_up(one)
    return one


def possible(one: dict[str, Any]) -> str:
    return str(next(event["text"] for event in one["events"] if event["kind"] == "possible"))


def shown(one: dict[str, Any]) -> str:
    text = StringIO()
    Console(file=text, width=160).print(explained([one]))
    return text.getvalue()


def steady(text: str) -> list[str]:
    """The lines that aren't empty, without what differs from run to run."""
    lines = [re.sub(r"[0-9][0-9:.-]*( UTC| ms| us)", "N", line.rstrip()) for line in text.splitlines()]
    lines = [re.sub(r" +", " ", re.sub("─+", "─", line)) for line in lines]
    return [re.sub(r"[0-9]{4}-[0-9-]+ ", "", line) for line in lines if line.strip()]


def test_a_full_queue_is_explained_with_its_length_and_what_there_was_room_for() -> None:
    with serving(FakeCluster(1, 1), config=router_config(max_queue=3)) as server:
        server.pause("prefill")
        waiting = threading.Thread(target=server.post, args=(PATH, {**ASK, "n": 2}))
        waiting.start()
        server.wait_until(lambda: server.service.core.requests.in_flight == 2)
        one = refused(server, 429, "queue_full", {**ASK, "n": 2})
        wanted = {
            "answers_asked": 2, "answers_in_flight": 2, "max_queue": 3, "retry_after_s": 1,
            "prefill_workers_ready": 1, "decode_workers_ready": 1,
        }  # fmt: skip
        assert one["numbers"] == wanted
        assert possible(one) == (
            "there was room for 1 more answers, it needed 2 or more; it may be tried again after 1 s"
        )  # fmt: skip
        text = shown(one)
        assert "refused after" in text
        assert "with 429 (queue_full)" in text
        assert [line.split() for line in text.splitlines() if "max queue" in line] == [["max", "queue", "3"]]
        page = (ROOT / "docs" / "explain.md").read_text().split("$ twinpool explain ours\n")[1].split("```")[0]
        assert steady(text) == steady(page)
        # The same client's id asks for what was refused, and for what was served later.
        server.resume()
        waiting.join()
        assert server.post(PATH, ASK, **{"X-Request-Id": "ours"}).status_code == 200
        assert [record["refused_status"] for record in records(server, "ours")] == [429, 0]


def test_a_tenants_limit_is_explained_with_what_was_left_of_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secret = new_key(keys, "acme")
    bearer = {"Authorization": f"Bearer {secret}"}
    cases: list[tuple[TenantLimits, dict[str, Any], dict[str, float], str]] = [
        # What was used up already is refused before the body is read.
        (
            TenantLimits(tokens_per_minute=10),
            ASK,
            {"tokens_asked": 1, "tokens_a_minute": 10},
            "of 10 tokens a minute were left, it needed 1 or more",
        ),
        (
            TenantLimits(requests_per_minute=1),
            ASK,
            {"requests_asked": 1, "requests_a_minute": 1},
            "of 1 requests a minute were left, it needed 1 or more",
        ),
        (
            TenantLimits(concurrent=1),
            {**ASK, "n": 3},
            {"answers_asked": 3, "tenant_answers_in_flight": 0, "tenant_answers_allowed": 1},
            "its tenant had room for 1 more answers at a time, it needed 3",
        ),
    ]
    for limits, body, numbers, text in cases:
        write_key_file(keys, replace(read_key_file(keys), tenants={"acme": limits}))
        with serving(FakeCluster(1, 1), config=Config(security=SecurityConfig(keys_file=str(keys)))) as server:
            while server.post(PATH, body, **bearer).status_code == 200:
                pass
            one = refused(server, 429, "tenant_limit", body, **bearer)
            assert one["tenant"] == "acme"
            assert one["numbers"].items() >= numbers.items()
            for what in ("requests", "tokens"):  # It has filled a little since it was empty.
                assert one["numbers"].get(f"{what}_left", 0) < 1
            assert text in possible(one)
            assert f"it may be tried again after {one['numbers']['retry_after_s']:g} s" in possible(one)


def test_a_late_first_token_and_a_wrong_request_are_explained() -> None:
    with serving(FakeCluster()) as server:
        teach(server)
        one = refused(server, 429, "slo_unreachable", **{SLO_HEADER: "500"})
        assert one["numbers"]["allowed_ms"] == 500
        assert one["numbers"]["expected_ms"] == pytest.approx(1000, rel=0.2)
        assert "its first token could have come after 1,0" in possible(one)
        one = refused(server, 400, "invalid_request_error", {"prompt": [5] * 100_000, "max_tokens": 1})
        assert "100000 tokens" in one["message"]
        assert [event["kind"] for event in one["events"]] == ["refused"]


def test_a_refusal_is_a_trace_with_its_numbers_and_an_error() -> None:
    with collecting() as (collector, server):
        bad = server.post(PATH, {"prompt": []}, traceparent=f"00-{TRACE}-{PARENT}-01")
        assert bad.status_code == 400
        root = collector.root(TRACE)
        ((_, child),) = [(process, span) for process, span in collector.spans() if span is not root]
    assert root.parent_span_id.hex() == PARENT
    assert (root.status.code, child.name, child.parent_span_id) == (
        Status.STATUS_CODE_ERROR, "admission", root.span_id
    )  # fmt: skip
    told = attributes_of(root.attributes)
    assert (told["http.response.status_code"], told["twinpool.answers_in_flight"]) == (400, 0)
    assert told["twinpool.max_queue"] == Config().router.max_queue


def test_a_flood_of_refusals_leaves_the_records_and_the_traces_of_what_was_served() -> None:
    config = router_config(kept_refusals=5, kept_records=2)
    with serving(FakeCluster(1, 1), config=config) as server:
        assert server.post(PATH, ASK, **{"X-Request-Id": "served"}).status_code == 200
        for number in range(12):
            assert server.post(PATH, {"prompt": 7}, **{"X-Request-Id": f"bad-{number}"}).status_code == 400
        assert records(server, "served")[0]["outcome"] == "length"
        assert len(server.service.records.kept.refusals) == 5
        assert records(server, "bad-7")
        answer = server.client.get("/cluster/requests/bad-6")
        assert answer.status_code == 404
        assert "router.kept_refusals" in answer.json()["error"]["message"]
    sender = Sender()
    exporter = TraceExporter(sender, TracingConfig("http://there/v1/traces", queue=8), lambda: random.Random(1))
    exporter.add(traced(0))
    assert sender.began.acquire(timeout=60)
    for number in range(20):
        exporter.add_refusal(refusal(number, trace=TraceContext(TRACE, PARENT, True)))
    assert exporter.dropped == 18
    for number in range(1, 7):
        exporter.add(traced(number))
    assert exporter.dropped == 18, "what was served has its room"
    sender.go.set()
    exporter.close(10.0)
    assert exporter.exported == 9


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_body_that_says_it_is_something_else_is_explained(path: str) -> None:
    with serving(FakeCluster(1, 1)) as server:
        headers = {"X-Request-Id": "ours", "Content-Type": "application/xml"}
        assert server.client.post(path, content=b"words", headers=headers).status_code == 415
        (one,) = records(server, "ours")
        assert (one["refused_status"], one["outcome"]) == (415, "not_json")
        assert "Content-Type: application/json" in shown(one)
        adds_up(one)


def test_who_is_not_let_in_is_explained_and_is_no_trace(tmp_path: Path) -> None:
    keys, parent = tmp_path / "keys.json", {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    secret = new_key(keys, "acme")
    write_key_file(keys, replace(read_key_file(keys), tenants={"acme": TenantLimits(models=("another",))}))
    with collecting(security={"keys_file": str(keys)}) as (collector, server):
        assert refused(server, 401, "missing_api_key", **parent)["tenant"] == ""
        wrong = refused(server, 401, "invalid_api_key", Authorization="Bearer tp-wrong", **parent)
        assert wrong["tenant"] == ""
        assert "tp-wrong" not in shown(wrong)
        mine = refused(server, 403, "model_not_allowed", Authorization=f"Bearer {secret}", **parent)
        assert mine["tenant"] == "acme"
        assert "acme may use another; this server has" in shown(mine)
        assert attributes_of(collector.root(TRACE).attributes)["http.response.status_code"] == 403
        # What isn't asked for text has no record.
        assert server.client.get("/v1/models", headers={"X-Request-Id": "list"}).status_code == 401
        assert server.client.get("/cluster/requests/list").status_code == 404


def refusal(number: int, tenant: str = "", trace: TraceContext = NO_TRACE) -> Refusal:
    request = RefusedRequest(f"c{number}", tenant, trace, 0.001)
    failure = ApiError(429, "x" * 1000, "rate_limit_error", "queue_full")
    return Refusal("router", "demo", number, request, 1e9, failure, {})


def there(kept: KeptRefusals, came: int) -> Counter[str]:
    """How many of each tenant's are kept, of so many that came."""
    return Counter(one.tenant for number in range(came) for one in kept.find(f"c{number}"))


@given(st.integers(0, 8), st.lists(st.sampled_from("abc"), max_size=60))
def test_a_tenant_that_floods_pushes_out_its_own(most: int, came: list[str]) -> None:
    kept = KeptRefusals(most)
    for number, tenant in enumerate(came):
        counts = there(kept, number)
        kept.put(refusal(number, tenant))
        after = there(kept, number + 1)
        assert after.total() == len(kept) == min(most, number + 1)
        if most and counts[tenant] * len(counts) >= most and counts.total() == most:
            assert after == counts, "who has its share takes nobody's room"
    assert kept.total == len(came)


def test_a_tenants_few_refusals_stay_through_the_flood_of_another() -> None:
    kept = KeptRefusals(100)
    for number in range(3):
        kept.put(refusal(number, "quiet"))
    for number in range(3, 10_000):
        kept.put(refusal(number, "loud"))
    assert [one.client_id for number in range(3) for one in kept.find(f"c{number}")] == ["c0", "c1", "c2"]
    assert len(kept) == 100
    assert max(len(one.message) for one in kept.find("c9999")) == MESSAGE_CHARS


def test_tenants_whose_refusals_are_all_forgotten_have_no_share_of_the_room() -> None:
    kept = KeptRefusals(10)
    came = ["gone", "other-gone", *["one"] * 20, *["two"] * 20]
    for number, tenant in enumerate(came):
        kept.put(refusal(number, tenant))
    left = [came[number] for number in range(len(came)) if [*kept.find(f"c{number}")]]
    assert Counter(left) == {"one": 5, "two": 5}


def test_a_refusal_without_a_record_is_refused_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    with serving(FakeCluster(1, 1)) as server:
        put: Callable[..., None] = broken
        monkeypatch.setattr(server.service.records.kept.refusals, "put", put)
        assert server.post(PATH, {"prompt": 7}).status_code == 400
