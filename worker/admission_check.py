"""Whether a worker can take a request at all, and what it says if not."""

from __future__ import annotations

from dataclasses import dataclass

from contracts.errors import ErrorKind


@dataclass(frozen=True, slots=True)
class AdmissionRefusal:
    kind: ErrorKind
    message: str
