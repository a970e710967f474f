"""Copies outside a device's streams: threads of the data planes copy between the pools and other memory.

They run beside the streams of `cache.device.device_port`, so whoever begins one has waited for what wrote the pages,
and lets nobody use its target before it is over. On a CPU a copy is over when it was begun. On a GPU each
`DeviceCopies` has a CUDA stream of its own, and its copies run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from twinpool.cache.device.device_port import DONE, Completion

CPU = torch.device("cpu")


class DeviceCopies(Protocol):
    """A line of copies that one thread begins, and that run in order."""

    def begin(self, copy: Callable[[], object]) -> Completion:
        """Begin a copy. What it reads and writes must stay until the completion is done."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Host memory that these copies read and write at full speed: uint8 [nbytes], not zeroed."""


class HostCopies:
    """Copies on a CPU."""

    def begin(self, copy: Callable[[], object]) -> Completion:
        copy()
        return DONE

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class CudaCopies:
    """Copies on a CUDA stream of their own. What was run of them on a GPU: docs/gpu.md."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, copy: Callable[[], object]) -> Completion:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                copy()
            except BaseException:
                self._stream.synchronize()  # Whoever hears of it gives pages back that a part of it may still touch.
                raise
            # Whoever waits sleeps: it is a thread beside the one that steps the worker.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return CudaEvent(event, self._device)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class CudaEvent:
    """A CUDA event as a `Completion`.

    It is asked on its own GPU: threads begin on the first one, and whoever asks there takes memory of it.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    @property
    def done(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        with torch.cuda.device(self._device):
            self._event.synchronize()

    def order(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


def device_copies(device: torch.device) -> DeviceCopies:
    """A line of copies into and out of memory of this device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


def zeroed(nbytes: int, device: torch.device = CPU) -> torch.Tensor:
    """Zeroed memory, uint8 [nbytes]. It is zero when this returns, for every stream and every process."""
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    settled(device)
    return memory


def settled(device: torch.device) -> None:
    """Return once everything that this process has begun on a device is over."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
