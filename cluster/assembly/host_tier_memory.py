"""The memory of a rank's host tier: an arena that outlives the process if the node's agent lends one, else its own."""

from __future__ import annotations

import logging
import os

import torch

from twinpool.cache.arena.arena import BOND_BYTES, Arena, arena_bytes
from twinpool.cache.device.device_port import Device
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.memory.memory_layout import PoolSetLayout
from twinpool.cluster.arena.arena_client import ArenaProvider
from twinpool.cluster.ranks.leader_channel import LeaderChannel
from twinpool.contracts.messages.rank_orders import BindArenas

log = logging.getLogger("twinpool.arena")


def host_memory(
    tier: PoolSetLayout, device: Device, arenas: ArenaProvider | None, rank: int, size: int, fingerprint: str
) -> tuple[torch.Tensor, Arena | None]:
    """Memory for a rank's part of the host tier, uint8 [tier.nbytes], and the arena that it lies in.

    `fingerprint` is `worker_fingerprint`: all that state depends on besides its tokens. An arena with another one, or
    of another rank or number of ranks, is not taken over. Without an arena, memory comes from `device`, and None.
    """
    named = f"{fingerprint}/{rank}/{size}"
    memory = arenas.take(rank, arena_bytes(tier), named) if arenas is not None else None
    if memory is None:
        return device.allocate_host(tier.nbytes), None
    arena = Arena(memory, tier, named)
    device.register_host(arena.region)
    return arena.region, arena


def take_over(manager: KVCacheManager, line: LeaderChannel | None) -> None:
    """Give the manager the state that the worker's last incarnation left in host memory, if the arenas of all its ranks
    have the same bond.

    Else the arenas of all ranks begin empty under a new bond: all parts of a page must come from one incarnation.
    """
    if manager.host is None:
        return
    keeper = manager.tiers.keeper
    mine = keeper.bond
    others = line.ask(BindArenas(b"")).wait() if line is not None else []
    copies = keeper.take_copies()
    if mine and all(bond == mine for bond, _ in others):
        pages = keeper.adopt(unfinished=any(count != copies for _, count in others))
        log.info("host memory taken over", extra={"pages": pages, **keeper.counters})
        return
    fresh = os.urandom(BOND_BYTES)
    if line is not None:
        line.ask(BindArenas(fresh)).wait()
    keeper.begin(fresh)


def rebind(arena: Arena | None, order: BindArenas) -> tuple[bytes, int]:
    """A follower's part of `take_over`: returns its arena's bond, and how many copies it has carried out since it was
    last asked. An order with a bond first empties the arena under that bond."""
    if arena is None:
        return b"", 0
    if order.bond:
        arena.begin(order.bond)
    return arena.bond, arena.take_copies()
