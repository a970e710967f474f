"""Certificates and their keys as PEM files.

All nodes of a cluster have certificates of the cluster's own authority, each with the name `NODE_NAME` beside those of
its host. Callers within the cluster check this name and not the host's, so that nodes may come by any address.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

NODE_NAME = "node.twinpool.internal"
"""The name in the certificate of every node."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """The files of one certificate. `names`: of their configuration keys, for messages."""

    cert: Path
    """The certificate, followed by those between it and its authority."""
    key: Path
    ca: Path | None = None
    """Certificates of the authorities whose peers are admitted; None where peers need none."""
    names: tuple[str, str, str] = ("the certificate", "its key", "its authority")

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return what changes when one of the files does; raises `OSError` where one is missing."""
        found = [path.stat() for path in (self.cert, self.key, self.ca) if path is not None]
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)

    def check(self, now: datetime | None = None) -> None:
        """Check that the files are whole, belong together, and are valid `now` (None: at this moment).

        With an authority, the certificate must be one of its own, and a node's. Raises `ConfigError` that says what to
        do.
        """
        from twinpool.contracts.credentials.certificate_check import (
            check_files,  # The configuration is read without it.
        )

        check_files(self, now)
