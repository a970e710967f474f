"""Clients that come back: routers that share a port are killed in the middle of streams, and so are decode workers.

What a client has before, and is given after, is together what an undisturbed stream has, byte for byte.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from tests.support.resuming_clients import Events, ids_of, never, read, routers_of, server_of
from tests.support.served_cluster import COMES_BACK_S, Serving, serving, until

COMPLETION = {
    "prompt": "It was a fine morning, and", "max_tokens": 96, "stream": True, "ignore_eos": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip
CHAT = {
    "messages": [{"role": "user", "content": "The old house stood"}], "max_tokens": 96, "stream": True,
    "ignore_eos": True, "logprobs": True, "top_logprobs": 2,
}  # fmt: skip
MESSAGES = {"messages": [{"role": "user", "content": "The sea was"}], "max_tokens": 96, "stream": True}
RESPONSES = {"input": "A letter came", "max_output_tokens": 96, "stream": True, "ignore_eos": True}
ENDPOINTS = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    sections = {
        "faults": {"step_delay_s": 0.01}, "cluster": {"lease_s": 8}, "engine": {"threads": 1},
        "router": {"reported_records": 0},
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("resumed")
    flags = ("--routers", "2", "--prefill", "1", "--decode", "2")
    with serving("demo", folder / "run", *flags, sections=sections) as running:
        yield running


def decode_workers(cluster: Serving) -> list[dict[str, Any]]:
    """The status of each, without the time that a command takes."""
    workers = httpx.get(f"{cluster.url}/cluster/status", timeout=60).json()["workers"]
    return [w for w in workers if w["name"].startswith("decode")]


@pytest.fixture(autouse=True)
def settled(cluster: Serving) -> Iterator[None]:
    yield
    routers_know_the_workers(cluster)
    cluster.settle()


def routers_know_the_workers(cluster: Serving) -> None:
    """Wait for the router that was killed to be back, whichever of the two a connection meets."""
    port = httpx.URL(cluster.url).port

    def listens(router: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in router.net_connections("tcp"))
        return False

    def known() -> bool:
        with routers_of(psutil.Process(cluster.process.pid)) as routers:
            if len(routers) != 2 or not all(map(listens, routers)):
                return False  # Connections would meet the other one alone.
        try:
            told = [httpx.get(f"{cluster.url}/cluster/status", timeout=60) for _ in range(12)]
        except httpx.HTTPError:
            return False
        return all(answer.status_code == 200 for answer in told)

    until(known, "both routers to know the workers")


def keyed(key: str, last_id: str = "") -> dict[str, str]:
    return {"Idempotency-Key": key, **({"Last-Event-ID": last_id} if last_id else {})}


def its_router(cluster: Serving, response: httpx.Response) -> psutil.Process:
    with routers_of(psutil.Process(cluster.process.pid)) as routers:
        return server_of(response, routers)


def kills_router(cluster: Serving, at: int) -> Callable[[int, httpx.Response], bool]:
    """Kills the router of a stream behind its event `at`."""

    def meanwhile(events: int, response: httpx.Response) -> bool:
        if events == at:
            router = its_router(cluster, response)
            router.kill()
            router.wait(60)  # It may listen a moment longer than its streams last, and would take the next connection.
        return False

    return meanwhile


def broken_off(cluster: Serving, path: str, body: dict[str, Any], key: str, at: int) -> tuple[Events, str]:
    """A stream whose router is killed behind event `at`, and its key. On a busy machine all of it may have been sent
    by then: so it is asked for again."""
    for number in range(10):
        one = f"{key}-{number}"
        first = read(cluster.url, path, body, keyed(one), kills_router(cluster, at))
        if first.broke:
            return first, one
        routers_know_the_workers(cluster)
    raise AssertionError("a stream was to break off")


def undisturbed(cluster: Serving, path: str, body: dict[str, Any], key: str) -> list[bytes]:
    return read(cluster.url, path, body, keyed(key), never).whole


def shape(events: list[bytes]) -> bytes:
    """The events without what tells one request of the same body from another, or the time."""
    whole = b"".join(events)
    whole = re.sub(rb"id: \d+-", b"id: ", whole)
    whole = re.sub(rb'"(created|created_at|completed_at)":\d+', b'"time":0', whole)
    whole = re.sub(rb"[0-9a-f]{24}", b"ID", whole)
    return re.sub(rb'"(cached_tokens|input_tokens|cache_read_input_tokens)":\d+', b'"cached":0', whole)


@pytest.mark.slow
def test_whichever_router_is_asked_knows_what_became_of_a_request(cluster: Serving) -> None:
    body = {**COMPLETION, "stream": False, "stream_options": None, "max_tokens": 4}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    asked, told = set[int](), list[dict[str, Any]]()

    def both_were_asked() -> bool:
        with httpx.stream("GET", f"{cluster.url}/cluster/requests/{answer.json()['id']}", timeout=60) as response:
            asked.add(its_router(cluster, response).pid)
            response.read()
        assert response.status_code == 200, response.text
        told.extend(response.json()["records"])
        return len(asked) == 2

    # Nobody reports here: what one router lacks, the controller must ask the other for.
    until(both_were_asked, "both routers to be asked")
    assert {(one["request_id"], one["router"], one["total_s"]) for one in told} == {
        (told[0]["request_id"], told[0]["router"], told[0]["total_s"])
    }
    nobody = httpx.get(f"{cluster.url}/cluster/requests/nobody", timeout=60)
    assert nobody.status_code == 404
    assert "nor have other routers" in nobody.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_killed_routers_client_is_given_the_rest_by_another_byte_for_byte(cluster: Serving, path: str) -> None:
    body = {"model": cluster.model, "temperature": 0.8, "seed": 5, **ENDPOINTS[path]}
    calm = undisturbed(cluster, path, body, f"calm {path}".replace(" ", "-"))
    first, key = broken_off(cluster, path, body, f"k-{path}", 12)
    rest = read(cluster.url, path, body, keyed(key, first.last_id), never)
    assert rest.ended, "the rest has the end"
    joined = first.whole + rest.whole
    assert shape(joined) == shape(calm)
    again = read(cluster.url, path, body, keyed(key), never)
    without_times = [re.sub(rb'"completed_at":\d+', b"", b"".join(events)) for events in (joined, again.whole)]
    assert without_times[0] == without_times[1], "without Last-Event-ID all of it comes again"


@pytest.mark.slow
def test_an_answer_without_a_seed_or_a_stream_is_the_same_again(cluster: Serving) -> None:
    body = {"model": cluster.model, **COMPLETION, "stream": False, "temperature": 1.0, "stream_options": None}
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        answers = [client.post("/v1/completions", json=body, headers=keyed("whole")).json() for _ in range(2)]
        other = client.post("/v1/completions", json=body, headers=keyed("another")).json()
    assert answers[0] == answers[1]
    assert answers[0]["choices"][0]["text"] != other["choices"][0]["text"], "each key has a seed of its own"
    assert answers[0]["id"] != other["id"]


@pytest.mark.slow
def test_a_key_with_another_body_is_refused(cluster: Serving) -> None:
    body = {"model": cluster.model, **COMPLETION}
    read(cluster.url, "/v1/completions", body, keyed("taken"), lambda events, _: events == 5)
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        refused = client.post("/v1/completions", json={**body, "max_tokens": 5}, headers=keyed("taken"))
    assert refused.status_code == 422
    assert "another body" in refused.json()["error"]["message"]
    rest = read(cluster.url, "/v1/completions", body, keyed("taken"), never)
    assert rest.ended, "the answer itself is not harmed"


@pytest.mark.slow
def test_the_last_connection_wins_and_the_one_before_is_told(cluster: Serving) -> None:
    body = {"model": cluster.model, **COMPLETION, "max_tokens": 800}
    second: list[Events] = []
    began = threading.Event()

    def reads_again() -> None:
        second.append(read(cluster.url, "/v1/completions", body, keyed("both"), never))

    def meanwhile(events: int, response: httpx.Response) -> bool:
        if not began.is_set() and events == 10:
            began.set()
            other.start()
        return False

    other = threading.Thread(target=reads_again)
    first = read(cluster.url, "/v1/completions", body, keyed("both"), meanwhile)
    other.join(60)
    assert b"came back on another connection" in first.whole[-1]
    assert ids_of(first.whole[-1:]) == [], "an error is no event of the answer"
    assert second[0].ended
    assert b"".join(second[0].whole).startswith(b"".join(first.whole[:-1]))


@pytest.mark.slow
def test_several_choices_with_a_stop_string_come_again_each_from_where_it_was(cluster: Serving) -> None:
    body = {"model": cluster.model, **COMPLETION, "n": 3, "temperature": 1.2, "seed": 3, "stop": [" the"]}
    calm = undisturbed(cluster, "/v1/completions", body, "three-calm")
    first, key = broken_off(cluster, "/v1/completions", body, "three", 9)
    rest = read(cluster.url, "/v1/completions", body, keyed(key, first.last_id), never)
    for index in range(3):
        mark = f'"index":{index},'.encode()
        both = first.whole + rest.whole, calm
        parts = [[re.sub(rb"id: \S+\n", b"", event) for event in events if mark in event] for events in both]
        assert shape(parts[0]) == shape(parts[1])
    assert rest.ended


@pytest.mark.slow
def test_an_answer_whose_decode_worker_died_with_its_router_is_drawn_again(cluster: Serving) -> None:
    body = {"model": cluster.model, **COMPLETION, "max_tokens": 900}
    at_work: list[int] = []

    def meanwhile(events: int, response: httpx.Response) -> bool:
        if events == 12:
            at_work.extend(w["pid"] for w in decode_workers(cluster) if w["running"])
            router = its_router(cluster, response)
            router.kill()
            router.wait(60)  # It may listen a moment longer than its streams last, and would take the next connection.
        return False

    first = read(cluster.url, "/v1/completions", body, keyed("gone"), meanwhile)
    assert first.broke
    assert len(at_work) == 1
    os.kill(at_work[0], signal.SIGKILL)
    rest = read(cluster.url, "/v1/completions", body, keyed("gone", first.last_id), never)
    assert rest.ended
    again = read(cluster.url, "/v1/completions", body, keyed("gone"), never)
    assert shape(first.whole + rest.whole) == shape(again.whole)
    without_usage = [[e for e in events if b'"usage":{' not in e] for events in (first.whole + rest.whole, again.whole)]
    assert b"".join(without_usage[0]) == b"".join(without_usage[1]), "the time of its creation came with the id"
    routers_know_the_workers(cluster)
    until(
        lambda: all(w["state"] == "ready" for w in cluster.status().values()),
        "the worker to be back",
        pause_s=COMES_BACK_S,
    )


def running(cluster: Serving) -> dict[str, int]:
    """Requests that each decode worker runs."""
    return {w["name"]: w["running"] for w in decode_workers(cluster)}


@pytest.mark.slow
def test_a_migrated_answer_is_found_where_it_went(cluster: Serving) -> None:
    body = {"model": cluster.model, **CHAT, "max_tokens": 900, "temperature": 0}
    drained: list[str] = []

    def meanwhile(events: int, response: httpx.Response) -> bool:
        if events == 12:
            drained.extend(n for n, count in running(cluster).items() if count)
            assert httpx.post(f"{cluster.url}/cluster/drain/{drained[0]}", timeout=60).status_code == 200
            until(lambda: not running(cluster).get(drained[0]), "the request to leave")
            router = its_router(cluster, response)
            router.kill()
            router.wait(60)  # It may listen a moment longer than its streams last, and would take the next connection.
        return False

    calm = undisturbed(cluster, "/v1/chat/completions", body, "moved-calm")
    first = read(cluster.url, "/v1/chat/completions", body, keyed("moved"), meanwhile)
    rest = read(cluster.url, "/v1/chat/completions", body, keyed("moved", first.last_id), never)
    routers_know_the_workers(cluster)
    assert cluster.twinpool("undrain", drained[0]).returncode == 0
    assert first.broke
    assert rest.ended
    assert shape(first.whole + rest.whole) == shape(calm)
    routers_know_the_workers(cluster)
    until(
        lambda: all(w["state"] == "ready" for w in cluster.status().values()),
        "the worker to be back",
        pause_s=COMES_BACK_S,
    )
