"""Huge pages for files in memory that processes share: mappings at addresses that can have them, and the system's work
of moving a file's pages together (`MADV_COLLAPSE`, madvise(2), since Linux 6.1).

A weight is read from end to end for each token. On pages of 4 KiB the processor looks up 512 times as many of them, and
keeps few in its table. Pages of a file in memory are small unless the administrator has set otherwise
(`/sys/kernel/mm/transparent_hugepage/shmem_enabled`); asked for by this call, they become huge all the same.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

HUGE_PAGE = 1 << 21
"""Bytes: of x86-64, and of arm64 with pages of 4 KiB. Where they are larger, mappings are of small pages."""
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


def map_shared(fd: int, nbytes: int) -> memoryview:
    """A file in memory, mapped whole and read-only at a multiple of a huge page's size, for as long as the view is
    kept. Raises `OSError` and `ValueError`."""
    room = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    address = np.frombuffer(room, np.uint8).ctypes.data
    begin = -address % HUGE_PAGE
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
    place = _libc().mmap(address + begin, nbytes, mmap.PROT_READ, flags, fd, 0)
    if place == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memoryview(room)[begin : begin + nbytes]  # `room` unmaps what lies in it, too.


def collapse(memory: memoryview) -> bool:
    """Have the pages of a file that is mapped by `map_shared` moved together into huge ones, for all who map it, now or
    later. Says whether the system did so; it doesn't where it is older, has none, or memory is too fragmented."""
    whole = len(memory) - len(memory) % HUGE_PAGE
    if not whole:
        return False
    address = np.frombuffer(memory, np.uint8).ctypes.data
    return int(_libc().madvise(address, whole, _MADV_COLLAPSE)) == 0


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
