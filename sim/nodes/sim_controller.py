"""The controller's process and the supervisor beside it: the production `Controller`, its messages and its actions.

The controller may be killed and started again: it goes on from its ledger, and the supervisor tells it what there is
and what has ended meanwhile. So may the supervisor: nothing is started while there is none, starts that it had not
carried out yet are lost with it, and the next one takes over what runs. The network may cut the controller off. A
cluster whose head is gone is gone with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import (
    ControllerAction,
    EndedProcess,
    KillWorker,
    OperatorNote,
    StartWorker,
    WorkerKey,
)
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.controller.node_room import ClusterRoom, NodePlace, NodeRoom, RoleRoom
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.messages.cluster_view import ClusterView
from twinpool.contracts.messages.leases import DepartureAnswer, LeaseGrant
from twinpool.contracts.messages.pool_changes import ServingChange
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerStatus
from twinpool.sim.fabric.sim_network import MessageT, SimPipe, there
from twinpool.sim.fabric.virtual_time import SimProcess
from twinpool.sim.nodes.build_sim_worker import SimWorld
from twinpool.sim.nodes.sim_worker import SimHost

TICK_S = 0.1
RETRY_S = 0.2
"""Seconds after which a worker that finds no controller asks again to be registered."""
FOLD_S = 0.02
"""Changes within this many seconds are published together, as in `cluster.controller.controller_service`."""


class SimControl:
    """Implements `sim.nodes.build_sim_worker.LeaseHome`."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self._prefix = f"{world.model}/" if world.model else ""
        """Of the names of its processes: two clusters have workers of one name."""
        self.process = SimProcess(world.agenda, f"{self._prefix}controller-0#1", "node-head", 1 + world.place)
        self._ledger = MemoryLedger()
        self._world_of_starts = world
        """With the settings that the next workers start with."""
        self.core = Controller(world.agenda, world.config.cluster, self._ledger, wall=world.agenda.now)
        self._listen()
        self.away = False
        """Whether the controller's process is dead, and the next one not started."""
        self.supervised = True
        """Whether the supervisor's process lives."""
        self._supervisors = 0
        """Supervisors that have ended."""
        self._ended: list[EndedProcess] = []
        """The ends of processes that the supervisor has to tell."""
        self.returning: set[WorkerName] = set()
        """Workers that an operator added, or told to start again, and nobody told to leave since."""
        self.sent_away: set[WorkerName] = set()
        """Workers that an operator had no more use for."""
        self.hosts: dict[WorkerName, SimHost] = {}
        """The newest incarnation of each worker."""
        self.all_hosts: list[SimHost] = []
        self._processes: dict[WorkerKey, SimProcess] = {}
        """The processes that were started, by the incarnation that each is now."""
        self.changes: list[tuple[float, ServingChange]] = []
        """What operators have changed of what is served, and when."""
        self.since: dict[int, float] = {0: 0.0}
        """When the first worker registered with the weights of each number."""
        self.watchers: list[Callable[[ClusterView], None]] = []
        self.given_up: set[WorkerName] = set()
        self._pids = count(100 + 100_000 * world.place)
        self._folding = False
        self._pipes: dict[int, tuple[SimPipe, SimPipe]] = {}
        self._nodes = [f"node-{number}" for number in range(world.shape.nodes)]
        self.core.set_nodes(NodePlace("", node) for node in self._nodes)
        self.core.set_room(self._room())
        for role, many in world.shape.workers.items():
            for number in range(many):
                self.core.pools.add(WorkerName(f"{role}-{number}"), role)
        self._tick()

    def new_process(self, label: str, node: str) -> SimProcess:
        return SimProcess(self.world.agenda, self._prefix + label, node, next(self._pids))

    def kill(self) -> None:
        """Kill the controller's process; nothing that reaches it is answered until it is started again."""
        self.away = True

    def start_again(self) -> None:
        """Start the controller's process again, over its ledger."""
        self.away = False
        agenda, config = self.world.agenda, self.world.config.cluster
        self.core = Controller(agenda, config, self._ledger, supervised=False, wall=agenda.now)
        self.core.set_nodes(NodePlace("", node) for node in self._nodes)
        self._listen()
        if self.supervised:
            self._attach()
        self.publish()

    def kill_supervisor(self) -> None:
        """Kill the supervisor: workers live, and nobody starts any or tells of ends until there is another one."""
        self.supervised = False
        self._supervisors += 1
        if not self.away:
            self.core.detach()

    def start_supervisor(self) -> None:
        """Start a supervisor, which takes over the processes that there are."""
        self.supervised = True
        if not self.away:
            self._attach()

    def _room(self) -> ClusterRoom:
        """Room for all workers of the plan, and for their starts at once."""
        most = 1 + sum(self.world.shape.workers.values())
        roles: dict[str, RoleRoom] = {
            role: RoleRoom(1, planned=many) for role, many in self.world.shape.workers.items()
        }
        return ClusterRoom(tuple(NodeRoom(NodePlace("", node), most, starts=most, roles=roles) for node in self._nodes))

    def _attach(self) -> None:
        self.core.set_room(self._room())
        self.core.attach([key for key, process in self._processes.items() if process.alive], self._ended)
        self._ended.clear()

    def wants(self, names: Iterable[WorkerName]) -> None:
        """Note that an operator wants these workers to serve from now on."""
        self.returning.update(names)
        self.sent_away.difference_update(names)

    def wants_no_more(self, names: Iterable[WorkerName]) -> None:
        """Note that an operator has no more use for these workers."""
        self.returning.difference_update(names)
        self.sent_away.update(names)

    def change_settings(self) -> None:
        """Have workers that start from now on compute steps of other sizes."""
        config = self._world_of_starts.config
        prefill = replace(config.prefill, chunk_tokens=config.prefill.chunk_tokens + 5)
        decode = replace(config.decode, max_batch_tokens=config.decode.max_batch_tokens + 1)
        self._world_of_starts = replace(self._world_of_starts, config=replace(config, prefill=prefill, decode=decode))

    def change(self, change: ServingChange) -> bool:
        """Make an operator's change of what is served; False where it is refused."""
        try:
            self.core.pools.make(change)
        except ConfigError as refusal:
            self.world.say("controller", f"refuses {change}: {refusal}")
            return False
        self.changes.append((self.world.agenda.now(), change))
        self._carry_out(self.core.tick())
        return True

    def unsettled(self) -> list[str]:
        """What is under way of operators' changes."""
        served = self.core.weights.told()
        found = ["the cluster is paused"] if served.paused else []
        found += ["the cluster sleeps"] if served.asleep and not served.by_demand else []
        found += [f"weights {served.pending.number} are still to be read"] if served.pending is not None else []
        if served.weights.number < (latest := max(self.since)):
            found.append(f"weights {latest} were served, and the cluster's are {served.weights.number}")
        serving = [host for host in self.hosts.values() if host.ended is None]
        return found + [
            f"{host.process} has other weights than {served.weights.number}"
            for host in serving
            if (host.weights.number if host.weights is not None else 0) != served.weights.number
        ]

    def unrest(self) -> list[str]:
        """What is under way in the cluster, and who should serve and doesn't."""
        found = [line for host in self.all_hosts if host.ended is None for line in host.unrest()] + self.unsettled()
        for view in self.core.views() if not self.core.weights.told().asleep else ():
            host = self.hosts.get(WorkerName(view.record.name))
            given_up = view.record.name in self.given_up | self.sent_away
            if view.status.state in ("starting", "dead") and not given_up and (host is None or host.ended is not None):
                found.append(f"{view.record.name} is {view.status.state}")
            if view.status.state == "left" and view.record.name in self.returning - self.given_up:
                found.append(f"{view.record.name} has left, and was to start again")
        return found

    def host(self, key: WorkerKey) -> SimHost:
        """The worker's incarnation."""
        return next(host for host in self.all_hosts if (host.name, host.incarnation) == key)

    def reaches(self, process: SimProcess) -> bool:
        """Whether a process can call the controller now."""
        return not self.away and self.world.exchange.network.reaches(process, self.process)

    # ------------------------------------------------------------ what workers say

    def register(self, record: WorkerRecord, answer: Callable[[LeaseGrant], None]) -> None:
        worker = self.world.exchange.processes[record.pid]
        record = there(record)

        def register() -> LeaseGrant:
            grant = self.core.register(record)
            if not grant.fenced:
                self.since.setdefault(record.weights_number, self.world.agenda.now())
            if not grant.fenced and self.core.table.nodes.cordoned(NodePlace(record.node_id, record.node)):
                self.world.violated(f"{worker} may serve on {record.node}, which is cordoned")
            return grant

        self._ask(worker, register, answer, again_s=RETRY_S)

    def renew(
        self,
        process: SimProcess,
        name: WorkerName,
        incarnation: Incarnation,
        status: WorkerStatus,
        answer: Callable[[LeaseGrant], None],
    ) -> None:
        status = there(status)
        self._ask(process, lambda: self.core.renew(name, incarnation, status), answer)

    def leave(
        self,
        process: SimProcess,
        name: WorkerName,
        incarnation: Incarnation,
        closed: bool,
        answer: Callable[[DepartureAnswer], None],
    ) -> None:
        def leave() -> DepartureAnswer:
            goes_on = self.core.leave(name, incarnation, closed=closed)
            self._carry_out(self.core.tick())
            return DepartureAnswer(goes_on, sleeps=goes_on and bool(self.core.table.served.asleep))

        self._ask(process, leave, answer, again_s=RETRY_S)

    def _pipes_of(self, worker: SimProcess) -> tuple[SimPipe, SimPipe]:
        """The connection that a worker keeps to the controller: there, and back."""
        if worker.pid not in self._pipes:
            network = self.world.exchange.network
            self._pipes[worker.pid] = network.pipe(worker, self.process), network.pipe(self.process, worker)
        return self._pipes[worker.pid]

    def _ask(
        self,
        worker: SimProcess,
        ask: Callable[[], MessageT],
        answer: Callable[[MessageT], None],
        again_s: float | None = None,
    ) -> None:
        """Make one call over the network: `ask` runs at the controller, `answer` in the worker's process. `again_s`:
        seconds after which a call that finds no controller is made again; None: it isn't."""
        to, back = self._pipes_of(worker)

        def asked() -> None:
            if self.away:
                if again_s is not None:
                    worker.later(again_s, lambda: to.send(asked))
                return
            answered = there(ask())
            back.send(lambda: worker.do(lambda: answer(answered)))

        to.send(asked)

    # ------------------------------------------------------------ what it does

    def _tick(self) -> None:
        if not self.away:
            self._carry_out(self.core.tick())
        self.world.agenda.after(TICK_S, self._tick)

    def _carry_out(self, actions: Sequence[ControllerAction]) -> None:
        for action in actions:
            match action:
                case StartWorker():
                    delay = self.world.rng.uniform(0.05, 1.0)
                    self.world.agenda.after(delay, partial(self._start, action, self._supervisors))
                case KillWorker():
                    self.world.say("controller", f"kills {action.name}#{action.incarnation}")
                    self._kill(action)
                case OperatorNote():
                    self.world.say("controller", action.text)

    def _listen(self) -> None:
        self.core.on_change(self._changed)
        self.core.table.on_note(self._given_up)  # Not by the report that operators get: a controller may die before.

    def _given_up(self, report: str) -> None:
        """Note a worker that the controller doesn't start again, by the text of its note for operators."""
        name = WorkerName(report.partition(" ")[0])
        if "left dead" in report or ("not restarted" in report and name not in self.returning):
            self.given_up.add(name)

    def _start(self, start: StartWorker, supervisor: int) -> None:
        if supervisor != self._supervisors:
            return  # The one that was to carry it out is dead.
        if self._goes_on(start):
            return
        label = f"{start.name}#{start.incarnation}"
        number = int(start.name.rpartition("-")[2])
        free = [node for node in self._nodes if node not in start.avoid] or self._nodes
        process = self.new_process(label, free[number % len(free)])
        self.world.say("controller", f"starts {label} on {process.node}")
        self.world.exchange.processes[process.pid] = process
        # The node's agent sees the process end, and reports it once the controller can be reached.
        agent = SimProcess(self.world.agenda, f"agent of {label}", process.node, 0)
        pipe = self.world.exchange.network.pipe(agent, self.process)
        process.on_death(lambda: self._died(process, pipe))
        self._begin(start, process, None)

    def _goes_on(self, start: StartWorker) -> bool:
        """Have the process of an incarnation that has left go on as the next one; returns whether it does. One that
        can't is killed."""
        before = start.name, start.successor_of
        process = self._processes.get(before)
        if process is None or not process.alive:
            return False
        if self.world.config.ranks_for(start.role) > 1:
            process.die()
            return False
        del self._processes[before]
        self._processes[start.name, start.incarnation] = process
        self._placed(start, process)
        host = self.host(before)
        process.do(lambda: host.follow_with(lambda: self._begin(start, process, host)))
        return True

    def _begin(self, start: StartWorker, process: SimProcess, before: SimHost | None) -> None:
        """Be an incarnation in its process. `before`: the one that its process was before."""
        if before is not None:
            process.become(f"{self._prefix}{start.name}#{start.incarnation}")
            self.world.say("controller", f"{start.name}#{before.incarnation} goes on as {process}")
        preparation = before.preparation if before is not None else None
        host = SimHost(self._world_of_starts, process, start, self, preparation=preparation)
        self.hosts[start.name] = host
        self.all_hosts.append(host)
        if before is None:
            self._processes[start.name, start.incarnation] = process
            self._placed(start, process)

    def _placed(self, start: StartWorker, process: SimProcess) -> None:
        if not self.away:
            self.core.placed(start.name, start.incarnation, NodePlace("", process.node))

    def _died(self, process: SimProcess, pipe: SimPipe) -> None:
        """A process has ended: tell it of the incarnation that it was."""
        name, incarnation = next(key for key, one in self._processes.items() if one is process)
        ended = EndedProcess(name, incarnation, "its process is gone")
        pipe.send(lambda: self._hear_end(ended))

    def _hear_end(self, ended: EndedProcess) -> None:
        if self.away or not self.supervised:
            self._ended.append(ended)
        else:
            self.core.died(ended.name, ended.incarnation, ended.reason)

    def _kill(self, kill: KillWorker) -> None:
        """Have the worker's node kill it; the message waits while the node can't be reached."""
        process = self._processes.get((kill.name, kill.incarnation))
        if process is not None:
            agent = SimProcess(self.world.agenda, f"agent of {process}", process.node, 0)
            delay = self.world.rng.uniform(0.0, self.world.shape.kill_s)
            send = self.world.exchange.network.pipe(self.process, agent).send
            send(partial(self._die_later, process, delay))

    def _die_later(self, process: SimProcess, delay_s: float) -> None:
        self.world.agenda.after(delay_s, process.die)

    def _changed(self) -> None:
        if not self._folding:
            self._folding = True
            self.world.agenda.after(FOLD_S, self.publish)

    def publish(self) -> None:
        """Send the whole table to everybody who watches it."""
        self._folding = False
        view = self.view()
        for watcher in self.watchers:
            watcher(view)

    def view(self) -> ClusterView:
        """The whole table, and what is served."""
        return ClusterView(0, self.core.views(), served=self.core.weights.told())
