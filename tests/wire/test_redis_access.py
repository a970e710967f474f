"""Clients of a Valkey or Redis server: whose password they show, and that the server's certificate is checked."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import TestAuthority
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.wire.redis_connection import RedisAccess, open_redis, tls_context

KEY = "cluster.ledger"


def shown(url: str, access: RedisAccess) -> tuple[str, ...]:
    """What a connection authenticates itself with: user and password, or the password alone."""
    connection: Any = open_redis(url, 1.0, KEY, access).connection_pool.make_connection()
    if connection.credential_provider is not None:
        return tuple(connection.credential_provider.get_credentials())
    return tuple(part for part in (connection.username, connection.password) if part)


@pytest.fixture
def password_file(tmp_path: Path) -> str:
    path = tmp_path / "password"
    path.write_text("of the file\nand another line\n")
    return str(path)


@pytest.mark.parametrize(
    ("url", "named", "in_file", "expected"),
    [
        ("redis://h", "", False, ()),
        ("redis://h", "named", False, ("named",)),
        ("redis://u@h", "named", False, ("u", "named")),
        ("redis://:own@h", "named", False, ("own",)),
        ("redis://u:own@h", "named", False, ("u", "own")),
        ("redis://h", "named", True, ("of the file",)),
        ("redis://u@h", "named", True, ("u", "of the file")),
        ("redis://u:own@h", "named", True, ("u", "own")),
        ("redis://:own@h", "", True, ("own",)),
        ("unix:///a/socket", "named", False, ("named",)),
        ("unix:///a/socket", "", True, ("of the file",)),
        ("rediss://u@h", "", True, ("u", "of the file")),
    ],
)
def test_an_addresses_own_password_comes_first_then_the_files_then_the_environments(
    url: str, named: str, in_file: bool, expected: tuple[str, ...], password_file: str
) -> None:
    access = RedisAccess(password=named, password_file=password_file if in_file else "")
    assert shown(url, access) == expected
    assert "named" not in repr(access)


def test_a_new_password_in_the_file_is_taken_up_by_the_next_connection(password_file: str) -> None:
    pool: Any = open_redis("redis://u@h", 1.0, KEY, RedisAccess(password_file=password_file)).connection_pool
    Path(password_file).write_text("newer")
    assert pool.make_connection().credential_provider.get_credentials() == ("u", "newer")


@pytest.mark.parametrize("content", [None, b"", b"\nsecond line", b"\xff\xfe"])
def test_a_file_without_a_password_is_refused_by_the_settings_name(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^{KEY}: .*password"):
        open_redis("redis://h", 1.0, KEY, RedisAccess(password_file=str(path)))


def test_over_tls_the_servers_certificate_and_its_host_are_checked(tmp_path: Path) -> None:
    files = TestAuthority(tmp_path).node()
    access = RedisAccess(ca=str(files.ca), cert=str(files.cert), key=str(files.key))
    given = open_redis("rediss://h", 1.0, KEY, access).connection_pool.connection_kwargs
    assert given["ssl_cert_reqs"] == "required"
    assert given["ssl_check_hostname"] is True
    assert given["ssl_min_version"] is ssl.TLSVersion.TLSv1_2
    assert (given["ssl_ca_certs"], given["ssl_certfile"], given["ssl_keyfile"]) == (access.ca, access.cert, access.key)
    bare = open_redis("rediss://h", 1.0, KEY).connection_pool.connection_kwargs
    assert not {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"} & bare.keys()
    assert bare["ssl_check_hostname"] is True
    context = tls_context(access, KEY)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert "ssl_cert_reqs" not in open_redis("redis://h", 1.0, KEY, access).connection_pool.connection_kwargs


@pytest.mark.parametrize("which", ["ca", "cert", "key"])
def test_files_that_are_none_are_refused_before_anything_is_sent(which: str, tmp_path: Path) -> None:
    files = TestAuthority(tmp_path).node()
    Path(getattr(files, which)).write_text("none")
    access = RedisAccess(ca=str(files.ca), cert=str(files.cert), key=str(files.key))
    with pytest.raises(ConfigError, match=rf"^{KEY}: .*{Path(getattr(files, which)).name}"):
        open_redis("rediss://h", 1.0, KEY, access)


def test_a_server_may_be_silent_for_so_long_and_no_longer() -> None:
    given = open_redis("redis://h", 1.5, KEY).connection_pool.connection_kwargs
    assert (given["socket_timeout"], given["socket_connect_timeout"]) == (1.5, 1.5)
    with pytest.raises(ConfigError, match=rf"^{KEY} is not the address"):
        open_redis("http://h", 1.0, KEY)
