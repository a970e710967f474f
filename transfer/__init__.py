"""Rooms, metadata slots and data planes: how a request's state gets from prefill to decode."""

from __future__ import annotations

from contracts.config import Config
from transfer.direct import LocalPlane, ShmPlane
from transfer.plane import Plane, Wake
from transfer.security import Curve
from transfer.tcp import ZmqPlane

__all__ = ["Curve", "Plane", "make_plane"]


def make_plane(config: Config, host: str, curve: Curve | None, wake: Wake) -> Plane:
    """The plane that `transfer.plane` names, bound to free ports of `host`."""
    if config.transfer.plane == "local":
        return LocalPlane(config.faults, wake)
    if config.transfer.plane == "shm":
        return ShmPlane(config.faults, host, curve)
    return ZmqPlane(config.faults, host, curve)
