"""The commands `twinpool keys` and `twinpool certs`: API keys in a key file, and the certificates and CURVE keys of a
cluster of one's own.

What makes and reads keys and certificates is imported when it is needed, as every command imports this module.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import socket
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.cli.command_parser import FINE, REFUSED, print_table
from twinpool.contracts.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from twinpool.contracts.credentials.mint_certificates import Authority
    from twinpool.contracts.key_file import ApiKey

_SPAN = re.compile(r"(\d{1,5})([dhm])")
_UNITS = {"d": timedelta(days=1), "h": timedelta(hours=1), "m": timedelta(minutes=1)}


def new_key(path: Path, tenant: str, expires: str = "") -> str:
    """Add a key of `tenant` to the file, which is made where there is none; returns its secret, which isn't kept.

    `expires`: after how long, as 90d, 12h or 30m; empty: never. Raises `ConfigError`.
    """
    from twinpool.contracts.key_file import KeyFile, check_tenant, mint_key, read_key_file, write_key_file

    check_tenant(tenant)
    now = datetime.now(UTC)
    ends = (now + _span(expires)).isoformat(timespec="seconds") if expires else ""
    content = read_key_file(path) if path.exists() else KeyFile()
    secret, key = mint_key(tenant, now.isoformat(timespec="seconds"), ends)
    write_key_file(path, dataclasses.replace(content, keys=(*content.keys, key)))
    return secret


def revoke_key(path: Path, key_id: str) -> str:
    """Take a key out of the file; returns its id. Raises `ConfigError` where there is none with that id."""
    from twinpool.contracts.key_file import read_key_file, write_key_file

    content = read_key_file(path)
    kept = tuple(key for key in content.keys if key.id != key_id)
    if len(kept) == len(content.keys):
        raise ConfigError(f"{path} has no key {key_id}: twinpool keys list shows them")
    write_key_file(path, dataclasses.replace(content, keys=kept))
    return key_id


def list_keys(path: Path) -> Table:
    """Return the keys of the file, with what their tenants may ask for."""
    from rich.table import Table

    from twinpool.contracts.key_file import read_key_file

    content = read_key_file(path)
    shown = Table("id", "tenant", "created", "expires", "requests/min", "tokens/min", "at a time", "priority", "models")
    for key in content.keys:
        limits = content.limits(key.tenant)
        numbers = (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent)
        shown.add_row(
            key.id, key.tenant, key.created, _ending(key), *(f"{n:,}" if n else "" for n in numbers),
            str(limits.priority), ", ".join(limits.models),
        )  # fmt: skip
    return shown


def _ending(key: ApiKey) -> str:
    if key.expired(datetime.now(UTC)):
        return f"[red]{key.expires}, expired[/]"
    return key.expires or "never"


def _span(text: str) -> timedelta:
    found = _SPAN.fullmatch(text)
    if found is None or not int(found[1]):
        raise ConfigError(f"--expires takes days, hours or minutes, such as 90d, 12h or 30m; got {text!r}")
    return int(found[1]) * _UNITS[found[2]]


CA, CA_KEY = "ca.pem", "ca.key"
NODE, NODE_KEY = "node.pem", "node.key"
CURVE, CURVE_SECRET = "curve.key", "curve.key_secret"
AUTHORITY_DAYS = 3650.0
LOCAL = ("localhost", "127.0.0.1", "::1")


def new_certificates(folder: Path, hosts: Sequence[str], days: float) -> list[str]:
    """Make an authority, a node's certificate for `hosts` and this machine, and CURVE keys; returns what to do next.

    All files but `ca.pem` are for their owner alone. Raises `ConfigError` where the folder has an authority already.
    """
    import zmq.auth

    from twinpool.contracts.credentials.mint_certificates import new_authority, write_private

    _check_days(days)
    if (folder / CA).exists() or (folder / CA_KEY).exists():
        raise ConfigError(
            f"{folder} has an authority already: twinpool certs renew {folder} makes a node's certificate"
        )
    authority = new_authority("Twinpool cluster", datetime.now(UTC), AUTHORITY_DAYS)
    node = _node(authority, hosts, days)  # Before anything is written: it may refuse a host.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    certificate, key = authority.pem()
    write_private(folder / CA_KEY, key)
    write_private(folder / CA, certificate)
    (folder / CA).chmod(0o644)
    _write_node(folder, node)
    with tempfile.TemporaryDirectory(dir=folder) as private:  # With mode 700: they are written with the umask's mode.
        for path in map(Path, zmq.auth.create_certificates(private, "curve")):
            path.chmod(0o600)
            path.replace(folder / path.name)
    return [
        f"made in {folder}: the authority ({CA}, {CA_KEY}), a node's certificate ({NODE}, {NODE_KEY}), CURVE keys",
        f"give every node {CA}, {NODE}, {NODE_KEY} and {CURVE_SECRET}; keep {CA_KEY} apart, who has it makes members",
        f"clients check the endpoint by {CA}; readers of KV events need {CURVE}",
    ]


def renew_certificate(folder: Path, hosts: Sequence[str], days: float) -> list[str]:
    """Replace the node's certificate by one of the folder's authority; returns what was done. Raises `ConfigError`."""
    from twinpool.contracts.credentials.mint_certificates import read_authority

    _check_days(days)
    authority = read_authority(folder / CA, folder / CA_KEY)
    _write_node(folder, _node(authority, hosts, days))
    return [f"made {folder / NODE} and its key anew; servers take them for new connections within a second"]


def check_certificates(folder: Path) -> tuple[Table, bool]:
    """Return a table of the folder's certificates, and whether all of them can be used now."""
    from rich.table import Table

    from twinpool.contracts.credentials.certificate_check import read_certificates
    from twinpool.contracts.credentials.certificate_files import CertificateFiles

    shown, good = Table("file", "names", "valid until", "state"), True
    node = CertificateFiles(folder / NODE, folder / NODE_KEY, folder / CA, (NODE, NODE_KEY, CA))
    for name in (CA, NODE):
        certificate = read_certificates(folder / name, name)[0]
        ends, state = certificate.not_valid_after_utc, "[green]valid[/]"
        if ends < datetime.now(UTC):
            good, state = False, "[red]expired[/]"
        else:
            state += f" for {(ends - datetime.now(UTC)).days} days"
        shown.add_row(name, ", ".join(_names(certificate)), ends.isoformat(sep=" ", timespec="minutes"), state)
    try:
        node.check()
    except ConfigError as error:
        good = False
        shown.add_row(NODE, "", "", f"[red]{error}[/]")
    return shown, good


def _node(authority: Authority, hosts: Sequence[str], days: float) -> tuple[bytes, bytes]:
    from twinpool.contracts.credentials.mint_certificates import new_node

    return new_node(authority, [*hosts, socket.gethostname(), *LOCAL], datetime.now(UTC), days)


def _write_node(folder: Path, node: tuple[bytes, bytes]) -> None:
    from twinpool.contracts.credentials.mint_certificates import write_private

    certificate, key = node
    # The key first: whoever reads between the two finds a pair that doesn't match, and keeps what it has.
    write_private(folder / NODE_KEY, key)
    write_private(folder / NODE, certificate)


def _names(certificate: object) -> list[str]:
    from cryptography import x509

    assert isinstance(certificate, x509.Certificate)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def _check_days(days: float) -> None:
    if not 0 < days <= AUTHORITY_DAYS:
        raise ConfigError(f"--days must be above 0 and at most {AUTHORITY_DAYS:g}, got {days:g}")


def keys(args: argparse.Namespace) -> int:
    if args.action == "list":
        print_table(list_keys(args.file))
        return FINE
    if not args.name:
        raise ConfigError(
            f"twinpool keys {args.action} needs {'a tenant' if args.action == 'new' else 'the id of a key'}"
        )
    if args.action == "new":
        print(new_key(args.file, args.name, args.expires))
    else:
        print(f"revoked {revoke_key(args.file, args.name)}")
    return FINE


def certs(args: argparse.Namespace) -> int:
    if args.action == "check":
        table, good = check_certificates(args.folder)
        print_table(table)
        return FINE if good else REFUSED
    make = new_certificates if args.action == "new" else renew_certificate
    for line in make(args.folder, args.host, args.days):
        print(line)
    return FINE
