"""The router's process: the production `Brain`, and what the router's fleet and service do around it, as events."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from contracts.errors import ConfigError
from contracts.ids import RequestId, Role, WorkerName
from contracts.messages import Command, Event, Progress, WorkerStatus
from contracts.ports import SessionId, WorkerView
from contracts.sampling import TokenLogprob
from router.actions import Deliver, End, Replay, Scores, Send
from router.audits import Finding, Result
from router.brain import Brain
from router.fleet import REACHABLE, RETRY_FIRST_S, RETRY_MOST_S
from router.request import Request
from router.service import TICK_S
from router.workers import Entry, WorkerKey, prefix_hashes
from sim.control import SimControl
from sim.plan import Ask
from sim.process import Process
from sim.wire import pack_commands, pack_views, status_there, unpack_commands, unpack_events, unpack_views
from sim.worker import SimHost, World

KEEPALIVE_S = 20.0
"""After so long without a sign of life gRPC closes a connection: `keepalive_time` and `keepalive_timeout`."""
CONNECT_S = 5.0


class Linking(Protocol):
    """Whose connections they are."""

    world: World
    process: Process

    def linked(self, key: WorkerKey) -> None: ...

    def unlinked(self, key: WorkerKey, reason: str) -> None: ...

    def events(self, key: WorkerKey, events: Sequence[Event]) -> None: ...


class Link:
    """The router's connection to one incarnation of one worker, made again whenever it ends."""

    def __init__(self, router: Linking, key: WorkerKey, host: SimHost) -> None:
        self.router, self.key, self.host = router, key, host
        self.closed = False
        self._pause = RETRY_FIRST_S
        self._number = 0
        self._session: SessionId | None = None
        self._connect()

    def _connect(self) -> None:
        """Ask for a session; what belongs to an earlier try counts no more."""
        if self.closed:
            return
        self._number += 1
        number, network = self._number, self.router.world.exchange.network
        mine, theirs = self.router.process, self.host.process
        self._heard = self.router.world.agenda.now()
        self.linked = False
        self._there = network.pipe(mine, theirs, lambda: self._broken(number, "the connection was reset"))
        self._back = network.pipe(theirs, mine)
        there, back = self._there, self._back

        def arrived() -> None:
            if self.host.incarnation != self.key[1]:
                back.send(lambda: self._broken(number, "it is another incarnation"))
                return
            session = self.host.open_session(
                lambda frame: back.send(lambda: self._events(number, frame)),
                lambda reason: back.send(lambda: self._broken(number, reason)),
            )
            if session is None:
                back.send(lambda: self._broken(number, "the worker has ended"))
            else:
                self._session = session
                # Its own end of the connection tells it; a word from here might be lost with the next reset.
                back.on_reset = lambda: self.host.close_session(session)
                mine.on_death(lambda: there.send(lambda: self.host.close_session(session)))
                back.send(lambda: self._opened(number))

        if theirs.alive:
            there.send(lambda: theirs.do(arrived))
        else:
            self.router.process.later(0.001, lambda: self._broken(number, "connection refused"))
        self._watch(number)

    def _watch(self, number: int) -> None:
        """Keepalive: a connection through which nothing comes back is closed."""

        def look() -> None:
            if self.closed or number != self._number:
                return
            network, now = self.router.world.exchange.network, self.router.world.agenda.now()
            answers = not self.host.process.stopped and network.reaches(self.router.process, self.host.process)
            if answers:
                self._heard = now
            silent = now - self._heard
            if silent >= (KEEPALIVE_S if self.linked else CONNECT_S):
                self._broken(number, "nothing was heard of it for too long")
            else:
                self.router.process.later(1.0, look)

        self.router.process.later(1.0, look)

    def _opened(self, number: int) -> None:
        if number == self._number and not self.closed:
            self.linked, self._pause = True, RETRY_FIRST_S
            self.router.linked(self.key)

    def _events(self, number: int, frame: bytes) -> None:
        if number == self._number and not self.closed:
            self.router.events(self.key, unpack_events(self.key[1], frame))

    def _broken(self, number: int, reason: str) -> None:
        if number != self._number or self.closed:
            return
        self._hang_up()
        self._number += 1
        if self.linked:
            self.linked = False
            self.router.unlinked(self.key, reason)
        self.router.process.later(self._pause, self._connect)
        self._pause = min(2 * self._pause, RETRY_MOST_S)

    def _hang_up(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._there.send(lambda: self.host.close_session(session))

    def send(self, commands: list[Command]) -> None:
        if self.linked and self._session is not None:
            for frame in pack_commands(commands):
                self._there.send(partial(self._arrived, self._session, frame))

    def _arrived(self, session: SessionId, frame: bytes) -> None:
        self.host.send(session, unpack_commands(frame))

    def close(self) -> None:
        self._hang_up()
        self.closed = True
        if self.linked:
            self.linked = False
            self.router.unlinked(self.key, "the controller no longer shows it as alive")


class Clients(Protocol):
    """Who asked, as a router knows them."""

    def on_tokens(self, ask: Ask, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None: ...

    def on_scores(self, ask: Ask, scores: tuple[TokenLogprob, ...]) -> None: ...

    def on_end(self, ask: Ask, end: End) -> None: ...

    def on_progress(self, ask: Ask, progress: Progress) -> None:
        """A worker reports of one of its requests; clients see what it counts in their usage."""


class SimRouter:
    """One start of the router. What its clients are told, `client` hears."""

    def __init__(
        self,
        world: World,
        control: SimControl,
        number: int,
        client: Clients,
    ) -> None:
        self.world, self.control = world, control
        self.process = control.new_process(f"router-0#{number}", "node-head")
        self.brain = Brain(world.config.router, world.agenda, self._mint, world.config.audit)
        self.links: dict[WorkerKey, Link] = {}
        self._client = client
        self._asks: dict[RequestId, Ask] = {}
        self._number, self._rooms = number, 0
        watched = world.exchange.network.pipe(control.process, self.process)

        def watch(views: tuple[WorkerView, ...]) -> None:
            table = pack_views(views)
            watched.send(lambda: self.process.do(lambda: self._viewed(unpack_views(table))))

        control.watchers.append(watch)
        self.process.on_death(lambda: control.watchers.remove(watch))
        watch(control.brain.views())
        self._tick()

    def _mint(self) -> str:
        self._rooms += 1
        return f"room-{self._number}.{self._rooms}"

    # ------------------------------------------------------------ clients

    def submit(self, ask: Ask, request_id: RequestId) -> None:
        now = self.world.agenda.now()
        self._asks[request_id] = ask
        request = Request(
            request_id, ask.prompt, ask.sampling, now=now, deadline=now + ask.deadline_s,
            hashes=prefix_hashes(ask.prompt, ask.salt), salt=ask.salt, priority=ask.priority,
        )  # fmt: skip
        self.brain.submit(request)
        self._act()

    def cancel(self, request_id: RequestId, *, finished: bool = False) -> None:
        """The client has left, or has what it wanted."""
        self._asks.pop(request_id, None)
        self.brain.cancel(request_id, finished=finished)
        self._act()

    def drain(self, name: WorkerName, *, undo: bool = False) -> bool:
        """What the operators' endpoints do; False where they would refuse."""
        entry = self.brain.workers.named(name)
        link = self.links.get(entry.key) if entry is not None else None
        if entry is None or link is None or not link.linked:
            return False
        if not undo and not self.may_leave(entry):
            return False
        if undo:
            entry.tell_to_stay()
        else:
            entry.tell_to_leave(self.world.agenda.now())
        host, pipe = link.host, self.world.exchange.network.pipe(self.process, link.host.process)
        back = self.world.exchange.network.pipe(link.host.process, self.process)

        def answer() -> None:
            status = status_there(host.worker.status())
            back.send(lambda: self.process.do(lambda: self._status(status)))

        def tell() -> None:
            host.call(lambda worker: worker.undrain() if undo else worker.drain())
            host.call(lambda worker: answer())

        pipe.send(tell)
        return True

    def may_leave(self, entry: Entry) -> bool:
        """As `router.drains` decides it: somebody of its role must stay."""
        staying = self.brain.workers.staying(entry.record.role, self.world.agenda.now())
        return entry.status.state == "ready" and staying != [entry] and bool(staying)

    def change_role(self, name: WorkerName, role: Role) -> bool:
        """What the operators' endpoint does; False where it would refuse."""
        entry = self.brain.workers.named(name)
        if entry is None or entry.record.role is role or not self.may_leave(entry):
            return False
        entry.tell_to_leave(self.world.agenda.now())
        try:
            self.control.brain.change_role(name, role)
        except ConfigError:
            entry.tell_to_stay()
            return False
        return True

    def _status(self, status: WorkerStatus) -> None:
        self.brain.on_status(status)
        self._act()

    # ------------------------------------------------------------ events in, actions out

    def _tick(self) -> None:
        self.brain.tick()
        self._act()
        self.process.later(TICK_S, self._tick)

    def _viewed(self, views: tuple[WorkerView, ...]) -> None:
        wanted = {(v.record.name, v.record.incarnation): v.record for v in views if v.status.state in REACHABLE}
        for key in [k for k in self.links if k not in wanted]:
            self.links.pop(key).close()
        self.brain.on_view(views)
        self._act()
        for key in wanted:
            if key not in self.links:
                hosts = [h for h in self.control.all_hosts if (h.name, h.incarnation) == key]
                self.links[key] = Link(self, key, hosts[0])

    def linked(self, key: WorkerKey) -> None:
        self.brain.on_linked(key)
        self._act()

    def unlinked(self, key: WorkerKey, reason: str) -> None:
        self.world.say(self.process.label, f"lost {key[0]}#{key[1]}: {reason}")
        self.brain.on_unlinked(key, reason)
        self._act()

    def events(self, key: WorkerKey, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Progress):
                ask = self._asks.get(event.request_id)
                if ask is not None:
                    self._client.on_progress(ask, event)
            else:
                self.world.say(f"{key[0]}#{key[1]}", f"says {event}")
            self.brain.on_event(key, event)
        self._act()

    def _act(self) -> None:
        sends: dict[WorkerKey, list[Command]] = {}
        while actions := self.brain.take_actions():
            for action in actions:
                match action:
                    case Deliver():
                        ask = self._asks.get(action.request_id)
                        if ask is not None:
                            self._client.on_tokens(ask, action.tokens, action.logprobs)
                    case Scores():
                        ask = self._asks.get(action.request_id)
                        if ask is not None:
                            self._client.on_scores(ask, action.scores)
                    case Send():
                        self.world.say(self.process.label, f"tells {action.worker[0]} {_short(action.command)}")
                        sends.setdefault(action.worker, []).append(action.command)
                    case End():
                        ask = self._asks.pop(action.request_id, None)
                        if ask is not None:
                            self._client.on_end(ask, action)
                    case Finding() if action.result in (Result.DAMAGED, Result.UNCLEAR, Result.DISPUTED):
                        self.world.violated(f"the audit of {action.request_id} finds {action}")
                    case Replay():
                        reason = f"{action.request_id} goes on as attempt {action.attempt}: {action.reason}"
                        self.world.say(self.process.label, reason)
        for key, commands in sends.items():
            link = self.links.get(key)
            if link is not None:
                link.send(commands)

    def check(self) -> list[str]:
        found = self.brain.check()
        held = set(self.brain.request_ids())
        found += [f"request {rid} has a client and runs nowhere" for rid in sorted(set(self._asks) - held)]
        return found + [f"request {rid} runs and has no client" for rid in sorted(held - set(self._asks))]


def _short(command: Command) -> str:
    name = type(command).__name__
    attempt, room = getattr(command, "attempt", None), getattr(command, "room", "")
    return f"{name} {command.request_id}{'' if attempt is None else f' attempt {attempt}'}{' ' + room if room else ''}"
