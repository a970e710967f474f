"""HTTP/1.0 has no chunks: its clients get bodies that have a length, or end with the connection."""

from __future__ import annotations

import json
import socket

import pytest

from tests.router.http_server import Server
from twinpool.router.service.router_service import RouterService

ASKED = {"prompt": [5, 6], "max_tokens": 6, "seed": 1, "ignore_eos": True}
OTHERS = {"whole": ASKED, "refused": {"prompt": [5], "n": 0}}


def send(server: Server, body: object, version: str = "1.0", *headers: str) -> socket.socket:
    raw = json.dumps(body).encode()
    lines = [f"POST /v1/completions HTTP/{version}", "Host: x", f"Content-Length: {len(raw)}", *headers]
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    client.sendall("\r\n".join((*lines, "", "")).encode() + raw)
    return client


def read(client: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """The status, the headers and the body of an answer: as many bytes as it says, else all until the end."""
    with client.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers: dict[str, str] = {}
        while line := file.readline().decode().strip():
            name, _, value = line.partition(": ")
            assert name not in headers, f"{name} comes twice"
            headers[name] = value
        length = headers.get("content-length")
        return status, headers, file.read() if length is None else file.read(int(length))


def test_a_stream_comes_without_chunks_and_ends_with_the_connection(server: Server) -> None:
    with send(server, {**ASKED, "stream": True}) as client:
        status, headers, body = read(client)
    assert status == 200
    assert "transfer-encoding" not in headers
    assert "content-length" not in headers
    assert headers["connection"] == "close"
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], "whole, and nothing behind it"
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]
    assert "".join(texts) == server.post("/v1/completions", ASKED).json()["choices"][0]["text"]


def test_a_streams_events_come_one_by_one(server: Server) -> None:
    """The second token is made only once the first has been read."""
    server.pause("decode")
    with send(server, {**ASKED, "stream": True}) as client:
        data = b""
        while b"data: " not in data:
            data += client.recv(65536)
        assert b"[DONE]" not in data
        server.resume()
        while part := client.recv(65536):
            data += part
    assert data.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("keep_alive", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_answers_have_a_length_and_a_connection_stays_for_whom_asks(
    server: Server, name: str, keep_alive: bool
) -> None:
    with send(server, OTHERS[name], "1.0", *(("Connection: keep-alive",) if keep_alive else ())) as client:
        status, headers, body = read(client)
        assert status == (200 if name == "whole" else 400)
        assert "transfer-encoding" not in headers
        assert json.loads(body)
        if keep_alive:
            assert headers["connection"] == "keep-alive"
            client.sendall(b"GET /live HTTP/1.0\r\n\r\n")
            status, headers, body = read(client)
            assert (status, json.loads(body)) == (200, {"status": "alive"})
        assert headers["connection"] == "close"
        assert client.recv(1) == b""


def test_a_stream_ends_its_connection_though_its_client_asks_for_it_to_stay(server: Server) -> None:
    with send(server, {**ASKED, "stream": True}, "1.0", "Connection: keep-alive") as client:
        _, headers, body = read(client)
    assert headers["connection"] == "close"
    assert body.endswith(b"data: [DONE]\n\n")


def test_nobody_is_told_to_go_on_sending(server: Server) -> None:
    with send(server, ASKED, "1.0", "Expect: 100-continue") as client:
        assert read(client)[0] == 200


def test_a_draining_router_keeps_no_connection(server: Server) -> None:
    defaults = server.uvicorn.server_state.default_headers
    close = (b"connection", b"close")
    server.call(lambda: defaults.append(close))
    try:
        with send(server, ASKED, "1.0", "Connection: keep-alive") as client:
            assert read(client)[1]["connection"] == "close"
            assert client.recv(1) == b""
    finally:
        server.call(lambda: defaults.remove(close))


def test_a_client_that_leaves_a_stream_is_heard_of(server: Server) -> None:
    service: RouterService = server.service
    before = service.metrics.disconnects
    server.pause("decode")
    with send(server, {**ASKED, "stream": True}) as client:
        assert client.recv(1)
    server.wait_until(lambda: service.metrics.disconnects == before + 1)
    server.resume()


def test_http_1_1_has_chunks_and_keeps_its_connections(server: Server) -> None:
    with send(server, {**ASKED, "stream": True}, "1.1") as client, client.makefile("rb") as file:
        head = b"".join(iter(file.readline, b"\r\n"))
        assert b"transfer-encoding: chunked" in head
        assert b"connection" not in head
