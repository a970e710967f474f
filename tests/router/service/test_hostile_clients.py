"""What one client does to the router costs the others nothing: counted; `bench/serving/hostile_clients.py` times it."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from tests.router.fake_worker import FakeCluster, expected
from tests.router.http_server import Server, router_config, serving
from tests.router.tokenizer_pool.test_tokenizer_pool import FakeChild
from twinpool.contracts.sampling_params import SamplingParams

STREAMS = 8
TOKENS = 12


@pytest.fixture
def running() -> Iterator[Server]:
    with serving(FakeCluster(1, 1), config=router_config(max_connections=24)) as server:
        yield server


def streamed(server: Server, number: int) -> list[int]:
    body = {"prompt": [5, 6, number], "max_tokens": TOKENS, "seed": 1, "stream": True, "return_token_ids": True}
    with (
        httpx.Client(timeout=60, trust_env=False) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=body) as response,
    ):
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [t for line in lines[:-1] for t in json.loads(line[6:])["choices"][0]["token_ids"]]


def eight_streams_are_right(server: Server) -> None:
    with ThreadPoolExecutor(STREAMS) as pool:
        got = list(pool.map(lambda n: streamed(server, n), range(STREAMS)))
    assert got == [expected((5, 6, n), SamplingParams(TOKENS, seed=1)) for n in range(STREAMS)]


def test_streams_and_health_go_on_while_large_bodies_are_being_read(server: Server) -> None:
    """The readers say nothing at all, as long as anybody looks; both of them, and small bodies need none."""
    children: list[FakeChild] = []
    readers = server.service.readers
    readers._start = lambda descriptor: children.append(FakeChild(descriptor)) or children[-1]  # type: ignore
    body = json.dumps({"prompt": "word " * 2000}).encode()
    senders = []
    for _ in range(6):
        client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        senders.append(client)
    server.wait_until(lambda: readers.waiting == 4 and len(children) == 2)
    eight_streams_are_right(server)
    assert server.client.get("/live").status_code == 200
    assert server.client.get("/health").status_code == 200
    for client in senders:
        client.close()
    server.wait_until(lambda: readers.waiting == 0 and server.service.buffer.held == 0)
    server.at_rest()
    assert server.call(lambda: server.service.admission.booked) == 0


@pytest.mark.slow
def test_after_hostile_clients_everything_is_as_it_was(server: Server) -> None:
    """Large, nested, endless and garbled requests, and more connections than there may be, while streams run."""
    server.client.close()
    server.wait_until(lambda: not server.uvicorn.connections.all)
    limit = server.service.body_limit
    rng = random.Random(5)
    nested = b'{"prompt":"a","x":[' + b"[]," * 100_000 + b"[]]}"
    asked: list[tuple[bytes, set[int]]] = [
        (nested, {400}),
        (b" " * (limit + 1), {413}),
        (json.dumps({"prompt": "word " * 100_000}).encode(), {400}),
        (json.dumps({"prompt": [5] * 100_000}).encode(), {400}),
        (json.dumps({"prompt": [5] * 500, "max_tokens": 1, "n": 128, "return_token_ids": True}).encode(), {200}),
    ]
    wrong: list[tuple[int, set[int]]] = []

    def harm() -> None:
        for body, statuses in asked:
            status = httpx.post(f"{server.url}/v1/completions", content=body, timeout=60, trust_env=False).status_code
            if status not in statuses:
                wrong.append((status, statuses))
        for _ in range(30):
            with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
                client.sendall(rng.choice([b"", b"GET ", b"POST /v1/completions HTTP/1.1\r\n"]) + rng.randbytes(2000))

    eight_streams_are_right(server)
    before = len(os.listdir("/proc/self/fd"))
    idle: list[socket.socket] = []
    harming = threading.Thread(target=harm)
    harming.start()
    for _ in range(60):
        with suppress(OSError):
            idle.append(socket.create_connection(("127.0.0.1", server.port), timeout=60))
    eight_streams_are_right(server)
    harming.join(60)
    assert not wrong
    registry = server.uvicorn.connections
    server.wait_until(lambda: len(registry.all) <= registry.limit)
    assert registry.closed_idle >= 60 - registry.limit
    for client in idle:
        client.close()
    server.wait_until(lambda: not registry.all and not registry.waiting)
    assert server.service.buffer.held == 0
    assert server.service.readers.waiting == 0
    # A reader's socket and its process' own are all that may be new.
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * server.service.config.reader_processes
    server.client = httpx.Client(base_url=server.url, timeout=60, trust_env=False)
    server.at_rest()
