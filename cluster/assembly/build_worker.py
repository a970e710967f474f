"""Building a worker of one rank, the leading rank of a worker of several, or a follower, from its parts.

The parts (checkpoint, pools, engine, data plane, rooms) meet nowhere else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from twinpool.cache.arena.arena import Arena
from twinpool.cache.device.device_choice import make_device
from twinpool.cache.device.device_copies import settled
from twinpool.cache.device.device_port import DEVICE, HOST, Device
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.pool.tp_ranks import FollowerPools, FollowerSteps
from twinpool.cache.storage.backends.backend_factory import make_backend
from twinpool.cache.storage.io_queue import ThreadedIoQueue
from twinpool.cache.storage.page_store import FollowerPageStore, RankPageStore
from twinpool.cluster.arena.arena_client import ArenaProvider
from twinpool.cluster.assembly.build_parts import (
    WorkerParts,
    build_parts,
    curve_keys_for,
    host_memory,
    host_tier,
    numerics_class_of,
    rank_layout,
    shard_for,
    streams_beside,
    weights_digest,
    worker_fingerprint,
)
from twinpool.cluster.ranks import DataParallelRank, RankGroup
from twinpool.colocate import decode_class_for
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.tokenizer_files import read_tokenizer_files
from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.grammar import GRAMMAR_ENGINE
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import Worker
from twinpool.contracts.messages.fingerprint import numerics_class
from twinpool.decode.worker import DecodeWorker
from twinpool.engine.runner.graphs.step_graphs import Capture, CudaCapture, DraftedSteps
from twinpool.engine.runner.kernel_choice import hold_to_class
from twinpool.engine.runner.load_model import KeptModel, load_engine
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.engine.structured_output.grammar_engine import GrammarEngine
from twinpool.engine.tensors.adapters import AdapterFolders, AdapterStore
from twinpool.engine.tensors.tensor_parallel import TensorParallelGroup
from twinpool.prefill.worker import PrefillWorker
from twinpool.transfer.net.zmq_channel import Waiter, ZmqControlTransport
from twinpool.transfer.planes.make_plane import make_plane
from twinpool.transfer.planes.tp_plane import FollowerLinks
from twinpool.transfer.rooms.peers import RoomEnd
from twinpool.transfer.rooms.peers import fingerprint as fingerprint_of
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.transfer.rooms.sender.kv_sender import KVSender
from twinpool.worker.worker_loop import WorkerSetup

log = logging.getLogger("twinpool.engine")
_PART_OF_START = 0.4
"""The part of `cluster.start_timeout_s` in which graphs may be begun: weights were loaded before."""


def capture_steps(
    engine: ModelRunner, config: Config, context: int, make: Callable[[torch.device], Capture] = CudaCapture
) -> None:
    """Capture the steps of a worker with contexts of up to `context` positions, before it serves.

    With ``auto`` a worker whose steps can't be captured launches them kernel by kernel, and logs why; with ``on`` that
    is a `ConfigError`.
    """
    wanted, device = config.engine.graphs, engine.device.torch_device
    if wanted == "off":
        return
    if device.type != "cuda":
        if wanted == "on":
            raise ConfigError("engine.graphs=on needs a GPU: a CPU has nothing to capture; set engine.graphs=auto")
        return
    try:
        within_s = config.cluster.start_timeout_s * _PART_OF_START
        decode = config.decode
        drafted = DraftedSteps(decode.draft_requests, decode.drafts) if decode.drafts else None
        engine.capture(make(device), rows=decode.max_batch_tokens, context=context, within_s=within_s, drafted=drafted)
    except (ConfigError, RuntimeError) as error:
        if wanted == "on":
            raise ConfigError(f"engine.graphs=on: {error!s:.300}; set engine.graphs=auto to go on without") from error
        log.warning("steps are launched kernel by kernel, slower for small batches reason=%s", f"{error!s:.300}")


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
    group: RankGroup | None = None,
    arenas: ArenaProvider | None = None,
    kept: KeptModel | None = None,
    dp: DataParallelRank | None = None,
) -> Worker:
    """Load the model, open the worker's sockets on `host`, and return the worker, not yet stepping.

    `counts`: pages and slots that each pool can lease (`MemoryPlan.counts`). `device`: replaces the configured one.
    `group`: the other ranks of a worker of several; this process is the leader, and the caller closes the group.
    `arenas`: gives memory for the host tier that outlives the worker; state that an earlier incarnation left there is
    taken over. `kept`: the model of this process's last worker, which isn't loaded again where this one has the same.
    `dp`: the worker's place among those that it shares its experts with, which the caller closes.
    Raises `CheckpointError`, `ConfigError`, or `PeerDead` for a rank that could not start.
    """
    clock = clock or SystemClock()
    with ExitStack() as undo:
        p = build_parts(role, name, spec, config, host, counts, device, clock, group, arenas, undo, kept, dp)
        transfer = config.transfer
        transport = ZmqControlTransport(host, p.waiter, p.curve, transfer.link_timeout_s, transfer.control_frame_bytes)
        pools = p.manager.pools
        common = fingerprint_of(weights_digest(spec, config), pools.spec, _numerics(p))
        end = RoomEnd(name, incarnation, common, p.plane, pools, p.device, transfer, transport, clock)
        sender = KVSender(end, [one.process for one in group.line.joined] if group else ())
        undo.callback(sender.close)
        setup = WorkerSetup(
            name, incarnation, config, p.engine, p.manager, sender, p.waiter, p.spec.context, clock, time.sleep,
            grammar_engine(p.spec, undo), adapter_store(p, undo), p.engine.decoder.tells_experts,
        )  # fmt: skip
        worker: Worker
        if role is Role.PREFILL:
            worker = PrefillWorker(setup)
        else:
            # After the sender: this registers the pools once more, with the metadata slots that only a receiver has.
            receiver = KVReceiver(end, config.decode.metadata_slots, verify=config.cache_for(role).verify)
            undo.callback(receiver.close)
            worker = _generating_worker(role, p, replace(setup, receiver=receiver))
        undo.pop_all()
    return worker


def _generating_worker(role: Role, p: WorkerParts, setup: WorkerSetup) -> DecodeWorker:
    """A decode worker, or one that computes prompts as well; its steps are captured first."""
    for socket in p.plane.waitable:
        p.waiter.add(socket)
    capture_steps(p.engine, p.config, p.spec.context)
    return decode_class_for(role, p.config)(setup)


def grammar_engine(spec: ModelSpec, undo: ExitStack) -> GrammarEngine | None:
    """The structured-output engine of a checkpoint, which `undo` closes; None for one without a tokenizer. Raises
    `CheckpointError` for a tokenizer that can't be read."""
    text = read_tokenizer_files(spec.path).content
    if text is None:
        return None
    from twinpool.engine.structured_output.grammar_engine import LLGuidanceEngine

    engine = LLGuidanceEngine(text, spec.vocab_size, spec.eos_token_ids)
    undo.callback(engine.close)
    return engine


def adapter_store(parts: WorkerParts, undo: ExitStack) -> AdapterStore | None:
    """Where a worker has its adapters, which `undo` closes; None where it takes none."""
    config, engine = parts.config.adapters, parts.engine
    if not config.used or engine.ranks.size > 1:
        return None
    decoder, device = engine.decoder, engine.device.torch_device
    files = AdapterFolders(config, decoder.adapted, decoder.dtype, device, decoder.kernels, parts.waiter.wake)
    engine.adapters = AdapterStore(config.max_loaded, files)
    undo.callback(engine.adapters.close)
    return engine.adapters


def _numerics(parts: WorkerParts) -> str:
    """The worker's numerics class: the mode, kernels, instruction set and libraries that it computes with, and what
    makes its masks: an answer that goes on elsewhere must find the same ones."""
    config = parts.config.engine
    computed_by = numerics_class_of(parts.config, parts.spec, parts.device)
    return numerics_class(config.numerics, f"{computed_by}, {GRAMMAR_ENGINE}")


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
    weights: str
    """Digest of the weights (`weights_digest`)."""

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
    name: WorkerName | None = None,
    dp: DataParallelRank | None = None,
) -> RankParts:
    """Build the parts with which a follower carries out its leader's orders. Raises what `build_worker` does.

    `counts`: pages and slots that each pool can lease, the same on all ranks. `kept`: as for
    `build_worker`. `dp`: where the worker `name` shares its experts, this rank's place among the same ranks of the
    others, which the caller closes; it is waited for until these are built.
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
        engine = load_engine(
            model, config.engine, layout.spec, pools.gates, epochs, device, ranks, kept=kept,
            shard=shard_for(role, config, ranks, name), experts=dp.experts if dp is not None else None,
        )  # fmt: skip
        if dp is not None:
            dp.wait_for_all()
        undo.pop_all()
    for socket in plane.waitable:
        waiter.add(socket)
    state = FollowerPools(
        places,
        ranks.size,
        lambda place: arena.count_copy() if arena and place == HOST else None,
        partial(settled, device.torch_device),
    )
    return RankParts(
        state, FollowerLinks(plane, steps), steps, engine, storage, waiter, arena, weights_digest(spec, config)
    )
