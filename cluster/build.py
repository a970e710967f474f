"""Builds a worker from its parts: checkpoint, pools, engine, data plane, rooms. The one place where they meet."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cache.arena import Arena
from cache.device import DEVICE, HOST, Device, make_device
from cache.moves import describe_spec
from cache.pools import PoolSet, host_layout
from cache.ranked import RankedPools, RankState
from cache.ranked_shelf import RankedShelf, RankStorage
from cache.registry import PoolSetLayout
from cache.seat import Seat
from cache.shelf import RankShelf, Shelf
from cache.storage import StorageQueue, make_backend
from cluster.arena import Arenas
from cluster.crew import Crew
from cluster.host_memory import host_memory, take_over
from cluster.memory import state_options, stride
from cluster.rank_line import RankLine
from contracts.access import SECRET_VARIABLE
from contracts.clock import Clock, SystemClock
from contracts.config import Config
from contracts.errors import ConfigError
from contracts.fingerprint import numerics_class
from contracts.ids import Incarnation, Role, WorkerName
from contracts.model import ModelSpec
from contracts.orders import Ready
from contracts.ports import Worker
from decode import DecodeWorker
from engine import Engine, Model, dtype_for, load_engine, model_for
from engine.engine import class_of, hold_to_class
from engine.ranks import ALONE, Ranks
from engine.shard import Shard
from prefill import PrefillWorker
from transfer import Curve, make_plane
from transfer.agreement import fingerprint as fingerprint_of
from transfer.control import ZmqCarrier
from transfer.plane import Plane
from transfer.ranked import RankedPlane, RankLinks
from transfer.receiver import ReceiverEnd
from transfer.sender import SenderEnd
from transfer.waiting import Waiter


@dataclass(frozen=True)
class Parts:
    """What both kinds of worker are made of."""

    spec: ModelSpec
    config: Config
    device: Device
    waiter: Waiter
    plane: Plane
    seat: Seat
    engine: Engine
    curve: Curve | None


def build_worker(
    role: Role,
    name: WorkerName,
    incarnation: Incarnation,
    spec: ModelSpec,
    config: Config,
    *,
    host: str,
    counts: Mapping[str, int],
    clock: Clock | None = None,
    device: Device | None = None,
    crew: Crew | None = None,
    arenas: Arenas | None = None,
) -> Worker:
    """Load the model and open the worker's sockets on `host`. Everything is released when a part can't be built.

    `counts` are the pages and slots that each of its pools can lease (`cluster.memory`). `device` is where it runs, if
    not where the config says. `crew`: the other ranks, where the worker has several; this is their leader, and whoever
    gives the crew closes it. `arenas`: where the host tier lies, if it is to outlive the worker; what an earlier
    incarnation left there is taken over. Raises `CheckpointError`, `ConfigError`, or `PeerDead` for a rank that could
    not start.
    """
    clock = clock or SystemClock()
    p = _parts(role, name, spec, config, host, counts, device, clock, crew, arenas)
    transfer = config.transfer
    carrier = ZmqCarrier(host, p.waiter, p.curve, transfer.link_timeout_s, transfer.control_frame_bytes)
    common = fingerprint_of(spec.fingerprint, p.seat.pools.spec, _numerics(p))
    sender = SenderEnd(
        name, incarnation, common, p.plane, p.seat.pools, p.device, config.transfer,
        carrier=carrier, clock=clock, others=crew.line.processes if crew else (),
    )  # fmt: skip
    if role is Role.PREFILL:
        return PrefillWorker(
            name, incarnation, config, p.engine, p.seat, sender, p.waiter,
            context=spec.context, clock=clock, pause=time.sleep,
        )  # fmt: skip
    # After the sender: the plane registers the metadata slots with the reader's end, which has them.
    receiver = ReceiverEnd(
        name, incarnation, common, p.plane, p.seat.pools, config.decode.metadata_slots, config.transfer,
        verify=config.cache_for(role).verify, carrier=carrier, clock=clock,
    )  # fmt: skip
    for socket in p.plane.waitable:
        p.waiter.add(socket)
    return DecodeWorker(
        name, incarnation, config, p.engine, p.seat, receiver, p.waiter,
        sender=sender, context=spec.context, clock=clock, pause=time.sleep,
    )  # fmt: skip


def _parts(
    role: Role,
    name: WorkerName,
    spec: ModelSpec,
    config: Config,
    host: str,
    counts: Mapping[str, int],
    device: Device | None,
    clock: Clock,
    crew: Crew | None,
    arenas: Arenas | None,
) -> Parts:
    hold_to_class(config.engine)
    curve = _curve(host)
    if config.engine.device == "cuda":
        raise ConfigError("engine.device=cuda: data planes register host memory only as yet; use engine.device=cpu")
    if (config.tp_for(role) > 1) != (crew is not None):
        raise ConfigError(f"{role}.tp={config.tp_for(role)} needs a process for each rank")
    device = device or make_device("cpu")
    waiter = Waiter()
    ranks, line = (ALONE, None) if crew is None else (crew.ranks, crew.line)
    own = make_plane(config, host, curve, waiter.wake, ranks.rank, ranks.size)
    plane: Plane = own if line is None else RankedPlane(own, line)
    try:
        model, layout = rank_layout(role, spec, config, counts, ranks)
        region = plane.allocate("pages", layout.nbytes)
        pools = PoolSet(layout.spec, layout.counts, region) if line is None else RankedPools(
            layout, region, line, DEVICE
        )  # fmt: skip
        if line is not None:
            waiter.add(line.socket)
        seat = _seat(pools, device, spec, config, role, name, clock, waiter, line, arenas)
        epochs = {pool: allocator.epochs for pool, allocator in pools.allocators.items()}
        engine = load_engine(model, config.engine, layout.spec, pools.gates, epochs, device, ranks, line)
        if line is not None:
            line.ask(Ready(), config.cluster.start_timeout_s).wait()
        take_over(seat, line)
    except BaseException:
        plane.close()
        waiter.close()
        raise
    return Parts(spec, config, device, waiter, plane, seat, engine, curve)


def _numerics(parts: Parts) -> str:
    """The worker's numerics class: how it computes, and with what."""
    config = parts.config.engine
    return numerics_class(config.numerics, _class(parts.config, parts.spec, parts.device))


def _class(config: Config, spec: ModelSpec, device: Device) -> str:
    return class_of(config.engine, dtype_for(spec, config.engine), device.torch_device)


def _curve(host: str) -> Curve | None:
    """The cluster's keys. Raises `ConfigError` where there are none and `host` isn't loopback."""
    secret = os.environ.get(SECRET_VARIABLE)
    if secret is None and not host.startswith("127."):
        raise ConfigError(f"a worker on {host} needs {SECRET_VARIABLE}: only loopback goes without authentication")
    return Curve.from_secret(bytes.fromhex(secret)) if secret else None


def rank_layout(
    role: Role, spec: ModelSpec, config: Config, counts: Mapping[str, int], ranks: Ranks
) -> tuple[Model, PoolSetLayout]:
    """The model, and what one of its ranks holds: every rank works out the same pages, each of its own heads."""
    model = model_for(spec)
    options = replace(state_options(spec, config, role), shard=Shard(ranks.rank, ranks.size))
    return model, PoolSetLayout(model.pool_set(options), {pool: 1 + count for pool, count in counts.items()})


def host_tier(layout: PoolSetLayout, config: Config, role: Role, size: int) -> PoolSetLayout | None:
    """How a rank's part of the host tier lies; None where there is none."""
    host_bytes = config.cache_for(role).host_bytes
    return host_layout(layout.spec, host_bytes // size, layout.counts) if host_bytes else None


@dataclass(frozen=True)
class RankParts:
    """What a follower is made of."""

    state: RankState
    links: RankLinks
    engine: Engine
    storage: RankStorage | None
    waiter: Waiter
    arena: Arena | None

    def close(self) -> None:
        if self.storage is not None:
            self.storage.close(1.0)
        self.links.close()
        self.waiter.close()


def build_rank(
    role: Role,
    spec: ModelSpec,
    config: Config,
    *,
    host: str,
    counts: Mapping[str, int],
    ranks: Ranks,
    arenas: Arenas | None = None,
) -> RankParts:
    """Build what a follower needs to carry out its leader's orders. Raises what `build_worker` does."""
    hold_to_class(config.engine)
    device = make_device("cpu")
    waiter = Waiter()
    plane = make_plane(config, host, _curve(host), waiter.wake, ranks.rank, ranks.size)
    storage: RankStorage | None = None
    arena: Arena | None = None
    try:
        model, layout = rank_layout(role, spec, config, counts, ranks)
        pools = PoolSet(layout.spec, layout.counts, plane.allocate("pages", layout.nbytes))
        plane.register(pools, None)
        places = {DEVICE: pools}
        tier = host_tier(layout, config, role, ranks.size)
        if tier is not None:
            named = _fingerprint(pools, spec, config, device)
            memory, arena = host_memory(tier, device, arenas, ranks.rank, ranks.size, named)
            mirror = PoolSet(tier.spec, tier.counts, memory, tier.order, "host")
            places[HOST] = mirror
            backend = make_backend(config.cache_for(role).storage)
            if backend is not None:
                queue = StorageQueue(backend, wake=waiter.wake)
                storage = RankStorage(RankShelf(queue, mirror, named, ranks.rank, ranks.size))
        epochs = {pool: allocator.epochs for pool, allocator in pools.allocators.items()}
        engine = load_engine(model, config.engine, layout.spec, pools.gates, epochs, device, ranks)
    except BaseException:
        plane.close()
        waiter.close()
        raise
    for socket in plane.waitable:
        waiter.add(socket)
    state = RankState(places, ranks.size, lambda place: arena.count_copy() if arena and place == HOST else None)
    return RankParts(state, RankLinks(plane), engine, storage, waiter, arena)


def _seat(
    pools: PoolSet,
    device: Device,
    spec: ModelSpec,
    config: Config,
    role: Role,
    name: WorkerName,
    clock: Clock,
    waiter: Waiter,
    line: RankLine | None,
    arenas: Arenas | None,
) -> Seat:
    """The pool set with its tiers, as the role's cache section has them."""
    cache = config.cache_for(role)
    size = 1 if line is None else line.size
    tier = host_tier(pools.layout, config, role, size)
    host: PoolSet | None = None
    arena: Arena | None = None
    fingerprint = _fingerprint(pools, spec, config, device)
    if tier is not None:
        memory, arena = host_memory(tier, device, arenas, 0, size, fingerprint)
        host = PoolSet(tier.spec, tier.counts, memory, tier.order, "host") if line is None else RankedPools(
            tier, memory, line, HOST, "host"
        )  # fmt: skip
        if arena is not None and isinstance(host, RankedPools):
            host.on_copy = arena.count_copy
    backend = make_backend(cache.storage) if host is not None else None
    storage = StorageQueue(backend, wake=waiter.wake, clock=clock) if backend is not None else None
    shelf: Shelf | None = None
    if storage is not None and isinstance(host, RankedPools) and line is not None:
        shelf = RankedShelf(RankShelf(storage, host, fingerprint, 0, size), host, line)
    return Seat(
        pools, device, cache, clock.now,
        host=host, storage=storage, shelf=shelf, fingerprint=fingerprint, rank=_event_rank(role, name),
        stride=stride(config, role), arena=arena,
    )  # fmt: skip


def _event_rank(role: Role, name: WorkerName) -> int:
    """What is added to the port of `cache.events`, so that no two workers of a host want the same."""
    kind, _, index = name.rpartition("-")
    # By its name, which it keeps when its role is changed.
    decodes = kind == Role.DECODE if kind in list(Role) else role is Role.DECODE
    return 2 * (int(index) if index.isdigit() else 0) + decodes


def _fingerprint(pools: PoolSet, spec: ModelSpec, config: Config, device: Device) -> str:
    """What state on storage depends on besides its tokens: the model, the whole layout, and how it was computed. Under
    ``fast`` what another class computed is as good."""
    invariant = config.engine.numerics == "invariant"
    computed = [config.engine.numerics, *([_class(config, spec, device)] if invariant else [])]
    described = json.dumps([spec.fingerprint, describe_spec(pools.spec.whole), *computed], sort_keys=True)
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()
