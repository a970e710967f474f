"""Copies between host and device by pinned memory, so that the host doesn't wait for the device.

A plain copy from pageable memory, or reading a device tensor from the host, makes the host wait for all operations
launched before: for the step that runs while the next one is planned. So a step copies its inputs up through
`to_device` and its results down through `to_host`, and the host waits once, for the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
