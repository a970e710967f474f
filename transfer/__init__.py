"""Rooms, metadata slots and data planes: how a request's state gets from prefill to decode."""

from __future__ import annotations

from contracts.config import Config
from transfer.direct import LocalPlane, ShmPlane
from transfer.plane import Plane, RankPlane, Wake
from transfer.security import Curve
from transfer.tcp import ZmqPlane

__all__ = ["Curve", "Plane", "RankPlane", "make_plane"]


def make_plane(config: Config, host: str, curve: Curve | None, wake: Wake, rank: int = 0, size: int = 1) -> RankPlane:
    """The plane that `transfer.plane` names, bound to free ports of `host`; of rank `rank` of a worker of `size`."""
    if config.transfer.plane == "local":
        return LocalPlane(config.faults, wake, rank, size)
    silence_s = config.transfer.link_timeout_s
    if config.transfer.plane == "shm":
        return ShmPlane(config.faults, host, curve, rank, size, silence_s, config.transfer.control_frame_bytes)
    return ZmqPlane(config.faults, host, curve, rank, size, silence_s, config.transfer.frame_bytes)
