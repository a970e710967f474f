"""The asynchronous CPU: it computes on the thread that steps the worker, and copies and sends beside it.

Loads and saves have a thread each (`HostStream`), and so has each lane of sends. What computes runs on the caller's
thread, as a second thread for it would take the interpreter's lock from the first more often than it helped (decision
9): at once, or, for an operation with layer marks, when the caller next looks at it. So its caller can submit what
comes after its marks first, as on a GPU, and that runs beside it. What computes behind it, such as the draw of a step's
tokens, waits with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from twinpool.cache.device.cpu_memory import CpuMemory
from twinpool.cache.device.device_port import DONE, NO_GATES, Completion, DeviceOp, DeviceStream, GatedLoads
from twinpool.cache.device.host_stream import HostLanes, HostStream
from twinpool.cache.device.layer_marks import LayerCounts, LayerMarks

BESIDE = (DeviceStream.LOAD, DeviceStream.SAVE, DeviceStream.SEND)
"""The streams that may run beside what computes."""


class AsyncCpuDevice(CpuMemory):
    """CPU torch whose copies and sends, or some of them, run on threads of their own.

    One thread submits and waits; operations may wait for each other on any.
    """

    checks = False

    def __init__(self, wake: Callable[[], None] = lambda: None, beside: Collection[DeviceStream] = BESIDE) -> None:
        """`wake` is called whenever something on another thread is over. `beside`: the streams with threads of their
        own; the others run on the thread that submits. Ranks of a worker tell each other of copies in the order in
        which these run, on one thread: of several ranks, only sends may run beside."""
        self._beside = frozenset(beside)
        self._streams = {stream: HostStream(f"device-{stream}", wake) for stream in beside}
        self._sends = HostLanes(f"device-{DeviceStream.SEND}", wake)
        self._deferred: _DeferredCompute | None = None

    def submit(
        self,
        op: DeviceOp,
        run: Callable[[], object],
        after: Sequence[Completion] = (),
        *,
        gates: GatedLoads = NO_GATES,
        keep: Sequence[Any] = (),
        marks: LayerMarks | None = None,
    ) -> Completion:
        if op.stream in self._beside:
            if op.stream is DeviceStream.SEND:
                return _Beside(self._sends.submit(op.lane, run, after), self._deferred)
            return _Beside(self._streams[op.stream].submit(run, after), self._deferred)
        before = self._deferred if self._deferred is not None and not self._deferred.begun else None
        if before is not None and marks is not None:
            before.run()
            before = None
        if before is not None or marks is not None:
            self._deferred = _DeferredCompute(run, after, marks, before)
            return self._deferred
        self._deferred = None
        for completion in after:
            completion.wait()
        run()
        return DONE

    def marks(self, groups: Sequence[LayerCounts]) -> LayerMarks:
        return LayerMarks(groups)

    def end_lane(self, lane: str) -> None:
        self._sends.end(lane)

    def close(self) -> None:
        if self._deferred is not None:
            self._deferred.give_up()  # Else what comes after its marks would keep its thread for ever.
            self._deferred = None
        self._sends.close()
        for stream in self._streams.values():
            stream.close()


class _Beside:
    """An operation of another stream than the one that computes, as a `Completion`. It may come after a mark of an
    operation that is still to be run by the thread that asks here."""

    def __init__(self, operation: Completion, deferred: _DeferredCompute | None) -> None:
        self._operation, self._deferred = operation, deferred

    @property
    def done(self) -> bool:
        self._run_deferred()
        return self._operation.done

    def wait(self) -> None:
        self._run_deferred()
        self._operation.wait()

    def order(self) -> None:
        self.wait()

    def _run_deferred(self) -> None:
        if self._deferred is not None:
            _ = self._deferred.done
            self._deferred = None


class _DeferredCompute:
    """An operation that the submitting thread runs when it looks at it; other threads wait until it has."""

    def __init__(
        self,
        run: Callable[[], object],
        after: Sequence[Completion],
        marks: LayerMarks | None,
        before: _DeferredCompute | None,
    ) -> None:
        """`before`: the operation that is to be run first, being of the same stream."""
        self._run, self._after, self._marks, self._before = run, after, marks, before
        self._thread = threading.get_ident()
        self.begun = False
        self._over = threading.Event()
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        if threading.get_ident() == self._thread:
            self.run()
        return self._over.is_set()

    def wait(self) -> None:
        if threading.get_ident() == self._thread:
            self.run()
        self._over.wait()
        if self._error is not None:
            raise self._error

    def order(self) -> None:
        self.wait()

    def run(self) -> None:
        """Run it, unless that has begun before. What it raises is kept for those who wait; an interrupt is raised here
        as well."""
        if self.begun:
            return
        self.begun = True
        if self._before is not None:
            self._before.run()
            self._before = None
        try:
            for completion in self._after:
                completion.wait()
            self._run()
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._end()

    def give_up(self) -> None:
        """Fail it, and what is before it, unless it has begun before: its host closes."""
        if not self.begun:
            if self._before is not None:
                self._before.give_up()
                self._before = None
            self.begun, self._error = True, RuntimeError("the device was closed before it ran")
            self._end()

    def _end(self) -> None:
        del self._run
        if self._marks is not None:
            self._marks.end(self._error)
        self._over.set()
