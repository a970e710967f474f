"""Layer marks of an operation of an NVIDIA GPU: a word of pinned host memory that the compute stream counts up.

The kernels of a group's layers come before the copy that writes the group's number to the word, on the same stream. So
whoever reads the number on the host knows that they are over, also where the operation is a captured graph, which no
callback of the host could be part of.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from cache.device.layer_marks import LayerCounts, LayerMarks

_LOOK_S = 20e-6
"""Seconds between two looks at the word: short beside the transfer of a group of layers."""


class CudaLayerMarks(LayerMarks):
    """The marks of one operation on a CUDA stream; `passed` and `end` are called as it is launched."""

    def __init__(self, groups: Sequence[LayerCounts], device: torch.device) -> None:
        super().__init__(groups)
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._seen = self._word.numpy()
        self._numbers = torch.arange(len(groups) + 1, dtype=torch.int32, device=device)
        self._launched = 0

    def passed(self, written: LayerCounts) -> None:
        self._launched_to(self._through(self._launched, written))

    def end(self, error: BaseException | None) -> None:
        self._error = error
        if error is None:
            self._launched_to(len(self.groups))

    def reached(self, group: int) -> bool:
        return group < int(self._seen[0])

    def wait(self, group: int) -> None:
        while not self.settled(group):
            time.sleep(_LOOK_S)
        self._raise_unless_reached(group)

    def _launched_to(self, count: int) -> None:
        """Have the stream say that `count` groups are through, once what was launched so far is over."""
        if count > self._launched:
            self._launched = count
            self._word.copy_(self._numbers[count : count + 1], non_blocking=True)
