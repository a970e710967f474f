"""The gRPC channels and servers by which the processes of a cluster call each other: their options and credentials.

HTTP proxies of the environment are ignored, since they can't reach loopback or a cluster's hosts. A connection that was
cut is tried again within a second: gRPC's own back-off grows to two minutes, longer than any lease. The size of
messages is bounded on both sides: what is asked for is short, answers may have the whole table of workers.

Within a cluster that has certificates there is mutual TLS with each node's; without them calls are in the clear.
Servers read their certificate again when its files change; a channel has those of the moment at which it was opened.
"""

from __future__ import annotations

import grpc
import grpc.aio

from twinpool.contracts.credentials.certificate_files import NODE_NAME, CertificateFiles
from twinpool.contracts.credentials.node_tls import RereadFiles
from twinpool.contracts.errors import ConfigError

ChannelOptions = list[tuple[str, int]]

RECONNECT_FIRST_MS = 100
RECONNECT_MOST_MS = 1000
CONTROL_BYTES = 1024 * 1024
"""Bytes of the largest message to a server: a worker's registration, or a heartbeat with its counters."""
TABLE_BYTES = 64 * 1024 * 1024
"""Bytes of the largest answer: the controller's table, of which each worker takes a few kilobytes."""
CONCURRENT_CALLS = 4096
"""The most calls that one connection may have open at a server."""
METADATA_BYTES = 16 * 1024


def channel_options(silence_s: float | None = None) -> ChannelOptions:
    """Options of a channel to a process of this cluster.

    `silence_s`: seconds without a sign of life after which the peer counts as gone; None: the channel sends no pings.
    """
    options = [
        ("grpc.max_receive_message_length", TABLE_BYTES),
        ("grpc.max_send_message_length", CONTROL_BYTES),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_FIRST_MS),
        # Also how long one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", RECONNECT_MOST_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MOST_MS),
        # Else a channel that is opened anew inherits the back-off of the one before.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return options if silence_s is None else [*options, *_pings(silence_s)]


def server_options(silence_s: float) -> ChannelOptions:
    """Options of a server. A client that is silent for `silence_s` seconds, pings included, counts as gone."""
    return [
        ("grpc.max_receive_message_length", CONTROL_BYTES),
        ("grpc.max_send_message_length", TABLE_BYTES),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.max_concurrent_streams", CONCURRENT_CALLS),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.max_ping_strikes", 0),
        *_pings(silence_s),
    ]


def _pings(silence_s: float) -> ChannelOptions:
    half_ms = max(1, int(500 * silence_s))
    return [
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.keepalive_timeout_ms", half_ms),
        # gRPC waits for an answer for the longer of this (a minute by default) and the timeout above.
        ("grpc.http2.ping_timeout_ms", half_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]


# ---------------------------------------------------------------- mutual TLS


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
