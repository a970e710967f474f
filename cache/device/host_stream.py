"""The host stream: a thread that runs operations one after the other, each once what it comes after has happened.

Copies and sends of a CPU run on such threads, beside the thread that computes: copying lets go of the interpreter's
lock. So do sends of a GPU: a stream that waits for an event orders kernels, but a socket or a network card has to be
told once the event *has* happened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from twinpool.cache.device.device_port import Completion

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
