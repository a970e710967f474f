"""TLS between the nodes of a cluster: both ends have a certificate of the cluster's own authority."""

from __future__ import annotations

import ssl

from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.credentials.reread_files import RereadFiles
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
