"""TLS between the nodes of a cluster: both ends have a certificate of the cluster's own authority.

Contexts are made again whenever the files of the certificate change (`RereadFiles`).
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from typing import Generic, TypeVar

from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.errors import ConfigError


class NodeTls:
    """The TLS contexts of a node, of its files as they are at each call. Raises `ConfigError` where they can't be used
    at first; later bad files change nothing. Connections that are open keep theirs."""

    def __init__(self, files: CertificateFiles) -> None:
        self._contexts = RereadFiles(files, _read)

    def server(self) -> ssl.SSLContext:
        """Return the context of one that is called, by nodes only."""
        return self._contexts.latest()[0]

    def client(self) -> ssl.SSLContext:
        """Return the context of one that calls a node; the name to ask for is `NODE_NAME`."""
        return self._contexts.latest()[1]


def _read(files: CertificateFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server = _context(files, ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_REQUIRED
    return server, _context(files, ssl.PROTOCOL_TLS_CLIENT)


def _context(files: CertificateFiles, protocol: int) -> ssl.SSLContext:
    assert files.ca is not None, "nodes have an authority"
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(files.cert, files.key)
        context.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"can't use the node's certificate {files.cert}: {error}") from None
    return context


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
