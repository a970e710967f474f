"""The endpoint's certificate as a TLS context, read again whenever its files change."""

from __future__ import annotations

import logging
import ssl

from contracts.credentials.certificate_files import CertificateFiles
from contracts.errors import ConfigError
from router.state.router_log import log


class HttpsCertificate:
    """The certificate of the endpoint. Raises `ConfigError` where it can't be used at first; later bad files change
    nothing. `context` is for the connections that come from now on; those that are open keep theirs."""

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self.context = self._read()
        self._stamp = files.stamp()

    def refresh(self) -> None:
        """Read the files again if they aren't those that were read last."""
        try:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self.context = self._read()
            log("certificate read")
        except (OSError, ConfigError) as error:
            log("the certificate is as before: its files can't be used", level=logging.ERROR, reason=str(error))

    def _read(self) -> ssl.SSLContext:
        self._files.check()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._files.cert, self._files.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"can't use the certificate {self._files.cert}: {error}") from None
        return context
