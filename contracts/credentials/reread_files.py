"""What is made of a certificate's files, made again whenever they change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.errors import ConfigError

log = logging.getLogger("twinpool.tls")
T = TypeVar("T")


class RereadFiles(Generic[T]):
    """The latest of what `read` makes of the files. Files that can't be used are an error at first, and later change
    nothing."""

    def __init__(self, files: CertificateFiles, read: Callable[[CertificateFiles], T]) -> None:
        """Raises `ConfigError`, as `read` does, where the files can't be used."""
        self._files, self._read = files, read
        try:
            self._stamp = files.stamp()  # Before they are read: a change between the two is seen.
        except OSError as error:
            raise ConfigError(f"can't read a certificate: {error}") from None
        self._latest = read(files)

    def latest(self) -> T:
        """Return what the files as they are now give, or what they gave last."""
        try:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return self._latest
            self._stamp = stamp
            self._files.check()
            self._latest = self._read(self._files)
        except (OSError, ConfigError) as error:
            log.error("a certificate is as before: its files can't be used", extra={"reason": str(error)})
        else:
            log.info("a certificate was read again")
        return self._latest
