"""Clients that leave, stall or wait while workers die: one unbroken stream, or a clear end, and nothing left."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.router.fake_worker import FakeCluster, expected
from tests.router.http_server import Server, router_config, serving
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role
from twinpool.contracts.messages.worker_events import Done
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.api.http_exchange import HttpExchange
from twinpool.router.api.http_protocol import BoundedHttpProtocol

PROMPT = [5, 6, 7]
ASK: dict[str, Any] = {"prompt": PROMPT, "seed": 1, "max_tokens": 30, "return_token_ids": True}
ANSWER = expected(PROMPT, SamplingParams(30, seed=1))


class Stream:
    """A stream read event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = (line for line in response.iter_lines() if line.startswith("data: "))
        self.tokens: list[int] = []
        self.error: dict[str, Any] | None = None
        self.done = False

    def read(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Read until `enough`, or to the end."""
        for line in self._lines:
            if line == "data: [DONE]":
                self.done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                self.error = event["error"]
                continue
            for choice in event["choices"]:
                self.tokens += choice.get("token_ids", [])
            if enough():
                return


def send_request(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A request on a bare connection."""
    raw = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    client.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(raw)) + raw)
    return client


def busy(server: Server, role: str) -> str:
    """The worker of `role` that has a leg."""
    return server.call(lambda: next(n for n, w in server.cluster.workers.items() if n.startswith(role) and w.legs))


def steps(server: Server, name: str, count: int) -> None:
    server.call(lambda: [server.cluster[name].step() for _ in range(count)])


# ---------------------------------------------------------------- workers die


@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_stream_goes_on_unbroken_when_its_decode_worker_dies(server: Server, after: int) -> None:
    server.pause("decode")
    with server.client.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response:
        stream = Stream(response)
        stream.read(lambda: len(stream.tokens) == 1)
        name = busy(server, "decode")
        steps(server, name, after)
        if after:
            stream.read(lambda: len(stream.tokens) == 1 + after)
        server.call(server.cluster[name].die)
        server.resume()
        stream.read()
    assert stream.tokens == ANSWER
    assert stream.done
    assert stream.error is None


@pytest.mark.slow
def test_a_whole_answer_survives_the_death_of_both_workers_and_their_return() -> None:
    with serving(FakeCluster()) as server:
        server.pause("decode")
        got: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: got.append(server.post("/v1/completions", ASK)))
        waiting.start()
        server.wait_until(lambda: bool(server.cluster["decode-0"].legs))
        steps(server, "decode-0", 5)
        for name in ("prefill-0", "decode-0"):
            server.call(lambda name=name: server.cluster[name].die())  # type: ignore[misc]
            server.call(server.cluster.changed)
        server.resume()
        for name in ("prefill-0", "decode-0"):
            server.call(lambda name=name: server.cluster.restart(name))  # type: ignore[misc]
        waiting.join(60)
        assert got[0].json()["choices"][0]["token_ids"] == ANSWER
        assert "twinpool_replays_total 1.0" in server.client.get("/metrics").text
        server.at_rest()


def test_an_error_in_mid_stream_is_an_event_and_no_done(server: Server) -> None:
    server.pause("decode")
    with server.client.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response:
        stream = Stream(response)
        stream.read(lambda: len(stream.tokens) == 1)
        name = busy(server, "decode")
        leg = next(iter(server.cluster[name].legs.values()))
        done = Done(leg.submit.request_id, 0, "error", error=ErrorKind.INVALID, message="planted")
        server.call(lambda: leg.session.on_events([done]))
        stream.read()
    assert not stream.done
    assert stream.error is not None
    assert stream.error["message"] == "planted"
    server.call(server.cluster[name].legs.clear)


def test_an_error_before_the_first_token_is_a_plain_error_though_streaming(server: Server) -> None:
    for name in ("prefill-0", "prefill-1"):
        server.cluster[name].refusals = [ErrorKind.OVERLOADED]
    response = server.post("/v1/completions", {**ASK, "stream": True})
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "planted: overloaded"


@pytest.mark.slow
def test_without_a_worker_of_a_role_a_request_waits_and_then_says_which() -> None:
    cluster = FakeCluster()
    cluster["decode-0"].state = "draining"
    with serving(cluster, config=router_config(worker_wait_s=0.3)) as server:
        response = server.post("/v1/completions", ASK)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "no decode worker could serve the request within 0.3 s" in response.json()["error"]["message"]
        server.at_rest()


def test_one_failed_answer_of_several_takes_the_others_back(server: Server) -> None:
    server.pause("decode")
    got: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: got.append(server.post("/v1/completions", {**ASK, "n": 4})))
    waiting.start()
    server.wait_until(lambda: sum(len(server.cluster[n].legs) for n in ("decode-0", "decode-1")) == 4)
    name = busy(server, "decode")
    leg = next(iter(server.cluster[name].legs.values()))
    done = Done(leg.submit.request_id, 0, "error", error=ErrorKind.INVALID, message="planted")
    server.call(lambda: leg.session.on_events([done]))
    waiting.join(60)
    assert got[0].status_code == 400
    server.call(lambda: server.cluster[name].legs.pop(leg.submit.request_id, None))
    server.at_rest()


# ---------------------------------------------------------------- clients leave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_a_client_that_leaves_frees_both_sides_at_once(server: Server, stream: bool, moment: str) -> None:
    server.pause(moment)
    before = server.service.core.counts.cancelled
    with send_request(server, {**ASK, "stream": stream}) as client:
        server.wait_until(lambda: any(w.legs for n, w in server.cluster.workers.items() if n.startswith(moment)))
        if stream and moment == "decode":
            assert b"data: " in client.recv(65536)
    server.wait_until(lambda: not server.cluster.leftovers())
    assert server.service.core.counts.cancelled == before + 1
    assert {c.attempt for w in server.cluster.workers.values() for c in w.cancels} == {0}


@pytest.mark.slow
def test_a_client_that_leaves_while_it_waits_for_a_worker_is_forgotten() -> None:
    cluster = FakeCluster()
    cluster["decode-0"].state = "draining"
    with serving(cluster) as server:
        with send_request(server, ASK):
            server.wait_until(lambda: server.service.core.requests.waiting == 1)
        server.at_rest()


def test_a_client_that_leaves_in_its_own_body_is_forgotten(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_connection_serves_one_request_after_another(server: Server) -> None:
    with send_request(server, {**ASK, "stream": True}) as client:
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += client.recv(65536)
        assert b"[DONE]" in answer
        client.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(65536)
        assert b"alive" in answer


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_off_at_a_bound() -> None:
    with serving(FakeCluster(), config=router_config(client_buffer_events=50)) as server:
        body = {"prompt": [5], "max_tokens": 2000, "stream": True, "logprobs": 20, "n": 8}
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            raw = json.dumps(body).encode()
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
            server.wait_until(lambda: server.service.metrics.slow_clients == 1)
            server.wait_until(lambda: not server.cluster.leftovers())
            # What it was sent before is its own; then comes the error, and no sign of success.
            client.settimeout(60)
            answer = b""
            while part := client.recv(2**20):
                answer += part
                if answer.endswith(b"0\r\n\r\n"):
                    break
        assert b"too slowly" in answer
        assert b"[DONE]" not in answer
        server.at_rest()


def test_a_hundred_clients_that_leave_at_any_moment_leave_nothing(server: Server) -> None:
    clients = []
    for i in range(100):
        client = send_request(server, {**ASK, "max_tokens": 200, "stream": i % 2 == 0})
        clients.append(client)
        if i % 3:
            clients.pop(i % len(clients)).close()
    for client in clients:
        client.close()
    server.at_rest()


@pytest.mark.slow
def test_shutting_down_ends_streams_in_an_error_and_tells_the_workers() -> None:
    cluster = FakeCluster()
    with serving(cluster) as server:
        server.pause("decode")
        client = send_request(server, {**ASK, "stream": True})
        answer = client.recv(65536)
        server.wait_until(lambda: bool(cluster["decode-0"].legs))
    while part := client.recv(65536):
        answer += part
    client.close()
    assert b"shutting down" in answer
    assert b"[DONE]" not in answer
    assert not cluster.leftovers()


def test_small_writes_are_not_held_back(server: Server) -> None:
    """Nagle's algorithm would add 40 ms to every answer on a connection that is used again."""
    with send_request(server, {**ASK, "stream": True}) as client:
        assert client.recv(10)
        transports = server.call(lambda: [c.transport for c in server.uvicorn.server_state.connections])
        option = socket.IPPROTO_TCP, socket.TCP_NODELAY
        assert all(t.get_extra_info("socket").getsockopt(*option) for t in transports)
        assert transports


class Ahead:
    """Every system clock, which is ahead of the machine's by what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_s = 0.0
        monkeypatch.setattr(SystemClock, "now", staticmethod(lambda: time.monotonic() + self.by_s))


def test_a_request_ends_at_its_own_timeout_on_both_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ahead(monkeypatch)
    with serving(FakeCluster(1, 1)) as server:
        server.pause(Role.PREFILL)
        server.pause(Role.DECODE)
        body, got = {"prompt": [5, 6, 7], "max_tokens": 9, "timeout": 77}, list[httpx.Response]()
        waiting = threading.Thread(target=lambda: got.append(server.post("/v1/completions", body)))
        waiting.start()
        workers = server.cluster.workers.values()
        server.wait_until(lambda: all(worker.submits for worker in workers))
        clock.by_s += 77
        waiting.join(60)
        assert got[0].status_code == 504
        error = got[0].json()["error"]
        assert error["code"] == "deadline"
        assert "longer than 77 s" in error["message"]
        assert all(worker.submits[0].deadline_s <= 77 for worker in workers), "workers know it too"
        server.resume()


def test_a_stream_that_runs_out_of_time_ends_in_an_error_after_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ahead(monkeypatch)
    with serving(FakeCluster(1, 1)) as server:
        server.pause(Role.DECODE)
        body = {"prompt": [5, 6, 7], "max_tokens": 9, "timeout": 77, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            events = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
            assert "choices" in next(events), "prefill's token was here"
            clock.by_s += 77
            *_, last = events
        assert "77 s" in last["error"]["message"]
        server.resume()


def test_a_client_that_stops_reading_for_a_while_gets_every_token_in_order() -> None:
    """Its socket is full meanwhile: what can't be written at once waits, and nothing overtakes it."""
    with serving(FakeCluster(), config=router_config(client_buffer_events=100_000)) as server:
        body = {**ASK, "max_tokens": 2000, "stream": True, "logprobs": 5}
        for listening in server.uvicorn.servers:
            for bound in listening.sockets:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(20)
            client.connect(("127.0.0.1", server.port))
            raw = json.dumps(body).encode()
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
                % len(raw)
                + raw
            )
            server.wait_until(
                lambda: any(
                    one.flow.write_paused
                    for one in server.uvicorn.connections.all
                    if isinstance(one, BoundedHttpProtocol)
                )
            )
            received = b""
            while piece := client.recv(65_536):
                received += piece
        tokens: list[int] = []
        for line in received.split(b"\n"):
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice.get("token_ids", [])
        assert tokens == expected(PROMPT, SamplingParams(2000, seed=1))
        assert b"data: [DONE]" in received
        server.at_rest()


def test_a_token_wakes_no_task_of_its_stream(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sends: list[bytes] = []
    write = HttpExchange.write

    async def counted(self: HttpExchange, body: bytes, *, more: bool = True) -> None:
        sends.append(body)
        await write(self, body, more=more)

    monkeypatch.setattr(HttpExchange, "write", counted)
    events = server.stream("/v1/completions", {**ASK, "max_tokens": 200})
    assert len(events) > 200
    assert len(sends) < 20
