"""HTTPS: who is answered, what a handshake may take, and certificates that change while a router serves."""

from __future__ import annotations

import asyncio
import socket
import ssl
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import WAIT_S, Server, serving
from tests.support.certificates import TestAuthority
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.errors import ConfigError
from twinpool.router.api.router_server import HttpsCertificate, TlsListener

ASK = {"prompt": [5, 6, 7], "max_tokens": 4, "seed": 1}


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path)


def secured(authority: TestAuthority, **router: Any) -> Config:
    files = authority.node()
    return Config(
        router=RouterConfig(**router), security=SecurityConfig(tls_cert=str(files.cert), tls_key=str(files.key))
    )


@pytest.fixture
def server(authority: TestAuthority) -> Iterator[Server]:
    with serving(FakeCluster(), config=secured(authority), trust=authority.trust()) as found:
        yield found
        found.at_rest()


def shown(server: Server, trust: ssl.SSLContext) -> bytes:
    """The certificate that a new connection is shown, in PEM."""
    with (
        socket.create_connection(("127.0.0.1", server.port), WAIT_S) as plain,
        trust.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        found = secure.getpeercert(binary_form=True)
        assert found is not None
        return ssl.DER_cert_to_PEM_cert(found).encode()


def test_answers_and_streams_are_those_of_plain_http(server: Server) -> None:
    with serving(FakeCluster()) as plain:
        expected = plain.complete(**ASK)["choices"]
    assert server.complete(**ASK)["choices"] == expected
    events = server.stream("/v1/completions", ASK)
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize(
    "said", [b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\0" * 100, b"\0" * 4096, b"\r\n"]
)
def test_who_speaks_anything_else_is_told_nothing(server: Server, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as plain:
        plain.sendall(said)
        plain.shutdown(socket.SHUT_WR)
        heard = b""
        try:
            while part := plain.recv(4096):
                heard += part
        except ConnectionError:
            pass
    assert b"HTTP" not in heard
    assert len(heard) < 100, "an alert of TLS at most"
    server.complete(**ASK)


def test_a_client_that_does_not_know_the_authority_says_nothing(server: Server) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shown(server, ssl.create_default_context())


def test_tls_below_1_2_is_refused(server: Server, authority: TestAuthority) -> None:
    old = authority.trust()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shown(server, old)


def test_handshakes_that_never_end_are_counted_and_give_way_to_clients(authority: TestAuthority) -> None:
    config = secured(authority, max_connections=4, header_timeout_s=120.0)
    with serving(FakeCluster(), config=config, trust=authority.trust()) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port), WAIT_S) for _ in range(40)]
        server.wait_until(lambda: server.uvicorn.connections.accepted >= 40)
        assert server.call(lambda: len(server.uvicorn.connections.all)) <= 4
        server.complete(**ASK)
        for connection in silent[:30]:
            assert connection.recv(1) == b"", "closed for others"
        for connection in silent:
            connection.close()
        server.client.close()
        server.wait_until(lambda: not server.uvicorn.connections.all)
        server.at_rest()


def test_a_handshake_has_a_deadline(authority: TestAuthority) -> None:
    config = secured(authority, header_timeout_s=0.2)
    with serving(FakeCluster(), config=config, trust=authority.trust()) as server:
        with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as silent:
            assert silent.recv(1) == b""
        server.wait_until(lambda: not server.uvicorn.connections.all)


def test_a_new_certificate_holds_for_new_connections_and_a_bad_one_changes_nothing(
    server: Server, authority: TestAuthority
) -> None:
    trust = authority.trust()
    files = authority.node("node")
    certificate = server.uvicorn.certificate
    assert certificate is not None
    server.call(certificate.refresh)
    second = files.cert.read_bytes()
    assert shown(server, trust) == second
    for broken in (b"nonsense", authority.node("expired", days=1, ago=2).cert.read_bytes()):
        files.cert.write_bytes(broken)
        server.call(certificate.refresh)
        assert shown(server, trust) == second
    server.complete(**ASK)


def test_files_are_looked_at_again_by_the_server_itself(server: Server, authority: TestAuthority) -> None:
    certificate = server.uvicorn.certificate
    assert certificate is not None
    before = certificate.context
    authority.node("node")
    server.wait_until(lambda: certificate.context is not before)


def test_an_expired_certificate_starts_nothing(authority: TestAuthority) -> None:
    with pytest.raises(ConfigError, match="has expired"):
        HttpsCertificate(replace(authority.expired(), ca=None))


def test_a_listener_that_is_closed_takes_nobody() -> None:
    made: list[str] = []

    def make() -> Any:
        made.append("a protocol")
        raise AssertionError("nobody is to be taken")

    async def life() -> None:
        bound = socket.create_server(("127.0.0.1", 0))
        listener = TlsListener(bound, make, cast(Any, None), 1.0)
        listener.close()
        await listener.wait_closed()
        _, writer = await asyncio.open_connection(*bound.getsockname())
        for _ in range(20):
            await asyncio.sleep(0)
        writer.close()
        bound.close()

    asyncio.run(life())
    assert made == []
