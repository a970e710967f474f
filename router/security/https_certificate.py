"""The endpoint's certificate as a TLS context, read again whenever its files change."""

from __future__ import annotations

import ssl

from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.credentials.reread_files import RereadFiles
from twinpool.contracts.errors import ConfigError


class HttpsCertificate:
    """The certificate of the endpoint. Raises `ConfigError` where it can't be used at first; later bad files change
    nothing. `context` is for the connections that come from now on; those that are open keep theirs."""

    def __init__(self, files: CertificateFiles) -> None:
        files.check()
        self._contexts = RereadFiles(files, _read)
        self.context = self._contexts.latest()

    def refresh(self) -> None:
        """Read the files again if they aren't those that were read last."""
        self.context = self._contexts.latest()


def _read(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.cert, files.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"can't use the certificate {files.cert}: {error}") from None
    return context
