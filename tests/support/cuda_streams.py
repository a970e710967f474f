"""A stand-in of torch's CUDA streams and events on a machine without a GPU: late, and strict about memory.

It does nothing that nobody waits for. What is launched (`launch`, in the place of a kernel) lies in the queue of the
current stream until a test has that stream run on (`run`), or somebody waits for an event or a stream; then only what
has to come before is done. A stream stops where it waits for an event that hasn't happened. So whatever an order is
missing for is done too early, by a test that runs the wrong stream first.

A tensor's memory (`Memory`) is poisoned when the last reference to it goes, as the caching allocator would hand it out
again at once: kernels have an address and no reference.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from twinpool.cache.device import cuda_device
from twinpool.cache.device.cuda_device import CudaDevice, MarkWord

POISON = -1.0


class CudaStreams:
    """All streams of one GPU, in the place of `torch.cuda`; for one test."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.default = Stream(self)

    @property
    def current(self) -> Stream:
        stack: list[Stream] = self._local.__dict__.setdefault("stack", [self.default])
        return stack[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        _ = self.current
        self._local.stack.append(stream)
        try:
            yield
        finally:
            self._local.stack.pop()

    def launch(self, kernel: Callable[[], object]) -> None:
        """Queue a kernel on the current stream."""
        with self.lock:
            self.current.queue.append(kernel)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: Stream(self))
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "device", _on_device)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.finish_all())
        monkeypatch.setattr(cuda_device, "MarkWord", lambda device: _Word(self))

    def finish_all(self) -> None:
        for stream in self.streams:
            stream.synchronize()


class Stream:
    """A queue of kernels, of events to record and of events to wait for."""

    def __init__(self, cuda: CudaStreams) -> None:
        self._cuda = cuda
        self.queue: deque[Callable[[], object] | _Record | _Wait] = deque()
        cuda.streams.append(self)

    def run(self) -> None:
        """Do what is queued, up to the first event that hasn't happened."""
        with self._cuda.lock:
            while self.queue and not (isinstance(self.queue[0], _Wait) and not self.queue[0].over):
                self._next()

    def _next(self) -> None:
        head = self.queue.popleft()
        if isinstance(head, _Record):
            head.event.happened = max(head.event.happened, head.number)
        elif not isinstance(head, _Wait):
            head()

    def finish(self, until: Callable[[], bool]) -> None:
        """Do what is queued until that holds, and of other streams what it waits for."""
        with self._cuda.lock:
            while not until():
                assert self.queue, "it would never happen"
                head = self.queue[0]
                if isinstance(head, _Wait) and not head.over:
                    head.event.finish(head.number)
                else:
                    self._next()

    def synchronize(self) -> None:
        self.finish(lambda: not self.queue)

    def record_event(self) -> Event:
        event = Event(self._cuda)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        with self._cuda.lock:
            self.queue.append(_Wait(event, event.recorded))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event:
    """An event, as often as it is recorded."""

    def __init__(self, cuda: CudaStreams) -> None:
        self._cuda = cuda
        self.recorded = self.happened = 0
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        with self._cuda.lock:
            self._stream = stream or self._cuda.current
            self.recorded += 1
            if self._stream.queue:
                self._stream.queue.append(_Record(self, self.recorded))
            else:
                self.happened = self.recorded  # Nothing is before it.

    def query(self) -> bool:
        return self.happened >= self.recorded

    def synchronize(self) -> None:
        self.finish(self.recorded)

    def finish(self, number: int) -> None:
        if self._stream is not None:
            self._stream.finish(lambda: self.happened >= number)


class _Record:
    def __init__(self, event: Event, number: int) -> None:
        self.event, self.number = event, number


class _Wait(_Record):
    @property
    def over(self) -> bool:
        return self.event.happened >= self.number


class Memory:
    """A tensor's memory: kernels read `cell`, and it is poisoned when this object goes."""

    def __init__(self, value: float) -> None:
        self.cell = [value]
        weakref.finalize(self, self.cell.__setitem__, 0, POISON)


class _Word(MarkWord):
    """The word of layer marks, counted up by kernels of the stand-in."""

    def __init__(self, cuda: CudaStreams) -> None:
        super().__init__(torch.device("cpu"))
        self._cuda = cuda

    def add(self, marks: int) -> None:
        self.launched += marks
        self._cuda.launch(lambda: self._word.add_(marks))


@contextmanager
def _on_device(device: Any) -> Iterator[None]:
    yield


def stream_of(device: CudaDevice, name: Any) -> Stream:
    """The stand-in behind one of a device's streams."""
    found: Any = device._streams[name]
    assert isinstance(found, Stream)
    return found
