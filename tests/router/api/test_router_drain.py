"""A router that is asked to end drains: it says so, refuses what is new, and finishes the answers that run."""

from __future__ import annotations

import json
import signal
import threading

import httpx
import pytest

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import WAIT_S, Server, serving
from twinpool.router.api import router_server

BODY = {"prompt": [5, 6, 7], "seed": 1, "max_tokens": 12}
NEW = (
    ("/v1/completions", BODY),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/responses", {"input": "x"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
    ("/tokenize", {"prompt": "x"}),
)


class Asked:
    """A streamed or whole answer that is under way, at a worker that doesn't move."""

    def __init__(self, server: Server, *, stream: bool = True) -> None:
        self._server, self._stream = server, stream
        self.status, self.raw = 0, ""
        self._thread = threading.Thread(target=self._ask)
        server.pause("decode")
        self._thread.start()
        server.wait_until(lambda: server.service.core.requests.in_flight == 1)

    def _ask(self) -> None:
        with httpx.Client(base_url=self._server.url, timeout=WAIT_S, trust_env=False) as client:
            answer = client.post("/v1/completions", json={**BODY, "stream": self._stream})
            self.status, self.raw = answer.status_code, answer.text

    def ended(self) -> None:
        """Wait until it has its answer, and the router has ended."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._server.wait_ended()

    @property
    def text(self) -> str:
        if not self._stream:
            return str(json.loads(self.raw)["choices"][0]["text"])
        events = [line.removeprefix("data: ") for line in self.raw.splitlines() if line]
        assert events[-1] == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def ask_to_end(server: Server) -> None:
    server.call(lambda: server.uvicorn.handle_exit(signal.SIGTERM, None))


@pytest.mark.parametrize("stream", [True, False])
def test_a_drain_is_said_at_once_refuses_what_is_new_and_finishes_what_runs(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_server, "ONE_REQUEST_S", 1e9)  # As if no second went by.
    cluster = FakeCluster()
    with serving(cluster) as server:
        undisturbed = server.complete(**BODY)["choices"][0]["text"]
        asked = Asked(server, stream=stream)
        for _ in range(3):  # `timeout` signals its child, then the child's group.
            ask_to_end(server)
        health = server.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert "shutting down" in health.json()["problems"][0]
        assert server.client.get("/live").status_code == 200
        assert server.client.get("/v1/models").status_code == 200
        for path, body in NEW:
            refused = server.post(path, body)
            assert refused.status_code == 503, path
            assert int(refused.headers["retry-after"]) > 0
            assert "close" in refused.headers["connection"]
            assert "shutting down" in refused.json()["error"]["message"]
        server.resume()
        asked.ended()
        assert (asked.status, asked.text) == (200, undisturbed)
        assert not cluster.leftovers()


def test_an_idle_router_ends_at_once() -> None:
    with serving(FakeCluster()) as server:
        ask_to_end(server)
        server.wait_ended()


@pytest.mark.parametrize("again", [False, True])
def test_what_is_left_ends_with_an_error_after_its_time_or_when_asked_again(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.setattr(router_server, "ONE_REQUEST_S", 1e9)  # As if no second went by.
    cluster = FakeCluster()
    with serving(cluster) as server:
        asked = Asked(server)
        ask_to_end(server)
        ask_to_end(server)
        assert server.client.get("/live").status_code == 200, "it waits"
        if again:
            monkeypatch.setattr(router_server, "ONE_REQUEST_S", 0.0)  # As if a second had gone by.
            ask_to_end(server)
        else:
            server.service.stop_timeout_s = 0.0
        asked.ended()
        assert "the server is shutting down" in asked.raw
        assert "[DONE]" not in asked.raw
        assert not cluster.leftovers()


def test_a_router_that_drains_or_leaves_must_be_gone_some_time_after_its_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    within: list[float] = []
    with serving(FakeCluster()) as server:
        monkeypatch.setattr(server.uvicorn, "_must_end", within.append)
        server.call(server.uvicorn.leave)
        server.call(server.uvicorn.asked_to_end)
        server.wait_ended()
        config, service = server.service.config, server.service
    assert len(within) == 2
    assert within[0] > config.max_timeout_s
    assert service.stop_timeout_s < within[1] < service.stop_timeout_s + 10
