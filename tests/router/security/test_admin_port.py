"""The operators' port: what it has, whom it takes it from, and that the endpoint has none of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import WAIT_S, Server, serving
from twinpool.cli.credential_commands import new_key, revoke_key
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.key_file import digest_of
from twinpool.router.api.admin_models import SERVED_ROUTES
from twinpool.router.api.app import OPERATORS, PREFIX_ROUTES, ROUTES
from twinpool.router.api.http_protocol import OPEN_PATHS

PATHS = {path + "decode-0" if path in PREFIX_ROUTES else path: next(iter({**ROUTES, **PREFIX_ROUTES}[path]))
         for path in OPERATORS}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "operators.json"


@pytest.fixture
def secret(file: Path) -> str:
    return new_key(file, "operator")


@pytest.fixture
def server(file: Path, secret: str) -> Iterator[Server]:
    config = Config(security=SecurityConfig(admin_port=1, admin_keys_file=str(file)))
    with serving(FakeCluster(), config=config) as found:
        yield found
        found.at_rest()


def ask(url: str, path: str, secret: str = "", method: str = "") -> httpx.Response:
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    with httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client:
        changes = path in SERVED_ROUTES and "lora" not in path  # Nothing here would ever follow such a change.
        body = b'{"wait": false}' if changes else None
        return client.request(method or PATHS.get(path, "GET"), path, headers=headers, content=body)


def test_an_operators_path_needs_an_operators_key_and_is_nowhere_else(server: Server, secret: str) -> None:
    for path in sorted(PATHS):
        for wrong in ("", "tp-wrong", secret[:-1], secret + "x", secret.upper()):
            assert ask(server.admin_url, path, wrong).status_code == 403, path
        assert ask(server.url, path, secret).status_code == 404, path
        answer = ask(server.admin_url, path, secret)
        assert answer.status_code not in (401, 403), path
        assert "no such endpoint" not in answer.text, f"{path}: a request that nobody knows is another 404"


def test_every_path_of_the_cluster_is_an_operators(server: Server) -> None:
    assert {path for path in (*ROUTES, *PREFIX_ROUTES) if path.startswith("/cluster/")} < OPERATORS
    assert {"/metrics", "/load"} < OPERATORS


def test_nothing_of_the_endpoint_is_on_the_operators_port(server: Server, secret: str) -> None:
    for path in sorted(set(ROUTES) - OPERATORS - OPEN_PATHS - {"/version"}):
        method = next(iter(ROUTES[path]))
        assert ask(server.admin_url, path, secret, method).status_code == 404, path


@pytest.mark.parametrize("path", sorted(OPEN_PATHS - OPERATORS))
def test_both_ports_tell_probes_of_their_health_without_a_key(server: Server, path: str) -> None:
    assert ask(server.admin_url, path).status_code == 200
    assert ask(server.url, path).status_code == 200


def test_a_revoked_operator_is_out_within_a_look_at_the_file(server: Server, file: Path, secret: str) -> None:
    assert ask(server.admin_url, "/cluster/status", secret).status_code == 200
    revoke_key(file, digest_of(secret)[:12])
    keys = server.service.admin_keys
    assert keys is not None
    server.wait_until(lambda: keys.tenant_of(secret) is None)
    assert ask(server.admin_url, "/cluster/status", secret).status_code == 403


def test_the_token_of_the_environment_is_an_operators_too(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINPOOL_ADMIN_TOKEN", "a token")
    assert ask(server.admin_url, "/cluster/status", "a token").status_code == 200
    assert ask(server.admin_url, "/cluster/status", "another token").status_code == 403


def test_clients_of_the_endpoint_do_not_take_the_operators_connections(file: Path, secret: str) -> None:
    config = Config(security=SecurityConfig(admin_port=1, admin_keys_file=str(file)))
    with serving(FakeCluster(), config=config) as server:
        server.call(lambda: setattr(server.uvicorn.connections, "limit", 2))
        others = [socket.create_connection(("127.0.0.1", server.port), WAIT_S) for _ in range(30)]
        assert ask(server.admin_url, "/cluster/status", secret).status_code == 200
        for other in others:
            other.close()


def test_without_a_port_of_its_own_operators_paths_are_the_endpoints(tmp_path: Path, secret: str, file: Path) -> None:
    config = Config(security=SecurityConfig(admin_keys_file=str(file)))
    with serving(FakeCluster(), config=config) as server:
        assert ask(server.url, "/cluster/status", secret).status_code == 200
        assert ask(server.url, "/cluster/status").status_code == 403
        assert ask(server.url, "/metrics").status_code == 200
