"""Building the parts of a follower rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from twinpool.cache.arena.arena import Arena
from twinpool.cache.device.device_backends import make_device
from twinpool.cache.device.device_copies import settled
from twinpool.cache.device.device_port import DEVICE, HOST
from twinpool.cache.pool.follower_steps import FollowerSteps
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.pool.tp_pool_set import FollowerPools
from twinpool.cache.storage.backends.backend_factory import make_backend
from twinpool.cache.storage.io_queue import ThreadedIoQueue
from twinpool.cache.storage.rank_page_store import RankPageStore
from twinpool.cache.storage.tp_page_store import FollowerPageStore
from twinpool.cluster.arena.arena_client import ArenaProvider
from twinpool.cluster.assembly.build_parts import (
    curve_keys_for,
    host_tier,
    rank_layout,
    streams_beside,
    worker_fingerprint,
)
from twinpool.cluster.assembly.host_tier_memory import host_memory
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import Role
from twinpool.engine.runner.kernel_choice import hold_to_class
from twinpool.engine.runner.load_model import KeptModel, load_engine
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.engine.tensors.tensor_parallel import TensorParallelGroup
from twinpool.transfer.net.waiter import Waiter
from twinpool.transfer.planes.follower_links import FollowerLinks
from twinpool.transfer.planes.make_plane import make_plane


@dataclass(frozen=True)
class RankParts:
    """The parts of a follower."""

    state: FollowerPools
    links: FollowerLinks
    steps: FollowerSteps
    engine: ModelRunner
    storage: FollowerPageStore | None
    waiter: Waiter
    arena: Arena | None

    def close(self) -> None:
        if self.storage is not None:
            self.storage.close(1.0)
        self.steps.close()
        self.links.close()
        self.waiter.close()


def build_rank(
    role: Role,
    spec: ModelSpec,
    config: Config,
    *,
    host: str,
    counts: Mapping[str, int],
    ranks: TensorParallelGroup,
    arenas: ArenaProvider | None = None,
    kept: KeptModel | None = None,
) -> RankParts:
    """Build the parts with which a follower carries out its leader's orders. Raises what `build_worker` does.

    `counts`: pages and slots that each pool can lease, the same on all ranks. `kept`: as for
    `build_worker`.
    """
    hold_to_class(config.engine)
    storage: FollowerPageStore | None = None
    arena: Arena | None = None
    with ExitStack() as undo:
        waiter = Waiter()
        undo.callback(waiter.close)
        device = make_device(config.engine.device, waiter.wake, streams=streams_beside(config, ranks.size))
        plane = make_plane(config, host, curve_keys_for(host), waiter.wake, ranks.rank, ranks.size)
        undo.callback(plane.close)
        model, layout = rank_layout(role, spec, config, counts, ranks)
        pools = PoolSet(layout.spec, layout.counts, plane.allocate("pages", layout.nbytes, device.torch_device))
        plane.register(pools, None)
        steps = FollowerSteps(device, pools.gates)
        undo.callback(steps.close)
        places = {DEVICE: pools}
        tier = host_tier(layout, config, role, ranks.size)
        if tier is not None:
            named = worker_fingerprint(pools, spec, config, device)
            memory, arena = host_memory(tier, device, arenas, ranks.rank, ranks.size, named)
            mirror = PoolSet(tier.spec, tier.counts, memory, tier.order, "host")
            places[HOST] = mirror
            backend = make_backend(config.cache_for(role).storage)
            if backend is not None:
                queue = ThreadedIoQueue(backend, wake=waiter.wake)
                undo.callback(queue.close, 1.0)
                storage = FollowerPageStore(RankPageStore(queue, mirror, named, ranks.rank, ranks.size))
        epochs = {pool: allocator.epochs for pool, allocator in pools.allocators.items()}
        engine = load_engine(model, config.engine, layout.spec, pools.gates, epochs, device, ranks, kept=kept)
        undo.pop_all()
    for socket in plane.waitable:
        waiter.add(socket)
    state = FollowerPools(
        places,
        ranks.size,
        lambda place: arena.count_copy() if arena and place == HOST else None,
        partial(settled, device.torch_device),
    )
    return RankParts(state, FollowerLinks(plane, steps), steps, engine, storage, waiter, arena)
