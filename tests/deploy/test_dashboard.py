"""The dashboard against a real Prometheus that scrapes a real router in front of fake workers: every query is one that
Prometheus takes, and shows something where there is something."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import serving
from tests.support.prometheus_server import DEPLOY, PrometheusServer
from twinpool.contracts.config.load_config import config_from_dict

FOLDER = DEPLOY / "grafana"
FILE = FOLDER / "dashboards" / "twinpool.json"
EMPTY = ("autoscaler", "tenant", "kv_index", "controller", "link_", "requests_missed:ratio1h")
"""What a router in front of fake workers has no samples of."""
COUNTERS = {
    "prefill-0": ("preemptions", "hit_tokens_device", "pages_evicted"),
    "decode-0": ("retractions", "resumptions", "retracted", "pages_damaged", "tokens_drafted", "drafts_accepted"),
}


def panels() -> list[dict[str, Any]]:
    return [p for p in json.loads(FILE.read_text())["panels"] if p["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    """Each query with its panel's title, its variables filled in as Grafana does for All and scrapes of 1 s."""
    found = []
    for panel in panels():
        for target in panel["targets"]:
            text = target["expr"].replace("$job", ".*").replace("$router", ".*").replace("$__rate_interval", "4s")
            assert "$" not in text, text
            found.append((panel["title"], text))
    return found


def test_the_file_is_what_the_script_prints() -> None:
    script = FOLDER / "dashboard.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == FILE.read_text(), "run `make pages`"


def test_panels_are_apart_and_what_provisions_them_is_there() -> None:
    board = json.loads(FILE.read_text())
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])
    taken = [(x, y) for p in board["panels"] for x in cells(p, "x", "w") for y in cells(p, "y", "h")]
    assert len(set(taken)) == len(taken)
    for file in FOLDER.glob("provisioning/*/*.yml"):
        assert yaml.safe_load(file.read_text())["apiVersion"] == 1


def cells(panel: dict[str, Any], start: str, size: str) -> range:
    place = panel["gridPos"]
    return range(place[start], place[start] + place[size])


def test_queries_name_only_metrics_that_are_there() -> None:
    page = (DEPLOY.parent / "docs" / "metrics.md").read_text()
    for _, text in queries():
        for word in re.findall(r"\btwinpool_\w+", text):
            assert f"`{re.sub(r'_(bucket|count|sum)$', '', word)}`" in page, word


@pytest.mark.slow
def test_every_query_is_answered_by_a_real_prometheus(tmp_path: Path) -> None:
    watched = config_from_dict({"audit": {"fraction": 1.0}})
    with (
        serving(FakeCluster(), config=watched) as router,
        PrometheusServer(tmp_path / "prometheus", [f"127.0.0.1:{router.port}"]) as prometheus,
    ):

        def count_on(value: float) -> None:
            for worker, names in COUNTERS.items():
                router.cluster[worker].counters = dict.fromkeys(names, value)
            router.call(router.cluster.changed)

        values = itertools.count(1.0)

        def all_shown() -> bool:
            router.complete(max_tokens=4)
            count_on(next(values))
            return not unanswered()

        def unanswered() -> list[str]:
            due = [text for _, text in queries() if not any(name in text for name in EMPTY)]
            return [text for text in due if not prometheus.query(text)]

        try:
            prometheus.wait(all_shown, "an answer to every query")
        except AssertionError:
            pytest.fail("\n".join(["nothing to show:", *unanswered()]))
        for _, text in queries():
            prometheus.query(text)  # those that may be empty: Prometheus takes them
        (target,) = prometheus.targets()
        assert (target["health"], target["lastError"]) == ("up", "")
        assert prometheus.value("max(vllm:generation_tokens_total)") > 0, "the scrape took OpenMetrics, colons and all"
        assert prometheus.value("scrape_samples_scraped") > 300
        rules = prometheus.client.get("/api/v1/rules").json()["data"]["groups"]
        assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
