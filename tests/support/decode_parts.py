"""The parts of a decode worker without the worker: requests that are admitted, receive their prompts and take steps.

Nobody is at the other end of the rooms: a test says when a prompt has arrived, and what becomes of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, cast

from tests.support.pool_sets import host_pools, pool_sets, worn
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Device
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.manager.tier_set import LowerTiers
from twinpool.cache.memory.kv_cache_spec import extents
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.storage.backends.memory_backend import MemoryBackend
from twinpool.cache.storage.io_queue import InlineIoQueue
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation, RequestId, Role, RoomId, WorkerName
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import PeerRef, Submit
from twinpool.contracts.messages.worker_status import WorkerLimits
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.drafting import Drafter, Drafting
from twinpool.decode.request import DecodePages, DecodeRequest
from twinpool.decode.retraction.memory_pressure import OutputLengths
from twinpool.decode.scheduler import DecodeScheduler
from twinpool.decode.step_commit import DecodeStepCommit
from twinpool.decode.transfer_queue import TransferQueue
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.sim.fabric.hash_engine import HashEngine
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.transfer.rooms.receiver.receiver_rooms import ReceiverOutcome
from twinpool.transfer.rooms.room_messages import HandoverMetadata
from twinpool.transfer.rooms.room_states import ExpectedPrompt, PromptArrived
from twinpool.worker.request_table import RequestGate, RequestTable
from twinpool.worker.step_commit import NonfiniteRows

PAGE = 4
SESSION = SessionId(1)
PEER = PeerRef(WorkerName("prefill-0"), Incarnation(1), "inproc://prefill-0")


class ReceiverByHand:
    """Stands in for `KVReceiver`: rooms that come to what `outcomes` says."""

    def __init__(self) -> None:
        self.opened: dict[RoomId, ExpectedPrompt] = {}
        self.granted: dict[RoomId, Mapping[str, Lease]] = {}
        self.held: dict[RoomId, object] = {}
        self.aborted: dict[RoomId, str] = {}
        self.outcomes: list[ReceiverOutcome] = []
        self.slots = True

    def open(self, room: RoomId, peer: PeerRef, expected: ExpectedPrompt) -> None:
        if room in self.opened:
            raise WireError(f"room {room} exists already")
        self.opened[room] = expected

    def grant(self, room: RoomId, leases: Mapping[str, Lease], held: object) -> bool:
        if self.slots:
            self.granted[room], self.held[room] = leases, held
        return self.slots

    def abort(self, room: RoomId, reason: str) -> None:
        self.aborted[room] = reason
        for lease in self.granted.pop(room, {}).values():
            lease.release()

    def poll(self) -> list[ReceiverOutcome]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes


class DecodeParts:
    """See the module's prose. `pages` of four tokens each are in every pool, of a model of this `kind`, `host_pages` in
    a host tier, if there is one. `storage`: a queue that a test runs."""

    def __init__(
        self,
        pages: int = 32,
        device: Device | None = None,
        drafter: Drafter | None = None,
        kind: str = "full",
        host_pages: int = 0,
        storage: bool = False,
        **sections: Any,
    ) -> None:
        self.config = config = config_from_dict({"cache": {"page_tokens": PAGE}, **sections})
        spec, self.clock = pool_sets(PAGE)[kind], ManualClock()
        pools, device = worn(PoolSet(spec, spec.even(pages)), 1), device or CpuDevice()
        cache = config.cache_for(Role.DECODE)
        host = worn(host_pools(spec, 1 + host_pages), "host") if host_pages else None
        self.backend = MemoryBackend(uuid.uuid4().hex, 1 << 24) if storage else None
        self.queue = InlineIoQueue(self.backend) if self.backend is not None else None
        self.manager = KVCacheManager(
            pools, device, cache, self.clock.now, below=LowerTiers(host, self.queue, fingerprint="decode")
        )
        self.requests = RequestTable[DecodeRequest](WorkerName("decode-0"), WorkerLimits(4 * pages, 400), self.clock)
        self.pages = DecodePages(self.manager, cache)
        self.lengths = OutputLengths(config.decode.output_length_quantile, config.decode.first_answer_tokens)
        self.receiver = ReceiverByHand()
        receiver = cast(KVReceiver, self.receiver)
        self.transfers = TransferQueue(receiver, self.requests, self.pages, device, config, self.clock)
        engine = cast(ModelRunner, HashEngine(pools, device))
        self.drafting = drafting = Drafting(self.pages, config.decode, engine, self.clock, drafter)
        self.scheduler = DecodeScheduler(
            self.requests, self.pages, self.transfers, self.lengths, drafting, config, self.clock
        )
        self.fitness = NonfiniteRows(8, 60.0, self.clock)
        self.steps = DecodeStepCommit(
            self.requests,
            self.pages,
            engine,
            self.fitness,
            config,
            self.clock.advance,
            drafting,
            RequestGate(None, self.clock, lambda: None),
        )

    def submit(self, name: str, prompt: int = 6, most: int = 8, **fields: Any) -> Submit:
        """A request of so many tokens, that nobody else's prompt begins with."""
        tokens = tuple(sum(name.encode()) * 1000 + n for n in range(prompt))
        sampling = SamplingParams(max_tokens=most, temperature=0.0)
        return Submit(RequestId(name), 0, RoomId(name), tokens, prompt, sampling, PEER, **fields)

    def ask(self, name: str, prompt: int = 6, most: int = 8, **fields: Any) -> DecodeRequest:
        """A request that waits."""
        request = self.transfers.open(SESSION, self.submit(name, prompt, most, **fields))
        assert isinstance(request, DecodeRequest)
        self.requests.add(request)
        self.scheduler.add(request)
        return request

    def arrived(self, request: DecodeRequest, token: int = 7) -> PromptArrived:
        """What its room comes to when all is there."""
        room = request.submit.room
        assert request.allocation is not None
        leases, positions = self.receiver.granted.pop(room), len(request.submit.tokens)
        numbers, spec = request.allocation.lacking["full"], self.manager.spec
        where = leases["full"].indices[: len(numbers)], *extents(spec, "full", numbers, positions)
        found = self.manager.pools.digest("full", *where)
        digests = {"full": dict(zip(numbers, found, strict=True))}
        metadata = HandoverMetadata(room, 0, token, None, 0, positions)
        return PromptArrived(room, leases, metadata, {"full": 100}, digests)

    def run(self, *names: str, token: int = 7, **fields: Any) -> list[DecodeRequest]:
        """Requests that have received their prompts and run; `token`: the first of their answers."""
        requests = [self.ask(name, **fields) for name in names]
        assert list(self.scheduler.admit()) == []
        for request in requests:
            self.receiver.outcomes.append(self.arrived(request, token))
            assert len(list(self.transfers.poll())) == 1
            self.scheduler.start(request)
        return requests

    def leave(self, *requests: DecodeRequest) -> None:
        for request in requests:
            self.transfers.abort(request, "it left")
            self.pages.free(request)
            self.scheduler.remove(request)
            self.requests.remove(request)
