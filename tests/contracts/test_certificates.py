"""Certificates as files: what is refused before anything is served with it, and with which words."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.certificates import NAMES, TestAuthority
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.config.security_config import FILES, SecurityConfig
from twinpool.contracts.credentials.certificate_files import CertificateFiles, read_curve_pair, read_curve_public
from twinpool.contracts.credentials.mint_certificates import new_authority, new_node, write_private
from twinpool.contracts.errors import ConfigError


def test_a_pair_of_its_authority_is_good_until_it_ends(tmp_path: Path) -> None:
    files = TestAuthority(tmp_path).node(days=10)
    files.check()
    files.check(datetime.now(UTC) + timedelta(days=9.9))
    with pytest.raises(ConfigError, match=r"has expired at .*twinpool certs renew"):
        files.check(datetime.now(UTC) + timedelta(days=10.1))
    with pytest.raises(ConfigError, match=r"isn't valid before .*clock"):
        files.check(datetime.now(UTC) - timedelta(days=1))


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    one, other = authority.node("one"), authority.node("other")
    with pytest.raises(ConfigError, match="is not the key of"):
        CertificateFiles(one.cert, other.key, one.ca, NAMES).check()


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    mine, theirs = TestAuthority(tmp_path / "mine"), TestAuthority(tmp_path / "theirs").node()
    with pytest.raises(ConfigError, match="is not of the authority"):
        CertificateFiles(theirs.cert, theirs.key, mine.ca, NAMES).check()
    CertificateFiles(theirs.cert, theirs.key, None, NAMES).check()


def test_an_authority_that_has_expired_makes_no_good_certificates(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    authority = new_authority("old", now - timedelta(days=20), 10)
    certificate, key = new_node(authority, (), now, 10)
    files = CertificateFiles(tmp_path / "node.pem", tmp_path / "node.key", tmp_path / "ca.pem", NAMES)
    for path, content in ((files.cert, certificate), (files.key, key), (tmp_path / "ca.pem", authority.pem()[0])):
        write_private(path, content)
    with pytest.raises(ConfigError, match=r"its authority .*ca.pem has expired"):
        files.check()


def test_the_authoritys_own_certificate_is_no_nodes(tmp_path: Path) -> None:
    authority = new_authority("mine", datetime.now(UTC), 10)
    ca, key = tmp_path / "ca.pem", tmp_path / "ca.key"
    for path, content in zip((ca, key), authority.pem(), strict=True):
        write_private(path, content)
    with pytest.raises(ConfigError, match=r"lacks the name node.twinpool.internal"):
        CertificateFiles(ca, key, ca, NAMES).check()


@pytest.mark.parametrize("which", ["cert", "key", "ca"])
@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n"])
def test_files_that_are_missing_or_no_pem_are_named(tmp_path: Path, which: str, content: bytes | None) -> None:
    files = TestAuthority(tmp_path).node()
    path: Path = getattr(files, which)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        files.check()


@pytest.mark.parametrize("host", ["", "a b", "a/b", "evil\nname", "../x", "-x", "a" * 254])
def test_what_is_no_host_gets_no_certificate(host: str) -> None:
    authority = new_authority("mine", datetime.now(UTC), 10)
    with pytest.raises(ConfigError, match="neither a host's name nor an address"):
        new_node(authority, (host,), datetime.now(UTC), 10)


def test_private_files_are_their_owners_alone_from_the_first_byte(tmp_path: Path) -> None:
    files = TestAuthority(tmp_path).node()
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"tls_cert": "a"}, "security.tls_key is missing"),
        ({"cluster_ca": "a", "cluster_key": "b"}, "security.cluster_cert is missing"),
        ({"admin_port": 70_000}, "at most 65535"),
        ({"admin_port": -1}, "0 or more"),
        ({"cors_origins": "chat.example.com"}, "takes origins like"),
        ({"cors_origins": "https://a, https://b/path"}, "takes origins like"),
        ({"cors_origins": "https://a\r\nset-cookie: x"}, "takes origins like"),
    ],
)
def test_half_a_section_is_refused(section: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from_dict({"security": section})


def test_every_key_that_is_a_path_is_known_as_one() -> None:
    """`serve` makes these absolute for processes that start elsewhere."""
    assert set(FILES) == {key for key in SecurityConfig.__slots__ if key.endswith(("_file", "_cert", "_key", "_ca"))}


def test_curve_keys_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "curve.key_secret"
    for content in (None, "", 'curve\n    public-key = "x"\n'):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=r"curve\.key_secret"):
            read_curve_pair(path)
    with pytest.raises(ConfigError, match="twinpool certs new"):
        read_curve_public(tmp_path / "absent")
