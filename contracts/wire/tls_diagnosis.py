"""The diagnosis of a Valkey or Redis server that can't be reached: whether TLS is why, on which side.

The client's own errors don't tell: a server without TLS is silent to one that begins it, and one that refuses a
certificate may end the connection before its reason is read. So the connection is tried again without a client, which
sends no password.
"""

from __future__ import annotations

import socket
import ssl
from urllib.parse import urlsplit

from twinpool.contracts.wire.redis_connection import TLS, RedisAccess, tls_context

PORT = 6379
ALERT_S = 0.3
"""Seconds in which a server that refuses the client's certificate says so, once it has the client's last message."""
_PING = b"PING\r\n"


def tls_trouble(url: str, access: RedisAccess, timeout_s: float, setting: str) -> str:
    """Why TLS is why the server at `url` can't be used, in words that say what to do; empty where it isn't, or where
    nothing answers. Takes `timeout_s` twice at most."""
    if url.startswith("unix:"):
        return ""
    parts = urlsplit(url)
    place = (parts.hostname or "localhost", parts.port or PORT)
    if not url.startswith(TLS):
        anyone = ssl.create_default_context()
        anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE  # Only whether it speaks TLS is asked.
        if _speaks_plain(place, timeout_s) or not _speaks_tls(place, anyone, timeout_s):
            return ""
        return "it speaks TLS: write rediss:// instead of redis://, with security.ledger_ca"
    try:
        _shake_hands(place, tls_context(access, setting), timeout_s)
    except ssl.SSLCertVerificationError as error:
        return (
            f"its certificate is refused ({error.verify_message.rstrip('.')}): have security.ledger_ca name the file "
            f"of the authority that made it, and {setting} a host that it is for"
        )
    except ssl.SSLError as error:
        reason = (error.reason or "").upper()
        if "CERTIFICATE_REQUIRED" in reason or ("HANDSHAKE_FAILURE" in reason and not access.cert):
            return "it wants a client's certificate: set security.ledger_cert and security.ledger_key"
        if "ALERT" in reason and access.cert:
            what = reason.rpartition("ALERT_")[2].lower().replace("_", " ")
            return (
                f"it refuses the certificate of security.ledger_cert ({what}): have one made by an authority that the "
                "server knows (its tls-ca-cert-file)"
            )
        return _without_tls(place, timeout_s) or f"TLS with it fails ({error.reason or error})"
    except OSError:
        return _without_tls(place, timeout_s)
    return ""


def _without_tls(place: tuple[str, int], timeout_s: float) -> str:
    if not _speaks_plain(place, timeout_s):
        return ""
    return "it doesn't speak TLS there: name the port that does (its tls-port), or write redis:// instead of rediss://"


def _shake_hands(place: tuple[str, int], context: ssl.SSLContext, timeout_s: float) -> None:
    """Do the handshake of TLS, and wait a moment for what the server has against it. Raises `OSError`."""
    with socket.create_connection(place, timeout_s) as plain, context.wrap_socket(plain, server_hostname=place[0]) as s:
        s.settimeout(min(ALERT_S, timeout_s))
        try:
            s.recv(1)
        except TimeoutError:
            return


def _speaks_tls(place: tuple[str, int], context: ssl.SSLContext, timeout_s: float) -> bool:
    try:
        _shake_hands(place, context, timeout_s)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "").upper()  # It speaks it, and refuses who has no certificate.
    except OSError:
        return False
    return True


def _speaks_plain(place: tuple[str, int], timeout_s: float) -> bool:
    """Whether something answers as Redis does without TLS."""
    try:
        with socket.create_connection(place, timeout_s) as asked:
            asked.settimeout(timeout_s)
            asked.sendall(_PING)
            return asked.recv(1) in (b"+", b"-")
    except OSError:
        return False
