"""The reason why a worker refuses a request."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.contracts.errors import ErrorKind


@dataclass(frozen=True, slots=True)
class AdmissionRefusal:
    """Why a worker refuses a request: the `kind` and `message` of the `Done` event that tells its router."""

    kind: ErrorKind
    message: str
