"""Configuration of who may ask, and of what protects the sockets: keys, certificates, the operators' port."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twinpool.contracts.credentials.certificate_files import CertificateFiles

FILES = (
    "keys_file", "tls_cert", "tls_key", "tls_ca", "cluster_ca", "cluster_cert", "cluster_key", "curve_key",
    "admin_keys_file", "ledger_ca", "ledger_cert", "ledger_key", "ledger_password_file",
)  # fmt: skip
"""Keys that are paths."""


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may ask the endpoint, what it is open to, and what its sockets are protected with."""

    keys_file: str = ""
    """File of API keys, made by `twinpool keys`; requests for text need one of them. Empty: nobody needs a key."""
    open: bool = False
    """Whether an endpoint that other machines reach may do without keys."""
    tls_cert: str = ""
    """PEM file of the certificate, and of those above it, with which the endpoint speaks HTTPS. Empty: plain HTTP."""
    tls_key: str = ""
    """PEM file of the key of `tls_cert`."""
    tls_ca: str = ""
    """PEM file of the authority by which the commands check `tls_cert`, for one that this system doesn't know."""
    cluster_ca: str = ""
    """PEM file of the cluster's own authority: with it router, workers and controller call each other over mutual TLS,
    and every ZeroMQ and data socket between workers is authenticated and encrypted, on loopback too. On each node."""
    cluster_cert: str = ""
    """PEM file of the node's certificate of `cluster_ca`, as `twinpool certs` makes it. On each node."""
    cluster_key: str = ""
    """PEM file of the key of `cluster_cert`. On each node."""
    curve_key: str = ""
    """File of the CURVE keys with which workers publish KV events, made by `twinpool certs`: only who knows the public
    one may read them. On each node. Empty: events are in the clear."""
    admin_port: int = 0
    """Port of its own for operators' paths (`/cluster/...`, `/metrics`, `/load`), which the endpoint has no longer
    then. 0: they are on the endpoint's port."""
    admin_host: str = "127.0.0.1"
    """Address that `admin_port` listens on."""
    admin_keys_file: str = ""
    """File of operators' keys, made by `twinpool keys`; `admin_port` needs one of them for all but its health."""
    ledger_ca: str = ""
    """PEM file of the authority of the certificate that a `cluster.ledger` of rediss:// has, for one that this system
    doesn't know. Where controllers run."""
    ledger_cert: str = ""
    """PEM file of the certificate that the ledger's server asks controllers for. Empty: it asks for none."""
    ledger_key: str = ""
    """PEM file of the key of `ledger_cert`."""
    ledger_password_file: str = ""
    """File whose first line is the password at the ledger's server, of the user that `cluster.ledger` names
    (rediss://USER@HOST) or of the default one. It is read for each connection. Empty: TWINPOOL_LEDGER_PASSWORD."""
    cors_origins: str = ""
    """Origins whose pages may call the endpoint from a browser, separated by commas; *: every one. Empty: none."""
    log_prompts: bool = False
    """Whether the router logs the tokens of prompts, with the ids of their requests."""

    @property
    def https(self) -> CertificateFiles | None:
        """The files of the endpoint's certificate, None for plain HTTP."""
        if not self.tls_cert:
            return None
        names = ("security.tls_cert", "security.tls_key", "")
        return CertificateFiles(Path(self.tls_cert), Path(self.tls_key), names=names)

    @property
    def cluster(self) -> CertificateFiles | None:
        """The files of this node's certificate, None where calls within the cluster go without TLS."""
        if not self.cluster_ca:
            return None
        names = ("security.cluster_cert", "security.cluster_key", "security.cluster_ca")
        return CertificateFiles(Path(self.cluster_cert), Path(self.cluster_key), Path(self.cluster_ca), names)

    @property
    def origins(self) -> frozenset[str]:
        """Origins that `cors_origins` names."""
        return frozenset(part.strip().rstrip("/") for part in self.cors_origins.split(",") if part.strip())
