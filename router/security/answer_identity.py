"""The identity of an answer that a client may come back for: what every router makes of the same key, tenant and body.

Everything is a keyed hash (HMAC-SHA-256, RFC 2104) with the cluster's secret, or a fixed key without one. So all
routers of a cluster agree without speaking to each other: on the name under which workers keep the answer, on its id,
and on the seed where the client gave none. An answer of which nothing is kept any more is drawn again, token for token
the same (``numerics: invariant``, in one class). Without the secret nobody can make the name of another's answer.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

WITHOUT_SECRET = b"twinpool answers"
ID_DIGITS = 24


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """Who asks for what, in hex but for the seed."""

    key: str
    """Of the tenant and its key."""
    body: str
    """Of the endpoint and the body."""
    answer_id: str
    """The id that the client is told, without its prefix."""
    seed: int
    """64 bits."""


def identity_of(secret: str, tenant: str, key: str, endpoint: str, raw: bytes) -> AnswerIdentity:
    """Return the identity of a request. `secret`: the cluster's, in hex; empty where there is none."""
    made_with = bytes.fromhex(secret) or WITHOUT_SECRET

    def of(what: str, *parts: str) -> str:
        # JSON-like framing by lengths: no two lists of parts have the same bytes.
        message = b"".join(len(p.encode()).to_bytes(4) + p.encode() for p in (what, *parts))
        return hmac.new(made_with, message, hashlib.sha256).hexdigest()

    body = of("body", endpoint, hashlib.sha256(raw).hexdigest())[:32]
    name = of("key", tenant, key)[:32]
    answer_id, seed = of("id", name, body)[:ID_DIGITS], int(of("seed", name, body)[:16], 16)
    return AnswerIdentity(name, body, answer_id, seed)
