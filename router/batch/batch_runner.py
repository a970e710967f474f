"""The runner of batches of one router: claims them, asks their requests in idle capacity, and keeps the answers.

A batch is one router's at a time: the one that has its lock (`router.batch.batch_store`). It checks the input, asks
each request that has no line yet in-process, as a client's would be, and appends a line to the output or to the errors.
A request's seed, where it names none, is a function of batch and line, so one that is asked again is answered alike.

**Idle capacity only.** Requests of batches are background (`contracts.messages.router_commands.BACKGROUND`): workers
serve every other request before them, and let them take steps only while no other runs there. Beyond that this router
begins new ones only while it takes less than half of its own queue, and some decode worker runs nothing else; they are
no part of a tenant's limits, of the latencies that it reports, or of what its drain waits for. Where an endpoint has
several models each line is asked of its own, and waits for that one's idle capacity alone. A model that sleeps for want
of requests is woken by one line, as by any request.

What fails by the client's fault is an answer, as is an exception of ours. What finds no room waits. What fails by the
server's fault is tried `batch.line_tries` times, as a request that takes workers with it must not do so for ever.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.compact_json import joined
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.json_logs import log
from twinpool.router.batch.batch_lines import (
    NO_MODEL,
    AnswerLog,
    CheckedInput,
    InputLine,
    LineQueue,
    ModelChoice,
    OneModel,
    answered_line,
    check_input,
    line_refusal,
    queues_of,
)
from twinpool.router.batch.batch_store import (
    BATCH,
    BatchEvent,
    BatchPlace,
    BatchProblem,
    BatchState,
    BatchStore,
    Locked,
    StorageFull,
    StoredBatch,
)
from twinpool.router.openai.api_errors import ApiError, failure_of, failure_of_done
from twinpool.router.service.admission import IdleCapacity
from twinpool.router.service.open_answers import ClientRequest
from twinpool.router.service.router_service import RouterService
from twinpool.router.tokenizer_pool.tokenizer_process import FrameKind

KINDS = {
    "/v1/chat/completions": FrameKind.CHAT,
    "/v1/completions": FrameKind.COMPLETION,
    "/v1/embeddings": FrameKind.EMBEDDINGS,
    "/v1/responses": FrameKind.RESPONSES,
}
"""The endpoints that a batch may be of."""
ENVELOPE_BYTES = 16 * 1024
"""What a line may have beside its body."""
MAX_CLAIMED = 64
POLL_S, SWEEP_S, DISK_RETRY_S, LOOK_S = 1.0, 60.0, 5.0, 0.05
"""Seconds between two looks for batches, for what has expired, for room on the disk, and for idle capacity."""
BACKOFF_S = (0.5, 30.0)
"""Seconds before a request is tried again, at first and at most."""
GRACE_S, THREADS = 30.0, 4
NO_ROOM = frozenset(
    {"queue_full", "tenant_limit", "overloaded", "cancelled", "shutting_down", "body_buffer_full", "asleep"}
)
"""Codes of failures that say nothing of the request: it is asked again, however often."""
T = TypeVar("T")


class BatchRun:
    """A batch that this router has. `run` takes it as far as it comes; the lock ends with it in any case."""

    def __init__(self, runner: BatchRunner, place: BatchPlace, lock: Locked, batch: StoredBatch) -> None:
        self.batch, self.place = batch, place
        self._runner, self._store, self._lock = runner, runner.store, lock
        self._ids = f"batch_req_{batch.id.removeprefix('batch_')}_"
        self._log: AnswerLog | None = None
        self._starts: array[int] = array("Q")
        self.models = bytearray()
        """Of each request the place of its model; requests that are to be asked are in that one's queue."""
        self._queues: dict[int, LineQueue] = {}
        self._tries: Counter[int] = Counter()
        self.unwritten: list[tuple[int, int, bytes]] = []
        """Lines that are to be kept."""
        self.asking: dict[asyncio.Task[None], int] = {}
        self._changed = asyncio.Event()
        self._kept_at = 0.0
        self.begun = False
        """Whether it is known which requests have no answer yet."""
        self.full_until = 0.0
        """When a full disk is tried again, in seconds of the clock; nothing is asked before. 0 where it has room."""

    async def run(self) -> None:
        try:
            if self.batch.status in (BatchState.VALIDATING, BatchState.IN_PROGRESS):
                await self._begin()
            while self.batch.status is BatchState.IN_PROGRESS:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._store.config.sync_s):
                        await self._changed.wait()
                self._changed.clear()
                await self._go_on()
            if not self.batch.ended:
                await self._end(BatchEvent.PUBLISHED)
        except asyncio.CancelledError:
            with suppress(OSError, TwinpoolError):
                await self._stop()
            raise
        finally:
            if self._log is not None:
                self._log.close()
            self._lock.release()

    async def _begin(self) -> None:
        """Check the input, and find out what is answered already."""
        path, thread = self.place.file(self.batch.input_file_id), self._runner.thread
        limits = self._store.config.max_lines, self._runner.body_limit + ENVELOPE_BYTES
        try:
            async with self._runner.reading:
                found = await thread(partial(check_input, path, *limits, self._runner.models.places()))
        except FileNotFoundError as error:
            gone = BatchProblem("file_gone", f"the input can't be read: {error.strerror}")
            found = CheckedInput(array("Q", [0]), [gone], bytearray())
        if found.problems:
            refused = self.batch.after(BatchEvent.REFUSED, self._runner.now(), errors=found.problems)
            await self._keep_surely(refused)
            return
        self._starts, self.models = found.starts, found.models
        total = len(found.starts) - 1
        outputs = [self.place.file(one) for one in (self.batch.output_file_id, self.batch.error_file_id)]
        async with self._runner.reading:
            self._log = await thread(partial(AnswerLog, outputs, self._ids, total))
        self.begun = True
        self._queues = queues_of(self.models, self._log.done)
        if self.batch.status is BatchState.VALIDATING:
            await self._keep_surely(self.batch.after(BatchEvent.CHECKED, self._runner.now(), total=total))

    async def _go_on(self) -> None:
        """Keep what was answered, and look whether the batch is over."""
        assert self._log is not None
        await self._flush()
        if await self._runner.thread(self.place.cancel.exists):
            await self._stop()
            await self._keep(self._counted().after(BatchEvent.CANCEL, self._runner.now()))
        elif self._runner.now() >= self.batch.expires_at:
            await self._stop()
            await self._expire()
        elif all(self._log.done):
            await self._keep(self._counted().after(BatchEvent.ANSWERED, self._runner.now()))
        elif self._runner.service.clock.now() - self._kept_at > POLL_S and self._counted() != self.batch:
            await self._keep(self._counted())

    def _counted(self) -> StoredBatch:
        assert self._log is not None
        completed, failed = self._log.counts
        return msgspec.structs.replace(self.batch, completed=completed, failed=failed)

    async def _keep(self, batch: StoredBatch) -> None:
        """Keep the batch as it is now; while the disk is full it stays as it was."""
        self._kept_at = self._runner.service.clock.now()
        try:
            await self._runner.thread(partial(self._store.keep, self.place, batch))
        except OSError as error:
            self._full(str(error))
        else:
            self.batch, self.full_until = batch, 0.0

    async def _keep_surely(self, batch: StoredBatch) -> None:
        """Keep the batch as it is now, however long the disk is full."""
        await self._keep(batch)
        while self.batch is not batch:
            await asyncio.sleep(DISK_RETRY_S)
            await self._keep(batch)

    async def _flush(self) -> None:
        """Keep the lines that wait. Where that fails they go on waiting, and nothing more is asked."""
        lines = self.unwritten[:]
        if not lines or self._log is None or self._runner.service.clock.now() < self.full_until:
            return
        try:
            size = sum(len(line) for *_, line in lines)
            await self._runner.thread(partial(self._store.check_room, self.place.folder, size))
            await self._runner.thread(partial(self._log.append, lines))
        except (OSError, StorageFull) as error:
            self._full(str(error))
            return
        self.full_until = 0.0
        del self.unwritten[: len(lines)]
        self._runner.kept.update("failed" if which else "completed" for _, which, _ in lines)

    def _full(self, reason: str) -> None:
        self.full_until = self._runner.service.clock.now() + DISK_RETRY_S
        log("batch waits for the disk", level=logging.ERROR, batch=self.batch.id, reason=reason)

    async def _stop(self) -> None:
        """Give up what is asked, and keep what was answered."""
        asking = list(self.asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await self._flush()

    async def _expire(self) -> None:
        """Give each request without an answer a line that says so, and end."""
        assert self._log is not None
        waiting = {number for number, *_ in self.unwritten}
        for number in range(len(self._log.done)):
            if not self._log.done[number] and number not in waiting:
                name = (await self._runner.thread(partial(self._read, number))).custom_id
                text = "this request could not be answered before the completion window was over"
                self._note(number, name, 1, b"", {"code": "batch_expired", "message": text})
        await self._flush()
        if not self.unwritten:
            await self._end(BatchEvent.TIMED_OUT)

    async def _end(self, event: BatchEvent) -> None:
        batch = self._counted() if self._log is not None else self.batch
        try:
            published = await self._runner.thread(partial(self._store.publish, self.place, batch))
        except OSError as error:
            self._full(str(error))
            await asyncio.sleep(DISK_RETRY_S)
            return
        await self._keep(batch.after(event, self._runner.now(), published=published))

    # ------------------------------------------------------------ one request

    def due(self, idle: Collection[int]) -> int | None:
        """Take the number of the request that is to be asked next, of a model whose place is `idle`; None where there
        is none now."""
        now = self._runner.service.clock.now()
        if self._log is None or self.batch.status is not BatchState.IN_PROGRESS or now < self.full_until:
            return None
        queues = [queue for place, queue in self._queues.items() if place in idle]
        return next((number for queue in queues if (number := queue.due(now)) is not None), None)

    def ask(self, number: int) -> None:
        """Begin to ask a request."""
        task = asyncio.get_running_loop().create_task(self._ask(number))
        self.asking[task] = number
        task.add_done_callback(self._asked)

    def _asked(self, task: asyncio.Task[None]) -> None:
        number = self.asking.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # The input can't be read now.
            log("line can't be read", level=logging.ERROR, batch=self.batch.id, line=number, reason=repr(error))
            self._later(number, counted=False)
        self._changed.set()
        self._runner.wake()

    async def _ask(self, number: int) -> None:
        line = await self._runner.thread(partial(self._read, number))
        if (wrong := line_refusal(line, self.batch.endpoint)) is not None:
            self._note(number, line.custom_id, 1, wrong)
            return
        seed = int.from_bytes(hashlib.sha256(f"{self._ids}{number}".encode()).digest()[:8])
        name = f"{self.batch.id}-{number}"
        asked = ClientRequest(KINDS[self.batch.endpoint], bytes(line.body), name, self.batch.tenant, background=seed)
        try:
            body, failure = await self._answer(asked)
        except Exception:  # Our own bug, which another try would meet again.
            log("line failed", level=logging.ERROR, trace=True, batch=self.batch.id, line=number)
            text = "the server failed at this request; its log says how"
            self._note(number, line.custom_id, 1, ApiError(500, text, "server_error", "internal"))
            return
        if failure is not None and failure.code in NO_ROOM:
            self._later(number, counted=False)
        elif failure is not None and failure.status >= 500 and self._tries[number] + 1 < self._store.config.line_tries:
            self._later(number, counted=True)
        elif failure is not None:
            self._note(number, line.custom_id, 1, failure)
        else:
            self._note(number, line.custom_id, 0, body)

    async def _answer(self, asked: ClientRequest) -> tuple[bytes, ApiError | None]:
        """Ask the router itself. Returns the answer's body, or how it failed."""
        try:
            service = self._runner.models.of_line(asked.raw, asked.tenant)
            if isinstance(service, ApiError):
                return b"", service
            with self._runner.service.buffer.beside_clients(len(asked.raw)):
                stream = await service.open(asked)
        except TwinpoolError as error:
            return b"", failure_of(error)
        try:
            if stream.request.stream:
                text = "lines of a batch aren't streamed: leave stream out"
                return b"", ApiError(400, text, "invalid_request_error", None, "stream")
            async with asyncio.timeout(stream.timeout_s + GRACE_S):
                await stream.ended()
            if stream.failed is not None:
                return b"", failure_of_done(stream.failed, stream.request)
            return joined(stream.answer.whole(None)), None
        except TimeoutError:
            return b"", ApiError(504, f"no end after {stream.timeout_s:g} s", "server_error", "deadline")
        finally:
            service.abandon(stream)

    def _later(self, number: int, *, counted: bool) -> None:
        self._tries[number] += counted
        first, most = BACKOFF_S
        wait_s = min(most, first * 2 ** min(self._tries[number], 10))
        self._queues[self.models[number]].later(number, self._runner.service.clock.now() + wait_s)

    def _read(self, number: int) -> InputLine:
        begin, end = self._starts[number], self._starts[number + 1]
        with self.place.file(self.batch.input_file_id).open("rb") as source:
            source.seek(begin)
            return msgspec.json.decode(source.readline(end - begin), type=InputLine)  # Blank lines may follow.

    def _note(
        self, number: int, name: str, which: int, answer: bytes | ApiError, error: dict[str, str] | None = None
    ) -> None:
        """Have a line kept (`answered_line`), in the output (0) or among the errors (1)."""
        request_id = f"{self.batch.id}-{number}"
        self.unwritten.append((number, which, answered_line(f"{self._ids}{number}", name, request_id, answer, error)))


class BatchRunner:
    """All batches that this router has, on its event loop."""

    def __init__(
        self,
        service: RouterService,
        store: BatchStore,
        now: Callable[[], float] = time.time,
        models: ModelChoice | None = None,
    ) -> None:
        """`now`: seconds since 1970. `models`: where there are several, of which `service` leads."""
        self.service, self.store, self.now = service, store, now
        self.models = models or OneModel(service)
        self._idle = [IdleCapacity(one, store.config.quiet_s) for one in self.models.services]
        self.body_limit = max(one.body_limit for one in self.models.services)
        self.kept: Counter[str] = Counter(completed=0, failed=0)
        """Lines that were kept, by the file."""
        self._threads = ThreadPoolExecutor(THREADS, "batches")
        self.reading = asyncio.Semaphore(THREADS // 2)
        """For who reads whole inputs and outputs: other threads are left to clients."""
        self.runs: dict[asyncio.Task[None], BatchRun] = {}
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._looked_at = self._swept_at = float("-inf")
        service.metrics.of_process.append(self.metrics)

    async def thread(self, call: Callable[[], T]) -> T:
        """Call what blocks. Whoever is cancelled meanwhile waits for its end: what writes has written, or not begun,
        before the batch is another router's."""
        called = asyncio.get_running_loop().run_in_executor(self._threads, call)
        try:
            return await asyncio.shield(called)
        except asyncio.CancelledError:
            while not called.done():
                with suppress(asyncio.CancelledError):  # It was cancelled already.
                    await asyncio.wait([called])
            raise

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._loop())

    async def close(self) -> None:
        """Give all batches up, with what was answered kept. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._give_up()
        self._threads.shutdown(wait=False)

    def wake(self) -> None:
        self._wake.set()

    def look(self) -> None:
        """Look for batches at once."""
        self._looked_at = float("-inf")
        self._wake.set()

    async def _loop(self) -> None:
        while True:
            try:
                await self.turn()
            except Exception:  # Our own bug, or a disk that is gone; the next turn may be better.
                log("batches can't go on", level=logging.ERROR, trace=True)
                await asyncio.sleep(POLL_S)
            self._wake.clear()
            waits = any(run.batch.status is BatchState.IN_PROGRESS for run in self.runs.values())
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if waits else POLL_S):
                    await self._wake.wait()

    async def turn(self) -> None:
        """Claim what is free where that is due, and begin lines."""
        if self.service.draining or self.service.leaving:
            await self._give_up()
            return
        now = self.service.clock.now()
        if now - self._looked_at >= POLL_S:
            self._looked_at = now
            await self._claim()
        if now - self._swept_at >= SWEEP_S:
            self._swept_at = now
            await self.thread(self.store.sweep)
        self.begin_lines()

    async def _give_up(self) -> None:
        for task in self.runs:
            task.cancel()
        await asyncio.gather(*self.runs, return_exceptions=True)

    async def _claim(self) -> None:
        """Take batches that nobody has, in turn of the tenants."""
        mine = {run.place for run in self.runs.values()}
        free = [place for place in await self.thread(lambda: list(self.store.waiting())) if place not in mine]
        taken = Counter(place.folder for place in mine)
        while free and len(self.runs) < MAX_CLAIMED:
            place = min(free, key=lambda one: taken[one.folder])
            if taken[place.folder] >= MAX_CLAIMED - len(self.runs):
                return  # What is left is for other tenants.
            free.remove(place)
            claimed = await self.thread(partial(self.store.claim, place))
            if claimed is None:
                continue
            taken[place.folder] += 1
            run = BatchRun(self, place, *claimed)
            task = asyncio.get_running_loop().create_task(run.run())
            self.runs[task] = run
            task.add_done_callback(self._ended)
            log("batch claimed", batch=run.batch.id, status=str(run.batch.status))

    def _ended(self, task: asyncio.Task[None]) -> None:
        run = self.runs.pop(task)
        for asked in run.asking:
            asked.cancel()
        failed = None if task.cancelled() else task.exception()
        log("batch left", batch=run.batch.id, status=str(run.batch.status), failed=repr(failed) if failed else None)

    @property
    def asking(self) -> int:
        """Requests that are under way."""
        return sum(len(run.asking) for run in self.runs.values())

    def begin_lines(self) -> None:
        """Ask as many requests as there is idle capacity for, those of the tenant that has fewest under way first."""
        runs = list(self.runs.values())
        room = self._room(runs)
        while runs and (free := [place for place, count in room.items() if count > 0]):
            under_way: Counter[str] = Counter()
            for run in self.runs.values():
                under_way[run.batch.tenant] += len(run.asking)
            run = min(runs, key=lambda one: (under_way[one.batch.tenant], len(one.asking)))
            if (number := run.due(free)) is None:
                runs.remove(run)
                continue
            run.ask(number)
            room[run.models[number]] -= 1

    def _room(self, runs: Sequence[BatchRun]) -> dict[int, int]:
        """How many requests may begin, by the place of their model."""
        running = Counter(run.models[number] for run in runs for number in run.asking.values())
        found = {NO_MODEL: self.store.config.concurrency - running[NO_MODEL]}
        for place, service in enumerate(self.models.services):
            served = service.core.workers.served
            if served.asleep and served.by_demand and not served.paused:
                found[place] = 1 - running[place]  # It wakes the model; the others follow once that serves.
            else:
                found[place] = self._idle[place].requests(self.store.config.concurrency) - running[place]
        return found

    def metrics(self) -> Iterator[Metric]:
        lines = CounterMetricFamily("twinpool_batch_lines", "Requests of batches that have a line", labels=["result"])
        for result, count in self.kept.items():
            lines.add_metric([result], count)
        yield lines
        yield GaugeMetricFamily("twinpool_batch_lines_running", "Requests of batches under way", value=self.asking)
        states = Counter(run.batch.status for run in self.runs.values())
        batches = GaugeMetricFamily("twinpool_batches", "Batches that this router has, by status", labels=["status"])
        for state in BATCH.rows:
            batches.add_metric([str(state)], states[state])
        yield batches
        waiting = sum(bool(run.full_until) for run in self.runs.values())
        yield GaugeMetricFamily("twinpool_batches_without_disk", "Batches that wait for room on disk", value=waiting)
