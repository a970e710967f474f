"""Access to the services of workers and controller, for callers that know the cluster's secret.

On loopback there is no secret and every caller is admitted. Elsewhere each call, and the first frame of a stream,
carries a token made from the secret, so the secret itself, from which data planes derive their keys, never travels. The
token does, in the clear where there are no certificates: it keeps strangers out, but nobody who can read the cluster's
traffic.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable

SECRET_VARIABLE = "TWINPOOL_CLUSTER_SECRET"
"""Environment variable with the cluster's secret in hex; needed when workers bind to other than loopback."""
ACCESS_KEY = "twinpool-access"

RpcMetadata = tuple[tuple[str, str], ...]


def cluster_secret() -> str:
    """This process's secret in hex; empty where there is none."""
    return os.environ.get(SECRET_VARIABLE, "")


def access_token(secret: str) -> str:
    """Return the token by which callers are admitted, in hex; empty without a secret. Raises `ValueError` when `secret`
    is not hex."""
    return hmac.new(bytes.fromhex(secret), b"twinpool grpc access", hashlib.sha256).hexdigest() if secret else ""


def access_metadata(secret: str) -> RpcMetadata:
    """Return what a caller adds to the metadata of each call: nothing without a secret. Raises as `access_token`."""
    return ((ACCESS_KEY, access_token(secret)),) if secret else ()


def admits(secret: str, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Return whether a call with this metadata is admitted; every call is without a secret."""
    wanted = dict(access_metadata(secret))
    given = dict(metadata)
    return all(hmac.compare_digest(str(given.get(key, "")).encode(), value.encode()) for key, value in wanted.items())
