"""The credentials of gRPC servers and channels within a cluster: mutual TLS with the node's certificate.

Without certificates calls are in the clear. Servers read their certificate again when its files change; a channel has
those of the moment at which it was opened.
"""

from __future__ import annotations

import grpc
import grpc.aio

from twinpool.contracts.credentials.certificate_files import NODE_NAME, CertificateFiles
from twinpool.contracts.credentials.reread_files import RereadFiles
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.wire.grpc_channels import ChannelOptions


def open_channel(target: str, options: ChannelOptions, files: CertificateFiles | None) -> grpc.aio.Channel:
    """Open a channel to a process of this cluster; with `files` only to one that proves to be a node of it.

    Raises `ConfigError` where the files can't be read.
    """
    if files is None:
        return grpc.aio.insecure_channel(target, options=options)
    ca, key, cert = _read(files)
    named: list[tuple[str, int | str]] = [*options, ("grpc.ssl_target_name_override", NODE_NAME)]
    return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), options=named)


def add_port(server: grpc.aio.Server, address: str, files: CertificateFiles | None) -> int:
    """Have `server` listen on ``host:port``; with `files` only clients with a certificate of the authority are served.

    Returns the port that was bound. Raises `RuntimeError` where the address can't be had, `ConfigError` where the files
    can't be read.
    """
    if files is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _server_credentials(files))


def _server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    configurations = RereadFiles(files, _configuration)
    first = given = configurations.latest()

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at each handshake; None: as before."""
        nonlocal given
        before, given = given, configurations.latest()
        return given if given is not before else None

    return grpc.dynamic_ssl_server_credentials(
        first,
        newer,  # type: ignore[arg-type]  # It may return None, which the stubs don't know.
        require_client_authentication=True,
    )


def _configuration(files: CertificateFiles) -> grpc.ServerCertificateConfiguration:
    ca, key, cert = _read(files)
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)


def _read(files: CertificateFiles) -> tuple[bytes, bytes, bytes]:
    assert files.ca is not None
    try:
        return files.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read the node's certificate: {error}") from None
