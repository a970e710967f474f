"""The readers of one router: child processes for large bodies, and the queue in front of them.

Of several readers one takes no body above `LARGE_BYTES`: whoever sends 8 MB waits for others who do, and nobody else
waits for them. A reader that takes too long costs its one body; over one that ended, a body is tried once more.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from contracts.errors import RequestError
from router.openai.api_errors import ReaderEnded, ReaderFailed
from router.state.router_log import log
from router.tokenizer_pool.tokenizer_process import HEAD, FrameKind, refusal_of

LARGE_BYTES = 256 * 1024
START_TIMEOUT_S = 30.0


@dataclass(slots=True, eq=False)
class _Job:
    """A body that waits or is read."""

    number: int
    kind: FrameKind
    raw: bytes
    reply: asyncio.Future[tuple[FrameKind, bytes]]


class _TokenizerChild:
    """One child and this end of its socket."""

    def __init__(self, setup: bytes, start: Callable[[int], subprocess.Popen[bytes]]) -> None:
        self.channel, theirs = socket.socketpair()
        try:
            self.channel.setblocking(False)
            self._child = start(theirs.fileno())
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()
        self._setup: bytes | None = setup
        self.over = False
        """It ends after the answer that it has given."""

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ask(self, kind: FrameKind, raw: bytes) -> tuple[FrameKind, bytes]:
        """One body's answer. Raises `ReaderEnded` when the child ends before it has given one."""
        loop = asyncio.get_running_loop()
        try:
            if self._setup is not None:
                await loop.sock_sendall(self.channel, HEAD.pack(FrameKind.SETUP, False, len(self._setup)) + self._setup)
                self._setup = None
            await loop.sock_sendall(self.channel, HEAD.pack(kind, False, len(raw)))
            await loop.sock_sendall(self.channel, raw)
            answered, self.over, length = HEAD.unpack(await self._exactly(HEAD.size))
            return FrameKind(answered), await self._exactly(length)
        except OSError as error:
            raise ReaderEnded(f"the reader can't be spoken to: {error}") from None

    async def _exactly(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        data, at = bytearray(size), 0
        view = memoryview(data)
        while at < size:
            got = await loop.sock_recv_into(self.channel, view[at:])
            if not got:
                raise ReaderEnded(f"the reader ended: {self._how()}")
            at += got
        return bytes(data)

    def _how(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._child.wait(1.0)
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return "its socket was closed"

    def close(self) -> None:
        """End the child. Idempotent."""
        self.channel.close()
        self._child.kill()
        self._child.wait()


class TokenizerPool:
    """Used from one event loop."""

    def __init__(
        self,
        setup: bytes,
        processes: int,
        timeout_s: float,
        *,
        start: Callable[[int], subprocess.Popen[bytes]] | None = None,
    ) -> None:
        """`start` starts a child that speaks on the given descriptor."""
        self._setup = setup
        self._timeout_s = timeout_s
        self._start = start or start_reader
        self._count = processes
        self._numbers = itertools.count()
        self._small: deque[_Job] = deque()
        self._large: deque[_Job] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._processes: dict[int, _TokenizerChild] = {}
        self._woken: list[asyncio.Future[None]] = []
        self.started = 0
        """Processes started so far."""

    @property
    def waiting(self) -> int:
        return sum(not job.reply.done() for job in (*self._small, *self._large))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def submit(self, kind: FrameKind, raw: bytes) -> asyncio.Future[tuple[FrameKind, bytes]]:
        """Have a body read. The future raises `RequestError` where it is refused and `ReaderFailed` where its reader
        ended over it; when it is cancelled, a body that still waits is never read."""
        loop = asyncio.get_running_loop()
        if not self._tasks:
            self._tasks = [loop.create_task(self._read(manager)) for manager in range(self._count)]
        job = _Job(next(self._numbers), kind, raw, loop.create_future())
        (self._small if len(raw) <= LARGE_BYTES else self._large).append(job)
        self._wake()
        return job.reply

    async def close(self) -> None:
        """End the children; what they were reading fails. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for queue in (self._small, self._large):
            for job in queue:
                _fail(job, ReaderFailed("the server is shutting down"))
            queue.clear()
        for manager in list(self._processes):
            self._drop(manager)

    def _wake(self) -> None:
        woken, self._woken = self._woken, []
        for future in woken:
            if not future.done():
                future.set_result(None)

    def _take(self, manager: int) -> _Job | None:
        """The body that has waited longest, of those that this child may have: the first keeps free for small ones."""
        queues = [self._small] if manager == 0 and self._count > 1 else [self._small, self._large]
        for queue in queues:
            while queue and queue[0].reply.done():
                queue.popleft()
        queue = min((q for q in queues if q), key=lambda q: q[0].number, default=deque())
        return queue.popleft() if queue else None

    async def _read(self, manager: int) -> None:
        while True:
            job = self._take(manager)
            if job is None:
                future = asyncio.get_running_loop().create_future()
                self._woken.append(future)
                await future
                continue
            try:
                try:
                    answer = await self._ask(manager, job)
                except ReaderEnded:  # it may have been another body's fault, or the system's
                    answer = await self._ask(manager, job)
            except asyncio.CancelledError:
                _fail(job, ReaderFailed("the server is shutting down"))
                raise
            except Exception as error:
                _fail(job, error)
            else:
                if not job.reply.done():
                    job.reply.set_result(answer)

    async def _ask(self, manager: int, job: _Job) -> tuple[FrameKind, bytes]:
        process = self._processes.get(manager)
        timeout_s = self._timeout_s
        try:
            if process is None:
                timeout_s += START_TIMEOUT_S
                process = self._processes[manager] = _TokenizerChild(self._setup, self._start)
                self.started += 1
            async with asyncio.timeout(timeout_s):
                kind, answer = await process.ask(job.kind, job.raw)
        except TimeoutError:
            self._drop(manager)
            log("body took too long", bytes=len(job.raw), seconds=timeout_s)
            raise RequestError(f"the body took longer than {self._timeout_s:g} s to read; send a shorter one") from None
        except ReaderEnded as error:
            self._drop(manager)
            log("reader lost", bytes=len(job.raw), reason=str(error))
            raise
        except BaseException:
            self._drop(manager)
            raise
        if process.over:
            self._drop(manager)
        if kind is FrameKind.REFUSED:
            raise refusal_of(answer)
        if kind is FrameKind.FAILED:
            raise ReaderFailed(f"a reader failed on the body: {answer.decode()}")
        return kind, answer

    def _drop(self, manager: int) -> None:
        process = self._processes.pop(manager, None)
        if process is not None:
            process.close()


def _fail(job: _Job, error: Exception) -> None:
    if not job.reply.done():
        job.reply.set_exception(error)


def start_reader(descriptor: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "router.tokenizer_pool.tokenizer_process", str(descriptor)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor])
