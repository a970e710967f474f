"""What a scrape gets: text that Prometheus' own parsers read, in the form that was asked for, in the habit of names."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, serving

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


@pytest.fixture(scope="module")
def asked() -> Iterator[Server]:
    """A router that has answered a few requests."""
    with serving(FakeCluster()) as server:
        shared = {"dp_steps": 9.0, "dp_idle_steps": 4.0, "dp_idle_rows": 70.0}
        server.cluster["prefill-0"].counters = {
            "preemptions": 2.0, "pictures_computed": 3.0, "host_pages_total": 8.0, "host_pages_used": 6.0, **shared,
        }  # fmt: skip
        server.cluster["decode-0"].counters = {"retractions": 3.0, "retracted": 1.0}
        server.call(server.cluster.changed)
        server.complete(max_tokens=4)
        server.complete(max_tokens=3)
        yield server


def test_both_forms_have_the_same_samples(asked: Server) -> None:
    plain = asked.client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    opened = asked.client.get("/metrics", headers={"Accept": OPENMETRICS})
    assert opened.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert opened.text.endswith("# EOF\n")
    forms = [
        {(s.name, *sorted(s.labels.items())) for f in read(answer.text) for s in f.samples}
        for read, answer in ((read_text, plain), (read_openmetrics, opened))
    ]
    assert forms[0] == forms[1]
    assert len(forms[0]) > 200


@pytest.mark.parametrize(
    ("accept", "opened"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text; version=0.0.1", True),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;q=0.4,*/*;q=0.1", True),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.4", False),
        ("application/openmetrics-text;q=x,*/*", False),
        (",;,q=,", False),
    ],
)
def test_openmetrics_is_for_who_would_rather_have_it(asked: Server, accept: str, opened: bool) -> None:
    answer = asked.client.get("/metrics", headers={"Accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/openmetrics-text") == opened
    assert "vllm:num_requests_running{" in answer.text


def test_names_are_in_the_habit(asked: Server) -> None:
    """https://prometheus.io/docs/practices/naming: base units at the end, `_total` at the end of counters alone."""
    for family in read_text(asked.client.get("/metrics").text):
        assert family.documentation, family.name
        assert not re.search(r"_(s|ms|mib|percent|total|count|sum|now)$", family.name), family.name
        assert not re.search(r"_(seconds|bytes|tokens|pages|ratio)_(?!accepted|total|computed|cached)", family.name)
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
            assert not {"request", "client", "id", "instance", "job"} & sample.labels.keys()


def test_series_grow_with_workers_and_not_with_requests(asked: Server) -> None:
    def series() -> set[str]:
        lines = asked.client.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}

    before = series()
    for _ in range(5):
        asked.complete(max_tokens=4)
    assert series() == before


def samples(server: Server) -> dict[str, float]:
    found = {}
    for line in server.client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def test_workers_have_their_state_starts_and_pages(asked: Server) -> None:
    found = samples(asked)
    assert found['twinpool_worker_state{role="decode",state="ready",worker="decode-0"}'] == 1
    assert found['twinpool_worker_starts_total{role="decode",worker="decode-0"}'] >= 1
    workers = len(asked.cluster.workers) // 2
    assert found['twinpool_workers{role="prefill",state="ready"}'] == workers
    assert found['twinpool_workers{role="prefill",state="dead"}'] == 0
    assert found['twinpool_kv_usage_ratio{role="prefill",tier="host",worker="prefill-0"}'] == 0.75
    assert found['twinpool_preemptions_total{role="prefill",worker="prefill-0"}'] == 2
    assert found['twinpool_images_total{outcome="computed",role="prefill",worker="prefill-0"}'] == 3


def test_a_worker_that_shares_its_experts_has_the_steps_that_it_took_with_rows_and_without(asked: Server) -> None:
    found = {name: value for name, value in samples(asked).items() if name.startswith("twinpool_worker_shared_steps")}
    assert found == {
        'twinpool_worker_shared_steps_total{role="prefill",rows="some",worker="prefill-0"}': 5,
        'twinpool_worker_shared_steps_total{role="prefill",rows="none",worker="prefill-0"}': 4,
        'twinpool_worker_shared_steps_idle_rows_total{role="prefill",worker="prefill-0"}': 70,
    }


def test_placements_are_counted_by_worker_and_policy(asked: Server) -> None:
    placed = {k: v for k, v in samples(asked).items() if k.startswith("twinpool_placements_total")}
    assert all('policy="cache_aware"' in key for key in placed)
    submitted = samples(asked)["twinpool_requests_submitted_total"]
    assert sum(v for k, v in placed.items() if 'role="decode"' in k) == submitted
    assert sum(v for k, v in placed.items() if 'role="prefill"' in k) == submitted
