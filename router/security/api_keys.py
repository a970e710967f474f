"""The API keys that a router knows, read again whenever their file changes."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from twinpool.contracts.errors import ConfigError
from twinpool.contracts.json_logs import log
from twinpool.contracts.key_file import ApiKey, KeyFile, TenantLimits, digest_of, read_key_file

_SHOWN = 16
"""Hexadecimal digits of a hash by which keys are looked up; the rest is compared in constant time."""


class ApiKeys:
    """The keys of one file. Raises `ConfigError` where it can't be read at first; later a bad file changes nothing."""

    def __init__(self, path: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """`now`: the time, by which keys expire."""
        self._path, self._now = path, now
        self._read: tuple[int, int, int] | None = None
        self._keys: dict[str, list[ApiKey]] = {}
        self._content = KeyFile()
        self._take(self._stamp(), read_key_file(path))

    def refresh(self) -> None:
        """Read the file again if it isn't the one that was read last."""
        # Before it is read: what is written meanwhile has another stamp, and is read with the next call.
        if (stamp := self._stamp()) == self._read:
            return
        try:
            self._take(stamp, read_key_file(self._path))
        except ConfigError as error:
            self._read = stamp
            log("keys are as before: their file can't be read", level=logging.ERROR, reason=str(error))

    def tenant_of(self, secret: str) -> str | None:
        """Return the tenant whose key this is, None where it is nobody's or has expired."""
        digest = digest_of(secret)
        found = None
        for key in self._keys.get(digest[:_SHOWN], ()):
            if hmac.compare_digest(key.sha256, digest) and not key.expired(self._now()):
                found = key.tenant
        return found

    def limits(self, tenant: str) -> TenantLimits:
        return self._content.limits(tenant)

    def _take(self, stamp: tuple[int, int, int] | None, content: KeyFile) -> None:
        self._read = stamp
        keys: dict[str, list[ApiKey]] = {}
        for key in content.keys:
            keys.setdefault(key.sha256[:_SHOWN], []).append(key)
        self._keys, self._content = keys, content
        log("keys read", keys=len(content.keys), tenants=len({key.tenant for key in content.keys}))

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
