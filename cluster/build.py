"""Builds a worker from its parts: checkpoint, pools, engine, data plane, rooms. The one place where they meet."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass

from cache.device import Device, make_device
from cache.moves import describe_spec
from cache.pools import PoolSet, host_pools
from cache.registry import PoolSetLayout
from cache.seat import Seat
from cache.storage import StorageQueue, make_backend
from contracts.access import SECRET_VARIABLE
from contracts.clock import Clock, SystemClock
from contracts.config import Config
from contracts.errors import ConfigError
from contracts.ids import Incarnation, Role, WorkerName
from contracts.model import ModelSpec
from contracts.ports import Worker
from decode import DecodeWorker
from engine import Engine, StateOptions, dtype_for, load_engine, model_for
from prefill import PrefillWorker
from transfer import Curve, make_plane
from transfer.plane import Plane
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
    device_tokens: int,
    clock: Clock | None = None,
    device: Device | None = None,
) -> Worker:
    """Load the model and open the worker's sockets on `host`. Everything is released when a part can't be built.

    `device_tokens` is the number of positions that its pools hold. `device` is where it runs, if not where the config
    says. Raises `CheckpointError` or `ConfigError`.
    """
    clock = clock or SystemClock()
    p = _parts(role, name, spec, config, host, device_tokens, device, clock)
    if role is Role.PREFILL:
        sender = SenderEnd(
            name, incarnation, spec.fingerprint, p.plane, p.seat.pools, p.device, config.transfer,
            host=host, clock=clock, waiter=p.waiter, curve=p.curve,
        )  # fmt: skip
        return PrefillWorker(
            name, incarnation, config, p.engine, p.seat, sender, p.waiter,
            context=spec.context, clock=clock, pause=time.sleep,
        )  # fmt: skip
    receiver = ReceiverEnd(
        name, incarnation, spec.fingerprint, p.plane, p.seat.pools, config.decode.metadata_slots, config.transfer,
        verify=config.cache_for(role).verify, clock=clock, waiter=p.waiter, curve=p.curve,
    )  # fmt: skip
    return DecodeWorker(
        name, incarnation, config, p.engine, p.seat, receiver, p.waiter,
        context=spec.context, clock=clock, pause=time.sleep,
    )  # fmt: skip


def _parts(
    role: Role,
    name: WorkerName,
    spec: ModelSpec,
    config: Config,
    host: str,
    device_tokens: int,
    device: Device | None,
    clock: Clock,
) -> Parts:
    secret = os.environ.get(SECRET_VARIABLE)
    curve = Curve.from_secret(bytes.fromhex(secret)) if secret else None
    if curve is None and not host.startswith("127."):
        raise ConfigError(f"a worker on {host} needs {SECRET_VARIABLE}: only loopback goes without authentication")
    if config.engine.device == "cuda":
        raise ConfigError("engine.device=cuda: data planes register host memory only as yet; use engine.device=cpu")
    device = device or make_device("cpu")
    waiter = Waiter()
    plane = make_plane(config, host, curve, waiter.wake)
    try:
        page_tokens = config.cache_for(role).page_tokens
        model = model_for(spec)
        pool_set = model.pool_set(StateOptions(dtype_for(spec, config.engine), page_tokens))
        layout = PoolSetLayout(pool_set, pool_set.even(1 + -(-device_tokens // page_tokens)))
        pools = PoolSet(pool_set, layout.counts, plane.allocate("pages", layout.nbytes))
        seat = _seat(pools, device, spec, config, role, name, clock, waiter)
        epochs = {pool: allocator.epochs for pool, allocator in pools.allocators.items()}
        engine = load_engine(model, config.engine, pool_set, pools.gates, epochs, device)
    except BaseException:
        plane.close()
        waiter.close()
        raise
    return Parts(spec, config, device, waiter, plane, seat, engine, curve)


def _seat(
    pools: PoolSet,
    device: Device,
    spec: ModelSpec,
    config: Config,
    role: Role,
    name: WorkerName,
    clock: Clock,
    waiter: Waiter,
) -> Seat:
    """The pool set with its tiers, as the role's cache section has them."""
    cache = config.cache_for(role)
    host = host_pools(pools.spec, cache.host_bytes, device) if cache.host_bytes else None
    backend = make_backend(cache.storage) if host is not None else None
    storage = StorageQueue(backend, wake=waiter.wake, clock=clock) if backend is not None else None
    return Seat(
        pools, device, cache, clock.now,
        host=host, storage=storage, fingerprint=_fingerprint(pools, spec, config), rank=_event_rank(role, name),
    )  # fmt: skip


def _event_rank(role: Role, name: WorkerName) -> int:
    """What is added to the port of `cache.events`, so that no two workers of a host want the same."""
    index = name.rpartition("-")[2]
    return 2 * (int(index) if index.isdigit() else 0) + (role is Role.DECODE)


def _fingerprint(pools: PoolSet, spec: ModelSpec, config: Config) -> str:
    """What state on storage depends on besides its tokens: the model, the whole layout, and how it was computed."""
    described = json.dumps([spec.fingerprint, describe_spec(pools.spec.whole), config.engine.numerics], sort_keys=True)
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()
