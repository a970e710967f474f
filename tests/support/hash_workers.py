"""Workers on state of every kind: their tokens are a hash of the state that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from twinpool.cache.device.device_port import Device
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.manager.tier_set import LowerTiers
from twinpool.cache.memory.kv_cache_spec import PoolSetLayout, PoolSetSpec
from twinpool.cache.pool.pool_set import PoolSet, host_layout
from twinpool.cache.storage.backends.backend_factory import make_backend
from twinpool.cache.storage.io_queue import ThreadedIoQueue
from twinpool.cluster.assembly.memory_plan import stride
from twinpool.colocate import decode_class_for
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.worker import DecodeWorker
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.prefill.worker import PrefillWorker
from twinpool.sim.fabric import hash_answers
from twinpool.sim.fabric.hash_engine import HashEngine
from twinpool.transfer.net.zmq_channel import Waiter, ZmqControlTransport
from twinpool.transfer.planes.make_plane import make_plane
from twinpool.transfer.rooms.peers import RoomEnd, fingerprint
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.transfer.rooms.sender.kv_sender import KVSender
from twinpool.worker.worker_loop import WorkerSetup

CONTEXT = 400


def recite(spec: PoolSetSpec, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy answer of `count` tokens, without pools, pages or workers."""
    return list(hash_answers.recite(spec, tuple(prompt), SamplingParams(max_tokens=count, temperature=0.0)).tokens)


def hash_worker(
    role: Role, spec: PoolSetSpec, config: Config, count: int, clock: Clock, device: Device
) -> PrefillWorker | DecodeWorker:
    """A worker whose engine hashes what it reads; the rest is what a cluster runs. `count`: pages of each pool."""
    waiter, cache = Waiter(), config.cache_for(role)
    plane = make_plane(config, "127.0.0.1", None, waiter.wake)
    steps = stride(config, role)
    # Room for a few windows, not for one of each page: they are used again and again.
    windows = {p.name: min(count, 4 * spec.window_hold(p.name, steps)) for p in spec.pools if p.window_tokens}
    layout = PoolSetLayout(spec, spec.even(count) | windows)
    pools = PoolSet(spec, layout.counts, plane.allocate("pages", layout.nbytes))
    backend = make_backend(cache.storage)
    queue = ThreadedIoQueue(backend, wake=waiter.wake) if backend is not None else None
    host = None
    if cache.host_bytes:
        below = host_layout(spec, cache.host_bytes, layout.counts)
        host = PoolSet(spec, below.counts, device.allocate_host(below.nbytes), below.order, "host")
    manager = KVCacheManager(
        pools, device, cache, clock.now, below=LowerTiers(host, queue, fingerprint="hash"), stride=steps
    )
    engine = cast(ModelRunner, HashEngine(pools, device))
    transport = ZmqControlTransport("127.0.0.1", waiter, None)
    name, first = WorkerName(f"{role}-0"), Incarnation(1)
    common_to_all = fingerprint("hash", spec, "invariant:by hand")
    end = RoomEnd(name, first, common_to_all, plane, pools, device, config.transfer, transport, clock)
    sender = KVSender(end)
    setup = WorkerSetup(name, first, config, engine, manager, sender, waiter, CONTEXT, clock, lambda s: None)
    if role is Role.PREFILL:
        return PrefillWorker(setup)
    setup = replace(setup, receiver=KVReceiver(end, 16, verify=cache.verify))
    return decode_class_for(role, config)(setup)
