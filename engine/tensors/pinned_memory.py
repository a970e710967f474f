"""Between host and device without waiting: what goes up is copied from pinned memory, what comes down into it.

A plain copy from pageable memory, or reading a tensor where it lies, makes the host wait for all that the device was
given before: for the step that runs while the next one is planned. So a step takes its numbers up through
`to_device`, leaves its results in `to_host`, and is waited for once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
HostNumbers = (
    Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]] | np.ndarray[Any, Any]
)


def to_device(values: HostNumbers, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers that the host knows, where kernels read them."""
    if device.type == "cpu" and dtype in _NUMPY:
        # A third of what torch.tensor takes for lists of lists, as block tables are.
        return torch.from_numpy(np.asarray(values, dtype=_NUMPY[dtype]))
    known = isinstance(values, np.ndarray)
    tensor = torch.from_numpy(values).to(dtype) if known else torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: Tensor) -> Tensor:
    """A copy that the host may read once everything launched so far is complete; on a CPU the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
