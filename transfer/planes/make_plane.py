"""The choice of data plane: opens the one that the configuration names."""

from __future__ import annotations

from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.plane_choice import with_plane
from twinpool.transfer.net.zmq_sockets import CurveKeys
from twinpool.transfer.planes.data_plane import RankDataPlane, WakeCallback
from twinpool.transfer.planes.direct.cuda_ipc import CudaIpc
from twinpool.transfer.planes.direct.direct_link import LocalPlane
from twinpool.transfer.planes.direct.shm_plane import ShmPlane
from twinpool.transfer.planes.nixl.nixl_plane import NixlPlane
from twinpool.transfer.planes.tcp.zmq_plane import ZmqPlane


def make_plane(
    config: Config, host: str, curve: CurveKeys | None, wake: WakeCallback, rank: int = 0, size: int = 1
) -> RankDataPlane:
    """Open the plane that `transfer.plane` names, bound to a free port of `host`, for rank `rank` of a worker of `size`
    ranks. ``auto``, which `serve` has resolved, is for workers built by hand. Raises `ConfigError` for a plane that
    doesn't reach the pools, or that this machine lacks."""
    if config.transfer.plane == "auto":
        config = with_plane(config, one_host=host.startswith("127."))
    if config.transfer.plane == "local":
        return LocalPlane(config.faults, wake, rank, size)
    chosen = config.transfer
    silence_s, message_bytes = chosen.link_timeout_s, chosen.control_frame_bytes
    if chosen.plane in {"shm", "cuda_ipc"}:
        sharing = CudaIpc() if chosen.plane == "cuda_ipc" else None
        return ShmPlane(config.faults, host, curve, rank, size, silence_s, message_bytes, sharing)
    if chosen.plane == "nixl":
        return NixlPlane(config.faults, host, curve, rank, size, silence_s, message_bytes, wake)
    return ZmqPlane(chosen, config.faults, host, curve, rank, size, wake)
