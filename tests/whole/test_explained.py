"""One request that is replayed, retracted and moved, on real workers: `twinpool explain` tells all of it, in order,
with times that add up."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.served_cluster import ROOT, Serving, serving, until

OURS = "a-request-of-ours"
TOKENS = 500


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    sections = {
        "transfer": {"plane": "local"},
        "audit": {"fraction": 1.0},
        # The first hand-over arrives damaged. All are retracted again and again, and steps take their time, so that
        # there is time for the rest.
        "faults": {"corrupt_page": 1, "step_delay_s": 0.01, "retract_every": 20},
        "decode": {"speculation": "off"},
    }
    base = tmp_path_factory.mktemp("explained")
    with serving("demo", base, "--prefill", "2", "--decode", "2", sections=sections) as running:
        yield running


class Client(threading.Thread):
    """One streamed answer, in a thread of its own."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__()
        self._url, self._body = url, body
        self.id, self.tokens = "", list[int]()
        self.start()

    def run(self) -> None:
        with httpx.stream(
            "POST", f"{self._url}/v1/completions", json=self._body | {"stream": True}, timeout=120,
            headers={"X-Request-Id": OURS},
        ) as response:  # fmt: skip
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    self.id = event["id"]
                    self.tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or []]


def explained(cluster: Serving, request_id: str) -> dict[str, Any]:
    done = cluster.twinpool("explain", request_id, "--json")
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout)
    return dict(record)


def in_order(record: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    """The first event of each kind after the one before."""
    found, events = list[dict[str, Any]](), iter(record["events"])
    for kind in kinds:
        event = next((event for event in events if event["kind"] == kind), None)
        assert event is not None, f"no {kind!r} after {[event['kind'] for event in found]}: {record['events']}"
        found.append(event)
    return found


def rows(text: str) -> set[str]:
    """The labels of an explanation's lines: what stands before the first wide gap or colon, numbers left out."""
    labels = (re.split(r"  +|:|,", line.strip())[0] for line in text.splitlines())
    labels = (re.sub(r"[0-9a-f]{24}", "ID", label) for label in labels)
    return {re.sub(r"\d+", "N", label) for label in labels if re.fullmatch(r"[a-z*][a-z _*0-9-]*", label)}


def adds_up(record: dict[str, Any]) -> None:
    shown = [span for span in record["spans"] if not span["hidden"]]
    total = record["total_s"]
    assert sum(span["end_s"] - span["start_s"] for span in shown) == pytest.approx(total, rel=0.01)
    assert [span["start_s"] for span in shown[1:]] == [span["end_s"] for span in shown[:-1]]
    assert (shown[0]["start_s"], shown[-1]["end_s"]) == (0.0, pytest.approx(total))


@pytest.mark.slow
def test_a_request_that_was_replayed_retracted_and_moved_is_explained_in_order(cluster: Serving) -> None:
    began = time.time()
    client = Client(cluster.url, cluster.body([7] * 40, max_tokens=TOKENS))
    until(lambda: len(client.tokens) >= 30, "it to be retracted", pause_s=0.002)
    (running,) = httpx.get(f"{cluster.url}/cluster/requests/{OURS}", timeout=60).json()["records"]
    source = running["choices"][-1]["chosen"]
    httpx.post(f"{cluster.url}/cluster/drain/{source}", timeout=60).raise_for_status()
    client.join(120)
    took = time.time() - began
    assert len(client.tokens) == TOKENS
    assert running["outcome"] == "running"
    adds_up(running)
    until(lambda: "audited" in [e["kind"] for e in explained(cluster, client.id)["events"]], "the answer's audit")

    record = explained(cluster, OURS)
    assert (record["client_id"], record["outcome"], record["generated"]) == (OURS, "length", TOKENS)
    # The client measures with its own clock, and from outside.
    assert began <= record["arrived"] <= began + took
    assert record["first_token_s"] < record["total_s"] <= took
    replayed, _, retracted, resumed, begun, paused, moved, ended, audited = in_order(
        record, "replayed", "placed", "retracted", "resumed", "move begun", "move paused", "moved", "ended", "audited"
    )
    assert "damaged" in replayed["text"]
    assert {retracted["worker"], resumed["worker"], begun["worker"], paused["worker"]} == {source}
    assert retracted["text"] == resumed["text"] != "0 bytes"
    assert moved["worker"] != source
    assert (ended["text"], audited["text"].partition(":")[0]) == ("length", "exact")
    assert record["attempts"] > 1 <= record["retractions"]
    assert record["migrations"] == 1
    adds_up(record)
    # Each is a span as well, where the events say that it was.
    for name, event in (("retracted", retracted), ("move", paused)):
        span = next(span for span in record["spans"] if span["name"] == name)
        assert span["start_s"] == pytest.approx(event["at_s"], abs=0.002)
        assert span["worker"] == source
    again = next(span for span in record["spans"] if span["name"] == "queue" and span["detail"])
    assert again["start_s"] == pytest.approx(replayed["at_s"], abs=1e-5)
    assert [choice["role"] for choice in record["choices"]][:4] == ["prefill", "decode"] * 2
    first, avoided = record["choices"][0], record["choices"][2]
    assert [one["worker"] for one in first["candidates"]] == ["prefill-0", "prefill-1"]
    assert avoided["refused"][0]["workers"] == [first["chosen"]]

    text = cluster.twinpool("explain", client.id).stdout
    print(text)
    shown = (ROOT / "docs" / "explain.md").read_text().split("```console")[1].split("```")[0]
    # Whether a move is begun twice is chance: the damaged pages are those of the first write between two workers.
    assert rows(text) | {"move undone", "not prefill-N"} >= rows(shown), rows(shown) - rows(text)
    for word in ("replayed", "retracted", "moved", "audited", "100.0%", f"not {first['chosen']}: avoided"):
        assert word in text, text


@pytest.mark.slow
def test_what_is_not_known_is_said_with_how_long_records_are_kept(cluster: Serving) -> None:
    done = cluster.twinpool("explain", "no-such-request")
    assert done.returncode == 1
    assert "nothing is known of a request 'no-such-request'" in done.stderr
    assert "router.kept_records" in done.stderr


@pytest.mark.slow
def test_a_request_that_was_refused_is_explained_as_well(cluster: Serving) -> None:
    body = cluster.body([7] * 40, max_tokens=10**6)
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers={"X-Request-Id": "much"}, timeout=60)
    assert (answer.status_code, answer.headers["x-request-id"]) == (400, "much")
    text = cluster.twinpool("explain", "much").stdout
    assert "with 400 (invalid_request_error); it was placed nowhere" in text
    assert re.search(r"decode workers ready +\d", text), text
