"""The operators' client over real sockets: what it asks again, and what it must not."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from twinpool.cli.admin_client import ASKED_AGAIN, POLL_S, AdminClient, ClusterNotFound, RouterAway

ANSWER = json.dumps({"workers": []}).encode()
RESET, CLOSED, HALF = "reset", "closed", "half an answer"


@contextmanager
def router(breaks: list[str]) -> Iterator[tuple[str, list[bytes]]]:
    """A port that breaks its first connections off, each in its way, and answers the others; yields its URL and the
    requests that it has had."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for number in range(1000):
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    asked.append(connection.recv(65536).split(b"\r\n")[0])
                    how = breaks[number] if number < len(breaks) else ""
                    if how == RESET:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    elif how == HALF:
                        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{")
                    elif not how:
                        head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(ANSWER)}\r\n\r\n"
                        connection.sendall(head.encode() + ANSWER)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(60)


def test_a_look_is_asked_again_where_a_router_breaks_off() -> None:
    """One that is killed resets the connections that the kernel had for it; the next one has another router."""
    waits: list[float] = []
    with router([RESET, CLOSED, HALF]) as (url, asked):
        assert AdminClient(url, sleep=waits.append).status()["workers"] == []
    assert asked == [b"GET /cluster/status HTTP/1.1"] * 4
    assert waits == [POLL_S] * ASKED_AGAIN


def test_it_is_not_asked_for_ever() -> None:
    with router([RESET] * 100) as (url, asked), pytest.raises(RouterAway, match="no router answers"):
        AdminClient(url, sleep=lambda _: None).status()
    assert len(asked) == 1 + ASKED_AGAIN


@pytest.mark.parametrize("how", [RESET, CLOSED, HALF])
def test_what_changes_something_is_asked_once(how: str) -> None:
    """It may have been done."""
    with router([how]) as (url, asked), pytest.raises(RouterAway):
        AdminClient(url).call("POST", "/cluster/drain/decode-0")
    assert asked == [b"POST /cluster/drain/decode-0 HTTP/1.1"]


def test_a_port_where_nobody_listens_has_no_cluster_unless_a_router_answered_there_before() -> None:
    with router([]) as (url, _):
        known = AdminClient(url)
        known.status()
    with pytest.raises(ClusterNotFound) as away:
        known.status()
    assert isinstance(away.value, RouterAway), "it may be started again: commands wait for it"
    with pytest.raises(ClusterNotFound) as nobody:
        AdminClient(url).status()
    assert not isinstance(nobody.value, RouterAway)
