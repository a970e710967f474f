"""Certificates for tests: of an authority of their own, expired, of a stranger's."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.credentials.mint_certificates import new_authority, new_node, write_private

NAMES = ("the certificate", "its key", "its authority")


class TestAuthority:
    """An authority whose certificates lie in `folder`."""

    __test__ = False

    def __init__(self, folder: Path, now: datetime | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.now = now or datetime.now(UTC)
        self._authority = new_authority("a test", self.now, 3650)
        self.ca = folder / "ca.pem"
        write_private(self.ca, self._authority.pem()[0])

    def node(self, name: str = "node", *, days: float = 30, ago: float = 0) -> CertificateFiles:
        """Make (or make anew) the certificate `name`, valid for `days` from `ago` days before now on."""
        certificate, key = new_node(self._authority, ("localhost", "127.0.0.1"), self.now - timedelta(days=ago), days)
        files = CertificateFiles(self.folder / f"{name}.pem", self.folder / f"{name}.key", self.ca, NAMES)
        write_private(files.key, key)
        write_private(files.cert, certificate)
        return files

    def expired(self) -> CertificateFiles:
        """A certificate that ended yesterday."""
        return self.node("expired", days=1, ago=2)

    def trust(self) -> ssl.SSLContext:
        """What a client checks by."""
        return ssl.create_default_context(cafile=self.ca)
