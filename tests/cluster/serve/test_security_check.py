"""The `security` section before a start: what is refused, in one line, and what is said to be open."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.certificates import TestAuthority
from twinpool.cli.credential_commands import new_key
from twinpool.cluster.serve.preflight import ServeOptions, prepare
from twinpool.cluster.serve.security_check import check_security, open_ways, with_absolute_paths
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.errors import ConfigError

GIB = 1 << 30


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "certs")


def refused(security: SecurityConfig, words: str, host: str = "127.0.0.1", port: int = 8000) -> None:
    with pytest.raises(ConfigError, match=words):
        check_security(security, host, port)


def test_certificates_that_cannot_be_used_are_refused_before_anything_starts(authority: TestAuthority) -> None:
    old, other = authority.expired(), TestAuthority(authority.folder / "other").node()
    refused(SecurityConfig(tls_cert=str(old.cert), tls_key=str(old.key)), r"security\.tls_cert .* has expired")
    ca = str(authority.ca)
    expired = SecurityConfig(cluster_ca=ca, cluster_cert=str(old.cert), cluster_key=str(old.key))
    refused(expired, r"security\.cluster_cert .* has expired")
    foreign = SecurityConfig(cluster_ca=ca, cluster_cert=str(other.cert), cluster_key=str(other.key))
    refused(foreign, r"is not of the authority security\.cluster_ca")
    refused(SecurityConfig(tls_cert="/nowhere.pem", tls_key="/nowhere.key"), r"can't read security\.tls_cert /nowhere")
    refused(SecurityConfig(curve_key="/nowhere"), "can't read the CURVE keys /nowhere")
    refused(SecurityConfig(admin_keys_file="/nowhere.json"), "can't read the key file /nowhere.json")


def test_serve_refuses_an_expired_certificate_in_its_preflight(authority: TestAuthority) -> None:
    old = authority.expired()
    settings = (f"security.tls_cert={old.cert}", f"security.tls_key={old.key}")
    with pytest.raises(ConfigError, match="has expired"):
        prepare(ServeOptions(port=0, assignments=settings), 8 * GIB)


def test_the_operators_port_is_one_of_its_own_and_takes_keys_where_others_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TWINPOOL_ADMIN_TOKEN", raising=False)
    refused(SecurityConfig(admin_port=8000), "operators need a port of their own")
    refused(SecurityConfig(admin_port=8001, admin_host="0.0.0.0"), r"twinpool keys new OPERATOR")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(SecurityConfig(admin_port=port), rf"can't listen on 127.0.0.1:{port}")
        free = port
    check_security(SecurityConfig(admin_port=free), "127.0.0.1", 8000)
    keys = tmp_path / "operators.json"
    new_key(keys, "operator")
    check_security(SecurityConfig(admin_port=free, admin_host="0.0.0.0", admin_keys_file=str(keys)), "127.0.0.1", 8000)
    monkeypatch.setenv("TWINPOOL_ADMIN_TOKEN", "a token")
    check_security(SecurityConfig(admin_port=free, admin_host="0.0.0.0"), "127.0.0.1", 8000)


def test_each_of_several_routers_has_an_operators_port_that_is_checked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        several = ServeOptions(port=0, routers=3, assignments=(f"security.admin_port={port - 2}",))
        with pytest.raises(ConfigError, match=r"can't listen on 127.0.0.1:\d+"):
            prepare(several, 8 * GIB)
    security = SecurityConfig(admin_port=7999)
    with pytest.raises(ConfigError, match=r"up to 8001, are operators' ports of 3 routers, and --port is 8000"):
        check_security(security, "127.0.0.1", 8000, routers=3, bind=False)
    check_security(security, "127.0.0.1", 8000, routers=1, bind=False)
    with pytest.raises(ConfigError, match=r"up to 65536, .* 2 routers, and 65535 is the last port"):
        check_security(SecurityConfig(admin_port=65535), "127.0.0.1", 8000, routers=2, bind=False)


def test_paths_are_absolute_for_processes_that_start_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = with_absolute_paths(
        Config(security=SecurityConfig(tls_cert="certs/node.pem", tls_key="certs/node.key", keys_file="~/keys.json"))
    )
    assert found.security.tls_cert == str(tmp_path / "certs" / "node.pem")
    assert found.security.keys_file == str(Path.home() / "keys.json")
    assert found.security.cluster_ca == ""


def test_what_is_open_is_said_and_nothing_where_all_is_closed() -> None:
    assert open_ways(SecurityConfig(), "127.0.0.1", "127.0.0.1") == []
    assert open_ways(SecurityConfig(), "localhost", "127.0.0.1") == []
    (clear,) = open_ways(SecurityConfig(keys_file="x"), "0.0.0.0", "127.0.0.1")
    assert "travel in the clear" in clear
    everybody, clear = open_ways(SecurityConfig(open=True), "0.0.0.0", "127.0.0.1")
    assert "without a key" in everybody
    (calls,) = open_ways(SecurityConfig(), "127.0.0.1", "10.0.0.1")
    assert "security.cluster_ca" in calls
    closed = SecurityConfig(keys_file="x", tls_cert="x", cluster_ca="x")
    assert open_ways(closed, "0.0.0.0", "10.0.0.1") == []
