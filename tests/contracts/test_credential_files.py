"""Files of certificates and keys: chains of several, files that change under a process, files that can't be written."""

from __future__ import annotations

import json
import logging
import os
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from tests.support.certificates import NAMES, TestAuthority
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.credentials.mint_certificates import Authority, new_authority, new_node, write_private
from twinpool.contracts.credentials.node_tls import NodeTls, RereadFiles
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.key_file import ApiKey, KeyFile, TenantLimits, read_key_file, write_key_file

NOW = datetime.now(UTC)
YEAR = 365.0


def below(above: Authority, name: str, days: float = YEAR) -> Authority:
    """An authority whose certificate is `above`'s, valid until `days` from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    built = x509.CertificateBuilder(above.certificate.subject, subject, key.public_key(), x509.random_serial_number())
    built = built.not_valid_before(NOW - timedelta(days=YEAR)).not_valid_after(NOW + timedelta(days=days))
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    return Authority(built.sign(above.key, hashes.SHA256()), key)


def pem(authority: Authority) -> bytes:
    return authority.certificate.public_bytes(Encoding.PEM)


def files_of(folder: Path, signer: Authority, chain: list[Authority], known: list[Authority]) -> CertificateFiles:
    """A node's certificate by `signer`, followed by those of `chain`, where the authorities of `known` are admitted."""
    leaf, key = new_node(signer, ("localhost",), NOW, 10)
    files = CertificateFiles(folder / "node.pem", folder / "node.key", folder / "ca.pem", NAMES)
    write_private(files.cert, leaf + b"".join(map(pem, chain)))
    write_private(files.key, key)
    write_private(folder / "ca.pem", b"".join(map(pem, known)))
    return files


def test_a_chain_is_followed_link_by_link_to_one_of_the_authorities(tmp_path: Path) -> None:
    root, stranger = new_authority("root", NOW, YEAR), new_authority("stranger", NOW, YEAR)
    upper = below(root, "upper")
    lower = below(upper, "lower")

    def admitted(chain: list[Authority], known: list[Authority]) -> bool:
        try:
            files_of(tmp_path, lower, chain, known).check()
        except ConfigError as error:
            if "is not of the authority" not in str(error):
                raise
            return False
        return True

    assert admitted([lower, upper], [root])
    assert admitted([lower, upper], [stranger, root])
    assert admitted([lower, upper], [upper])
    assert not admitted([lower, upper], [stranger])
    assert not admitted([lower, below(root, "upper")], [root]), "one of the same name has signed nothing here"
    assert not admitted([below(upper, "lower"), upper], [root])
    assert not admitted([upper, lower], [root])
    assert not admitted([lower], [root])
    assert not admitted([], [root])


def test_every_certificate_of_a_chain_must_be_valid_now(tmp_path: Path) -> None:
    root = new_authority("root", NOW, YEAR)
    old = below(root, "old", days=-1)
    with pytest.raises(ConfigError, match=r"the certificate .*node.pem has expired"):
        files_of(tmp_path, old, [old], [root]).check()


class Read:
    """What is made of the files, counted."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, files: CertificateFiles) -> int:
        self.times += 1
        return self.times


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path)


def test_files_are_read_when_one_of_them_has_changed_and_only_then(authority: TestAuthority) -> None:
    files, read = authority.node(), Read()
    latest = RereadFiles(files, read)
    assert [latest.latest(), latest.latest()] == [1, 1]
    authority.node()
    assert [latest.latest(), latest.latest()] == [2, 2]
    assert files.ca is not None
    files.ca.write_bytes(files.ca.read_bytes() + pem(new_authority("one more", NOW, YEAR)))
    assert [latest.latest(), latest.latest()] == [3, 3], "an authority was added"


def test_files_that_do_not_pass_their_check_change_nothing_and_are_told_of_once(
    authority: TestAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    """They are asked for at every handshake."""
    caplog.set_level(logging.INFO, "twinpool.tls")
    files, read = authority.node(), Read()
    latest = RereadFiles(files, read)
    authority.node(days=1, ago=2)
    assert [latest.latest() for _ in range(3)] == [1, 1, 1]
    assert read.times == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    authority.node()
    assert latest.latest() == 2
    assert caplog.records[-1].message == "a certificate was read again"


def test_a_file_that_is_gone_for_a_moment_changes_nothing(authority: TestAuthority) -> None:
    files = authority.node()
    latest = RereadFiles(files, Read())
    kept = files.cert.read_bytes()
    files.cert.unlink()
    assert latest.latest() == 1
    write_private(files.cert, kept)
    assert latest.latest() == 2


def test_a_change_while_the_files_are_first_read_is_seen(authority: TestAuthority) -> None:
    times: list[int] = []

    def read(files: CertificateFiles) -> int:
        if not times:
            authority.node()
        times.append(len(times))
        return len(times)

    assert RereadFiles(authority.node(), read).latest() == 2


def test_both_ends_of_a_nodes_connections_ask_for_a_certificate_of_the_authority(authority: TestAuthority) -> None:
    tls = NodeTls(authority.node())
    for context in (tls.server(), tls.client()):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert [one["subject"] for one in context.get_ca_certs()] == [((("commonName", "a test"),),)]
    assert tls.client().check_hostname


# ---------------------------------------------------------------- files that are written

KEYS = KeyFile(
    (ApiKey("id", "acme", "ab" * 32, "2030-01-01T00:00:00+00:00"),), {"acme": TenantLimits(priority=-1, models=("m",))}
)


@pytest.mark.parametrize(
    "write", [lambda path: write_private(path, b"new"), lambda path: write_key_file(path, KEYS)], ids=["pem", "keys"]
)
def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left_beside_it(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be left has secrets in it."""

    def full(source: object, target: object) -> None:
        raise OSError("no space left on device")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="no space"):
            write(path)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", b"old")]
    write(path)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() != b"old"


def test_a_key_file_behind_a_link_is_replaced_where_it_lies(tmp_path: Path) -> None:
    """As secrets of Kubernetes are mounted, and as operators keep files of several hosts in one folder."""
    (tmp_path / "kept").mkdir()
    there, link = tmp_path / "kept" / "keys.json", tmp_path / "keys.json"
    there.write_text("{}")
    link.symlink_to(there)
    write_key_file(link, KEYS)
    assert link.is_symlink()
    assert read_key_file(there) == read_key_file(link) == KEYS


@pytest.mark.parametrize(
    ("tenant", "words"),
    [
        ({"concurrent": -1}, "concurrent must be a whole number, 0 or more; got -1"),
        ({"concurrent": True}, "concurrent must be a whole number"),
        ({"tokens_per_minute": 1.0}, "tokens_per_minute must be a whole number"),
        ({"weight": 0}, "weight must be 1 to 1000; got 0"),
        ({"weight": 1001}, "weight must be 1 to 1000; got 1001"),
        ({"models": "m"}, "models must be an array of names"),
        ({"models": ["m", 1]}, "models must be an array of names"),
        ({"speed": 1}, "must be an object of requests_per_minute"),
    ],
)
def test_limits_that_are_none_are_refused_by_their_place(tenant: dict[str, object], words: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"tenants": {"acme": tenant}}))
    with pytest.raises(ConfigError, match=rf"tenants\.acme.*{words}"):
        read_key_file(path)
    path.write_text(json.dumps({"tenants": {"acme": {"concurrent": 0, "weight": 1000, "priority": -7}}}))
    assert read_key_file(path).limits("acme") == TenantLimits(weight=1000, priority=-7)
    assert read_key_file(path).limits("nobody") == TenantLimits()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sha256": "AB" * 32}, "64 hexadecimal digits"),
        ({"sha256": "ab" * 31}, "64 hexadecimal digits"),
        ({"id": ""}, "needs an id"),
        ({"tenant": "a" * 65}, "1 to 64 letters"),
        ({"tenant": "a b"}, "1 to 64 letters"),
        ({"expires": "2030-01-31T12:00:00"}, "must be a time with its zone"),
        ({"expires": "soon"}, "must be a time with its zone"),
        ({"created": 5}, "must be an object of texts"),
        ({"secret": "x"}, "must be an object of texts"),
    ],
)
def test_a_key_that_is_none_is_refused_by_its_number(change: dict[str, object], words: str, tmp_path: Path) -> None:
    good = {"id": "i", "tenant": "a" * 64, "sha256": "ab" * 32, "expires": "2030-01-31T12:00:00+00:00"}
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [good, good]}))
    assert len(read_key_file(path).keys) == 2
    path.write_text(json.dumps({"keys": [good, {**good, **change}]}))
    with pytest.raises(ConfigError, match=rf"keys\[1\].*{words}"):
        read_key_file(path)


def test_a_key_ends_at_its_time_to_the_second() -> None:
    key = ApiKey("id", "acme", "ab" * 32, expires="2030-01-31T12:00:00+01:00")
    end = datetime(2030, 1, 31, 11, tzinfo=UTC)
    assert not key.expired(end - timedelta(seconds=1))
    assert key.expired(end)
    assert not ApiKey("id", "acme", "ab" * 32).expired(end)
