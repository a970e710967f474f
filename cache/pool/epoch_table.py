"""The epoch table: how often each page of a pool has been freed, counted on the host and read by kernels.

A block table carries the epochs that its pages had when they were leased. A step compares them with this table, in
the order of its stream: so it sees every page freed before it was launched, and none freed after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from twinpool.cache.memory.pinned_memory import upload_packed
from twinpool.contracts.ids import Epoch

_MAX_BUMPED = 4096
"""The most releases kept one by one until the device's copy of the table is updated; more are merged."""
_FEW = 32
"""The most pages that are looked up one by one: for so few, numpy's overhead costs more than the look-ups."""


class EpochTable:
    """The epochs of one pool, int32 [size]. A CPU reads the host's table; a GPU has a copy that steps update."""

    def __init__(self, size: int) -> None:
        self.host = torch.zeros(size, dtype=torch.int32)
        self.counts = self.host.numpy()
        """The same memory as a numpy array, for counting."""
        self._one_by_one: Any = self.counts.data
        """The same memory as a memoryview, for few pages at a time."""
        self.releases = 0
        """How often pages were released: as long as it doesn't change, no epoch does."""
        self._copy: torch.Tensor | None = None
        self._bumped: list[Sequence[int]] = []

    def bump(self, indices: Sequence[int]) -> None:
        """Count one more release of these pages, each named once."""
        self.releases += 1
        if len(indices) <= _FEW:
            counts = self._one_by_one
            for index in indices:
                counts[index] += 1
        else:
            self.counts[np.asarray(indices, dtype=np.int64)] += 1
        if self._copy is not None:
            self._bumped.append(indices)
            if len(self._bumped) > _MAX_BUMPED:
                # Pages come and go while no step reads the table.
                self._bumped = [np.unique(np.concatenate(self._bumped)).tolist()]

    def of(self, indices: Sequence[int]) -> tuple[Epoch, ...]:
        """The epochs of these pages."""
        if len(indices) <= _FEW:
            counts = self._one_by_one
            return tuple([counts[index] for index in indices])
        return tuple(self.counts[np.asarray(indices, dtype=np.int64)].tolist())

    def look_up(self, pages: NDArray[np.int32] | NDArray[np.int64]) -> NDArray[np.int32]:
        """The epochs of pages in any arrangement, such as many block tables side by side."""
        return self.counts.take(pages)

    def on(self, device: torch.device) -> torch.Tensor:
        """The table, up to date, on `device`; to be called from within an operation, always on the same stream. The
        host doesn't wait for what that stream runs."""
        return self.host if device.type == "cpu" else self._follow(device)

    def _follow(self, device: torch.device) -> torch.Tensor:
        if self._copy is None:
            (self._copy,) = upload_packed([self.counts], device)
        elif self._bumped:
            freed = np.unique(np.concatenate(self._bumped)).astype(np.int64, copy=False)
            self._bumped.clear()
            freed_k, counts_k = upload_packed([freed, self.look_up(freed)], device)
            self._copy.index_copy_(0, freed_k, counts_k)
        return self._copy
