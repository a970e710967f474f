"""Both ends of rooms in this process, over any pool set and plane: sequences of random state, handed over by hand."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.pool_sets import entry, filled, worn
from tests.support.stand_in_ranks import RankedSeat, content, fill, tp_manager
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Completion, Device, DeviceOp, DeviceStream
from twinpool.cache.memory.kv_cache_spec import HeldPages, PoolSetLayout, PoolSetSpec, due, extents
from twinpool.cache.memory.page_digest import ContentTag
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.block_hash import block_hashes
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import CapacityError
from twinpool.contracts.ids import Incarnation, RoomId, WorkerName
from twinpool.contracts.messages.fingerprint import Fingerprint
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.sim.fabric.plane_faults import StoreFaults, WireDamage
from twinpool.sim.fabric.sim_network import SimControlTransport, SimNetwork, SimSwitch
from twinpool.sim.fabric.sim_plane import SimPlane
from twinpool.sim.fabric.virtual_time import SimProcess, VirtualTime
from twinpool.transfer.net.zmq_channel import Waiter, ZmqControlTransport
from twinpool.transfer.planes.data_plane import DataPlane, PageNumbers
from twinpool.transfer.planes.make_plane import make_plane
from twinpool.transfer.planes.tp_plane import TPDataPlane
from twinpool.transfer.rooms import room_states
from twinpool.transfer.rooms.peers import RoomEnd, fingerprint
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.transfer.rooms.receiver.receiver_peers import ReceiverPeers
from twinpool.transfer.rooms.receiver.receiver_rooms import ReceiverOutcome, ReceiverRooms
from twinpool.transfer.rooms.room_messages import HandoverMetadata
from twinpool.transfer.rooms.room_states import ExpectedPrompt, SendablePages
from twinpool.transfer.rooms.sender.kv_sender import KVSender
from twinpool.transfer.rooms.sender.sender_peers import SenderPeers
from twinpool.transfer.rooms.sender.sender_rooms import SenderOutcome, SenderRooms

PLANES = ("local", "shm", "zmq", "nixl", "staged")
_UNTIL_S = 60.0


class LateDevice:
    """Runs what was submitted when it is waited for, or told to: everything before that is too early.

    Sends go first, then the other streams: a device may take that order, unless it was told what a send comes after.
    """

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.ops: list[DeviceOp] = []
        self._waiting: list[_Late] = []

    def submit(
        self, op: DeviceOp, run: Callable[[], object], after: Sequence[Completion] = (), **options: object
    ) -> Completion:
        self.ops.append(op)
        late = _Late(op.stream, run, tuple(after))
        self._waiting.append(late)
        return late

    def run_all(self) -> None:
        for late in sorted(self._waiting, key=lambda late: late.stream is not DeviceStream.SEND):
            late.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(CpuDevice(), name)


@dataclass
class _Late:
    stream: DeviceStream
    run: Callable[[], object]
    after: tuple[Completion, ...]
    done: bool = False

    def wait(self) -> None:
        if not self.done:
            for completion in self.after:
                completion.wait()
            self.run()
            self.done = True

    def order(self) -> None:
        self.wait()


@dataclass(eq=False)
class Prompt:
    """A sequence whose state lies at the writer: random bytes, sealed."""

    room: RoomId
    positions: int
    keys: tuple[bytes, ...]
    runs: dict[str, PageNumbers]
    leases: dict[str, Lease]
    tags: dict[str, tuple[ContentTag, ...]]

    def part(self, pool: str, numbers: range | None = None) -> SendablePages:
        run = self.runs[pool]
        numbers = run.numbers if numbers is None else numbers
        at = slice(numbers.start - run.first, numbers.stop - run.first)
        return SendablePages(numbers.start, run.indices[at], self.tags[pool][at])

    def all(self) -> dict[str, SendablePages]:
        return {pool: self.part(pool) for pool in self.runs}


@dataclass(eq=False)
class Ends:
    """A writer and a reader. Outcomes of both are kept until a test looks."""

    spec: PoolSetSpec
    sender: KVSender
    receiver: KVReceiver
    source: PoolSet
    target: PoolSet
    clock: ManualClock
    waiter: Waiter | SimWaiter
    random: random.Random
    managers: tuple[RankedSeat, RankedSeat]
    """All ranks of both."""
    pass_time: Callable[[], None] = lambda: None
    """Lets what was sent travel on for a moment, where time is simulated."""
    outcomes: list[ReceiverOutcome] = field(default_factory=list)
    heard: list[SenderOutcome] = field(default_factory=list)
    _rooms: int = 0

    # What a test breaks or looks at within the ends; nothing else reaches into them.

    @property
    def sender_peers(self) -> SenderPeers:
        return self.sender._peers

    @property
    def sender_rooms(self) -> SenderRooms:
        return self.sender._rooms

    @property
    def sender_plane(self) -> DataPlane:
        return self.sender.end.plane

    @property
    def receiver_peers(self) -> ReceiverPeers:
        return self.receiver._peers

    @property
    def receiver_rooms(self) -> ReceiverRooms:
        return self.receiver._rooms

    @property
    def receiver_plane(self) -> DataPlane:
        return self.receiver.end.plane

    def poll(self) -> None:
        self.outcomes += self.receiver.poll()
        self.heard += self.sender.poll()

    def until(self, come: Callable[[], object], what: str) -> None:
        end = time.monotonic() + _UNTIL_S
        while not come():
            assert time.monotonic() < end, f"waited {_UNTIL_S} s for {what}"
            self.poll()
            if not come():
                self.waiter.wait(0.01)

    def prompt(self, positions: int) -> Prompt:
        """Leases what is due at the writer, with whatever bytes lie there, and seals it."""
        self._rooms += 1
        room = RoomId(f"room-{self._rooms}")
        size = self.spec.page_tokens
        keys = tuple(block_hashes([self.random.randrange(1000) for _ in range(positions)], size))
        runs, leases, tags = {}, dict[str, Lease](), {}
        for pool, numbers in due(self.spec, positions).items():
            try:
                lease = leases[pool] = self.source.allocators[pool].lease(len(numbers), room)
            except CapacityError:
                for taken in leases.values():
                    taken.release()
                raise
            runs[pool] = PageNumbers(numbers.start, lease.indices)
            digests = self.source.digest(pool, lease.indices, *extents(self.spec, pool, numbers, positions))
            tags[pool] = tuple(ContentTag(keys[n], d) for n, d in zip(numbers, digests, strict=True))
        return Prompt(room, positions, keys, runs, leases, tags)

    @property
    def writer(self) -> PeerRef:
        """The writer as the reader knows it."""
        return PeerRef(WorkerName("prefill-0"), Incarnation(1), self.sender.control)

    def start(
        self, prompt: Prompt, held: HeldPages | None = None, extra: int = 0, wants: PeerRef | None = None
    ) -> dict[str, Lease]:
        """Opens the room on both sides and says the grant: leases for what isn't held, and `extra` after them.

        `wants`: whom the writer expects.
        """
        held = held or {}
        expected = ExpectedPrompt(prompt.keys, prompt.positions)
        self.receiver.open(prompt.room, self.writer, expected)
        self.sender.open(prompt.room, wants or PeerRef(WorkerName("decode-0"), Incarnation(1), ""))
        lacks = self.receiver.missing(expected, held)
        leases = {
            pool: self.target.allocators[pool].lease(len(numbers) + extra, prompt.room)
            for pool, numbers in lacks.items()
        }
        assert self.receiver.grant(prompt.room, leases, held)
        return leases

    def open(self, prompt: Prompt, held: HeldPages | None = None, extra: int = 0) -> dict[str, Lease]:
        """`start`, and the grant has come."""
        leases = self.start(prompt, held, extra)
        self.until(lambda: self.sender.granted(prompt.room), "the grant")
        return leases

    def seal(self, prompt: Prompt) -> None:
        self.sender.seal(prompt.room, HandoverMetadata(prompt.room, 0, 7, None, 0, prompt.positions))

    def outcome(self, room: RoomId) -> ReceiverOutcome:
        """What the room came to at the reader."""
        self.until(lambda: any(o.room == room for o in self.outcomes), f"an outcome of {room}")
        return next(o for o in self.outcomes if o.room == room)

    def released(self, room: RoomId) -> room_states.RoomReleased:
        """What the room came to at the writer."""

        def found() -> list[room_states.RoomReleased]:
            return [o for o in self.heard if isinstance(o, room_states.RoomReleased) and o.room == room]

        self.until(found, f"the end of {room} at the writer")
        return found()[0]

    def quiet(self) -> None:
        """Polls until no room is left, then checks that every page and slot is back at the reader."""

        def over() -> bool:
            return not (self.receiver.rooms or self.receiver.checking or self.sender.rooms)

        self.until(over, "the last room")
        assert self.sender.check() == self.receiver.check() == []
        assert self.source.check() == self.target.check() == []
        assert self.receiver.slots.free == self.receiver.slots.total
        for allocator in self.target.allocators.values():
            assert allocator.free == allocator.total, allocator.name


def image(pools: PoolSet) -> dict[tuple[str, int], list[bytes]]:
    """Every page and slot, by pool and index."""
    return {(pool, i): entry(pools, pool, i) for pool, count in pools.layout.counts.items() for i in range(count)}


def placed(ends: Ends, prompt: Prompt, leases: Mapping[str, Lease], lacks: Mapping[str, range]) -> None:
    """Asserts that what was lacking lies in the leases' first places, byte for byte."""
    for pool, numbers in lacks.items():
        theirs = leases[pool].indices[: len(numbers)]
        for ours, there in zip(prompt.runs[pool].at(numbers), theirs, strict=True):
            assert content(ends.managers[0], pool, ours) == content(ends.managers[1], pool, there), (pool, numbers)


class SimWaiter:
    """Waits in simulated time: what was sent travels meanwhile."""

    def __init__(self, agenda: VirtualTime) -> None:
        self._agenda = agenda

    def wait(self, timeout_s: float) -> None:
        over: list[bool] = []
        self._agenda.after(timeout_s, lambda: over.append(True))
        while not over:
            self._agenda.next()

    def wake(self) -> None: ...

    def close(self) -> None: ...


@contextmanager
def simulated_ends(
    spec: PoolSetSpec,
    plane: str,
    *,
    seed: int,
    count: int,
    slots: int,
    device: Device,
    store_faults: StoreFaults | None = None,
    nodes: tuple[str, str] = ("node-0", "node-0"),
) -> Iterator[Ends]:
    """The same ends over the simulator's planes and carrier: what arrives when is decided by the seed alone.

    `store_faults`: of the writer's one-sided writes. `nodes`: where writer and reader are."""
    agenda, rng = VirtualTime(), random.Random(seed)
    network = SimNetwork(agenda, rng, 0.002, 3.0)
    exchange, planes, damage = SimSwitch(network), dict[str, SimPlane](), WireDamage()
    processes = [
        SimProcess(agenda, f"{role}-0#1", node, pid)
        for pid, (role, node) in enumerate(zip(("prefill", "decode"), nodes, strict=True), 1)
    ]
    mine = [
        SimPlane(plane, network, process, planes, rng, damage, lambda: None, store_faults=store_faults)
        for process in processes
    ]
    managers = []
    for side, one in enumerate(mine):
        layout = PoolSetLayout(spec, spec.even(count + 7 * side))
        manager = tp_manager(spec, 1, count + 7 * side, regions=[one.allocate("pages", layout.nbytes)])
        filled(worn(manager.leader, seed + side), seed + side).zero({pool.name: [0] for pool in spec.pools})
        managers.append(manager)
    transports = [SimControlTransport(exchange, process, lambda: None) for process in processes]
    config, clock, waiter = config_from_dict({}).transfer, ManualClock(), SimWaiter(agenda)
    pools = [manager.leader for manager in managers]
    mark = fingerprint("a model", spec, "invariant:by hand")
    devices = device, AdversarialDevice(seed + 1)
    writing, reading = (
        RoomEnd(name, Incarnation(1), mark, mine[side], pools[side], devices[side], config, transports[side], clock)
        for side, name in enumerate((WorkerName("prefill-0"), WorkerName("decode-0")))
    )
    writer, reader = KVSender(writing), KVReceiver(reading, slots, verify=True)
    try:
        yield Ends(
            spec, writer, reader, pools[0], pools[1], clock, waiter, random.Random(seed), (managers[0], managers[1]),
            lambda: waiter.wait(0.005 * rng.random()),
        )  # fmt: skip
    finally:
        writer.close()
        reader.close()


@contextmanager
def ends(
    spec: PoolSetSpec,
    plane: str,
    *,
    seed: int = 1,
    count: int = 64,
    slots: int = 4,
    faults: Mapping[str, Any] | None = None,
    transfer: Mapping[str, Any] | None = None,
    device: Device | None = None,
    reader_device: Device | None = None,
    ranks: tuple[int, int] = (1, 1),
    marks: tuple[Fingerprint, Fingerprint] | None = None,
) -> Iterator[Ends]:
    """`ranks`: how many the writer has, and the reader; all in this process. `marks`: their fingerprints."""
    marks = marks or (fingerprint("a model", spec, "invariant:by hand"),) * 2
    clock = ManualClock()
    config = config_from_dict({"transfer": {"plane": plane, **(transfer or {})}, "faults": dict(faults or {})})
    waiter = Waiter()
    pools: list[PoolSet] = []
    planes: list[DataPlane] = []
    managers: list[RankedSeat] = []
    for side, size in enumerate(ranks):
        mine = [make_plane(config, "127.0.0.1", None, waiter.wake, rank, size) for rank in range(size)]
        layouts = [PoolSetLayout(spec.shard(rank, size), spec.even(count + 7 * side)) for rank in range(size)]
        regions = [plane.allocate("pages", layout.nbytes) for plane, layout in zip(mine, layouts, strict=True)]
        manager = tp_manager(spec, size, count + 7 * side, regions=regions)
        if size == 1:
            filled(manager.leader, seed + side).zero({pool.name: [0] for pool in spec.pools})
        else:
            fill(manager, seed + side)
        worn(manager.leader, seed + side)
        manager.connect(mine)
        planes.append(mine[0] if size == 1 else TPDataPlane(mine[0], manager.followers))
        pools.append(manager.leader)
        managers.append(manager)
    shared, devices = config.transfer, (device or CpuDevice(), reader_device or CpuDevice())
    transport = ZmqControlTransport("127.0.0.1", waiter, None, shared.link_timeout_s, shared.control_frame_bytes)
    writing, reading = (
        RoomEnd(name, Incarnation(1), marks[side], planes[side], pools[side], devices[side], shared, transport, clock)
        for side, name in enumerate((WorkerName("prefill-0"), WorkerName("decode-0")))
    )
    writer, reader = KVSender(writing), KVReceiver(reading, slots, verify=True)
    for socket in planes[1].waitable:
        waiter.add(socket)
    try:
        yield Ends(
            spec, writer, reader, pools[0], pools[1], clock, waiter, random.Random(seed), (managers[0], managers[1])
        )
    finally:
        for manager in managers:
            manager.close()
        writer.close()
        reader.close()
        waiter.close()
