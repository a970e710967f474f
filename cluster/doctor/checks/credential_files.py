"""Certificates and keys: valid, belonging together, for a while yet, and for their owner's eyes alone."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from twinpool.cluster.doctor.doctor_case import DoctorCase
from twinpool.cluster.doctor.finding import Finding, error, fine, from_refusal, warning
from twinpool.cluster.serve.security_check import check_security
from twinpool.contracts.credentials.certificate_check import read_certificates
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.key_file import read_key_file

SOON = timedelta(days=14)
"""A certificate that ends within this time is told of."""
_SECRETS = ("tls_key", "cluster_key", "curve_key", "keys_file", "admin_keys_file", "ledger_key", "ledger_password_file")
"""Keys of `security` whose files nobody else should read."""


def check_credentials(case: DoctorCase) -> Iterator[Finding]:
    """All that `security` names."""
    security, options, wrong = case.config.security, case.options, False
    try:
        check_security(security, options.host, 0, bind=False)
    except TwinpoolError as refused:
        wrong = True
        yield from_refusal(refused)
    for finding in (*_ends(case), *_modes(case), *_keys(case)):
        wrong = True
        yield finding
    if not wrong:
        named = [
            name
            for name in (*_SECRETS, "tls_cert", "cluster_cert", "cluster_ca", "ledger_ca")
            if getattr(security, name)
        ]
        yield fine(f"in order: {', '.join(named)}" if named else "no certificates or keys are configured")


def _ends(case: DoctorCase) -> Iterator[Finding]:
    for name in ("tls_cert", "cluster_cert", "cluster_ca", "ledger_cert", "ledger_ca"):
        path = getattr(case.config.security, name)
        if not path:
            continue
        try:
            ends = min(one.not_valid_after_utc for one in read_certificates(Path(path), f"security.{name}"))
        except ConfigError:
            continue  # Told of already.
        if timedelta() < ends - case.host.now() < SOON:
            yield warning(
                f"security.{name} {path} ends in {(ends - case.host.now()).days} days ({ends:%Y-%m-%d %H:%M} UTC)",
                "have a new one made in its place; new connections take it"
                if name.startswith("ledger")
                else "twinpool certs renew FOLDER; servers take the new one while they run",
            )


def _modes(case: DoctorCase) -> Iterator[Finding]:
    for name in _SECRETS:
        path = getattr(case.config.security, name)
        if not path:
            continue
        try:
            mode = stat.S_IMODE(Path(path).stat().st_mode)
        except OSError:
            continue  # Told of already.
        if mode & 0o077:
            yield warning(
                f"security.{name} {path} has mode {mode:o}: other users may read it",
                f"chmod 600 {path}",
            )


def _keys(case: DoctorCase) -> Iterator[Finding]:
    """API keys that have run out, where none is left."""
    for name in ("keys_file", "admin_keys_file"):
        path = getattr(case.config.security, name)
        try:
            keys = read_key_file(Path(path)).keys if path else ()
        except ConfigError:
            continue  # Told of already.
        if path and not any(not key.expired(case.host.now()) for key in keys):
            what = f"all {len(keys)} keys have run out" if keys else "it has no key"
            yield error(
                f"security.{name} {path}: {what}, so everybody is refused", "twinpool keys new NAME --file FILE"
            )
