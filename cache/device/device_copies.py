"""Copies between memory of the host and of a device: of steps, through pinned memory; and of data planes, in a line of
their own.

*Steps*: a plain copy from pageable memory, or reading a device tensor from the host, makes the host wait for all
operations launched before: for the step that runs while the next one is planned. So a step copies its inputs up through
`to_device` and its results down through `to_host`, and the host waits once, for the whole step.

*Data planes*: their threads copy between the pools and other memory, beside the streams of `cache.device.device_port`.
So whoever begins such a copy has waited for what wrote the pages, and lets nobody use its target before it is over. On
a CPU a copy is over when it was begun. On a GPU each `DeviceCopies` has a CUDA stream of its own, and its copies run
one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from twinpool.cache.device.device_port import DONE, Completion

# ------------------------------------------------------------ of steps


_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
_ALIGNED = 16
"""Bytes: where an array of a packed copy may begin."""
HostNumbers = (
    Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]] | np.ndarray[Any, Any]
)
HostIntegers = np.ndarray[Any, Any]
"""An array of int32 or int64."""


def to_device(values: HostNumbers, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy numbers of the host to `device`. On a CPU the tensor may share memory with an array `values`."""
    if device.type == "cpu" and dtype in _NUMPY:
        # A third of what torch.tensor takes for lists of lists, as block tables are.
        return torch.from_numpy(np.asarray(values, dtype=_NUMPY[dtype]))
    known = isinstance(values, np.ndarray)
    tensor = torch.from_numpy(values).to(dtype) if known else torch.tensor(values, dtype=dtype)
    return copy_up(tensor, device)


def copy_up(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to `device`; on a CPU, the tensor itself."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def upload(arrays: Sequence[HostIntegers], device: torch.device) -> list[Tensor]:
    """Copy arrays to `device` together. On a CPU the tensors share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return upload_packed(arrays, device)


def upload_packed(arrays: Sequence[HostIntegers], device: torch.device) -> list[Tensor]:
    """Copy arrays to `device` in one copy; the tensors are parts of it."""
    begins = [0, *accumulate(-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays)]
    packed = torch.empty(begins.pop(), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for begin, array in zip(begins, arrays, strict=True):
        # As bytes by numpy: torch takes no empty array for bytes.
        packed[begin : begin + array.nbytes] = torch.from_numpy(array.reshape(-1).view(np.uint8))
    there = packed.to(device, non_blocking=True)
    return [
        there[begin : begin + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for begin, array in zip(begins, arrays, strict=True)
    ]


def to_host(tensor: Tensor) -> Tensor:
    """Start a copy that the host may read once everything launched so far is complete; on a CPU, the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


# ------------------------------------------------------------ of data planes


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
