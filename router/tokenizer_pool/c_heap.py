"""Settings of the C library's heap, by which memory of large bodies goes back to the system. They need glibc; with
another C library both functions do nothing."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD = -3
"""Parameter of `mallopt` (glibc, malloc.h): the size in bytes from which an allocation is a mapping of its own."""
LARGE_BYTES = 256 * 1024


def map_large_buffers() -> None:
    """Give each allocation of `LARGE_BYTES` and more a mapping of its own, which ends as soon as it is freed.

    By default glibc raises that size to the largest mapping that was freed, up to 32 MiB. From then on buffers of
    bodies would lie in the heap, where a small allocation behind a freed buffer keeps its memory from the system.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(M_MMAP_THRESHOLD, LARGE_BYTES)


def give_back() -> None:
    """Return the heap's free memory to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
