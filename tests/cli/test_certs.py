"""`twinpool certs` and keys that end by themselves."""

from __future__ import annotations

import http.server
import json
import ssl
import stat
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.certificates import TestAuthority
from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.cli.credential_commands import new_certificates
from twinpool.contracts.credentials.certificate_check import read_certificates
from twinpool.contracts.credentials.certificate_files import CertificateFiles, read_curve_pair, read_curve_public
from twinpool.contracts.key_file import read_key_file
from twinpool.router.security.tenant_accounts import ApiKeys


def twinpool(*arguments: str) -> int:
    return cli.run(command_line.parser().parse_args(arguments))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    new_certificates(tmp_path / "certs", ["gateway.example.com", "10.1.2.3"], 30)
    return tmp_path / "certs"


def files_of(folder: Path) -> CertificateFiles:
    return CertificateFiles(folder / "node.pem", folder / "node.key", folder / "ca.pem")


def test_what_new_makes_is_good_and_its_owners_alone(folder: Path) -> None:
    files_of(folder).check()
    pair = read_curve_pair(folder / "curve.key_secret")
    assert read_curve_public(folder / "curve.key") == pair.public
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"ca.pem": 0o644} | dict.fromkeys(
        ("ca.key", "node.pem", "node.key", "curve.key", "curve.key_secret"), 0o600
    )
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_new_never_replaces_an_authority(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "ca.key").read_bytes()
    assert twinpool("certs", "new", str(folder)) == 2
    assert "twinpool certs renew" in capsys.readouterr().err
    assert (folder / "ca.key").read_bytes() == before


def test_renew_makes_another_certificate_of_the_same_authority(folder: Path) -> None:
    before = read_certificates(folder / "node.pem", "it")[0]
    assert twinpool("certs", "renew", str(folder), "--host", "other.example.com", "--days", "2") == 0
    files_of(folder).check()
    after = read_certificates(folder / "node.pem", "it")[0]
    assert after.serial_number != before.serial_number
    assert after.not_valid_after_utc < before.not_valid_after_utc


def test_check_shows_what_ends_when_and_fails_where_something_has(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert twinpool("certs", "check", str(folder)) == 0
    shown = capsys.readouterr().out
    assert "gateway.example.com" in shown
    assert "valid for 29 days" in shown
    old = TestAuthority(folder / "other").expired()
    (folder / "node.pem").write_bytes(old.cert.read_bytes())
    assert twinpool("certs", "check", str(folder)) == 1
    assert "expired" in capsys.readouterr().out
    (folder / "node.pem").unlink()
    assert twinpool("certs", "check", str(folder)) == 2
    assert "can't read node.pem" in capsys.readouterr().err


@pytest.mark.parametrize("days", ["0", "-1", "99999", "nan"])
def test_days_that_are_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], days: str) -> None:
    assert twinpool("certs", "new", str(tmp_path / "certs"), "--days", days) == 2
    assert "--days" in capsys.readouterr().err
    assert not (tmp_path / "certs").exists()


def test_a_host_that_is_none_leaves_no_half_made_authority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert twinpool("certs", "new", str(tmp_path / "certs"), "--host", "../x") == 2
    assert "neither a host's name nor an address" in capsys.readouterr().err
    assert twinpool("certs", "new", str(tmp_path / "certs"), "--host", "x") == 0


# ---------------------------------------------------------------- keys that end


@pytest.mark.parametrize(
    ("given", "span"), [("90d", timedelta(days=90)), ("12h", timedelta(hours=12)), ("5m", timedelta(minutes=5))]
)
def test_a_key_ends_when_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, span: timedelta
) -> None:
    path = tmp_path / "keys.json"
    assert twinpool("keys", "new", "acme", "--file", str(path), "--expires", given) == 0
    secret, now = capsys.readouterr().out.strip(), datetime.now(UTC)
    (key,) = read_key_file(path).keys
    assert abs(datetime.fromisoformat(key.expires) - now - span) < timedelta(seconds=60)
    assert ApiKeys(path).tenant_of(secret) == "acme"
    assert ApiKeys(path, lambda: now + span - timedelta(seconds=61)).tenant_of(secret) == "acme"
    assert ApiKeys(path, lambda: now + span + timedelta(seconds=61)).tenant_of(secret) is None


@pytest.mark.parametrize("given", ["90", "d", "0d", "-1d", "1y", "999999d", "1.5d"])
def test_a_span_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str) -> None:
    path = tmp_path / "keys.json"
    assert twinpool("keys", "new", "acme", "--file", str(path), f"--expires={given}") == 2
    assert "--expires takes" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize("expires", ["soon", "2030-01-01", "2030-01-01T00:00:00"])
def test_an_end_without_a_zone_is_refused_and_not_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], expires: str
) -> None:
    path = tmp_path / "keys.json"
    assert twinpool("keys", "new", "acme", "--file", str(path)) == 0
    tree = json.loads(path.read_text())
    tree["keys"][0]["expires"] = expires
    path.write_text(json.dumps(tree))
    assert twinpool("keys", "list", "--file", str(path)) == 2
    assert "a time with its zone" in capsys.readouterr().err


# ---------------------------------------------------------------- commands over HTTPS


class _Status(http.server.BaseHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(self.headers.get("Authorization", ""))
        body = b'{"workers": []}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "node.pem", folder / "node.key")
    _Status.asked.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Status) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"https://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(60)


def test_an_operators_key_goes_only_to_whom_its_authority_knows(
    url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TWINPOOL_ADMIN_TOKEN", "a key")
    monkeypatch.delenv("TWINPOOL_CA", raising=False)
    stranger = TestAuthority(tmp_path / "stranger").ca
    for flags in ([], ["--ca", str(stranger)]):
        assert twinpool("status", "--url", url, *flags) == 3
        assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err
    assert _Status.asked == []
    assert twinpool("status", "--url", url, "--ca", str(folder / "ca.pem")) == 0
    monkeypatch.setenv("TWINPOOL_CA", str(folder / "ca.pem"))
    assert twinpool("status", "--url", url) == 0
    assert _Status.asked == ["Bearer a key"] * 2
    assert twinpool("status", "--url", url, "--ca", "/nowhere.pem") == 2
