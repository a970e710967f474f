"""The C library's heap: what large bodies took of it goes back to the system (glibc; elsewhere these do nothing)."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD = -3
"""glibc, malloc.h: allocations from so many bytes on are mappings of their own."""
LARGE_BYTES = 256 * 1024


def map_large_buffers() -> None:
    """Give each allocation of `LARGE_BYTES` and more a mapping of its own, which ends as soon as it is freed.

    Unless told, glibc raises that limit to the largest that was freed, up to 32 MiB: buffers of bodies would lie in the
    heap from then on, and what is kept behind one keeps its pages.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(M_MMAP_THRESHOLD, LARGE_BYTES)


def give_back() -> None:
    """Return the heap's free memory to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
