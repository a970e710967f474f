"""A worker's process in the simulator: what `cluster.host`, `cluster.lease` and gRPC do around a worker, as events.

The worker itself, its seat, pools and rooms are built as `cluster.build` builds them. The process steps it as the host
does, asks the same lease before each step and each delivery, and sleeps as long as the worker itself says.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from cache.arena import Arena, arena_bytes
from cache.device import DEVICE, HOST, CpuDevice, Device
from cache.lazy import LazyDevice
from cache.pools import PoolSet, host_layout
from cache.ranked import RankedPools, RankState
from cache.ranked_shelf import RankedShelf, RankStorage
from cache.registry import PoolSetLayout
from cache.seat import Seat
from cache.shelf import RankShelf
from cluster.controller import Grant
from cluster.host import HostEnd
from cluster.host_memory import take_over
from cluster.lease import Lease
from cluster.memory import plan_memory, stride
from cluster.progress import Pulse
from cluster.rank_line import RankLine
from contracts.config import Config
from contracts.errors import PeerDead
from contracts.fingerprint import numerics_class
from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages import Command, Event, WorkerStatus
from contracts.ports import SessionId, Worker, WorkerRecord
from decode import DecodeWorker
from engine import Engine
from prefill import PrefillWorker
from sim.agenda import Agenda, Entry
from sim.arenas import SimArenas
from sim.carrier import Exchange, SimCarrier
from sim.engine import HashEngine
from sim.plan import CONTEXT, Shape, pool_set
from sim.plane import Damage, SimPlane
from sim.process import Process
from sim.ranks import SimFollowers, SimRank
from sim.storage import SimQueue, Store
from sim.wire import pack_events
from transfer.agreement import fingerprint
from transfer.plane import Plane
from transfer.ranked import RankedPlane, RankLinks
from transfer.receiver import ReceiverEnd
from transfer.sender import SenderEnd

IDLE_S = 0.1
"""As `WorkerHost`'s `idle_s`."""
FINGERPRINT = "simulated"
_SPINS = 2000


class Home(Protocol):
    """What a worker's process is told to do by, and tells."""

    def register(self, record: WorkerRecord, answer: Callable[[Grant], None]) -> None: ...

    def renew(
        self,
        process: Process,
        name: WorkerName,
        incarnation: Incarnation,
        status: WorkerStatus,
        answer: Callable[[Grant], None],
    ) -> None: ...

    def leave(self, process: Process, name: WorkerName, incarnation: Incarnation) -> None: ...

    def new_process(self, label: str, node: str) -> Process:
        """Another one of this node."""


@dataclass(frozen=True)
class World:
    """What all processes of a run share."""

    agenda: Agenda
    rng: random.Random
    shape: Shape
    config: Config
    exchange: Exchange
    planes: dict[int, SimPlane]
    damage: Damage
    arenas: SimArenas
    store: Store | None
    say: Callable[[str, str], None]
    """Writes a line of the log: who, and what."""
    violated: Callable[[str], None]


class SimSleep:
    """Implements `transfer.waiting.Sleep`: instead of sleeping, it notes until when its worker would."""

    def __init__(self) -> None:
        self.asked: float | None = None
        self.on_wake: Callable[[], None] = lambda: None

    def wait(self, timeout_s: float) -> None:
        self.asked = timeout_s

    def wake(self) -> None:
        self.on_wake()

    def close(self) -> None:
        self.on_wake = lambda: None


@dataclass(frozen=True)
class Built:
    """A worker, and of its parts those that are looked at when all is over."""

    worker: Worker
    seat: Seat
    plane: SimPlane
    followers: SimFollowers | None = None
    receiver: ReceiverEnd | None = None


def build(
    world: World, process: Process, role: Role, name: WorkerName, incarnation: Incarnation, sleep: SimSleep, home: Home
) -> Built:
    """A worker with everything but a model: the engine hashes."""
    shape, config, agenda = world.shape, world.config, world.agenda
    cache, size = config.cache_for(role), config.tp_for(role)
    device: Device = LazyDevice(world.rng.randrange(1 << 30)) if shape.lazy else CpuDevice()
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
    plane: Plane = own
    if size == 1:
        pools = PoolSet(spec, layouts[0].counts, region)
    else:
        followers = SimFollowers(agenda, process, world.rng, sleep.wake)
        for rank in range(1, size):
            mine = home.new_process(f"{name}.rank{rank}#{incarnation}", process.node)
            followers.ranks.append(_rank(world, mine, role, layouts[rank], followers, rank, size))
        plane, pools = RankedPlane(own, followers), RankedPools(layouts[0], region, followers, DEVICE)
    host, arena = _host_tier(world, process, role, layouts[0], device, 0, size, followers)
    queue: SimQueue | None = None
    shelf: RankedShelf | None = None
    if host is not None and world.store is not None:
        queue = SimQueue(world.store, process, sleep.wake)
        if followers is not None and isinstance(host, RankedPools):
            shelf = RankedShelf(RankShelf(queue, host, FINGERPRINT, 0, size), host, followers)
    seat = Seat(
        pools, device, cache, agenda.now,
        host=host, storage=queue, shelf=shelf, fingerprint=FINGERPRINT, stride=stride(config, role), wall=agenda.now,
        arena=arena,
    )  # fmt: skip
    ranks = followers.ranks if followers is not None else []
    together = followers.catch_up if followers is not None else lambda: None
    engine = cast(Engine, HashEngine(pools, device, [rank.pools for rank in ranks], together))
    take_over(seat, cast(RankLine | None, followers))
    carrier = SimCarrier(world.exchange, process, sleep.wake)
    common: dict[str, Any] = {"context": CONTEXT, "clock": agenda, "pause": lambda s: None}
    common_to_all = fingerprint(FINGERPRINT, spec, numerics_class(config.engine.numerics, "hashing"))
    sender = SenderEnd(
        name, incarnation, common_to_all, plane, pools, device, config.transfer, carrier=carrier, clock=agenda,
        others=[(rank.process.pid, 1, rank.process.node) for rank in ranks],
    )  # fmt: skip
    if role is Role.PREFILL:
        worker = PrefillWorker(name, incarnation, config, engine, seat, sender, sleep, **common)
        return Built(worker, seat, own, followers)
    receiver = ReceiverEnd(
        name, incarnation, common_to_all, plane, pools, config.decode.metadata_slots, config.transfer,
        verify=cache.verify, carrier=carrier, clock=agenda,
    )  # fmt: skip
    decode = DecodeWorker(name, incarnation, config, engine, seat, receiver, sleep, sender=sender, **common)
    return Built(decode, seat, own, followers, receiver)


def _plane(world: World, process: Process, wake: Callable[[], None], rank: int, size: int) -> SimPlane:
    network = world.exchange.network
    return SimPlane(world.shape.plane, network, process, world.planes, world.rng, world.damage, wake, rank, size)


def _rank(
    world: World,
    process: Process,
    role: Role,
    layout: PoolSetLayout,
    followers: SimFollowers,
    rank: int,
    size: int,
) -> SimRank:
    """A follower, as `cluster.build` builds it."""
    world.exchange.processes[process.pid] = process

    def wake() -> None:
        followers.turn(rank)

    plane = _plane(world, process, wake, rank, size)
    pools = PoolSet(layout.spec, layout.counts, plane.allocate("pages", layout.nbytes))
    plane.register(pools, None)
    places = {DEVICE: pools}
    host, arena = _host_tier(world, process, role, layout, CpuDevice(), rank, size, None)
    storage: RankStorage | None = None
    if host is not None:
        places[HOST] = host
        if world.store is not None:
            shelf = RankShelf(SimQueue(world.store, process, wake), host, FINGERPRINT, rank, size)
            storage = RankStorage(shelf)
    state = RankState(places, size, lambda place: arena.count_copy() if arena and place == HOST else None)
    return SimRank(rank, process, pools, state, RankLinks(plane), storage, arena)


def _host_tier(
    world: World,
    process: Process,
    role: Role,
    layout: PoolSetLayout,
    device: Device,
    rank: int,
    size: int,
    followers: SimFollowers | None,
) -> tuple[PoolSet | None, Arena | None]:
    """A rank's mirror in host memory, in an arena where one is to be had; the leader's, with its `followers`."""
    cache = world.config.cache_for(role)
    if not cache.host_bytes:
        return None, None
    tier = host_layout(layout.spec, cache.host_bytes // size, layout.counts)
    memory = world.arenas.take(process, arena_bytes(tier)) if cache.arena == "auto" else None
    arena = Arena(memory, tier, f"{FINGERPRINT}/{rank}/{size}") if memory is not None else None
    region = arena.region if arena is not None else device.allocate_host(tier.nbytes)
    if followers is None:
        return PoolSet(tier.spec, tier.counts, region, tier.order, "host"), arena
    host = RankedPools(tier, region, followers, HOST, "host")
    if arena is not None:
        host.on_copy = arena.count_copy
    return host, arena


@dataclass
class _Session:
    deliver: Callable[[bytes], None]
    ended: Callable[[str], None]


class SimHost:
    """One incarnation of one worker in its process."""

    def __init__(
        self,
        world: World,
        process: Process,
        role: Role,
        name: WorkerName,
        incarnation: Incarnation,
        home: Home,
        make: Callable[[World, Process, Role, WorkerName, Incarnation, SimSleep, Home], Built] = build,
    ) -> None:
        self.world, self.process, self.home = world, process, home
        self.name, self.role, self.incarnation = name, role, incarnation
        self.sleep = SimSleep()
        self.built = make(world, process, role, name, incarnation, self.sleep, home)
        self.worker = self.built.worker
        self.lease = Lease(world.agenda)
        self.ended: HostEnd | None = None
        self._registered = False
        self._inbox: deque[Callable[[], None]] = deque()
        self._sessions: dict[SessionId, _Session] = {}
        self._next_session = 1
        self._turn: Entry | None = None
        self._renewal: Entry | None = None
        self._checks_in = world.rng.randrange(40)
        self._pulse = Pulse(world.agenda)
        self._hung = False
        self._spins = 0
        self.snapshot = self.worker.status()
        self.sleep.on_wake = self.wake
        process.on_death(self._died)
        for rank in self.built.followers.ranks if self.built.followers is not None else []:
            rank.process.on_death(partial(process.do, partial(self._lost_rank, str(rank.process))))
        self._register()

    # ------------------------------------------------------------ lease

    def _record(self) -> WorkerRecord:
        worker, process = self.worker, self.process
        return WorkerRecord(
            self.name, self.role, self.incarnation, process.pid, process.node, process.label, worker.control,
            worker.fits, fingerprint=worker.fingerprint,
        )  # fmt: skip

    def _register(self) -> None:
        sent = self.world.agenda.now()

        def granted(grant: Grant) -> None:
            if grant.fenced:
                self._end(HostEnd.FENCED, "no longer wanted")
                return
            self._registered = True
            self.lease.granted(sent, grant.lease_s)
            self._renew()
            self._schedule(0.0)

        self.home.register(self._record(), granted)

    def _renew(self) -> None:
        if self.ended is not None:
            return
        sent = self.world.agenda.now()

        def granted(grant: Grant) -> None:
            if grant.fenced:
                self.lease.fence()
                self._end(HostEnd.FENCED, "the controller has ended the lease")
            else:
                self.lease.granted(sent, grant.lease_s)
                if grant.drain:
                    self.call(lambda worker: worker.drain())

        if not self.lease.held:
            self._end(HostEnd.FENCED, "the controller could not be reached in time")
            return
        self.home.renew(self.process, self.name, self.incarnation, self._pulse.on(self.snapshot), granted)
        self._renewal = self.process.later(self.world.config.cluster.heartbeat_s, self._renew)

    # ------------------------------------------------------------ what reaches it

    def open_session(self, deliver: Callable[[bytes], None], ended: Callable[[str], None]) -> SessionId | None:
        """`deliver` gets frames. None when the worker has ended."""
        if self.ended is not None or not self.process.alive:
            return None
        session = SessionId(self._next_session)
        self._next_session += 1
        self._sessions[session] = _Session(deliver, ended)
        return session

    def close_session(self, session: SessionId) -> None:
        if self._sessions.pop(session, None) is not None:
            self._put(lambda: self.worker.drop_session(session))

    def send(self, session: SessionId, commands: list[Command]) -> None:
        def take() -> None:
            if session in self._sessions:
                for command in commands:
                    self.worker.handle(session, command)

        self._put(take)

    def call(self, run: Callable[[Worker], None]) -> None:
        self._put(lambda: run(self.worker))

    def _put(self, item: Callable[[], None]) -> None:
        if self.ended is None and self.process.alive:
            self._inbox.append(item)
            self.wake()

    def wake(self) -> None:
        if self.ended is None and self._registered and self.sleep.asked is not None:
            self._schedule(0.0)

    # ------------------------------------------------------------ the loop

    def _schedule(self, delay_s: float) -> None:
        if self._turn is not None:
            self._turn.cancel()
        self.sleep.asked = None
        self._turn = self.process.later(delay_s, self._run)

    def hang(self) -> None:
        """From now on its loop makes no turn, although its lease is renewed."""
        self._hung = True

    def _run(self) -> None:
        self._turn = None
        if self.ended is not None or self._hung:
            return
        try:
            end = self._round()
        except PeerDead as error:
            end = HostEnd.DIED, str(error)
        except Exception as error:
            self.world.violated(f"{self.process}: {type(error).__name__}: {error}")
            end = HostEnd.DIED, f"{type(error).__name__}: {error}"
        if end is not None:
            self._end(*end)

    def _round(self) -> tuple[HostEnd, str] | None:
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()
        if not self.lease.held:
            return HostEnd.FENCED, "the worker's lease has ended"
        events = self.worker.step()
        if events and not self.lease.held:
            return HostEnd.FENCED, "the worker's lease has ended"
        self._deliver(events)
        steps, self.snapshot = self.snapshot.steps, self.worker.status()
        if self.worker.unfit:
            return HostEnd.FENCED, self.worker.unfit
        self._pulse.turned(self.snapshot.steps, self.worker.runnable, self.world.shape.step_s)
        if self.worker.drained and not self._inbox:
            return HostEnd.LEFT, "the worker was drained and has left"
        self._check_sometimes()
        took = self.world.shape.step_s * self.world.rng.uniform(0.5, 1.5) if self.snapshot.steps != steps else 0.0002
        self.sleep.asked = None
        self.worker.wait(IDLE_S)
        asked = self.sleep.asked
        self._look_for_spins(took > 0.0002 or asked is None or asked > 0.0)
        if asked is None or took > 0.0002:
            self._schedule(took)
        else:
            self._schedule(max(asked, took))
            self.sleep.asked = asked
        return None

    def _look_for_spins(self, sound: bool) -> None:
        """A loop that would not sleep, turn after turn, and has nothing to show for it, uses up a processor."""
        self._spins = 0 if sound else self._spins + 1
        if self._spins == _SPINS:
            self.world.violated(f"{self.process}: its loop has turned {_SPINS} times for something that is due")

    def _check_sometimes(self) -> None:
        self._checks_in -= 1
        if self._checks_in < 0:
            self._checks_in = 60
            for violation in self.worker.check().violations:
                self.world.violated(f"{self.process}: {violation}")

    def _deliver(self, events: list[tuple[SessionId, Event]]) -> None:
        grouped: dict[SessionId, list[Event]] = {}
        for session, event in events:
            grouped.setdefault(session, []).append(event)
        for session, batch in grouped.items():
            target = self._sessions.get(session)
            if target is not None:
                target.deliver(pack_events(self.incarnation, batch))

    # ------------------------------------------------------------ rest

    def unrest(self) -> list[str]:
        """Why nothing can be said of it yet, or never: what is still held although nobody asks for anything."""
        worker, seat, receiver = self.worker, self.built.seat, self.built.receiver
        status, report = worker.status(), worker.check()
        found = [f"{status.running} run, {status.waiting} wait"] if status.running or status.waiting else []
        found += [f"{report.rooms} rooms are open"] if report.rooms else []
        found += ["copies, loads or reads are under way"] if seat.busy else []
        for pool, allocator in seat.pools.allocators.items():
            if seat.free(pool) != allocator.total:
                found.append(f"{pool}: {seat.free(pool)} of {allocator.total} are free or only kept")
        if receiver is not None and receiver.slots.free != receiver.slots.total:
            found.append(f"{receiver.slots.free} of {receiver.slots.total} metadata slots are free")
        return [f"{self.process}: {line}" for line in found]

    # ------------------------------------------------------------ ends

    def _end(self, end: HostEnd, reason: str) -> None:
        """The way out that the worker's process itself takes."""
        if self.ended is not None:
            return
        self.ended = end
        self.world.say(self.process.label, f"ends, {end}: {reason}")
        if end is HostEnd.LEFT:
            # Who leaves in peace has finished everything and handed over everything.
            for line in self.unrest():
                self.world.violated(f"{line}, and it leaves")
        try:
            if end in (HostEnd.FENCED, HostEnd.DIED):
                self.worker.fence()
            sessions, self._sessions = list(self._sessions.values()), {}
            for session in sessions:
                session.ended(reason)
            self.worker.close()
        except PeerDead as error:
            self.world.say(self.process.label, f"can't be closed: {error}")
        except Exception as error:
            self.world.violated(f"{self.process} could not be closed: {type(error).__name__}: {error}")
        if end is HostEnd.LEFT:
            self.home.leave(self.process, self.name, self.incarnation)
        self.process.die()

    def _lost_rank(self, which: str) -> None:
        """Without one of its ranks a worker has no state that it could go on from."""
        self._end(HostEnd.DIED, f"{which} died")

    def _died(self) -> None:
        """Its process is gone: the system closes its connections."""
        if self.ended is None:
            self.ended = HostEnd.STOPPED
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            session.ended("the connection was reset")
