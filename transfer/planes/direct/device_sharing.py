"""Sharing a device's memory with writers in other processes of the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """A reader's memory, mapped into this process."""

    region: torch.Tensor
    """uint8 [bytes], on a device."""
    close: Callable[[], None]
    """Ends the mapping; `region` may not be used after it."""


class DeviceSharing(Protocol):
    """How memory of a device is opened in another process."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Zeroed memory of `device` that can be shared: uint8 [nbytes]. Raises `ConfigError` for a device that can't
        share."""

    def describe(self, region: torch.Tensor) -> dict[str, Any]:
        """Plain values by which another process opens `region`, which `allocate` returned."""

    def open(self, described: Mapping[str, Any], nbytes: int, device: torch.device) -> MappedRegion:
        """Map memory that another process described, of `nbytes`, so that copies which run on `device` reach it. Raises
        `LayoutMismatch`, with the reason, where that can't be done, and for what is no description."""
