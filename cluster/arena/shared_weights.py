"""Images of loaded models that the workers of a node share: kept by the node's arena agent, mapped on huge pages.

A weight is read from end to end for each token. On pages of 4 KiB the processor looks up 512 times as many of them, and
keeps few in its table. Pages of a file in memory are small unless the administrator has set otherwise
(`/sys/kernel/mm/transparent_hugepage/shmem_enabled`); so files are mapped at addresses that can have huge ones, and the
system is asked to move their pages together (`MADV_COLLAPSE`, madvise(2), since Linux 6.1).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import socket
from collections.abc import Callable, Iterator

import numpy as np

from twinpool.cluster.arena.arena_agent import IMAGE_SEALS
from twinpool.cluster.arena.arena_client import ArenaLoan, ask, reach
from twinpool.contracts.clock import Clock
from twinpool.engine.runner.model_image import ImageUnfit, WritableImage

log = logging.getLogger("twinpool.arena")

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


IMAGE_PAUSE_S = 0.1


class SharedImages:
    """`ModelImages` of one process, from the agent of this node. What was mapped is offered to the next agent until the
    process ends, or uses another image alone."""

    def __init__(self, token: str, wait_s: float, clock: Clock, pause: Callable[[float], None]) -> None:
        """`token`: the agent's, in hex; empty: there is no agent. `wait_s`: how long another process may take to load a
        model before this one loads its own."""
        self._token, self._wait_s = token, wait_s
        self._clock, self._pause = clock, pause
        self._loans: list[ArenaLoan] = []

    def find(self, key: str) -> memoryview | None:
        deadline = self._clock.now() + self._wait_s
        with self._reached() as connection:
            while True:
                answer, fds = ask(connection, {"verb": "image", "token": self._token, "key": key})
                if fds:
                    log.info("the weights are those that this node has already", extra={"image": key})
                    return self._mapped(key, fds[0])
                if "claimed" in answer:
                    return None
                if "alone" in answer:
                    raise ImageUnfit(str(answer["alone"]))
                if self._clock.now() >= deadline:
                    raise ImageUnfit(f"another process has been loading this model for {self._wait_s:g} s")
                self._pause(IMAGE_PAUSE_S)

    def keep(self, key: str, image: WritableImage) -> memoryview:
        fd = os.memfd_create(f"twinpool-weights-{key[:8]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            image.write(fd)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, IMAGE_SEALS)
            with self._reached() as connection:
                answer, _ = ask(connection, {"verb": "keep", "token": self._token, "key": key}, (fd,))
        except (OSError, ImageUnfit) as error:
            os.close(fd)
            self.give_up(key, str(error))
            raise ImageUnfit(f"the weights could not be shared: {error}") from None
        kept, memory = bool(answer.get("kept")), self._mapped(key, fd)
        shared = {"image": key, "bytes": image.nbytes, "kept": kept, "huge_pages": collapse(memory)}
        log.info("the weights are shared", extra=shared)
        return memory

    def give_up(self, key: str, reason: str) -> None:
        message = {"verb": "alone", "token": self._token, "key": key, "reason": reason[:1000]}
        with contextlib.suppress(ImageUnfit), self._reached() as connection:
            ask(connection, message)

    def use_only(self, key: str) -> None:
        left = [loan for loan in self._loans if loan.message["key"] != key]
        self._loans = [loan for loan in self._loans if loan.message["key"] == key]
        for loan in left:
            loan.end()
            message = {"verb": "leave", "token": self._token, "key": loan.message["key"]}
            with contextlib.suppress(ImageUnfit), self._reached() as connection:
                ask(connection, message)

    def _mapped(self, key: str, fd: int) -> memoryview:
        """The image in this file, which is kept open: it is offered to the next agent when this one dies."""
        loan = ArenaLoan(fd, {"verb": "keep", "token": self._token, "key": key}, None)
        try:
            nbytes = os.fstat(fd).st_size
            memory = map_shared(fd, nbytes)
            loan.connection = reach(self._token, self._clock, self._pause)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise ImageUnfit(f"the weights could not be mapped: {error}") from None
        loan.begin()
        self._loans.append(loan)
        return memory

    @contextlib.contextmanager
    def _reached(self) -> Iterator[socket.socket]:
        """A connection to the agent; what fails on it is `ImageUnfit`."""
        if not self._token:
            raise ImageUnfit("this node has no agent")
        try:
            with reach(self._token, self._clock, self._pause) as connection:
                yield connection
        except (OSError, ValueError) as error:
            raise ImageUnfit(f"the node's agent: {error}") from None
