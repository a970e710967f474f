"""The worker's client of the images of loaded models that its node's agent keeps."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Callable, Iterator

from twinpool.cluster.arena.arena_agent import IMAGE_SEALS
from twinpool.cluster.arena.arena_client import ArenaLoan, ask, reach
from twinpool.cluster.arena.huge_pages import collapse, map_shared
from twinpool.contracts.clock import Clock
from twinpool.contracts.interfaces.model_images import ImageUnfit, WritableImage

log = logging.getLogger("twinpool.arena")

PAUSE_S = 0.1


class SharedImages:
    """`ModelImages` of one process, from the agent of this node. What was mapped stays so until the process ends, and
    is offered to the next agent as long."""

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
                self._pause(PAUSE_S)

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
