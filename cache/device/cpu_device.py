"""The devices that compute on the CPU: one does one thing after the other, one copies and sends beside it.

`AsyncCpuDevice` has a thread for loads, one for saves, and one for each lane of sends (`HostStream`): copying lets go
of the interpreter's lock. Sends of a GPU have such threads as well: a stream that waits for an event orders kernels,
but a socket or a network card has to be told once the event *has* happened.

What computes runs on the caller's thread, as a second thread for it would take the interpreter's lock from the first
more often than it helped (decision 9): at once, or, for an operation with layer marks, when the caller next looks at
it. So its caller can submit what comes after its marks first, as on a GPU, and that runs beside it. What computes
behind it, such as the draw of a step's tokens, waits with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from twinpool.cache.device.device_port import (
    DONE,
    NO_GATES,
    Completion,
    DeviceOp,
    DeviceStream,
    GatedLoads,
    LayerCounts,
    LayerMarks,
    PageSpanUse,
    RemoteWrite,
    UncheckedRemoteWrite,
)


class CpuMemory:
    """What devices on the CPU have in common of `cache.device.device_port.Device`."""

    torch_device = torch.device("cpu")

    def end_lane(self, lane: str) -> None:
        return

    def touch(self, name: str, *, reads: Sequence[PageSpanUse] = (), writes: Sequence[PageSpanUse] = ()) -> None:
        return

    def remote_write(self, name: str, writes: Sequence[PageSpanUse]) -> RemoteWrite:
        return UncheckedRemoteWrite()

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def register_host(self, memory: torch.Tensor) -> None:
        return


_BEGINNING = threading.Lock()


class HostStream:
    """Runs operations in order, on one thread that starts with the first. `wake` is called, on that thread, whenever
    one is over."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_alone)
        self._wake = wake

    def submit(self, run: Callable[[], object], after: Sequence[Completion]) -> Completion:
        """Queue an operation. Where one of `after` failed it fails with the same error, and doesn't run."""

        def operation() -> None:
            for completion in after:
                completion.wait()
            run()

        future = self._pool.submit(operation)
        future.add_done_callback(lambda _: self._wake())
        return _StreamOp(future)

    def close(self, wait: bool = True) -> None:
        """End the thread after what was submitted, and `wait` for that. Idempotent."""
        self._pool.shutdown(wait)


class HostLanes:
    """Host streams by lane, each made when it is first used."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        """`name`: of the threads. `wake`: as for `HostStream`."""
        self._name, self._wake = name, wake
        self._streams: dict[str, HostStream] = {}

    def submit(self, lane: str, run: Callable[[], object], after: Sequence[Completion]) -> Completion:
        """Queue an operation on a lane, as `HostStream.submit` does."""
        if lane not in self._streams:
            self._streams[lane] = HostStream(self._name, self._wake)
        return self._streams[lane].submit(run, after)

    def end(self, lane: str) -> None:
        """Forget a lane: its thread ends after what was submitted."""
        stream = self._streams.pop(lane, None)
        if stream is not None:
            stream.close(wait=False)

    def close(self) -> None:
        """Wait for what was submitted to any lane, and end their threads. Idempotent."""
        for stream in self._streams.values():
            stream.close()


class _StreamOp:
    """An operation of a host stream, as a `Completion`."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()

    def order(self) -> None:
        self.wait()


def _alone() -> None:
    """Let torch use this thread alone for what runs on it: a team of threads for a copy would only be in the way of
    those that compute.

    torch keeps the number for each thread, and that of the last call for threads that come later: a thread of its own
    gives later ones the number that they would have had. One at a time, as a thread that begins in between would take
    the 1 for that number.
    """
    with _BEGINNING:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        restoring = threading.Thread(target=torch.set_num_threads, args=(before,))
        restoring.start()
        restoring.join()


class CpuDevice(CpuMemory):
    """CPU torch: an operation is complete when `submit` returns."""

    checks = False

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
        for completion in after:
            completion.wait()
        run()
        return DONE

    def marks(self, groups: Sequence[LayerCounts]) -> None:
        return None

    def close(self) -> None:
        return


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
