"""The thread that runs one worker, and the thread-safe methods by which other threads reach the worker.

A worker is single-threaded and has no event loop, so all its methods but `wake` are called on one *engine thread*.
Other threads (gRPC's loop, an asyncio loop in the same process, the lease keeper) put commands and calls into an inbox;
between two steps the engine thread empties it. Events of a step go out grouped by session, one delivery a session and
step, on the engine thread: a `deliver` callback must only pass them on and never block.

A worker ends for one of four causes, and its end tells all sessions the reason, once:

- ``left``: it was drained and has nothing left to do;
- ``fenced``: its lease has ended, so it may send nothing any more (checked before every step and every delivery); or
  the worker itself reports that its results can't be trusted (`Worker.unfit`), after that step's events are out;
- ``died``: `step` raised, which is a bug or a broken device: the traceback is logged once and nothing is trusted;
- ``stopped``: its owner called `stop`.

The *step watchdog* finds a worker whose loop hangs: the worker measures progress, the controller judges. Heartbeats run
beside the engine thread, so a hung step delays none of them and would keep its lease for ever. Therefore heartbeats
carry how long the loop has made no progress. A loop with nothing to compute makes progress with every round; a loop
that could compute makes progress only when a step ends. Waiting for others (a hand-over, a grant, a slow peer) is no
lack of progress: such waits have deadlines of their own.

A long step is not a hang. The allowed time grows with the longest of a worker's latest steps, and a worker that has
ended no step yet gets `cluster.start_timeout_s`, since it may be compiling its kernels.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from msgspec.structs import replace

from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.interfaces.worker_interface import SessionId, Worker
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import CheckReport, WorkerStatus

log = logging.getLogger("twinpool.host")
T = TypeVar("T")

DeliverEvents = Callable[[list[Event]], None]
OnWorkerEnd = Callable[[StreamEnd], None]


class WorkerEnd(StrEnum):
    """The cause of a worker's end."""

    LEFT = "left"
    FENCED = "fenced"
    DIED = "died"
    STOPPED = "stopped"


class WorkerClosed(TwinpoolError):
    """Raised for a call to a worker, or a session with one, that has left, was fenced, died or was stopped."""


@dataclass(frozen=True, slots=True)
class _InboxItem:
    """One entry of the inbox; `refuse` is called instead of `run` when the worker has ended."""

    run: Callable[[], None]
    refuse: Callable[[WorkerClosed], None] = lambda error: None


LEFT = "the worker was drained and has left"


@dataclass(frozen=True, slots=True)
class _OpenSession:
    deliver: DeliverEvents
    ended: OnWorkerEnd


class StepPause:
    """Whether a worker makes no step from the end of this one on, and keeps all requests. Commands and calls are still
    taken in. Any thread."""

    def __init__(self) -> None:
        self.on, self._ended = False, threading.Event()

    def set(self, on: bool) -> None:
        """Idempotent."""
        self.on = on
        if not on:
            self._ended.set()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the pause. For one thread."""
        self._ended.clear()
        if self.on:
            self._ended.wait(timeout_s)


class WorkerThread:
    """Runs one worker on one thread."""

    def __init__(
        self,
        worker: Worker,
        *,
        may_send: Callable[[], bool] = lambda: True,
        on_end: Callable[[WorkerEnd, str], None] = lambda end, reason: None,
        idle_s: float = 0.1,
        clock: Clock | None = None,
        before_step: Callable[[int], None] = lambda steps: None,
    ) -> None:
        """The worker is closed by this thread when it ends; before `start`, closing it is the caller's part.

        `may_send` tells whether the worker's lease still holds. `on_end` is called once, on the engine thread, after
        all sessions have ended and before the worker is closed. `idle_s` bounds how long an idle worker sleeps
        between two rounds. `before_step` is called on the engine thread with the number of steps that have ended.
        """
        self._worker = worker
        self._may_send = may_send
        self._on_end = on_end
        self._idle_s = idle_s
        self._clock = clock or SystemClock()
        self._watchdog = StepWatchdog(self._clock)
        self._before_step = before_step
        self._lock = threading.Lock()
        self._inbox: deque[_InboxItem] = deque()
        self._sessions: dict[SessionId, _OpenSession] = {}
        self._next_session = 1
        self._end: WorkerEnd | None = None
        self._reason = ""
        self._stopping = False
        self.pause = StepPause()
        self.changed_weights = False
        """Whether the worker has other weights than the checkpoint's, or the same after a flush."""
        self.closed = False
        """Whether the worker has ended and was closed without an error."""
        self.fits = worker.fits
        self.control = worker.control
        self.undrains = 0
        """How often `undrain` was called."""
        self.snapshot: WorkerStatus = worker.status()
        """The status after the latest step."""
        self._thread = threading.Thread(target=self._run, name=f"engine-{self.snapshot.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def ended(self) -> WorkerEnd | None:
        return self._end

    def heartbeat(self) -> WorkerStatus:
        """The status that heartbeats carry: the latest snapshot, so that a long step delays no heartbeat, with the
        watchdog's times. Any thread."""
        return replace(self._watchdog.on(self.snapshot), routers=len(self._sessions))

    def open_session(self, deliver: DeliverEvents, ended: OnWorkerEnd = lambda end: None) -> SessionId:
        """Open a router's session; may be called from any thread.

        `deliver` gets each step's events, `ended` is called once if the worker ends first; both on
        the engine thread. Raises `WorkerClosed` when the worker has ended.
        """
        with self._lock:
            if self._end is not None:
                raise WorkerClosed(self._closed_text())
            session = SessionId(self._next_session)
            self._next_session += 1
            self._sessions[session] = _OpenSession(deliver, ended)
            return session

    def close_session(self, session: SessionId) -> None:
        """Close the session of a router that is gone; its requests are cancelled before the next step. Idempotent; any
        thread."""
        with self._lock:
            if self._sessions.pop(session, None) is None or self._end is not None:
                return
            self._inbox.append(_InboxItem(lambda: self._worker.drop_session(session)))
        self._worker.wake()

    def send(self, session: SessionId, commands: Sequence[Command]) -> None:
        """Queue commands of a session, in order; dropped when the session or the worker has ended. Any thread."""

        def take() -> None:
            if session in self._sessions:
                for command in commands:
                    self._worker.handle(session, command)

        with self._lock:
            if self._end is not None:
                return
            self._inbox.append(_InboxItem(take))
        self._worker.wake()

    def call(self, run: Callable[[Worker], T]) -> Future[T]:
        """Run `run(worker)` on the engine thread between two steps; any thread. The future gets its result, or what it
        raises, or `WorkerClosed` when the worker has ended."""
        future: Future[T] = Future()

        def take() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(run(self._worker))
            except Exception as error:
                future.set_exception(error)

        with self._lock:
            if self._end is not None:
                future.set_exception(WorkerClosed(self._closed_text()))
                return future
            self._inbox.append(_InboxItem(take, future.set_exception))
        self._worker.wake()
        return future

    def status(self) -> Future[WorkerStatus]:
        return self.call(lambda worker: worker.status())

    def check(self) -> Future[CheckReport]:
        return self.call(lambda worker: worker.check())

    def drain(self) -> Future[WorkerStatus]:
        """Stop admission; the future gets the status after that, with the requests that are still to be finished."""
        return self.call(_drain)

    def undrain(self) -> Future[WorkerStatus]:
        """Admit again. Only the thread that renews the lease may call it: `undrains` is counted without a lock."""
        self.undrains += 1
        return self.call(_undrain)

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the worker and wait for its thread; returns False when a step took longer than `timeout_s`. Any thread
        but the engine's. Idempotent."""
        self._stopping = True
        self._worker.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            end, reason = self._loop()
        except Exception as error:
            log.exception("the worker has died: a step failed")
            end, reason = WorkerEnd.DIED, f"{type(error).__name__}: {error}"
        self._finish(end, reason)

    def _loop(self) -> tuple[WorkerEnd, str]:
        while True:
            self._take_inbox()
            if self._stopping:
                return WorkerEnd.STOPPED, "the worker was stopped"
            if not self._may_send():
                return WorkerEnd.FENCED, "the worker's lease has ended"
            began = self._clock.now()
            self._before_step(self.snapshot.steps)
            if self.pause.on:  # No lack of progress. Requests wait, and their deadlines come all the same.
                self.snapshot = replace(self._worker.status(), paused=True)
                self._watchdog.turned(self.snapshot.steps, False, 0.0)
                self._worker.take_part()
                if self._worker.drained and self._left():  # It keeps no request waiting.
                    return WorkerEnd.LEFT, LEFT
                self.pause.wait(self._idle_s)
                continue
            events = self._worker.step()
            if events and not self._may_send():
                return WorkerEnd.FENCED, "the worker's lease has ended"
            self._deliver(events)
            self.snapshot = self._worker.status()
            if unfit := self._worker.unfit:
                log.error("the worker is fenced: %s", unfit)
                return WorkerEnd.FENCED, unfit
            self._watchdog.turned(self.snapshot.steps, self._worker.runnable, self._clock.now() - began)
            # An undrain that is already in the inbox must win against leaving, so look before deciding.
            if self._worker.drained and self._left():
                return WorkerEnd.LEFT, LEFT
            self._worker.wait(self._idle_s)

    def _left(self) -> bool:
        with self._lock:
            if self._inbox:
                return False
            self._end, self._reason = WorkerEnd.LEFT, LEFT
            return True

    def _take_inbox(self) -> None:
        """Run the items that are in the inbox now, one at a time: when one raises, `_finish` refuses the rest."""
        for _ in range(len(self._inbox)):
            with self._lock:
                item = self._inbox.popleft()
            item.run()

    def _deliver(self, events: Sequence[tuple[SessionId, Event]]) -> None:
        grouped: dict[SessionId, list[Event]] = {}
        for session, event in events:
            grouped.setdefault(session, []).append(event)
        for session, batch in grouped.items():
            with self._lock:
                target = self._sessions.get(session)
            if target is not None:
                target.deliver(batch)

    def _finish(self, end: WorkerEnd, reason: str) -> None:
        """End the worker, whatever the cause: fence it, end the sessions, refuse queued calls, close the worker."""
        with self._lock:
            self._end, self._reason = end, reason
            sessions = list(self._sessions.values())
            self._sessions.clear()
            refused = list(self._inbox)
            self._inbox.clear()
        try:
            if end in (WorkerEnd.FENCED, WorkerEnd.DIED):
                self._worker.fence()
        except Exception:
            log.exception("the worker could not be fenced")
        for session in sessions:
            session.ended(StreamEnd(reason, left=end is WorkerEnd.LEFT))
        for item in refused:
            item.refuse(WorkerClosed(self._closed_text()))
        self._on_end(end, reason)
        try:
            self._worker.close()
            self.closed = True
        except Exception:
            log.exception("the worker could not be closed")

    def _closed_text(self) -> str:
        return self._reason or "the worker has ended"


def _drain(worker: Worker) -> WorkerStatus:
    worker.drain()
    return worker.status()


def _undrain(worker: Worker) -> WorkerStatus:
    worker.undrain()
    return worker.status()


LONG_STEPS = 4.0
"""A worker may go without progress for this many times its longest step."""
FORGETS = 0.99
"""The factor by which each step shrinks the remembered longest step, so that old ones are forgotten."""
USUAL_S = 1.0
"""Shorter times are reported as 0, so that the status stays equal and the controller's table isn't sent again."""


class StepWatchdog:
    """The progress of one worker's loop. Written by the engine thread, read by any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = clock.now()
        self._steps = 0
        self._longest_s = 0.0

    def turned(self, steps: int, runnable: bool, took_s: float) -> None:
        """Record a round of the loop. `steps`: steps ended since the start; `runnable`: whether the worker could
        compute now; `took_s`: duration of the round."""
        if steps != self._steps:
            self._longest_s = max(took_s, FORGETS * self._longest_s)
        if steps != self._steps or not runnable:
            self._at = self._clock.now()
        self._steps = steps

    @property
    def stalled_s(self) -> float:
        """Seconds without progress; 0 below `USUAL_S`."""
        seconds = self._clock.now() - self._at
        return seconds if seconds >= USUAL_S else 0.0

    def on(self, status: WorkerStatus) -> WorkerStatus:
        """The status with `stalled_s` and `longest_step_s` filled in."""
        longest = self._longest_s if self._longest_s >= USUAL_S else 0.0
        return replace(status, stalled_s=self.stalled_s, longest_step_s=longest)


def allowed_s(status: WorkerStatus, config: ClusterConfig) -> float:
    """Seconds that this worker may go without progress."""
    first = 0.0 if status.steps else config.start_timeout_s
    return max(config.stall_s, LONG_STEPS * status.longest_step_s, first)


def why_stalled(status: WorkerStatus, config: ClusterConfig) -> str:
    """The reason why this worker counts as hung, in words; empty while it doesn't."""
    allowed = allowed_s(status, config)
    if status.stalled_s < allowed:
        return ""
    return f"hung: no progress for {status.stalled_s:.1f} s, {allowed:g} s are allowed (cluster.stall_s)"
