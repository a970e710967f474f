"""Pages as objects on storage. What a backend of another package is written against is here, whatever moves inside."""

from cache.storage.storage_backend import (
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
