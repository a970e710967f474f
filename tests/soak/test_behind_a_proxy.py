"""Routers behind nginx and Envoy as docs/behind-a-proxy.md has them: nothing is held back, lost, or said otherwise.

The routers are real, their workers fakes that move only when a test lets them: what has come through the proxy is
looked at while the rest of the answer doesn't exist yet.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import yaml

from tests.router.fake_worker import FakeCluster, expected
from tests.router.http_server import Server, router_config, serving
from tests.soak.proxies import KINDS, Proxy, proxy, shown
from tests.support.served_cluster import until
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.api.router_server import KEEP_ALIVE_S
from twinpool.router.tokenizer_pool.prepare_request import BODY_BYTES_MOST

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(300)]
each = pytest.mark.parametrize("kind", KINDS)
PROMPT, TOKENS = (5, 6, 7), 12
ASKED: dict[str, Any] = {
    "prompt": list(PROMPT),
    "max_tokens": TOKENS,
    "seed": 1,
    "ignore_eos": True,
    "return_token_ids": True,
}
WANTED = expected(PROMPT, SamplingParams(TOKENS, seed=1))
BEAT_S = 0.25


class Front:
    """Two routers behind a proxy."""

    def __init__(self, routers: list[Server], through: Proxy) -> None:
        self.routers, self.proxy = routers, through
        self.client = httpx.Client(base_url=through.url, timeout=60, trust_env=False)

    def post(self, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def answers(self, body: dict[str, Any]) -> None:
        """Ask, and have the whole answer."""
        response = self.post(body)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["token_ids"] == WANTED

    def pause(self, role: str) -> None:
        for router in self.routers:
            router.pause(role)

    def resume(self) -> None:
        for router in self.routers:
            router.resume()

    def step(self) -> None:
        """Have the paused decode workers make one token of what they have."""
        for router in self.routers:
            router.call(router.cluster["decode-0"].step)

    def sum(self, of: str) -> int:
        return sum(int(getattr(router.service.metrics, of)) for router in self.routers)


@contextmanager
def front(
    kind: str, folder: Path, count: int = 2, changes: Mapping[str, str] = MappingProxyType({}), **config: Any
) -> Iterator[Front]:
    with ExitStack() as stack:
        configs = router_config(**config)
        routers = [stack.enter_context(serving(FakeCluster(1, 1), config=configs)) for _ in range(count)]
        through = stack.enter_context(proxy(kind, folder / "proxy", [router.port for router in routers], changes))
        found = Front(routers, through)
        stack.callback(found.client.close)
        yield found
        for router in routers:
            if router.loop.is_running():
                router.at_rest()


def tokens_of(lines: list[str]) -> list[int]:
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [token for event in events[:-1] for token in json.loads(event)["choices"][0]["token_ids"]]


@each
def test_an_event_is_read_before_the_next_is_made(kind: str, tmp_path: Path) -> None:
    with front(kind, tmp_path) as both:
        both.pause("decode")
        with both.client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            lines = (line for line in response.iter_lines() if line)
            said = [next(lines)]
            while len(said) < TOKENS:
                assert json.loads(said[-1].removeprefix("data: "))["choices"][0]["token_ids"] == [WANTED[len(said) - 1]]
                both.step()
                said.append(next(lines))
            both.resume()
            said += lines
        assert tokens_of(said) == WANTED


@each
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_at_the_router(kind: str, stream: bool, tmp_path: Path) -> None:
    with front(kind, tmp_path) as both:

        def running() -> int:
            return sum(router.service.core.requests.in_flight for router in both.routers)

        both.pause("decode")
        body = json.dumps({**ASKED, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", both.proxy.port), timeout=30) as client:
            client.sendall(head + body)
            until(lambda: running() == 1, "the request to run")
            if stream:
                assert client.recv(65536).startswith(b"HTTP/1.1 200")
        until(lambda: both.sum("disconnects") == 1 and running() == 0, "the router to hear of it")
        both.resume()


@each
def test_a_long_silent_prefill_outlives_the_proxys_patience(kind: str, tmp_path: Path) -> None:
    """The router says something more often than the proxy's time-out, which is made short here."""
    changes = {"3700s": "2s"}
    with front(kind, tmp_path, changes=changes, stream_keepalive_s=BEAT_S) as both:
        both.pause("prefill")
        with both.client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as response:
            lines = response.iter_lines()
            said: list[str] = []
            while said.count(": keep-alive") < 3 / BEAT_S:  # Three seconds, and no data.
                said.append(next(lines))
            assert not any(line.startswith("data: ") for line in said)
            both.resume()
            said += lines
        assert tokens_of(said) == WANTED


REFUSED: list[tuple[str, str, Any]] = [
    ("POST", "/v1/completions", {"prompt": [5], "n": 0}),
    ("POST", "/v1/chat/completions", {"messages": [], "model": "demo"}),
    ("POST", "/v1/completions", {"prompt": "word " * 20_000}),
    ("POST", "/v1/completions", {"prompt": [5], "model": "other"}),
    ("POST", "/v1/messages", {"messages": []}),
    ("POST", "/v1/responses", {"input": 5}),
    ("GET", "/v1/models/other", None),
    ("GET", "/v1/completions", None),
    ("POST", "/v1/embeddings", {}),
]


@each
def test_errors_are_the_routers_own(kind: str, tmp_path: Path) -> None:
    with front(kind, tmp_path) as both, httpx.Client(base_url=both.routers[0].url, trust_env=False) as straight:
        for method, path, body in REFUSED:
            told = [one.request(method, path, json=body) for one in (straight, both.client)]
            assert told[0].status_code == told[1].status_code >= 400, path
            assert told[0].content == told[1].content, path
            assert told[1].headers["content-type"] == "application/json"


@each
def test_bodies_up_to_the_routers_limit_pass_and_larger_ones_are_refused_by_the_router(
    kind: str, tmp_path: Path
) -> None:
    with front(kind, tmp_path) as both:
        limit = both.routers[0].service.body_limit
        whole = both.post({**ASKED, "metadata": {"a": "x" * (limit - 1000)}})
        assert whole.json()["choices"][0]["token_ids"] == WANTED
        for size in (limit + 1, 16 * 2**20):
            refused = both.client.post("/v1/completions", content=b"x" * size)
            assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large"), size


@each
def test_headers_go_both_ways(kind: str, tmp_path: Path) -> None:
    key = {"Idempotency-Key": "a-long-random-text", "X-Request-Id": "look-at-me"}
    with front(kind, tmp_path, count=1) as one:
        body = {**ASKED, "stream": True, "of_next_year": 1}
        with one.client.stream("POST", "/v1/completions", json=body, headers=key) as response:
            first = "\n".join(response.iter_lines())
        assert response.headers["x-request-id"] == "look-at-me"
        assert response.headers["x-twinpool-ignored"] == "of_next_year"
        assert "\nid: " in f"\n{first}", "events have ids for whom comes back: the key has arrived"


@each
def test_what_is_for_operators_is_not_passed_on(kind: str, tmp_path: Path) -> None:
    with front(kind, tmp_path) as both:
        for path in ("/cluster/status", "/metrics", "/load", "/dashboard", "/", "/v1", "/health/x", "/healthy"):
            response = both.client.get(path)
            assert response.status_code == 404, path
            assert "no such endpoint" not in response.text, "the router has been asked"
        assert both.client.get("/health").json()["status"] == "ok"
        assert both.client.get("/v1/models").json()["data"][0]["id"] == "demo"
        for path in ("/inference/v1/generate", "/classify", "/tokenize", "/detokenize"):
            assert "message" in both.post({}, path).json()["error"], "a router has said what is missing"


@each
def test_connections_to_routers_are_kept(kind: str, tmp_path: Path) -> None:
    with front(kind, tmp_path, count=1) as one:
        registry = one.routers[0].uvicorn.connections
        one.post(ASKED)
        before, known = registry.accepted, len(registry.all)
        for _ in range(20):
            assert one.post(ASKED).status_code == 200
        health = 2 if kind == "envoy" else 0  # Which has connections of its own.
        assert registry.accepted - before <= known + health + 1, "as many as the proxy has processes"


@each
def test_a_router_that_drains_loses_nothing(kind: str, tmp_path: Path) -> None:
    """While streams run through both routers one is told to end: they end well, and all new requests are answered."""
    with front(kind, tmp_path) as both:
        both.pause("decode")
        streams: list[list[str]] = [[] for _ in range(6)]
        failures: list[BaseException] = []

        def read(lines: list[str]) -> None:
            try:
                with (
                    httpx.Client(base_url=both.proxy.url, timeout=60, trust_env=False) as client,
                    client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as response,
                ):
                    assert response.status_code == 200
                    lines += response.iter_lines()
            except BaseException as error:
                failures.append(error)

        readers = [threading.Thread(target=read, args=(lines,)) for lines in streams]
        for reader in readers:
            reader.start()
        until(lambda: sum(r.service.answering for r in both.routers) == len(streams), "all streams to run")
        leaving, staying = both.routers
        if not leaving.service.answering:
            leaving, staying = staying, leaving
        leaving.call(lambda: leaving.uvicorn.handle_exit(signal.SIGTERM, None))
        assert httpx.get(f"{leaving.url}/health").status_code == 503
        staying.resume()
        for number in range(20):
            body = {**ASKED, "metadata": {"a": "x" * 100_000}} if number % 2 else ASKED
            both.answers(body)  # Refused by one, answered by the other.
        leaving.resume()
        for reader in readers:
            reader.join(60)
        assert not failures, failures
        assert [tokens_of(lines) for lines in streams] == [WANTED] * len(streams)
        leaving.wait_ended()
        for _ in range(20):
            both.answers(ASKED)  # One is gone, the other answers.


@each
def test_refusals_for_now_reach_the_client_where_no_router_has_room(kind: str, tmp_path: Path) -> None:
    with front(kind, tmp_path) as both:
        for router in both.routers:
            router.call(lambda router=router: setattr(router.service, "draining", True))  # type: ignore[misc]
        refused = both.post(ASKED)
        for router in both.routers:
            router.call(lambda router=router: setattr(router.service, "draining", False))  # type: ignore[misc]
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert refused.headers["retry-after"] == "5"
        until(lambda: both.client.get("/health").status_code == 200, "the proxy to see that they are back", 30)
        assert both.post(ASKED).json()["choices"][0]["token_ids"] == WANTED


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_the_times_of_the_page_fit_those_of_routers() -> None:
    nginx, envoy = shown("nginx"), yaml.safe_load(shown("envoy"))
    longest = RouterConfig().max_timeout_s
    (idle,) = re.findall(r"keepalive_timeout (\w+);", nginx)
    (wait,) = re.findall(r"proxy_read_timeout (\w+);", nginx)
    (size,) = re.findall(r"client_max_body_size (\d+)m;", nginx)
    assert seconds(idle) < KEEP_ALIVE_S
    assert seconds(wait) > longest
    assert int(size) * 2**20 >= BODY_BYTES_MOST
    (cluster,) = envoy["static_resources"]["clusters"]
    (options,) = cluster["typed_extension_protocol_options"].values()
    assert seconds(options["common_http_protocol_options"]["idle_timeout"]) < KEEP_ALIVE_S
    (listener,) = envoy["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    assert seconds(manager["stream_idle_timeout"]) > longest
    (host,) = manager["route_config"]["virtual_hosts"]
    assert host["request_body_buffer_limit"] >= BODY_BYTES_MOST
    assert [route["route"]["timeout"] for route in host["routes"]] == ["0s", "0s"]
