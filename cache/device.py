"""The device port: every launch, copy and network write says what it reads and writes, and on which stream.

On a CPU, torch is synchronous and an operation is complete when it is named. Other devices complete later, in the
order of their streams and events; so callers hold the `Completion` and read nothing, free nothing and send nothing
before it is done. Whoever follows that on this device is right on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch


class Stream(StrEnum):
    """The streams of a worker. Operations of one stream complete in order; streams are ordered by `after`."""

    COMPUTE = "compute"
    COPY = "copy"
    SEND = "send"


@dataclass(frozen=True, slots=True)
class Span:
    """Pages of one pool, in all its buffers."""

    pool: str
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation as the device sees it."""

    name: str
    stream: Stream
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()


class Completion(Protocol):
    """When an operation is complete."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None:
        """Return once the operation is complete."""


class Device(Protocol):
    """Where tensors live and operations run."""

    @property
    def torch_device(self) -> torch.device: ...

    def submit(self, op: Op, run: Callable[[], None], after: Sequence[Completion] = ()) -> Completion:
        """Run `run` on `op.stream`, after the operations in `after`. What `run` raises, `submit` or `wait` raises."""


class _Done:
    done = True

    def wait(self) -> None:
        return


DONE: Completion = _Done()


class CpuDevice:
    """CPU torch: an operation is complete when `submit` returns."""

    torch_device = torch.device("cpu")

    def submit(self, op: Op, run: Callable[[], None], after: Sequence[Completion] = ()) -> Completion:
        for completion in after:
            completion.wait()
        run()
        return DONE


class CudaDevice:
    """NVIDIA: one CUDA stream a `Stream`; completions are CUDA events."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self._streams = {stream: torch.cuda.Stream(self.torch_device) for stream in Stream}  # type: ignore[no-untyped-call]

    def submit(self, op: Op, run: Callable[[], None], after: Sequence[Completion] = ()) -> Completion:
        stream = self._streams[op.stream]
        for completion in after:
            if isinstance(completion, _CudaEvent):
                stream.wait_event(completion.event)
            else:
                completion.wait()
        with torch.cuda.stream(stream):
            run()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return _CudaEvent(event)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    @property
    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


def make_device(name: str) -> Device:
    """``auto``, ``cpu`` or ``cuda`` as in `engine.device`."""
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return CudaDevice()
    return CpuDevice()
