"""Pages as objects on storage. What a backend of another package is written against is here, whatever moves inside."""

from cache.storage.storage_backend import (
    BackendCapacity,
    BackendCounts,
    ObjectBuffer,
    ObjectName,
    ObjectOutcome,
    ObjectVerdict,
    StorageBackend,
)

__all__ = [
    "BackendCapacity",
    "BackendCounts",
    "ObjectBuffer",
    "ObjectName",
    "ObjectOutcome",
    "ObjectVerdict",
    "StorageBackend",
]
