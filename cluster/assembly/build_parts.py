"""Building the parts that workers of both roles are made of: pools, KV cache manager, data plane, model runner.

A rank's host tier lies in an arena that outlives the process if the node's agent lends one, else in memory of its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from twinpool.cache.arena.arena import BOND_BYTES, Arena, arena_bytes
from twinpool.cache.device.cpu_device import BESIDE
from twinpool.cache.device.device_choice import make_device
from twinpool.cache.device.device_port import DEVICE, HOST, Device, DeviceStream
from twinpool.cache.manager.kv_cache_manager import EventSource, KVCacheManager
from twinpool.cache.manager.tier_set import LowerTiers
from twinpool.cache.memory.kv_cache_spec import LayoutOrder, PoolSetLayout
from twinpool.cache.memory.page_moves import describe_spec
from twinpool.cache.pool.pool_set import PoolSet, host_counts, host_layout
from twinpool.cache.pool.tp_ranks import TPDevice, TPPoolSet
from twinpool.cache.storage.backends.backend_factory import make_backend
from twinpool.cache.storage.io_queue import ThreadedIoQueue
from twinpool.cache.storage.page_store import PageStore, RankPageStore, TPPageStore
from twinpool.cluster.arena.arena_client import ArenaProvider
from twinpool.cluster.assembly.memory_plan import state_options, stride
from twinpool.cluster.ranks import DataParallelRank, LeaderChannel, RankGroup
from twinpool.contracts.checkpoint.gguf.gguf_header import is_gguf
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.clock import Clock
from twinpool.contracts.cluster_secret import SECRET_VARIABLE
from twinpool.contracts.config.cluster_config import Config, section_of
from twinpool.contracts.credentials.certificate_files import read_curve_pair
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import PAIR, Role, WorkerName, dp_rank
from twinpool.contracts.messages.rank_orders import AwaitReady, BindArenas
from twinpool.engine.models.model_base import Model
from twinpool.engine.models.registry import model_for
from twinpool.engine.runner.kernel_choice import class_of, dtype_for, hold_to_class
from twinpool.engine.runner.load_model import KeptModel, load_engine
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.engine.tensors.shard import Shard
from twinpool.engine.tensors.tensor_parallel import ALONE, TensorParallelGroup
from twinpool.transfer.net.zmq_channel import Waiter
from twinpool.transfer.net.zmq_sockets import CurveKeys
from twinpool.transfer.planes.data_plane import DataPlane
from twinpool.transfer.planes.make_plane import make_plane
from twinpool.transfer.planes.tp_plane import TPDataPlane


@dataclass(frozen=True)
class WorkerParts:
    """The parts of a worker of either role."""

    spec: ModelSpec
    config: Config
    device: Device
    waiter: Waiter
    plane: DataPlane
    manager: KVCacheManager
    engine: ModelRunner
    curve: CurveKeys | None


def build_parts(
    role: Role,
    name: WorkerName,
    spec: ModelSpec,
    config: Config,
    host: str,
    counts: Mapping[str, int],
    device: Device | None,
    clock: Clock,
    group: RankGroup | None,
    arenas: ArenaProvider | None,
    undo: ExitStack,
    kept: KeptModel | None = None,
    dp: DataParallelRank | None = None,
) -> WorkerParts:
    """Build the common parts of a worker; see `build_worker` for parameters and errors.

    A worker of several ranks waits here until all followers are built, and one that shares its experts until the
    others are. `undo` gets what closes each part.
    """
    hold_to_class(config.engine)
    if (config.dp_for(role) > 1) != (dp is not None):
        raise ConfigError(f"{section_of(role)}.dp={config.dp_for(role)} needs workers that are processes")
    curve = curve_keys_for(host)
    if (config.ranks_for(role) > 1) != (group is not None):
        key, count = ("pp", config.pp_for(role)) if config.pp_for(role) > 1 else ("tp", config.tp_for(role))
        raise ConfigError(f"{section_of(role)}.{key}={count} needs a process for each rank")
    ranks, line = (ALONE, None) if group is None else (group.ranks, group.line)
    waiter = Waiter()
    undo.callback(waiter.close)
    device = device or make_device(config.engine.device, waiter.wake, streams=streams_beside(config, ranks.size))
    undo.callback(device.close)
    if dp is not None and device.torch_device.type != "cpu":
        raise ConfigError(f"{section_of(role)}.dp={config.dp_for(role)}: on CPUs so far; set engine.device=cpu")
    if line is not None:
        device = TPDevice(device, line)
    own = make_plane(config, host, curve, waiter.wake, ranks.rank, ranks.size)
    plane: DataPlane = own if line is None else TPDataPlane(own, line)
    undo.callback(plane.close)
    model, layout = rank_layout(role, spec, config, counts, ranks)
    region = plane.allocate("pages", layout.nbytes, device.torch_device)
    pools = PoolSet(layout.spec, layout.counts, region) if line is None else TPPoolSet(layout, region, line, DEVICE)
    if line is not None:
        waiter.add(line.socket)
    manager = _manager(pools, device, spec, config, role, name, clock, waiter, line, arenas, undo)
    undo.callback(manager.close, 1.0)
    epochs = {pool: allocator.epochs for pool, allocator in pools.allocators.items()}
    engine = load_engine(
        model, config.engine, layout.spec, pools.gates, epochs, device, ranks, line, kept,
        shard_for(role, config, ranks, name), dp.experts if dp is not None else None,
    )  # fmt: skip
    if dp is not None:
        waiter.add(dp.channel.socket)
        dp.wait_for_all()
    if line is not None:
        check_weights(weights_digest(spec, config), line.ask(AwaitReady(), config.cluster.start_timeout_s).wait())
    take_over(manager, line)
    return WorkerParts(spec, config, device, waiter, plane, manager, engine, curve)


def streams_beside(config: Config, size: int) -> tuple[DeviceStream, ...]:
    """The streams that a rank of `size` runs beside what it computes on a CPU. Of several ranks these are sends alone:
    their leader tells the others of copies as it makes them. ``auto`` is what the worker's share of its node says;
    without one there are none."""
    if config.engine.copy_threads != "on":
        return ()
    return BESIDE if size == 1 else (DeviceStream.SEND,)


def numerics_class_of(config: Config, spec: ModelSpec, device: Device) -> str:
    """The class of kernels, processor, dtypes and kept weights that results depend on, whatever `engine.numerics`
    says."""
    kept = "" if config.cache.kv_dtype == "auto" else f"/kv-{config.cache.kv_dtype}"
    dtype, gguf = dtype_for(spec, config.engine), is_gguf(spec.path)
    return class_of(config.engine, dtype, device.torch_device, gguf) + kept


def curve_keys_for(host: str) -> CurveKeys | None:
    """The CURVE keys made from the cluster's secret, or None on loopback without a secret. Raises `ConfigError` where
    there is no secret and `host` isn't loopback."""
    secret = os.environ.get(SECRET_VARIABLE)
    if secret is None and not host.startswith("127."):
        raise ConfigError(f"a worker on {host} needs {SECRET_VARIABLE}: only loopback goes without authentication")
    return CurveKeys.from_secret(bytes.fromhex(secret)) if secret else None


def rank_layout(
    role: Role, spec: ModelSpec, config: Config, counts: Mapping[str, int], ranks: TensorParallelGroup
) -> tuple[Model, PoolSetLayout]:
    """The model, and the pool set of one of its ranks: all ranks have the same pages, each with its own heads and
    layers.

    `counts`: pages and slots that each pool can lease; the null page or slot comes on top.
    """
    model = model_for(spec, config.engine)
    options = replace(state_options(spec, config, role), shard=shard_for(role, config, ranks))
    return model, PoolSetLayout(model.pool_set(options), {pool: 1 + count for pool, count in counts.items()})


def shard_for(role: Role, config: Config, ranks: TensorParallelGroup, name: WorkerName | None = None) -> Shard:
    """The shard of one of a worker's ranks; of its state where no `name` says which of those it is that share their
    experts."""
    shard = Shard.of(ranks.rank, ranks.size, config.ep_for(role), config.pp_for(role))
    size = config.dp_for(role)
    return shard if name is None or size == 1 else replace(shard, dp_rank=dp_rank(name, size)[1], dp=size)


def host_tier(layout: PoolSetLayout, config: Config, role: Role, size: int) -> PoolSetLayout | None:
    """The layout of one rank's part of the host tier, of `size` ranks; None where the role has no host tier. All ranks
    have as many pages: those that the rank with the largest ones has room for."""
    host_bytes, spec = config.cache_for(role).host_bytes, layout.spec
    if not host_bytes:
        return None
    if spec.stages == 1:
        return host_layout(spec, host_bytes // size, layout.counts)
    shards = [spec.whole.shard(rank, size, spec.stages) for rank in range(size)]
    largest = max(shards, key=lambda shard: sum(map(shard.unit_bytes, shard.by_name)))
    counts = host_counts(largest, host_bytes // size, layout.counts)
    return PoolSetLayout(spec, counts, LayoutOrder.PAGE_FIRST)


def _manager(
    pools: PoolSet,
    device: Device,
    spec: ModelSpec,
    config: Config,
    role: Role,
    name: WorkerName,
    clock: Clock,
    waiter: Waiter,
    line: LeaderChannel | None,
    arenas: ArenaProvider | None,
    undo: ExitStack,
) -> KVCacheManager:
    """The KV cache manager over `pools`, with the tiers of the role's cache section. `undo` closes its storage."""
    cache = config.cache_for(role)
    size = 1 if line is None else line.size
    tier = host_tier(pools.layout, config, role, size)
    host: PoolSet | None = None
    arena: Arena | None = None
    fingerprint = worker_fingerprint(pools, spec, config, device)
    if tier is not None:
        memory, arena = host_memory(tier, device, arenas, 0, size, fingerprint)
        host = (
            PoolSet(tier.spec, tier.counts, memory, tier.order, "host")
            if line is None
            else TPPoolSet(tier, memory, line, HOST, "host")
        )
        if arena is not None and isinstance(host, TPPoolSet):
            host.on_copy = arena.count_copy
    backend = make_backend(cache.storage) if host is not None else None
    storage = ThreadedIoQueue(backend, wake=waiter.wake, clock=clock) if backend is not None else None
    if storage is not None:
        undo.callback(storage.close, 1.0)
    page_store: PageStore | None = None
    if storage is not None and isinstance(host, TPPoolSet) and line is not None:
        page_store = TPPageStore(RankPageStore(storage, host, fingerprint, 0, size), host, line)
    keys = config.security.curve_key
    return KVCacheManager(
        pools,
        device,
        cache,
        clock.now,
        below=LowerTiers(host, storage, page_store, fingerprint, arena),
        events=EventSource(rank=event_rank(role, name), curve=read_curve_pair(Path(keys)) if keys else None),
        stride=stride(config, role),
    )


def event_rank(role: Role, name: WorkerName) -> int:
    """The number that is added to the port of `cache.events.endpoint`: no two workers of a cluster have the same."""
    kind, _, index = name.rpartition("-")
    # By the role in the worker's name, which stays when its role is changed.
    decodes = kind == Role.DECODE if kind in PAIR else role is Role.DECODE
    return 2 * (int(index) if index.isdigit() else 0) + decodes


def worker_fingerprint(pools: PoolSet, spec: ModelSpec, config: Config, device: Device) -> str:
    """Digest, in hex, of all that state in storage and arenas depends on besides its tokens: model, layout of the whole
    worker, and numerics. Under ``fast`` the numerics class is left out: state of another class is as good."""
    invariant = config.engine.numerics == "invariant"
    computed = [config.engine.numerics, *([numerics_class_of(config, spec, device)] if invariant else [])]
    described = json.dumps([weights_digest(spec, config), describe_spec(pools.spec.whole), *computed], sort_keys=True)
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


def weights_digest(spec: ModelSpec, config: Config) -> str:
    """`ModelSpec.fingerprint`, and how the weights were quantised when they were loaded: other numbers than the
    checkpoint's. Expanded, they are the same up to rounding, which the numerics class tells. Whose modules compute with
    them is in it, too, since keys may lie in another order in transformers' than in those of this package. Of weights
    that were put in place of the checkpoint's also which change they came with: what was computed before it is of no
    use after it, even where the numbers are the same."""
    quantised = [config.engine.weights] if config.engine.weights in {"int8", "int4"} else []
    computed = [config.engine.models] if config.engine.models != "native" else []
    changed = [spec.weights.serial] if spec.weights is not None else []
    return "-".join((spec.fingerprint, *quantised, *computed, *changed))


def check_weights(mine: str, theirs: Sequence[str]) -> None:
    """Check that all ranks of a worker have loaded the same weights, each from the files of its own node. `theirs`:
    digests (`weights_digest`) of the ranks from 1 on. Raises `ConfigError`."""
    for rank, digest in enumerate(theirs, 1):
        if digest != mine:
            raise ConfigError(
                f"rank {rank} of this worker has other weights ({digest[:16]}) than rank 0 ({mine[:16]}): the model's "
                "files differ between their nodes"
            )


log = logging.getLogger("twinpool.arena")


def host_memory(
    tier: PoolSetLayout, device: Device, arenas: ArenaProvider | None, rank: int, size: int, fingerprint: str
) -> tuple[torch.Tensor, Arena | None]:
    """Memory for a rank's part of the host tier, uint8 [tier.nbytes], and the arena that it lies in.

    `fingerprint` is `worker_fingerprint`: all that state depends on besides its tokens. An arena with another one, or
    of another rank or number of ranks or stages, is not taken over. Without an arena, memory comes from `device`, and
    None.
    """
    named = f"{fingerprint}/{rank}/{size}" + (f"/{tier.spec.stages}" if tier.spec.stages > 1 else "")
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
