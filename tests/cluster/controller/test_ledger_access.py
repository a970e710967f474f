"""How controllers reach a ledger's server: over TLS, as a user with a password, and what is said where that fails."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.certificates import TestAuthority
from tests.support.free_ports import free_port
from tests.support.redis_servers import LedgerServer
from twinpool.cli.command_parser import USAGE
from twinpool.cli.commands import main
from twinpool.cluster.controller.controller_process import ControllerPlace, ControllerProcess
from twinpool.cluster.controller.open_ledger import PASSWORD_VARIABLE, open_ledger
from twinpool.contracts.config.load_config import load_config
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.errors import ConfigError

HERE = "10.0.0.1:7000"
ROOT = Path(__file__).parents[3]
USER, PASSWORD = "twinpool", "sehr-geheim"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("strange"))


@pytest.fixture(scope="module")
def secured(ours: TestAuthority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerServer]:
    """A server that takes TLS alone, with clients' certificates, and the user that the docs make."""
    folder = tmp_path_factory.mktemp("secured")
    (line,) = re.findall(r"^user twinpool .*$", (ROOT / "docs" / "control-plane.md").read_text(), re.MULTILINE)
    rights = line.replace(">PASSWORD", f">{PASSWORD}").removeprefix("user ").split()
    server = LedgerServer(folder, "--appendonly", "yes", "--appendfsync", "always", tls=ours).start()
    server.client.execute_command("ACL", "SETUSER", *rights)  # type: ignore[no-untyped-call]
    server.client.execute_command("ACL", "SETUSER", "nobody", "on", ">pw", "~other:*", "+@all")  # type: ignore[no-untyped-call]
    yield server
    server.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerServer]:
    server = LedgerServer(tmp_path_factory.mktemp("plain"), "--save", "", password="a-password").start()
    yield server
    server.close()


def files(authority: TestAuthority, *, ca: TestAuthority | None = None, password: Path | None = None) -> SecurityConfig:
    """A client's certificate of `authority`, and whose certificates it takes."""
    own = authority.node("controller")
    return SecurityConfig(
        ledger_ca=str((ca or authority).ca),
        ledger_cert=str(own.cert),
        ledger_key=str(own.key),
        ledger_password_file=str(password or ""),
    )


def as_user(server: LedgerServer, user: str = USER) -> str:
    return server.url.replace("://", f"://{user}@")


def test_a_ledger_is_kept_over_tls_by_a_user_that_may_do_no_more(
    secured: LedgerServer, ours: TestAuthority, tmp_path: Path
) -> None:
    secret = tmp_path / "password"
    secret.write_text(f"{PASSWORD}\n")
    ledger = open_ledger(as_user(secured), "a-cluster", 0, {}, files(ours, password=secret))
    assert ledger.check() == []
    assert secured.client.dbsize() == 0, "what was tried is removed"
    assert ledger.take(HERE, "one", 60.0, first=True)
    ledger.begin()
    ledger.put("worker/decode-0", "row")
    ledger.renew(60.0)
    ledger.stand_by("10.0.0.2:7000", 60.0)
    assert ledger.standbys() == ("10.0.0.2:7000",)
    leader = ledger.leader()
    assert leader is not None
    assert leader.endpoint == HERE
    ledger.forget()
    ledger.close()
    secured.client.flushdb()


def test_a_new_password_in_the_file_is_taken_up_by_the_next_connection(
    secured: LedgerServer, ours: TestAuthority, tmp_path: Path
) -> None:
    secret = tmp_path / "password"
    secret.write_text(PASSWORD)
    ledger = open_ledger(as_user(secured), "a-cluster", 0, {}, files(ours, password=secret))
    assert ledger.leader() is None
    secured.client.execute_command("ACL", "SETUSER", USER, f"<{PASSWORD}", ">another")  # type: ignore[no-untyped-call]
    try:
        secured.client.client_kill_filter(user=USER)
        with pytest.raises(OSError, match="answered"):
            ledger.leader()
        secret.write_text("another")
        assert ledger.leader() is None
        secret.unlink()
        secured.client.client_kill_filter(user=USER)
        with pytest.raises(OSError, match="can't read its password"):
            ledger.leader()
    finally:
        secured.client.execute_command("ACL", "SETUSER", USER, "<another", f">{PASSWORD}")  # type: ignore[no-untyped-call]
        ledger.close()


def refusal(url: str, security: SecurityConfig | None = None, password: str = "") -> str:
    """What a ledger is refused with, in which no password is."""
    ledger = open_ledger(url, "a-cluster", 0, {PASSWORD_VARIABLE: password}, security)
    with pytest.raises(ConfigError) as refused:
        ledger.check()
    ledger.close()
    assert password not in str(refused.value) or not password
    return str(refused.value)


def test_each_side_that_refuses_the_others_certificate_is_named_with_what_to_do(
    secured: LedgerServer, ours: TestAuthority, strange: TestAuthority
) -> None:
    wrong_ca = refusal(as_user(secured), files(ours, ca=strange), PASSWORD)
    assert "its certificate is refused" in wrong_ca
    assert "security.ledger_ca" in wrong_ca
    unknown = refusal(as_user(secured), SecurityConfig(), PASSWORD)
    assert "its certificate is refused" in unknown
    none = refusal(as_user(secured), SecurityConfig(ledger_ca=str(ours.ca)), PASSWORD)
    assert "wants a client's certificate: set security.ledger_cert" in none
    stranger = refusal(as_user(secured), files(strange, ca=ours), PASSWORD)
    assert "refuses the certificate of security.ledger_cert (unknown ca)" in stranger


def test_tls_on_one_side_alone_is_said(secured: LedgerServer, plain: LedgerServer, ours: TestAuthority) -> None:
    assert "doesn't speak TLS there" in refusal(plain.url.replace("redis:", "rediss:"), files(ours))
    assert "write rediss:// instead" in refusal(secured.url.replace("rediss:", "redis:"))


def test_a_user_without_the_password_or_the_rights_is_refused(
    secured: LedgerServer, plain: LedgerServer, ours: TestAuthority
) -> None:
    for wrong in ("falsch", ""):
        said = refusal(as_user(secured), files(ours), wrong)
        assert "refuses the password" in said or "needs" in said
        assert "security.ledger_password_file" in refusal(plain.url, None, wrong)
    assert "+@scripting" in refusal(as_user(secured, "nobody"), files(ours), "pw")


def test_a_replica_is_refused_with_its_primary(plain: LedgerServer, tmp_path: Path) -> None:
    port = str(plain.port)
    replica = LedgerServer(tmp_path, "--replicaof", "127.0.0.1", port, "--masterauth", "a-password").start()
    try:
        assert f"replica of 127.0.0.1:{port}" in refusal(replica.url)
    finally:
        replica.close()


def test_a_sentinel_is_refused_with_what_to_name_instead(plain: LedgerServer, tmp_path: Path) -> None:
    settings = tmp_path / "sentinel.conf"
    settings.write_text(f"sentinel monitor m 127.0.0.1 {plain.port} 1\n")
    sentinel = LedgerServer(tmp_path, "--sentinel", settings=settings).start()
    try:
        said = refusal(sentinel.url)
        assert "is a Sentinel" in said
        assert "leads to the primary" in said
    finally:
        sentinel.close()


def test_a_primary_that_has_become_a_replica_is_looked_up_again(plain: LedgerServer, tmp_path: Path) -> None:
    server = LedgerServer(tmp_path, "--save", "").start()
    ledger = open_ledger(server.url, "a-cluster", 0, {})
    try:
        assert ledger.take(HERE, "one", 60.0, first=True)
        before = server.client.info("stats")["total_connections_received"]
        server.client.replicaof("127.0.0.1", plain.port)
        with pytest.raises(OSError, match="has become a replica"):
            ledger.renew(60.0)
        server.client.replicaof("NO", "ONE")
        ledger.renew(60.0)
        assert server.client.info("stats")["total_connections_received"] == before + 1, "by another connection"
    finally:
        ledger.close()
        server.close()


def test_a_controller_says_at_its_start_that_its_ledger_will_never_do(
    secured: LedgerServer, ours: TestAuthority, strange: TestAuthority, tmp_path: Path
) -> None:
    secret = tmp_path / "password"
    secret.write_text("falsch")
    config = load_config(None, ["cluster.name=c", f"cluster.ledger={as_user(secured)}"])
    for given, word in (
        (files(ours, password=secret), "refuses the password"),
        (files(ours, ca=strange, password=secret), "security.ledger_ca"),
        (files(ours, password=tmp_path / "none"), "can't read its password"),
    ):
        place = ControllerPlace("127.0.0.1", free_port())
        with pytest.raises(ConfigError, match=word) as refused:
            ControllerProcess(replace(config, security=given), place, threading.Event())
        assert "falsch" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (["cluster.ledger=rediss+sentinel://h/0"], "leads to the primary"),
        (["cluster.ledger=redis://h/0?password=geheim"], "isn't taken"),
        (["cluster.ledger=rediss://h/0?ssl_cert_reqs=none"], "isn't taken"),
        (["cluster.ledger=redis://:ge/heim@h/0"], "names no host|number of its database|can't be read"),
        (["security.ledger_ca=/a"], "rediss://"),
        (["cluster.ledger=redis://h/0", "security.ledger_cert=/a", "security.ledger_key=/b"], "rediss://"),
        (["cluster.ledger=rediss://h/0", "security.ledger_cert=/a"], "go together"),
        (["security.ledger_password_file=/a"], "needs cluster.ledger on a server"),
    ],
)
def test_what_a_ledger_can_not_be_is_refused_without_its_password(settings: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as refused:
        load_config(None, settings)
    assert not re.search("geheim|ge/heim", str(refused.value))


@pytest.mark.parametrize("command", ["serve", "controller"])
def test_a_password_in_a_set_flag_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--address", "127.0.0.1", "--port", "1"] if command == "controller" else ["--model", "demo"]
    with pytest.raises(SystemExit) as ended:
        main([command, *where, "--set", "cluster.ledger=redis://u:geheim@h/0"])
    assert ended.value.code == USAGE
    said = capsys.readouterr().err
    assert "security.ledger_password_file" in said
    assert "geheim" not in said
