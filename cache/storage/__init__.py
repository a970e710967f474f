"""Pages as objects on storage. What a backend of another package is written against is here, whatever moves inside."""

from cache.storage.storage_backend import Backend, Capacity, Counts, Item, ObjectName, Outcome, Verdict

__all__ = ["Backend", "Capacity", "Counts", "Item", "ObjectName", "Outcome", "Verdict"]
