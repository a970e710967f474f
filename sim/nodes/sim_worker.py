"""A worker's process in the simulator: the production worker, with its thread, its lease and gRPC as events.

The worker itself, its KV cache manager, pools and rooms are built as `cluster.assembly.build_worker` builds them. The
process steps it as the host does, asks the same lease before each step and each delivery, and sleeps as long as the
worker itself says. One that has left by drain waits for what the controller says, and goes on as the next incarnation
where that has a plan for it; a worker of several ranks starts in new processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from twinpool.cluster.controller.controller_actions import StartWorker
from twinpool.cluster.worker_process.lease_keeper import WorkerLease
from twinpool.cluster.worker_process.worker_plan import WeightsPreparation
from twinpool.cluster.worker_process.worker_process import NEXT_PLAN_S
from twinpool.cluster.worker_process.worker_thread import StepWatchdog, WorkerEnd
from twinpool.contracts.errors import PeerDead
from twinpool.contracts.ids import Role
from twinpool.contracts.interfaces.worker_interface import SessionId, Worker
from twinpool.contracts.messages.leases import DepartureAnswer, LeaseGrant
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL, StreamEnd
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import EndedWorker, WorkerRecord
from twinpool.contracts.sampling_params import WeightsVersion
from twinpool.engine.runner.batch import BatchRow
from twinpool.sim.fabric.sim_network import pack_events
from twinpool.sim.fabric.virtual_time import SimProcess, StepCosts, TimerEntry, pairs_of
from twinpool.sim.nodes.build_sim_worker import (
    IDLE_S,
    SPINS,
    BuiltWorker,
    LeaseHome,
    SimSleep,
    SimWorld,
    build,
)
from twinpool.sim.scenario.scenario import digest_of

LEAVE_S = 2.0
"""Seconds that a worker which has left waits for the controller's answer."""
HURRY = "its worker leaves, and had waited for it for long enough"


@dataclass
class _SimSession:
    deliver: Callable[[bytes], None]
    ended: Callable[[StreamEnd], None]


class SimHost:
    """One incarnation of one worker in its process.

    It has more than twenty methods: it stands for a host, a session and a controller's client of a real cluster.
    """

    def __init__(
        self,
        world: SimWorld,
        process: SimProcess,
        start: StartWorker,
        home: LeaseHome,
        make: Callable[[SimWorld, SimProcess, StartWorker, SimSleep, LeaseHome], BuiltWorker] = build,
        preparation: WeightsPreparation | None = None,
    ) -> None:
        """`preparation`: that of its process, which was another incarnation before; None: it is new."""
        self.world, self.process, self.home = world, process, home
        self.name, self.role, self.incarnation = start.name, start.role, start.incarnation
        self.weights = start.weights
        self.sleep = SimSleep()
        self.built = make(world, process, start, self.sleep, home)
        self.worker = self.built.worker
        self.lease = WorkerLease(world.agenda)
        self._peers_ended: tuple[EndedWorker, ...] = ()
        self.ended: WorkerEnd | None = None
        self._registered = False
        self._inbox: deque[Callable[[], None]] = deque()
        self._sessions: dict[SessionId, _SimSession] = {}
        self._next_session = 1
        self._turn: TimerEntry | None = None
        self._renewal: TimerEntry | None = None
        self._checks_in = world.rng.randrange(40)
        self._watchdog = StepWatchdog(world.agenda)
        self._hung = False
        self._paused = False
        self._answer: DepartureAnswer | None = None
        """What the controller has said of its departure, as it was heard in time."""
        self._following: Callable[[], None] | None = None
        """How its process goes on, once it has left."""
        self.preparation = preparation or WeightsPreparation(self._prepare, begin=self._beside)
        self._spins = 0
        self.snapshot = self.worker.status()
        self.sleep.on_wake = self.wake
        self._step_s = 0.0
        """What the steps of a round take, where the plan has costs."""
        if world.shape.costs is not None or world.background:
            self.built.engine.on_launch = self._launched
        process.on_death(self._died)
        for rank in self.built.followers.ranks if self.built.followers is not None else []:
            rank.process.on_death(partial(process.do, partial(self._lost_rank, str(rank.process))))
        self._register()

    # ------------------------------------------------------------ lease

    def _record(self) -> WorkerRecord:
        worker, process = self.worker, self.process
        return WorkerRecord(
            self.name,
            self.role,
            self.incarnation,
            process.pid,
            process.node,
            process.label,
            worker.control,
            worker.fits,
            fingerprint=worker.fingerprint,
            stream_protocol=STREAM_PROTOCOL,
            weights=self.weights,
        )

    def _register(self) -> None:
        sent = self.world.agenda.now()

        def granted(grant: LeaseGrant) -> None:
            if grant.fenced:
                self._end(WorkerEnd.FENCED, "no longer wanted")
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

        def granted(grant: LeaseGrant) -> None:
            if grant.fenced:
                self.lease.fence()
                self._end(WorkerEnd.FENCED, "the controller has ended the lease")
            else:
                self.lease.granted(sent, grant.lease_s)
                if grant.ended != self._peers_ended:
                    self._peers_ended = ended = grant.ended
                    self.call(lambda worker: worker.workers_ended(ended))
                self._take_orders(grant)
                if grant.drain:
                    self.call(lambda worker: worker.drain())

        if not self.lease.held:
            self._end(WorkerEnd.FENCED, "the controller could not be reached in time")
            return
        status = self.preparation.on(self._watchdog.on(self.snapshot))
        self.home.renew(self.process, self.name, self.incarnation, status, granted)
        self._renewal = self.process.later(self.world.config.cluster.heartbeat_s, self._renew)

    def _take_orders(self, grant: LeaseGrant) -> None:
        """Carry out what a grant asks for besides draining."""
        self.preparation.order(grant.prepare)
        resumed, self._paused = self._paused and not grant.paused, grant.paused
        if resumed:
            self.wake()
        if grant.hurry:
            self.call(lambda worker: worker.end_requests(HURRY))

    def _prepare(self, weights: WeightsVersion) -> str:
        return digest_of(weights.path, int(self.name.rpartition("-")[2])) if weights.path else ""

    def _beside(self, work: Callable[[], None]) -> None:
        """Have files read, which takes a while."""
        self.process.later(self.world.rng.expovariate(4.0), work)

    # ------------------------------------------------------------ what reaches it

    def open_session(self, deliver: Callable[[bytes], None], ended: Callable[[StreamEnd], None]) -> SessionId | None:
        """Open a router's session: `deliver` gets frames, `ended` its end. None if the worker ended."""
        if self.ended is not None or not self.process.alive:
            return None
        session = SessionId(self._next_session)
        self._next_session += 1
        self._sessions[session] = _SimSession(deliver, ended)
        return session

    def close_session(self, session: SessionId) -> None:
        if self._sessions.pop(session, None) is not None:
            self._put(lambda: self.worker.drop_session(session))

    def send(self, session: SessionId, commands: Sequence[Command]) -> None:
        def take() -> None:
            if session in self._sessions:
                for command in commands:
                    if self.world.foreign(command.request_id):
                        self.world.violated(f"{self.process} is asked for {command.request_id}, of another model")
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
        """Stop the worker's loop for good, while its lease is still renewed."""
        self._hung = True

    def _run(self) -> None:
        self._turn = None
        if self.ended is not None or self._hung:
            return
        try:
            end = self._round()
        except PeerDead as error:
            end = WorkerEnd.DIED, str(error)
        except Exception as error:
            self.world.violated(f"{self.process}: {type(error).__name__}: {error}")
            end = WorkerEnd.DIED, f"{type(error).__name__}: {error}"
        if end is not None:
            self._end(*end)

    def _round(self) -> tuple[WorkerEnd, str] | None:
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()
        if not self.lease.held:
            return WorkerEnd.FENCED, "the worker's lease has ended"
        if self._paused:
            return self._rest_paused()
        events = self.worker.step()
        if events and not self.lease.held:
            return WorkerEnd.FENCED, "the worker's lease has ended"
        self._deliver(events)
        step_s, self._step_s = self._step_s, 0.0
        steps, self.snapshot = self.snapshot.steps, self.worker.status()
        if self.worker.unfit:
            return WorkerEnd.FENCED, self.worker.unfit
        self._watchdog.turned(self.snapshot.steps, self.worker.runnable, self.world.shape.step_s)
        if self.worker.drained and not self._inbox:
            return WorkerEnd.LEFT, "the worker was drained and has left"
        self._check_sometimes()
        if step_s:
            took = step_s
        elif self.snapshot.steps != steps:
            took = self.world.shape.step_s * self.world.rng.uniform(0.5, 1.5)
        else:
            took = 0.0002
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

    def _rest_paused(self) -> tuple[WorkerEnd, str] | None:
        """A turn of the loop in which the worker makes no step."""
        self.snapshot = replace(self.worker.status(), paused=True)
        self._watchdog.turned(self.snapshot.steps, False, 0.0)
        self.worker.take_part()
        if self.worker.drained and not self._inbox:
            return WorkerEnd.LEFT, "the worker was drained and has left"
        self._schedule(IDLE_S)
        self.sleep.asked = IDLE_S
        return None

    def _launched(self, rows: Sequence[BatchRow]) -> None:
        """Have a step take its time: what the process sends from now on leaves at its end. Look whether more background
        requests decode in it than may beside others."""
        if (costs := self.world.shape.costs) is not None:
            self._step_s += step_seconds(costs, self.role, rows)
            self.process.computes_until = self.world.agenda.now() + self._step_s
        draws = [row.draw for row in rows if row.draw is not None and row.start >= row.draw.prompt_len]
        background = sum((draw.params.seed, draw.params.choice) in self.world.background for draw in draws)
        most = self.world.config.decode.background_rows
        if self.role is not Role.PREFILL and most < background < len(draws):
            self.world.violated(f"{self.process}: {background} background requests decode beside others, not {most}")

    def _look_for_spins(self, sound: bool) -> None:
        """Report a loop that doesn't sleep for `SPINS` turns though it computes nothing."""
        self._spins = 0 if sound else self._spins + 1
        if self._spins == SPINS:
            self.world.violated(f"{self.process}: its loop has turned {SPINS} times for something that is due")

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
        """List the requests, rooms, pages and slots that the worker still holds; empty once it is at rest."""
        worker, manager, receiver = self.worker, self.built.manager, self.built.receiver
        status, report = worker.status(), worker.check()
        found = [f"{status.running} run, {status.waiting} wait"] if status.running or status.waiting else []
        found += [f"{report.rooms} rooms are open"] if report.rooms else []
        found += ["copies, loads or reads are under way"] if manager.busy else []
        for pool, allocator in manager.pools.allocators.items():
            if manager.supply.free_pages(pool) != allocator.total:
                found.append(f"{pool}: {manager.supply.free_pages(pool)} of {allocator.total} are free or only kept")
        if receiver is not None and receiver.slots.free != receiver.slots.total:
            found.append(f"{receiver.slots.free} of {receiver.slots.total} metadata slots are free")
        return [f"{self.process}: {line}" for line in found]

    # ------------------------------------------------------------ ends

    def _end(self, end: WorkerEnd, reason: str) -> None:
        """End the worker's process with the steps that production takes for this `end`."""
        if self.ended is not None:
            return
        self.ended = end
        self.world.say(self.process.label, f"ends, {end}: {reason}")
        if end is WorkerEnd.LEFT:
            # A worker that leaves after a drain has finished and handed over everything.
            for line in self.unrest():
                self.world.violated(f"{line}, and it leaves")
        closed = False
        try:
            if end in (WorkerEnd.FENCED, WorkerEnd.DIED):
                self.worker.fence()
            sessions, self._sessions = list(self._sessions.values()), {}
            for session in sessions:
                session.ended(StreamEnd(reason, left=end is WorkerEnd.LEFT))
            self.worker.close()
            closed = True
        except PeerDead as error:
            self.world.say(self.process.label, f"can't be closed: {error}")
        except Exception as error:
            self.world.violated(f"{self.process} could not be closed: {type(error).__name__}: {error}")
        if end is WorkerEnd.LEFT:
            self._depart(closed)
        else:
            self.process.die()

    def _depart(self, closed: bool) -> None:
        """Give the lease back; the process goes on where the controller says so in time, and has a plan for it."""
        if self.built.storage is not None:
            self.built.storage.settle()

        def heard(answer: DepartureAnswer) -> None:
            if self._answer is None:
                self._answer = answer
                self._go_on()

        alone = self.built.followers is None
        self.home.leave(self.process, self.name, self.incarnation, closed and alone, heard)
        self.process.later(LEAVE_S, lambda: heard(DepartureAnswer()))

    def follow_with(self, begin: Callable[[], None]) -> None:
        """Take in how the process goes on, once the controller's answer to its departure has come."""
        self._following = begin
        if self._answer is not None:
            self._go_on()

    def _go_on(self) -> None:
        assert self._answer is not None
        if not self._answer.goes_on:
            self.process.die()
        elif self._following is not None:
            self._following()
        elif not self._answer.sleeps:
            self.process.later(NEXT_PLAN_S, lambda: self.process.die() if self._following is None else None)

    def _lost_rank(self, which: str) -> None:
        """End the worker: without one of its ranks it has no state to go on from."""
        self._end(WorkerEnd.DIED, f"{which} died")

    def _died(self) -> None:
        """End all sessions of the dead process, as the system closes its connections."""
        if self.ended is None:
            self.ended = WorkerEnd.STOPPED
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            session.ended(StreamEnd("the connection was reset"))


def step_seconds(costs: StepCosts, role: Role, rows: Sequence[BatchRow]) -> float:
    """What a step of these rows takes on a worker of `role`."""
    if role is Role.DECODE:
        return costs.decode_s(len(rows), sum(row.start + 1 for row in rows))
    counts = [(row.start, len(row.tokens)) for row in rows]
    return costs.prefill_s(sum(count for _, count in counts), sum(pairs_of(*one) for one in counts))
