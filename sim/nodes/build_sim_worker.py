"""The building of a simulated worker, and the world that all processes of a run share."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast

from twinpool.cache.arena.arena import Arena, arena_bytes
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import DEVICE, HOST, Device
from twinpool.cache.manager.kv_cache_manager import EventSource, KVCacheManager
from twinpool.cache.manager.tier_set import LowerTiers
from twinpool.cache.memory.kv_cache_spec import PoolSetLayout
from twinpool.cache.pool.pool_set import PoolSet, host_layout
from twinpool.cache.pool.tp_ranks import FollowerPools, FollowerSteps, TPDevice, TPPoolSet
from twinpool.cache.storage.page_store import FollowerPageStore, RankPageStore, TPPageStore
from twinpool.cluster.assembly.build_parts import take_over, weights_digest
from twinpool.cluster.assembly.memory_plan import plan_memory, stride
from twinpool.cluster.controller.controller_actions import StartWorker
from twinpool.cluster.controller.weights_changes import DIGEST_CHARS
from twinpool.cluster.ranks import LeaderChannel
from twinpool.colocate import decode_class_for
from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import Incarnation, RequestId, Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import Worker
from twinpool.contracts.messages.fingerprint import numerics_class
from twinpool.contracts.messages.leases import DepartureAnswer, LeaseGrant
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerStatus
from twinpool.contracts.sampling_params import AdapterRef, WeightsVersion
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.engine.tensors.adapters import AdapterStore, AdapterWeights
from twinpool.prefill.worker import PrefillWorker
from twinpool.sim.fabric.hash_answers import VOCABULARY, SimGrammars
from twinpool.sim.fabric.hash_engine import HashEngine, SimDrafter
from twinpool.sim.fabric.plane_faults import StoreFaults, WireDamage
from twinpool.sim.fabric.sim_network import SimControlTransport, SimSwitch
from twinpool.sim.fabric.sim_plane import SimPlane
from twinpool.sim.fabric.sim_storage import SimArenas, SimQueue, SimStore
from twinpool.sim.fabric.virtual_time import SimProcess, VirtualLoop, VirtualTime
from twinpool.sim.nodes.sim_ranks import SimFollowers, SimRank
from twinpool.sim.scenario.scenario import (
    CONTEXT,
    FOLDERS,
    UNLIKE,
    UNREADABLE,
    ClusterShape,
    digest_of,
    pool_set,
    version_of,
)
from twinpool.transfer.planes.data_plane import DataPlane
from twinpool.transfer.planes.tp_plane import FollowerLinks, TPDataPlane
from twinpool.transfer.rooms.peers import RoomEnd, fingerprint
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.transfer.rooms.sender.kv_sender import KVSender
from twinpool.worker.worker_loop import WorkerSetup

IDLE_S = 0.1
"""Seconds that an idle worker waits at most, as `WorkerThread`'s `idle_s`."""
MODEL = ModelSpec(
    Path("/simulated"), "simulated", "Simulated", VOCABULARY, 1, CONTEXT, "float32", None, (), "simulated",
    config=JsonFields(Path("/simulated/config.json"), {}), headers={},
)  # fmt: skip
"""The checkpoint of the first model, of which nothing but the digest counts."""
SPINS = 2000


def spec_of(model: str) -> ModelSpec:
    """The checkpoint of a model; empty: of the first."""
    return replace(MODEL, name=model, fingerprint=f"{MODEL.fingerprint}-{model}") if model else MODEL


def content_of(model: str, digest: str) -> str:
    """What the engine computes with: a model's own weights, or others in their place, by their digest. Empty: the first
    model's own."""
    return f"{model} {digest}" if model else digest


def versions_of(model: str) -> dict[str, str]:
    """All weights that a model's cluster may serve, by the versions by which clients are told of them."""
    folders = (*FOLDERS, UNREADABLE, UNLIKE)
    digests = [digest_of(path, number) for path in folders for number in (0, 1) if (path, number) != (UNREADABLE, 1)]
    named = {version_of(path): digest_of(path) for path in FOLDERS}
    found = {spec_of(model).fingerprint: ""} | {digest[:DIGEST_CHARS]: digest for digest in digests} | named
    return {version: content_of(model, digest) for version, digest in found.items()}


def model_with(weights: WeightsVersion | None, model: str = "") -> ModelSpec:
    """The model with these weights in place of the checkpoint's, as `contracts.checkpoint.model_spec.with_weights`
    names it."""
    spec = spec_of(model)
    if weights is None or not weights.path:
        return replace(spec, weights=weights)
    return replace(spec, fingerprint=f"{spec.fingerprint}-{weights.digest[:32]}", weights=weights)


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

    def leave(
        self,
        process: SimProcess,
        name: WorkerName,
        incarnation: Incarnation,
        closed: bool,
        answer: Callable[[DepartureAnswer], None],
    ) -> None: ...

    def new_process(self, label: str, node: str) -> SimProcess:
        """Make another process on `node`, for a rank."""


@dataclass(frozen=True)
class SimWorld:
    """The objects that all processes of one model's cluster share. Time, network, storage and nodes are those of all
    models."""

    agenda: VirtualTime
    rng: random.Random
    shape: ClusterShape
    config: Config
    exchange: SimSwitch
    planes: dict[str, SimPlane]
    damage: WireDamage
    store_faults: StoreFaults
    arenas: SimArenas
    store: SimStore | None
    say: Callable[[str, str], None]
    """Writes a line of the log: the process, and the text."""
    violated: Callable[[str], None]
    background: frozenset[tuple[int, int]] = frozenset()
    """Background requests, by seed and choice."""
    model: str = ""
    """The model; empty: the first."""
    place: int = 0
    """Its place among the models."""
    foreign: Callable[[RequestId], bool] = lambda request_id: False
    """Whether a request is another model's."""
    loop: VirtualLoop | None = None
    """What routers wait on for a cluster that sleeps until there are requests; None: nothing of the run does."""


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
    storage: SimQueue | None = None


def build(world: SimWorld, process: SimProcess, start: StartWorker, sleep: SimSleep, home: LeaseHome) -> BuiltWorker:
    """Build a worker of production parts with a `HashEngine`, over simulated planes and storage."""
    role, name, incarnation = start.role, start.name, start.incarnation
    shape, config, agenda = world.shape, world.config, world.agenda
    named = weights_digest(model_with(start.weights, world.model), config)
    weights = content_of(world.model, start.weights.digest if start.weights else "")
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
            followers.ranks.append(_rank(world, mine, role, layouts[rank], followers, rank, named))
        plane, pools = TPDataPlane(own, followers), TPPoolSet(layouts[0], region, followers, DEVICE)
        device = TPDevice(device, followers)
    queue = SimQueue(world.store, process, sleep.wake) if cache.host_bytes and world.store is not None else None
    manager = _manager(world, process, role, pools, layouts[0], device, followers, queue, named)
    ranks = followers.ranks if followers is not None else []
    together = followers.catch_up if followers is not None else lambda: None
    stepped = followers.stepped if followers is not None else lambda: None
    hashing = HashEngine(pools, device, [rank.pools for rank in ranks], together, stepped, weights)
    engine = cast(ModelRunner, hashing)
    take_over(manager, cast(LeaderChannel | None, followers))
    transport = SimControlTransport(world.exchange, process, sleep.wake)
    common_to_all = fingerprint(named, spec, numerics_class(config.engine.numerics, "hashing"))
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
        return BuiltWorker(PrefillWorker(setup), manager, own, hashing, followers, storage=queue)
    receiver = KVReceiver(end, config.decode.metadata_slots, verify=cache.verify)
    drafter = SimDrafter(spec, world.rng.randrange(1 << 30) if config.decode.drafts else 0, weights)
    decode = decode_class_for(role, config)(replace(setup, receiver=receiver), drafter)
    return BuiltWorker(decode, manager, own, hashing, followers, receiver, queue)


def _manager(
    world: SimWorld,
    process: SimProcess,
    role: Role,
    pools: PoolSet,
    layout: PoolSetLayout,
    device: Device,
    followers: SimFollowers | None,
    storage: SimQueue | None,
    named: str,
) -> KVCacheManager:
    """The KV cache manager of the leader, with the tiers that the role's configuration and the plan have. `named`: the
    digest of the weights, which state on lower tiers is kept under."""
    config, agenda = world.config, world.agenda
    size = config.ranks_for(role)
    host, arena = _host_tier(world, process, role, layout, device, 0, named, followers)
    queue = storage.queue if storage is not None else None
    page_store: TPPageStore | None = None
    if queue is not None and followers is not None and isinstance(host, TPPoolSet):
        page_store = TPPageStore(RankPageStore(queue, host, named, 0, size), host, followers)
    return KVCacheManager(
        pools,
        device,
        config.cache_for(role),
        agenda.now,
        below=LowerTiers(host, queue, page_store, named, arena),
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
    named: str,
) -> SimRank:
    """Build a follower, as `cluster.assembly.build_worker` does."""
    size = world.config.ranks_for(role)
    world.exchange.processes[process.pid] = process

    def wake() -> None:
        followers.turn(rank)

    plane = _plane(world, process, wake, rank, size)
    pools = PoolSet(layout.spec, layout.counts, plane.allocate("pages", layout.nbytes))
    plane.register(pools, None)
    places = {DEVICE: pools}
    host, arena = _host_tier(world, process, role, layout, CpuDevice(), rank, named, None)
    storage: FollowerPageStore | None = None
    if host is not None:
        places[HOST] = host
        if world.store is not None:
            page_store = RankPageStore(SimQueue(world.store, process, wake).queue, host, named, rank, size)
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
    named: str,
    followers: SimFollowers | None,
) -> tuple[PoolSet | None, Arena | None]:
    """Build a rank's host tier, in an arena where one is free; the leader's spans its `followers`."""
    cache, size = world.config.cache_for(role), world.config.ranks_for(role)
    if not cache.host_bytes:
        return None, None
    tier = host_layout(layout.spec, cache.host_bytes // size, layout.counts)
    memory = world.arenas.take(process, arena_bytes(tier)) if cache.arena == "auto" else None
    arena = Arena(memory, tier, f"{named}/{rank}/{size}") if memory is not None else None
    region = arena.region if arena is not None else device.allocate_host(tier.nbytes)
    if followers is None:
        return PoolSet(tier.spec, tier.counts, region, tier.order, "host"), arena
    host = TPPoolSet(tier, region, followers, HOST, "host")
    if arena is not None:
        host.on_copy = arena.count_copy
    return host, arena
