"""The controller's process and the supervisor beside it: the production `Controller`, its messages and its actions.

The controller may be killed and started again: it goes on from its ledger, and the supervisor, which lives, tells it
what there is and what has ended meanwhile. A cluster whose head is gone is gone with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

from cluster.controller.controller import Controller
from cluster.controller.controller_actions import EndedProcess, KillWorker, LeaseGrant, OperatorNote, StartWorker
from cluster.controller.controller_ledger import MemoryLedger
from contracts.ids import Incarnation, WorkerName
from contracts.messages.worker_status import WorkerRecord, WorkerStatus, WorkerView
from sim.fabric.sim_network import SimPipe
from sim.fabric.sim_process import SimProcess
from sim.fabric.sim_wire import record_there, status_there
from sim.nodes.build_sim_worker import SimWorld
from sim.nodes.sim_worker import SimHost

TICK_S = 0.1
RETRY_S = 0.2
"""Seconds after which a worker that finds no controller asks again to be registered."""
FOLD_S = 0.02
"""Changes within this many seconds are published together, as in `cluster.controller.controller_service`."""


class SimControl:
    """Implements `sim.nodes.build_sim_worker.ControllerClient`."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.process = SimProcess(world.agenda, "controller-0#1", "node-head", 1)
        self._ledger = MemoryLedger()
        self.core = Controller(world.agenda, world.config.cluster, self._ledger)
        self.core.on_change(self._changed)
        self.away = False
        """Whether the controller's process is dead, and the next one not started."""
        self._ended: list[EndedProcess] = []
        """The ends of processes that the supervisor has to tell."""
        self.hosts: dict[WorkerName, SimHost] = {}
        """The newest process of each worker."""
        self.all_hosts: list[SimHost] = []
        self.watchers: list[Callable[[tuple[WorkerView, ...]], None]] = []
        self.given_up: set[WorkerName] = set()
        self._pids = count(100)
        self._folding = False
        self._pipes: dict[int, tuple[SimPipe, SimPipe]] = {}
        for role, many in world.shape.workers.items():
            for number in range(many):
                self.core.pools.add(WorkerName(f"{role}-{number}"), role)
        self._tick()

    def new_process(self, label: str, node: str) -> SimProcess:
        return SimProcess(self.world.agenda, label, node, next(self._pids))

    def kill(self) -> None:
        """Kill the controller's process; nothing that reaches it is answered until it is started again."""
        self.away = True

    def start_again(self) -> None:
        """Start the controller's process again, over its ledger."""
        self.away = False
        self.core = Controller(self.world.agenda, self.world.config.cluster, self._ledger, supervised=False)
        self.core.on_change(self._changed)
        running = [(host.name, host.incarnation) for host in self.all_hosts if host.process.alive]
        self.core.attach(running, self._ended)
        self._ended.clear()
        self._publish()

    # ------------------------------------------------------------ what workers say

    def register(self, record: WorkerRecord, answer: Callable[[LeaseGrant], None]) -> None:
        worker = self.world.exchange.processes[record.pid]
        record = record_there(record)
        self._ask(worker, lambda: self.core.register(record), answer, again_s=RETRY_S)

    def renew(
        self,
        process: SimProcess,
        name: WorkerName,
        incarnation: Incarnation,
        status: WorkerStatus,
        answer: Callable[[LeaseGrant], None],
    ) -> None:
        status = status_there(status)
        self._ask(process, lambda: self.core.renew(name, incarnation, status), answer)

    def leave(self, process: SimProcess, name: WorkerName, incarnation: Incarnation) -> None:
        self._pipe(process).send(lambda: None if self.away else self.core.leave(name, incarnation))

    def _pipe(self, worker: SimProcess) -> SimPipe:
        return self._pipes_of(worker)[0]

    def _pipes_of(self, worker: SimProcess) -> tuple[SimPipe, SimPipe]:
        """The connection that a worker keeps to the controller: there, and back."""
        if worker.pid not in self._pipes:
            network = self.world.exchange.network
            self._pipes[worker.pid] = network.pipe(worker, self.process), network.pipe(self.process, worker)
        return self._pipes[worker.pid]

    def _ask(
        self,
        worker: SimProcess,
        ask: Callable[[], LeaseGrant],
        answer: Callable[[LeaseGrant], None],
        again_s: float | None = None,
    ) -> None:
        """Make one call over the network: `ask` runs at the controller, `answer` in the worker's process. `again_s`:
        seconds after which a call that finds no controller is made again; None: it isn't."""
        there, back = self._pipes_of(worker)

        def asked() -> None:
            if self.away:
                if again_s is not None:
                    worker.later(again_s, lambda: there.send(asked))
                return
            grant = ask()
            back.send(lambda: worker.do(lambda: answer(grant)))

        there.send(asked)

    # ------------------------------------------------------------ what it does

    def _tick(self) -> None:
        for action in self.core.tick() if not self.away else ():
            match action:
                case StartWorker():
                    delay = self.world.rng.uniform(0.05, 1.0)
                    self.world.agenda.after(delay, partial(self._start, action))
                case KillWorker():
                    self.world.say("controller", f"kills {action.name}#{action.incarnation}")
                    self._kill(action)
                case OperatorNote():
                    self.world.say("controller", action.text)
                    self._given_up(action.text)
        self.world.agenda.after(TICK_S, self._tick)

    def _given_up(self, report: str) -> None:
        """Note a worker that the controller doesn't start again, by the text of its report to operators."""
        if "not restarted" in report or "left dead" in report:
            self.given_up.add(WorkerName(report.partition(" ")[0]))

    def _start(self, start: StartWorker) -> None:
        label = f"{start.name}#{start.incarnation}"
        number = int(start.name.rpartition("-")[2])
        process = self.new_process(label, f"node-{number % self.world.shape.nodes}")
        self.world.say("controller", f"starts {label} on {process.node}")
        self.world.exchange.processes[process.pid] = process
        # The node's agent sees the process end, and reports it once the controller can be reached.
        agent = SimProcess(self.world.agenda, f"agent of {label}", process.node, 0)
        pipe = self.world.exchange.network.pipe(agent, self.process)
        ended = EndedProcess(start.name, start.incarnation, "its process is gone")
        process.on_death(lambda: pipe.send(lambda: self._hear_end(ended)))
        host = SimHost(self.world, process, start.role, start.name, start.incarnation, self)
        self.hosts[start.name] = host
        self.all_hosts.append(host)

    def _hear_end(self, ended: EndedProcess) -> None:
        if self.away:
            self._ended.append(ended)
        else:
            self.core.died(ended.name, ended.incarnation, ended.reason)

    def _kill(self, kill: KillWorker) -> None:
        """Have the worker's node kill it; the message waits while the node can't be reached."""
        for host in self.all_hosts:
            if (host.name, host.incarnation) == (kill.name, kill.incarnation):
                agent = SimProcess(self.world.agenda, f"agent of {host.process}", host.process.node, 0)
                delay = self.world.rng.uniform(0.0, self.world.shape.kill_s)
                send = self.world.exchange.network.pipe(self.process, agent).send
                send(partial(self._die_later, host, delay))

    def _die_later(self, host: SimHost, delay_s: float) -> None:
        self.world.agenda.after(delay_s, host.process.die)

    def _changed(self) -> None:
        if not self._folding:
            self._folding = True
            self.world.agenda.after(FOLD_S, self._publish)

    def _publish(self) -> None:
        self._folding = False
        views = self.core.views()
        for watcher in self.watchers:
            watcher(views)
