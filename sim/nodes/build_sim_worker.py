"""The building of a simulated worker, and the world that all processes of a run share."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, cast

from twinpool.cache.arena.arena import Arena, arena_bytes
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import DEVICE, HOST, Device
from twinpool.cache.manager.kv_cache_manager import EventSource, KVCacheManager
from twinpool.cache.manager.tier_set import LowerTiers
from twinpool.cache.memory.memory_layout import PoolSetLayout
from twinpool.cache.pool.pool_set import PoolSet, host_layout
from twinpool.cache.pool.tp_ranks import FollowerPools, FollowerSteps, TPDevice, TPPoolSet
from twinpool.cache.storage.io_queue import InlineIoQueue
from twinpool.cache.storage.page_store import FollowerPageStore, RankPageStore, TPPageStore
from twinpool.cluster.assembly.build_parts import take_over
from twinpool.cluster.assembly.memory_plan import plan_memory, stride
from twinpool.cluster.ranks import LeaderChannel
from twinpool.colocate import decode_class_for
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import Worker
from twinpool.contracts.messages.fingerprint import numerics_class
from twinpool.contracts.messages.leases import LeaseGrant
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerStatus
from twinpool.contracts.sampling_params import AdapterRef
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.engine.tensors.adapters import AdapterStore, AdapterWeights
from twinpool.prefill.worker import PrefillWorker
from twinpool.sim.fabric.hash_answers import SimGrammars
from twinpool.sim.fabric.hash_engine import HashEngine, SimDrafter
from twinpool.sim.fabric.plane_faults import StoreFaults, WireDamage
from twinpool.sim.fabric.sim_network import SimControlTransport, SimSwitch
from twinpool.sim.fabric.sim_plane import SimPlane
from twinpool.sim.fabric.sim_storage import SimArenas, SimQueue, SimStore
from twinpool.sim.fabric.virtual_time import SimProcess, VirtualTime
from twinpool.sim.nodes.sim_ranks import SimFollowers, SimRank
from twinpool.sim.scenario.scenario import CONTEXT, ClusterShape, pool_set
from twinpool.transfer.planes.data_plane import DataPlane
from twinpool.transfer.planes.tp_plane import FollowerLinks, TPDataPlane
from twinpool.transfer.rooms.peers import RoomEnd, fingerprint
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.transfer.rooms.sender.kv_sender import KVSender
from twinpool.worker.worker_loop import WorkerSetup

IDLE_S = 0.1
"""Seconds that an idle worker waits at most, as `WorkerThread`'s `idle_s`."""
FINGERPRINT = "simulated"
SPINS = 2000


class LeaseHome(Protocol):
    """The controller as a worker's process sees it."""

    def register(self, record: WorkerRecord, answer: Callable[[LeaseGrant], None]) -> None: ...

    def renew(
        self,
        process: SimProcess,
        name: WorkerName,
        incarnation: Incarnation,
        status: WorkerStatus,
        answer: Callable[[LeaseGrant], None],
    ) -> None: ...

    def leave(self, process: SimProcess, name: WorkerName, incarnation: Incarnation) -> None: ...

    def new_process(self, label: str, node: str) -> SimProcess:
        """Make another process on `node`, for a rank."""


@dataclass(frozen=True)
class SimWorld:
    """The objects that all processes of a run share."""

    agenda: VirtualTime
    rng: random.Random
    shape: ClusterShape
    config: Config
    exchange: SimSwitch
    planes: dict[int, SimPlane]
    damage: WireDamage
    store_faults: StoreFaults
    arenas: SimArenas
    store: SimStore | None
    say: Callable[[str, str], None]
    """Writes a line of the log: the process, and the text."""
    violated: Callable[[str], None]


class SimSleep:
    """Implements `worker.worker_loop.Sleeper`: instead of sleeping, notes for how long its worker would."""

    def __init__(self) -> None:
        self.asked: float | None = None
        self.on_wake: Callable[[], None] = lambda: None

    def wait(self, timeout_s: float) -> None:
        self.asked = timeout_s

    def wake(self) -> None:
        self.on_wake()

    def close(self) -> None:
        self.on_wake = lambda: None


class SimAdapters:
    """Implements `engine.tensors.adapters.AdapterReader`: files take a while to be read."""

    def __init__(self, process: SimProcess, rng: random.Random, wake: Callable[[], None]) -> None:
        self._process, self._rng, self._wake = process, rng, wake

    def read(self, ref: AdapterRef) -> Future[AdapterWeights]:
        found = Future[AdapterWeights]()

        def done() -> None:
            found.set_result(AdapterWeights({}))
            self._wake()

        self._process.later(self._rng.expovariate(5.0), done)
        return found

    def close(self) -> None:
        """Nothing is waited for."""


@dataclass(frozen=True)
class BuiltWorker:
    """A worker, and the parts of it that are checked at the end of a run."""

    worker: Worker
    manager: KVCacheManager
    plane: SimPlane
    engine: HashEngine
    followers: SimFollowers | None = None
    receiver: KVReceiver | None = None


def build(
    world: SimWorld,
    process: SimProcess,
    role: Role,
    name: WorkerName,
    incarnation: Incarnation,
    sleep: SimSleep,
    home: LeaseHome,
) -> BuiltWorker:
    """Build a worker of production parts with a `HashEngine`, over simulated planes and storage."""
    shape, config, agenda = world.shape, world.config, world.agenda
    cache, size = config.cache_for(role), config.ranks_for(role)
    device: Device = AdversarialDevice(world.rng.randrange(1 << 30)) if shape.adversarial else CpuDevice()
    spec = pool_set(shape.pools, shape.page_tokens)
    memory = plan_memory(spec, config, role, CONTEXT, 1 << 40)
    assert memory is not None, "a plan draws sizes that fit"
    layouts = [
        PoolSetLayout(spec.shard(rank, size), {pool: 1 + count for pool, count in memory.counts.items()})
        for rank in range(size)
    ]
    own = _plane(world, process, sleep.wake, 0, size)
    region = own.allocate("pages", layouts[0].nbytes)
    followers: SimFollowers | None = None
    plane: DataPlane = own
    if size == 1:
        pools = PoolSet(spec, layouts[0].counts, region)
    else:
        followers = SimFollowers(agenda, process, world.rng, sleep.wake)
        for rank in range(1, size):
            mine = home.new_process(f"{name}.rank{rank}#{incarnation}", process.node)
            followers.ranks.append(_rank(world, mine, role, layouts[rank], followers, rank, size))
        plane, pools = TPDataPlane(own, followers), TPPoolSet(layouts[0], region, followers, DEVICE)
        device = TPDevice(device, followers)
    manager = _manager(world, process, role, pools, layouts[0], device, followers, sleep)
    ranks = followers.ranks if followers is not None else []
    together = followers.catch_up if followers is not None else lambda: None
    stepped = followers.stepped if followers is not None else lambda: None
    hashing = HashEngine(pools, device, [rank.pools for rank in ranks], together, stepped)
    engine = cast(ModelRunner, hashing)
    take_over(manager, cast(LeaderChannel | None, followers))
    transport = SimControlTransport(world.exchange, process, sleep.wake)
    common_to_all = fingerprint(FINGERPRINT, spec, numerics_class(config.engine.numerics, "hashing"))
    others = [(rank.process.pid, 1, rank.process.node) for rank in ranks]
    end = RoomEnd(name, incarnation, common_to_all, plane, pools, device, config.transfer, transport, agenda)
    sender = KVSender(end, others)
    setup = WorkerSetup(
        name, incarnation, config, engine, manager, sender, sleep, CONTEXT, agenda, lambda s: None, SimGrammars()
    )
    if config.adapters.used:
        reader = SimAdapters(process, world.rng, sleep.wake)
        hashing.adapters = AdapterStore(config.adapters.max_loaded, reader)
        setup = replace(setup, adapters=hashing.adapters)
    if role is Role.PREFILL:
        return BuiltWorker(PrefillWorker(setup), manager, own, hashing, followers)
    receiver = KVReceiver(end, config.decode.metadata_slots, verify=cache.verify)
    drafter = SimDrafter(spec, world.rng.randrange(1 << 30) if config.decode.drafts else 0)
    decode = decode_class_for(role, config)(replace(setup, receiver=receiver), drafter)
    return BuiltWorker(decode, manager, own, hashing, followers, receiver)


def _manager(
    world: SimWorld,
    process: SimProcess,
    role: Role,
    pools: PoolSet,
    layout: PoolSetLayout,
    device: Device,
    followers: SimFollowers | None,
    sleep: SimSleep,
) -> KVCacheManager:
    """The KV cache manager of the leader, with the tiers that the role's configuration and the plan have."""
    config, agenda = world.config, world.agenda
    size = config.ranks_for(role)
    host, arena = _host_tier(world, process, role, layout, device, 0, size, followers)
    queue: InlineIoQueue | None = None
    page_store: TPPageStore | None = None
    if host is not None and world.store is not None:
        queue = SimQueue(world.store, process, sleep.wake).queue
        if followers is not None and isinstance(host, TPPoolSet):
            page_store = TPPageStore(RankPageStore(queue, host, FINGERPRINT, 0, size), host, followers)
    return KVCacheManager(
        pools,
        device,
        config.cache_for(role),
        agenda.now,
        below=LowerTiers(host, queue, page_store, FINGERPRINT, arena),
        events=EventSource(agenda.now),
        stride=stride(config, role),
    )


def _plane(world: SimWorld, process: SimProcess, wake: Callable[[], None], rank: int, size: int) -> SimPlane:
    network = world.exchange.network
    return SimPlane(
        world.shape.plane, network, process, world.planes, world.rng, world.damage, wake, rank, size, world.store_faults
    )


def _rank(
    world: SimWorld,
    process: SimProcess,
    role: Role,
    layout: PoolSetLayout,
    followers: SimFollowers,
    rank: int,
    size: int,
) -> SimRank:
    """Build a follower, as `cluster.assembly.build_worker` does."""
    world.exchange.processes[process.pid] = process

    def wake() -> None:
        followers.turn(rank)

    plane = _plane(world, process, wake, rank, size)
    pools = PoolSet(layout.spec, layout.counts, plane.allocate("pages", layout.nbytes))
    plane.register(pools, None)
    places = {DEVICE: pools}
    host, arena = _host_tier(world, process, role, layout, CpuDevice(), rank, size, None)
    storage: FollowerPageStore | None = None
    if host is not None:
        places[HOST] = host
        if world.store is not None:
            page_store = RankPageStore(SimQueue(world.store, process, wake).queue, host, FINGERPRINT, rank, size)
            storage = FollowerPageStore(page_store)
    state = FollowerPools(places, size, lambda place: arena.count_copy() if arena and place == HOST else None)
    steps = FollowerSteps(CpuDevice(), pools.gates)
    return SimRank(rank, process, pools, state, steps, FollowerLinks(plane, steps), storage, arena)


def _host_tier(
    world: SimWorld,
    process: SimProcess,
    role: Role,
    layout: PoolSetLayout,
    device: Device,
    rank: int,
    size: int,
    followers: SimFollowers | None,
) -> tuple[PoolSet | None, Arena | None]:
    """Build a rank's host tier, in an arena where one is free; the leader's spans its `followers`."""
    cache = world.config.cache_for(role)
    if not cache.host_bytes:
        return None, None
    tier = host_layout(layout.spec, cache.host_bytes // size, layout.counts)
    memory = world.arenas.take(process, arena_bytes(tier)) if cache.arena == "auto" else None
    arena = Arena(memory, tier, f"{FINGERPRINT}/{rank}/{size}") if memory is not None else None
    region = arena.region if arena is not None else device.allocate_host(tier.nbytes)
    if followers is None:
        return PoolSet(tier.spec, tier.counts, region, tier.order, "host"), arena
    host = TPPoolSet(tier, region, followers, HOST, "host")
    if arena is not None:
        host.on_copy = arena.count_copy
    return host, arena
