"""The choice of data plane: opens the one that the configuration names."""

from __future__ import annotations

from contracts.config.cluster_config import Config
from transfer.net.curve_keys import CurveKeys
from transfer.planes.data_plane import RankDataPlane, WakeCallback
from transfer.planes.local_plane import LocalPlane
from transfer.planes.nixl_plane import NixlPlane
from transfer.planes.shm_plane import ShmPlane
from transfer.planes.zmq_plane import ZmqPlane


def make_plane(
    config: Config, host: str, curve: CurveKeys | None, wake: WakeCallback, rank: int = 0, size: int = 1
) -> RankDataPlane:
    """Open the plane that `transfer.plane` names, bound to a free port of `host`, for rank `rank` of a worker of `size`
    ranks."""
    if config.transfer.plane == "local":
        return LocalPlane(config.faults, wake, rank, size)
    chosen = config.transfer
    silence_s, message_bytes = chosen.link_timeout_s, chosen.control_frame_bytes
    if chosen.plane == "shm":
        return ShmPlane(config.faults, host, curve, rank, size, silence_s, message_bytes)
    if chosen.plane == "nixl":
        return NixlPlane(config.faults, host, curve, rank, size, silence_s, message_bytes, wake)
    bounce_bytes = chosen.bounce_bytes if chosen.plane == "staged" else None
    return ZmqPlane(
        config.faults, host, curve, rank, size, silence_s, chosen.frame_bytes, chosen.connections, message_bytes, wake,
        bounce_bytes,
    )  # fmt: skip
