"""The choice of data plane for ``transfer.plane=auto``, which planes reach pools on GPUs, and what goes between hosts.

One plane is chosen for the whole cluster, before its workers start:

    pools in       workers on              plane
    host memory    one host                shm
    host memory    hosts of a Ray          zmq
    GPUs           one host                cuda_ipc, or staged where some GPU doesn't reach another's memory
    GPUs           hosts of a Ray          staged

`nixl` has to be asked for: what it carries is neither authenticated nor encrypted. A Ray that `serve` joins counts as
several hosts, as it may grow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from twinpool.contracts.config.cluster_config import Config, section_of
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role

DEVICE_PLANES = ("cuda_ipc", "staged", "nixl", "local")
"""Planes that reach a GPU's memory; all but the first reach host memory, too. `nixl` does where its UCX has CUDA: each
worker finds out as it starts."""

ONE_HOST_PLANES = ("shm", "cuda_ipc")
"""Planes whose writer stores into the reader's memory itself."""


class PlaneOfOneHost(ConfigError):
    """Raised where workers of several hosts would have a plane that reaches one."""


def check_hosts(config: Config, hosts: Collection[str]) -> None:
    """Check that the plane goes between `hosts`, by name. Raises `PlaneOfOneHost`."""
    plane = config.transfer.plane
    if plane in ONE_HOST_PLANES and len(hosts) > 1:
        other = "zmq" if plane == "shm" else "staged"
        raise PlaneOfOneHost(
            f"transfer.plane={plane} reaches one host, and workers would be on {', '.join(sorted(hosts))}: use "
            f"transfer.plane={other} or auto"
        )


RANKS_OVER_HOSTS = "cluster.ranks_over_hosts"
NO_GPUS_OVER_HOSTS = (
    f"{RANKS_OVER_HOSTS} is for CPUs so far: NCCL between hosts authenticates nobody and was not run; leave it out, or "
    "set engine.device=cpu"
)


def check_ranks_over_hosts(config: Config, roles: Iterable[Role], *, joined: bool) -> None:
    """Check what doesn't go with ranks of a worker on several nodes. `joined`: whether a Ray is joined, which may have
    several. Raises `ConfigError`."""
    spread = [role for role in roles if config.over_hosts(role)]
    if not spread:
        return
    if not joined:
        raise ConfigError(
            f"{RANKS_OVER_HOSTS} is for a Ray of several machines: join it with --ray-address, or leave it out"
        )
    for role in spread:
        if config.dp_for(role) > 1:
            raise ConfigError(
                f"{RANKS_OVER_HOSTS} and {section_of(role)}.dp={config.dp_for(role)}: workers that share their experts "
                "are on one node; leave one of them out"
            )
    if config.engine.share_weights == "on":
        raise ConfigError(f"{RANKS_OVER_HOSTS} doesn't go with engine.share_weights=on yet: leave one of them out")
    if on_gpus(config):
        raise ConfigError(f"engine.device={config.engine.device}: {NO_GPUS_OVER_HOSTS}")


def on_gpus(config: Config) -> bool:
    """Whether `engine.device` names GPUs; ``auto`` of it must have been resolved."""
    return config.engine.device.startswith("cuda")


def with_plane(config: Config, one_host: bool, apart: str = "") -> Config:
    """`config` with ``auto`` of `transfer.plane` made the plane that the table above says. `apart`: why the host's GPUs
    don't share their memory, in words; empty where they can. Raises `ConfigError` for a plane that doesn't reach the
    pools."""
    chosen = config.transfer.plane
    if chosen == "auto":
        if on_gpus(config):
            chosen = "cuda_ipc" if one_host and not apart else "staged"
        else:
            chosen = "shm" if one_host else "zmq"
        return dataclasses.replace(config, transfer=dataclasses.replace(config.transfer, plane=chosen))
    if on_gpus(config) and chosen not in DEVICE_PLANES:
        raise ConfigError(
            f"transfer.plane={chosen} reaches host memory alone, and engine.device={config.engine.device}: use "
            f"transfer.plane=auto, {' or '.join(DEVICE_PLANES)}, or engine.device=cpu"
        )
    if not on_gpus(config) and chosen == "cuda_ipc":
        raise ConfigError("transfer.plane=cuda_ipc is for pools on GPUs, and engine.device=cpu: use shm or auto")
    if apart and chosen == "cuda_ipc":
        raise ConfigError(f"transfer.plane=cuda_ipc: {apart}; use transfer.plane=staged or auto")
    return config


def why(config: Config) -> str:
    """What a chosen plane is chosen for, in words."""
    return f"{config.transfer.plane}, for pools {'on GPUs' if on_gpus(config) else 'in host memory'}"
