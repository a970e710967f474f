"""The memory of devices that compute on the CPU: all of it is the host's, and copied at full speed as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twinpool.cache.device.device_port import PageSpanUse, RemoteWrite, UncheckedRemoteWrite


class CpuMemory:
    """What devices on the CPU have in common of `cache.device.device_port.Device`."""

    torch_device = torch.device("cpu")

    def end_lane(self, lane: str) -> None:
        return

    def touch(self, name: str, *, reads: Sequence[PageSpanUse] = (), writes: Sequence[PageSpanUse] = ()) -> None:
        return

    def remote_write(self, name: str, writes: Sequence[PageSpanUse]) -> RemoteWrite:
        return UncheckedRemoteWrite()

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def register_host(self, memory: torch.Tensor) -> None:
        return
