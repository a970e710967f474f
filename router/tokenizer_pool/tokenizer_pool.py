"""The pool of reader processes of one router, child processes that prepare large bodies, and the queue of bodies.

With several readers one of them takes no body above `LARGE_BYTES`, so that smaller bodies needn't wait behind larger
ones. A body that takes a reader too long is refused and the reader ended; a body whose reader ended by itself is tried
once more.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric

from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import RequestError
from twinpool.contracts.json_logs import log
from twinpool.contracts.python_command import module_command
from twinpool.router.openai.api_errors import ClientGone, ReaderEnded, ReaderFailed
from twinpool.router.openai.structured_output import may_need_grammar
from twinpool.router.tokenizer_pool.image_fetcher import ImageFetcher
from twinpool.router.tokenizer_pool.prepare_request import BodyReader, PreparedRequest, TextAnswer
from twinpool.router.tokenizer_pool.tokenizer_process import (
    HEAD,
    REQUESTS,
    TEXTS,
    FrameKind,
    fetched_frame,
    prepared_of,
    refusal_of,
    text_of,
    wanted_of,
)

INLINE_BYTES = 2048
"""Bodies up to this size are read on the loop: that takes less time than a hop to a reader."""
LARGE_BYTES = 256 * 1024
_PICTURE = re.compile(rb"image|\\u", re.IGNORECASE)
"""What a small body with a picture has in it: its type, whose letters may be escaped."""
START_TIMEOUT_S = 30.0
"""How much longer the first body of a new reader process may take, which has to load the tokenizer first."""


@dataclass(slots=True, eq=False)
class _Job:
    """A body that waits for a reader or is being read; `number` is its place in the order of arrival."""

    number: int
    kind: FrameKind
    raw: bytes
    tenant: str
    """Who sent it; empty where nobody needs a key."""
    fetched: bytes
    """The frame of images that were fetched for it; empty: of none."""
    reply: asyncio.Future[tuple[FrameKind, bytes]]


class _TokenizerChild:
    """One reader process, and the router's end of its socket."""

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
        self._adapters = b""
        """The frame of the adapters that it knows of; empty: of none."""
        self.over = False
        """Whether the process ends after the answer that it has given."""

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ask(self, job: _Job, adapters: bytes) -> tuple[FrameKind, bytes]:
        """Send one body and return the answer's kind and content; one call at a time. `adapters`: those that are
        served, of which the process is told where they are others than before.

        Raises `ReaderEnded` when the process ends before it has answered. After a cancelled call the process is of no
        use any more: close it.
        """
        loop = asyncio.get_running_loop()
        try:
            if self._setup is not None:
                await loop.sock_sendall(self.channel, HEAD.pack(FrameKind.SETUP, False, len(self._setup)) + self._setup)
                self._setup = None
            if adapters != self._adapters:
                head = HEAD.pack(FrameKind.ADAPTERS, False, len(adapters))
                await loop.sock_sendall(self.channel, head + adapters)
                self._adapters = adapters
            if name := job.tenant.encode():
                await loop.sock_sendall(self.channel, HEAD.pack(FrameKind.TENANT, False, len(name)) + name)
            if job.fetched:
                await loop.sock_sendall(self.channel, HEAD.pack(FrameKind.FETCHED, False, len(job.fetched)))
                await loop.sock_sendall(self.channel, job.fetched)
            await loop.sock_sendall(self.channel, HEAD.pack(job.kind, False, len(job.raw)))
            await loop.sock_sendall(self.channel, job.raw)
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
        """Kill the process and wait for its end. Idempotent."""
        self.channel.close()
        self._child.kill()
        self._child.wait()


class TokenizerPool:
    """The pool of reader processes; used from one event loop. Processes start when they are first needed."""

    def __init__(
        self,
        setup: bytes,
        processes: int,
        timeout_s: float,
        images: ImageFetcher | None = None,
        *,
        start: Callable[[int], subprocess.Popen[bytes]] | None = None,
    ) -> None:
        """`setup` is the first frame's content (`setup_frame`), `timeout_s` the time that one body may take. `images`
        fetches those that bodies name by URLs; None where readers allow none.

        `start` starts a reader process on the given descriptor; it is `start_reader` by default.
        """
        self._setup = setup
        self._timeout_s = timeout_s
        self._images = images
        self._start = start or start_reader
        self._count = processes
        self._numbers = itertools.count()
        self._small: deque[_Job] = deque()
        self._large: deque[_Job] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self.adapters = b""
        """The adapters that are served, as readers are told of them (`adapters_frame`); empty: there never were any."""
        self._processes: dict[int, _TokenizerChild] = {}
        self._woken: list[asyncio.Future[None]] = []
        self.started = 0
        """Processes started so far."""

    @classmethod
    def of(cls, setup: bytes, config: RouterConfig) -> TokenizerPool:
        """A router's, by its configuration."""
        return cls(setup, config.reader_processes, config.reader_timeout_s, ImageFetcher(config))

    def families(self) -> Iterator[Metric]:
        """Yield the families of a scrape."""
        yield GaugeMetricFamily("twinpool_reader_processes", "Readers that run", value=len(self.pids))
        yield GaugeMetricFamily("twinpool_bodies_waiting", "Bodies that wait for a reader", value=self.waiting)
        if self._images is not None:
            yield from self._images.families()

    async def prepare(
        self,
        reader: BodyReader,
        kind: FrameKind,
        raw: bytes,
        tenant: str,
        on_gone: Callable[[Callable[[], object]], None] | None = None,
    ) -> PreparedRequest:
        """Read the body of a request for text, a small one by `reader` at once. `on_gone` is called with a function to
        be called when the client leaves, so that a body that waits isn't read. Raises as `submit`'s futures, and
        `ClientGone`."""
        if read_inline(raw, reader.sees):
            return REQUESTS[kind](reader, raw, tenant)
        reply = asyncio.ensure_future(self._answer(kind, raw, tenant))
        if on_gone is not None:
            on_gone(reply.cancel)
        try:
            _, frame = await reply
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not reply.cancelled() or task is None or task.cancelling():
                raise
            raise ClientGone("the client left while its body was read") from None
        return prepared_of(frame)

    async def text(self, reader: BodyReader, kind: FrameKind, raw: bytes, tenant: str) -> TextAnswer:
        """Return the answer of an endpoint that counts or makes tokens. Raises as `submit`'s futures."""
        if read_inline(raw, reader.sees):
            return TEXTS[kind](reader, raw)
        return text_of((await self._answer(kind, raw, tenant))[1])

    async def _answer(self, kind: FrameKind, raw: bytes, tenant: str) -> tuple[FrameKind, bytes]:
        """The answer to a body, which is read once more where images that it names have to be fetched. Raises as
        `submit`'s futures and `ImageFetcher.fetched`."""
        answered, frame = await self.submit(kind, raw, tenant)
        if answered is not FrameKind.WANTED:
            return answered, frame
        assert self._images is not None, "readers allow URLs where the router fetches them"
        async with self._images.fetched(wanted_of(frame), tenant) as found:
            return await self.submit(kind, raw, tenant, fetched_frame(found))

    @property
    def waiting(self) -> int:
        """The number of bodies that wait for a reader."""
        return sum(not job.reply.done() for job in (*self._small, *self._large))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def submit(
        self, kind: FrameKind, raw: bytes, tenant: str = "", fetched: bytes = b""
    ) -> asyncio.Future[tuple[FrameKind, bytes]]:
        """Queue a body of `tenant`'s, with the frame of images that were `fetched` for it; returns a future of the
        answer's kind and content.

        The future raises `RequestError` where the body is refused or takes too long, and `ReaderFailed` where a reader
        failed or two ended on it. Cancel the future, and a body that still waits is never read.
        """
        loop = asyncio.get_running_loop()
        if self._closed:  # Readers that were started now would be nobody's to end.
            late: asyncio.Future[tuple[FrameKind, bytes]] = loop.create_future()
            late.set_exception(ReaderFailed("the server is shutting down"))
            return late
        if not self._tasks:
            self._tasks = [loop.create_task(self._read(manager)) for manager in range(self._count)]
        job = _Job(next(self._numbers), kind, raw, tenant, fetched, loop.create_future())
        (self._small if len(raw) + len(fetched) <= LARGE_BYTES else self._large).append(job)
        self._wake()
        return job.reply

    async def close(self) -> None:
        """End the reader processes; bodies that are waiting or being read fail with `ReaderFailed`. Idempotent."""
        self._closed = True
        if self._images is not None:
            self._images.close()
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
        """Take the body that has waited longest of those that this reader may read: reader 0 reads no large ones."""
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
                except ReaderEnded:  # The end may be another body's fault, or the system's.
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
                kind, answer = await process.ask(job, self.adapters)
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


def read_inline(raw: bytes, sees: bool) -> bool:
    """Whether a body is read on the loop. Compiling a grammar may take a second, and as much memory as a reader may
    have; so may a picture, of which a few bytes can say that it is large, where the server `sees`. A body in UTF-16 or
    UTF-32, which JSON may be in, is looked into by a reader alone."""
    if len(raw) > INLINE_BYTES or b"\0" in raw or may_need_grammar(raw):
        return False
    return not sees or _PICTURE.search(raw) is None


def _fail(job: _Job, error: Exception) -> None:
    if not job.reply.done():
        job.reply.set_exception(error)


def start_reader(descriptor: int) -> subprocess.Popen[bytes]:
    """Start a reader process that inherits `descriptor`, its end of the socket pair."""
    command = module_command("twinpool.router.tokenizer_pool.tokenizer_process", str(descriptor))
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor])
