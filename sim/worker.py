"""A worker's process in the simulator: what `cluster.host`, `cluster.lease` and gRPC do around a worker, as events.

The worker itself, its seat, pools and rooms are built as `cluster.build` builds them. The process steps it as the host
does, asks the same lease before each step and each delivery, and sleeps as long as the worker itself says.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from cache.arena import Arena, arena_bytes
from cache.device import CpuDevice, Device
from cache.lazy import LazyDevice
from cache.pools import PoolSet, host_layout
from cache.registry import PoolSetLayout
from cache.seat import Seat
from cluster.controller import Grant
from cluster.host import HostEnd
from cluster.host_memory import take_over
from cluster.lease import Lease
from cluster.memory import plan_memory, stride
from cluster.progress import Pulse
from contracts.config import Config
from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages import Command, Event, WorkerStatus
from contracts.ports import SessionId, WorkerRecord
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
from sim.storage import SimQueue, Store
from transfer.receiver import ReceiverEnd
from transfer.sender import SenderEnd

IDLE_S = 0.1
"""As `WorkerHost`'s `idle_s`."""
FINGERPRINT = "simulated"
_SPINS = 2000


class Home(Protocol):
    """What a worker's process is told to do by, and tells."""

    def register(self, record: WorkerRecord, answer: Callable[[Grant], None]) -> None: ...

    def renew(self, host: SimHost, status: WorkerStatus, answer: Callable[[Grant], None]) -> None: ...

    def leave(self, host: SimHost) -> None: ...


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

    worker: PrefillWorker | DecodeWorker
    seat: Seat
    plane: SimPlane
    receiver: ReceiverEnd | None = None


def build(
    world: World, process: Process, role: Role, name: WorkerName, incarnation: Incarnation, sleep: SimSleep
) -> Built:
    """A worker with everything but a model: the engine hashes."""
    shape, config, agenda = world.shape, world.config, world.agenda
    cache = config.cache_for(role)
    device: Device = LazyDevice(world.rng.randrange(1 << 30)) if shape.lazy else CpuDevice()
    spec = pool_set(shape.pools, shape.page_tokens)
    plan = plan_memory(spec, config, role, CONTEXT, 1 << 40)
    assert plan is not None, "a plan draws sizes that fit"
    layout = PoolSetLayout(spec, {pool: 1 + count for pool, count in plan.counts.items()})
    plane = SimPlane(shape.plane, world.exchange.network, process, world.planes, world.rng, world.damage, sleep.wake)
    pools = PoolSet(spec, layout.counts, plane.allocate("pages", layout.nbytes))
    host, arena = _host_tier(world, process, role, layout, device)
    queue: SimQueue | None = None
    if host is not None and world.store is not None:
        queue = SimQueue(world.store, process, sleep.wake)
    seat = Seat(
        pools, device, cache, agenda.now,
        host=host, storage=queue, fingerprint=FINGERPRINT, stride=stride(config, role), wall=agenda.now,
        arena=arena,
    )  # fmt: skip
    take_over(seat, None)
    engine = cast(Engine, HashEngine(pools, device))
    carrier = SimCarrier(world.exchange, process, sleep.wake)
    common: dict[str, Any] = {"context": CONTEXT, "clock": agenda, "pause": lambda s: None}
    sender = SenderEnd(
        name, incarnation, FINGERPRINT, plane, pools, device, config.transfer, carrier=carrier, clock=agenda
    )
    if role is Role.PREFILL:
        return Built(PrefillWorker(name, incarnation, config, engine, seat, sender, sleep, **common), seat, plane)
    receiver = ReceiverEnd(
        name, incarnation, FINGERPRINT, plane, pools, config.decode.metadata_slots, config.transfer,
        verify=cache.verify, carrier=carrier, clock=agenda,
    )  # fmt: skip
    worker = DecodeWorker(name, incarnation, config, engine, seat, receiver, sleep, sender=sender, **common)
    return Built(worker, seat, plane, receiver)


def _host_tier(
    world: World, process: Process, role: Role, layout: PoolSetLayout, device: Device
) -> tuple[PoolSet | None, Arena | None]:
    """The mirror in host memory, in an arena where one is to be had."""
    cache = world.config.cache_for(role)
    if not cache.host_bytes:
        return None, None
    tier = host_layout(layout.spec, cache.host_bytes, layout.counts)
    memory = world.arenas.take(process, arena_bytes(tier)) if cache.arena == "auto" else None
    arena = Arena(memory, tier, FINGERPRINT) if memory is not None else None
    region = arena.region if arena is not None else device.allocate_host(tier.nbytes)
    return PoolSet(tier.spec, tier.counts, region, tier.order, "host"), arena


@dataclass
class _Session:
    deliver: Callable[[list[Event]], None]
    ended: Callable[[str], None]


class SimHost:
    """One incarnation of one worker in its process."""

    def __init__(
        self, world: World, process: Process, role: Role, name: WorkerName, incarnation: Incarnation, home: Home
    ) -> None:
        self.world, self.process, self.home = world, process, home
        self.name, self.role, self.incarnation = name, role, incarnation
        self.sleep = SimSleep()
        self.built = build(world, process, role, name, incarnation, self.sleep)
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
        self._register()

    # ------------------------------------------------------------ lease

    def _record(self) -> WorkerRecord:
        worker, process = self.worker, self.process
        return WorkerRecord(
            self.name, self.role, self.incarnation, process.pid, process.node, process.label, worker.control,
            worker.fits,
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
        self.home.renew(self, self._pulse.on(self.snapshot), granted)
        self._renewal = self.process.later(self.world.config.cluster.heartbeat_s, self._renew)

    # ------------------------------------------------------------ what reaches it

    def open_session(self, deliver: Callable[[list[Event]], None], ended: Callable[[str], None]) -> SessionId | None:
        """None when the worker has ended."""
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

    def call(self, run: Callable[[PrefillWorker | DecodeWorker], None]) -> None:
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
                target.deliver(batch)

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
        except Exception as error:
            self.world.violated(f"{self.process} could not be closed: {type(error).__name__}: {error}")
        if end is HostEnd.LEFT:
            self.home.leave(self)
        self.process.die()

    def _died(self) -> None:
        """Its process is gone: the system closes its connections."""
        if self.ended is None:
            self.ended = HostEnd.STOPPED
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            session.ended("the connection was reset")
