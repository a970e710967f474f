"""Connections, and what comes on them, have bounds and deadlines; whoever asks after its health always gets in."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, router_config, serving
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.router.api import http_protocol as module
from twinpool.router.api.http_protocol import RESERVE, BoundedHttpProtocol, ClientConnections, connection_limit
from twinpool.router.service.admission import FREE_BYTES, BodyBuffer

STREAM = json.dumps({"prompt": [5, 6], "max_tokens": 6, "stream": True, "seed": 1}).encode()


@pytest.fixture
def bounded(server: Server) -> Iterator[Server]:
    """The module's server with room for four connections, none of them taken."""
    registry = server.uvicorn.connections
    server.client.close()
    server.wait_until(lambda: not registry.all)
    before, registry.limit = registry.limit, 4
    yield server
    registry.limit = before


@pytest.fixture
def running() -> Iterator[Server]:
    with serving(FakeCluster(1, 1)) as server:
        yield server


class Client:
    """A plain socket to the router, counted there when it is made."""

    def __init__(self, server: Server) -> None:
        registry = server.uvicorn.connections
        before = registry.accepted
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        server.wait_until(lambda: registry.accepted > before)

    def send(self, method: str, path: str, body: bytes = b"", length: int | None = None) -> None:
        size = len(body) if length is None else length
        self.socket.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode() + body)

    def stream(self) -> None:
        """Begin a stream and wait for its first event."""
        self.send("POST", "/v1/completions", STREAM)
        assert b"data:" in self.until(b"\n\n", after=b"data:")

    def until(self, end: bytes, after: bytes = b"") -> bytes:
        data = b""
        while end not in data[data.find(after) :] or after not in data:
            part = self.socket.recv(65536)
            assert part, f"closed after {data!r}"
            data += part
        return data

    def rest(self) -> bytes:
        """Everything until the router closes."""
        data = b""
        try:
            while part := self.socket.recv(65536):
                data += part
        except ConnectionResetError:
            pass
        return data

    def get(self, path: str) -> int:
        self.send("GET", path)
        return int(self.until(b"}").split()[1])


def sweep(server: Server, later_s: float) -> None:
    """What is late in `later_s` seconds is closed now."""
    server.call(lambda: server.uvicorn.connections.sweep(server.loop.time() + later_s))


def test_beyond_the_bound_the_connection_goes_that_has_waited_longest_and_no_stream(bounded: Server) -> None:
    bounded.pause("decode")
    busy = Client(bounded)
    busy.stream()
    idle = [Client(bounded) for _ in range(3)]
    idle[0].socket.sendall(b"GET /live HTTP/1.1\r\nHos")  # half a request is none
    newest = [Client(bounded) for _ in range(2)]
    assert idle[0].rest() == b""
    assert idle[1].rest() == b""
    assert idle[2].get("/live") == 200
    assert [client.get("/live") for client in newest] == [200, 200]
    assert newest[0].get("/v1/models") == 200, "who came for another has all rights"
    bounded.resume()
    assert b"[DONE]" in busy.until(b"[DONE]")
    assert len(bounded.uvicorn.connections.all) == 4
    newest[0].send("GET", "/metrics")
    shown = newest[0].until(b"twinpool_audits_waiting").decode()
    assert 'twinpool_http_connections{state="idle"}' in shown
    assert 'twinpool_http_connections_closed_total{reason="idle"} 2.0' in shown
    assert "twinpool_body_buffer_bytes 0.0" in shown


def test_a_connection_that_was_answered_waits_behind_those_that_never_asked(bounded: Server) -> None:
    clients = [Client(bounded) for _ in range(4)]
    assert clients[0].get("/live") == 200
    Client(bounded)
    assert clients[1].rest() == b""
    assert clients[0].get("/live") == 200


def test_where_all_are_at_work_health_is_answered_and_all_else_hears_503(bounded: Server) -> None:
    bounded.pause("decode")
    busy = [Client(bounded) for _ in range(4)]
    for client in busy:
        client.stream()
    for path in ("/live", "/health", "/ping"):
        assert Client(bounded).get(path) == 200
    late = Client(bounded)
    late.send("POST", "/v1/completions", STREAM)
    answer = late.rest()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in answer
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "too_many_connections"
    bounded.resume()
    assert all(b"[DONE]" in client.until(b"[DONE]") for client in busy)


def test_above_the_reserve_nobody_gets_in(bounded: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESERVE", 0)
    bounded.pause("decode")
    busy = [Client(bounded) for _ in range(4)]
    for client in busy:
        client.stream()
    with socket.create_connection(("127.0.0.1", bounded.port), timeout=60) as late:
        late.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        with suppress(ConnectionResetError):
            assert late.recv(10) == b""
    bounded.resume()
    assert all(b"[DONE]" in client.until(b"[DONE]") for client in busy)


def http_of(registry: ClientConnections) -> list[BoundedHttpProtocol]:
    return [connection for connection in registry.all if isinstance(connection, BoundedHttpProtocol)]


def begun(registry: ClientConnections) -> bool:
    """Whether the first bytes of a request have come to any of them."""
    return any(connection._began is not None for connection in http_of(registry))


def body_bytes(registry: ClientConnections) -> list[int]:
    """What has come of the body on each."""
    return sorted(connection._body_bytes for connection in http_of(registry))


def test_headers_have_a_deadline_from_their_first_byte(bounded: Server) -> None:
    silent, slow = Client(bounded), Client(bounded)
    slow.socket.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
    began = bounded.uvicorn.connections
    bounded.wait_until(lambda: begun(began))
    sweep(bounded, 9.0)
    slow.socket.sendall(b" x\r\nX-More: ")
    sweep(bounded, 11.0)
    answer = slow.rest()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"headers took longer than 10 s" in answer
    assert silent.get("/live") == 200, "a connection without a byte is idle, not late"


def test_bodies_have_a_deadline_that_grows_with_what_has_come(bounded: Server) -> None:
    slow, quick = Client(bounded), Client(bounded)
    slow.send("POST", "/v1/completions", b"{", length=1000)
    size = 10 * RouterConfig().body_bytes_per_s
    quick.send("POST", "/v1/completions", b" " * size, length=size + len(STREAM))
    registry = bounded.uvicorn.connections
    bounded.wait_until(lambda: body_bytes(registry) == [1, size])
    sweep(bounded, 25.0)
    answer = slow.rest()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"comes too slowly: 1 bytes" in answer
    quick.socket.sendall(STREAM)
    assert b"[DONE]" in quick.until(b"[DONE]")


def test_a_body_that_the_router_does_not_read_is_not_late(bounded: Server) -> None:
    waits = Client(bounded)
    waits.send("POST", "/v1/completions", STREAM[:1], length=len(STREAM))
    registry = bounded.uvicorn.connections
    bounded.wait_until(lambda: body_bytes(registry) == [1])
    (connection,) = http_of(registry)
    bounded.call(connection.flow.pause_reading)
    sweep(bounded, 1000.0)
    bounded.call(connection.flow.resume_reading)
    waits.socket.sendall(STREAM[1:])
    assert b"[DONE]" in waits.until(b"[DONE]")


def test_a_stray_line_break_behind_a_request_cuts_no_stream(bounded: Server) -> None:
    bounded.pause("decode")
    busy = Client(bounded)
    busy.stream()
    busy.socket.sendall(b"\r\n")
    registry = bounded.uvicorn.connections
    bounded.wait_until(lambda: begun(registry))
    sweep(bounded, 50.0)
    bounded.resume()
    assert b"[DONE]" in busy.until(b"[DONE]")


def test_a_connection_is_busy_with_a_request_that_came_during_the_one_before(bounded: Server) -> None:
    bounded.pause("decode")
    client, registry = Client(bounded), bounded.uvicorn.connections
    length = f"Content-Length: {len(STREAM)}\r\n\r\n".encode()
    client.socket.sendall(
        b"GET /live HTTP/1.1\r\nHost: x\r\n\r\nPOST /v1/completions HTTP/1.1\r\nHost: x\r\n" + length + STREAM
    )
    client.until(b"data:")
    assert not registry.waiting, "whoever waits is cut where others come"
    bounded.resume()
    client.until(b"[DONE]")


def test_headers_have_a_bound(bounded: Server) -> None:
    client = Client(bounded)
    client.socket.sendall(b"GET /live HTTP/1.1\r\n")
    try:
        for _ in range(40):
            client.socket.sendall(b"X-More: " + b"y" * 4096 + b"\r\n")
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert client.rest().startswith(b"HTTP/1.1 431")


def test_a_client_that_takes_nothing_is_cut_off(bounded: Server) -> None:
    bounded.pause("decode")
    stuck = Client(bounded)
    stuck.stream()
    registry = bounded.uvicorn.connections

    def take_nothing() -> None:
        for connection in http_of(registry):
            connection.pause_writing()

    bounded.call(take_nothing)
    sweep(bounded, 59.0)
    assert len(registry.all) == 1
    sweep(bounded, 61.0)
    bounded.wait_until(lambda: not registry.all)
    bounded.wait_until(lambda: not bounded.service.core.requests.in_flight)


@pytest.mark.parametrize("descriptors", [64, 128, 256, 1024, 65_536])
def test_connections_leave_descriptors_for_everything_else(descriptors: int) -> None:
    registry = ClientConnections(RouterConfig(), connection_limit(RouterConfig(), descriptors))
    rest = descriptors - registry.limit - RESERVE - registry.backlog
    assert registry.limit >= 1
    assert rest >= 30, "workers, the controller, readers, logs"
    assert registry.limit <= RouterConfig().max_connections


# ---------------------------------------------------------------- bodies


def test_large_bodies_of_all_clients_have_one_bound_and_small_ones_get_in_beside_them() -> None:
    config = router_config(max_body_bytes=400_000, body_buffer_bytes=500_000)
    with serving(FakeCluster(1, 1), config=config) as server:
        held = Client(server)
        held.send("POST", "/v1/completions", b" " * 400_000, length=400_000)
        assert held.until(b"}").startswith(b"HTTP/1.1 400"), "whole: read and refused, and its memory is free"
        assert server.service.buffer.held == 0
        slow = Client(server)
        slow.send("POST", "/v1/completions", b" " * 399_999, length=400_000)
        buffer = server.service.buffer
        server.wait_until(lambda: buffer.held == 399_999 - FREE_BYTES)
        refused = Client(server)
        refused.send("POST", "/v1/completions", b" " * 300_000, length=300_001)
        answer = refused.until(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 5" in answer
        refused.socket.close()
        assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2
        slow.socket.close()
        server.wait_until(lambda: buffer.held == 0)
        server.at_rest()


def test_a_body_that_was_read_takes_nobodys_room_while_it_is_answered(bounded: Server) -> None:
    bounded.pause("decode")
    client = Client(bounded)
    client.send("POST", "/v1/completions", b" " * 2 * FREE_BYTES + STREAM)
    client.until(b"\n\n", after=b"data:")
    assert bounded.service.buffer.held == 0
    bounded.resume()
    assert b"[DONE]" in client.until(b"[DONE]")
    bounded.wait_until(lambda: not bounded.service.answering)
    assert bounded.service.buffer.held == 0, "nor is it given back twice"


def test_a_full_house_is_told_before_the_body_is_read() -> None:
    with serving(FakeCluster(1, 1), config=router_config(max_queue=1)) as server:
        server.pause("prefill")
        waiting = threading.Thread(target=server.post, args=("/v1/completions", {"prompt": [5], "max_tokens": 2}))
        waiting.start()
        server.wait_until(lambda: server.service.core.requests.in_flight == 1)
        client = Client(server)
        client.send("POST", "/v1/completions", b"", length=100_000)  # not one byte of it comes
        assert client.until(b"\r\n\r\n").startswith(b"HTTP/1.1 429")
        client.socket.close()
        server.resume()
        waiting.join(60)
        server.at_rest()


def test_a_body_buffer_gives_back_what_was_taken() -> None:
    buffer = BodyBuffer(10)
    buffer.take(10)
    with pytest.raises(Exception, match="10 bytes are being received"):
        buffer.take(1)
    buffer.give_back(10)
    buffer.take(10)


def test_what_came_with_earlier_requests_counts_for_none_of_the_later_ones(running: Server) -> None:
    registry = running.uvicorn.connections
    before = set(registry.all)
    client = Client(running)
    (mine,) = registry.all - before
    assert isinstance(mine, BoundedHttpProtocol)
    client.send("POST", "/tokenize", b"x" * 2 * module.HEAD_BYTES)
    assert client.until(b"}}").startswith(b"HTTP/1.1 400")
    client.socket.sendall(b"GET /live HTTP/1.1\r\nHos")
    running.wait_until(lambda: mine not in registry.all or mine._began is not None)
    assert not running.call(mine.transport.is_closing), "its headers have only begun"
    client.socket.sendall(b"t: x\r\n\r\n")
    assert client.until(b"}").startswith(b"HTTP/1.1 200")
