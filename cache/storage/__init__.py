"""Storage of pages as objects. A backend of another package imports its names from here: they stay, whatever moves
inside."""

from twinpool.cache.storage.storage_backend import (
    CUT_OFF,
    BackendCapacity,
    BackendCounts,
    BackendTally,
    ObjectBuffer,
    ObjectName,
    ObjectOutcome,
    ObjectVerdict,
    Payload,
    StorageBackend,
)

__all__ = [
    "CUT_OFF",
    "BackendCapacity",
    "BackendCounts",
    "BackendTally",
    "ObjectBuffer",
    "ObjectName",
    "ObjectOutcome",
    "ObjectVerdict",
    "Payload",
    "StorageBackend",
]
