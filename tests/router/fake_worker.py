"""Workers that draw tokens from a formula: what prefill and decode say to a router, without a model.

A token depends on the tokens before it, on seed, choice and position, so that a lost, repeated or reordered token
changes everything after it. Prefill sends the first token (and scores) with its report and hands its room over; decode
waits for the room and sends the rest, one token a frame, its report, and the end. Nothing moves while `paused`.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from twinpool.contracts.errors import ErrorKind, RequestError
from twinpool.contracts.ids import Incarnation, RequestId, Role, RoomId, WorkerName
from twinpool.contracts.messages.cluster_view import ServedWeights
from twinpool.contracts.messages.fingerprint import PROTOCOL, Fingerprint
from twinpool.contracts.messages.kept_answers import Attach, Attached, Detach
from twinpool.contracts.messages.pool_changes import (
    ChangedSetting,
    ChangedWorkers,
    DrainWorkers,
    LoadAdapter,
    OperatorChange,
    SetRole,
    SettingsAnswer,
    SettingsChange,
    UndrainWorkers,
    UnloadAdapter,
)
from twinpool.contracts.messages.router_commands import Audit, Cancel, Command, InvalidatePrefix, Submit
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL, StreamEnd
from twinpool.contracts.messages.worker_events import Audited, Done, Embedding, Event, LegReport, PromptScores, Tokens
from twinpool.contracts.messages.worker_status import CheckReport, WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.sampling_params import (
    CLASSES,
    JUDGED,
    AdapterRef,
    ChosenExperts,
    SamplingParams,
    TokenLogprob,
    WeightsVersion,
)

VOCAB = 1000
FIRST = 300
"""Tokens are drawn from here up to `VOCAB`: ordinary pieces of the demo's vocabulary, no special token."""
BYTES_A_TOKEN = 10
PAGES = 100


def draw(tokens: Sequence[int], sampling: SamplingParams) -> int:
    """The token at position ``len(tokens)``."""
    raw = struct.pack("<4QQQ", *([0] * 4 + list(tokens))[-4:], sampling.seed, sampling.choice * 2**32 + len(tokens))
    return FIRST + zlib.crc32(raw) % (VOCAB - FIRST)


def logprob(token: int, count: int, *, routed: bool = False) -> TokenLogprob:
    """A log-probability that tells which token it belongs to, and so do the experts of two layers."""
    top = tuple((token + i, -token / 1000 - i) for i in range(count))
    experts = ChosenExperts(2, struct.pack("<4H", *range(token, token + 4))) if routed else None
    return TokenLogprob(token, -token / 1000, top, experts)


def expected(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """The whole undisturbed answer, stop token included."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + sampling.max_tokens:
        tokens.append(draw(tokens, sampling))
        if tokens[-1] in sampling.stop_token_ids:
            break
    return tokens[len(prompt) :]


def ending(submit: Submit, tokens: Sequence[int]) -> Done | None:
    """The end that `tokens` (prompt included) bring, if they do."""
    key = (submit.request_id, submit.attempt)
    if len(tokens) > len(submit.tokens) and tokens[-1] in submit.sampling.stop_token_ids:
        return Done(*key, "stop", stop_token=tokens[-1])
    if len(tokens) - submit.prompt_len >= submit.sampling.max_tokens:
        return Done(*key, "length")
    return None


def scored(submit: Submit, tokens: Sequence[int], at: int) -> tuple[TokenLogprob, ...]:
    count = submit.sampling.logprobs
    return () if count is None else (logprob(tokens[at], count, routed=submit.sampling.routed_experts),)


def embedding(tokens: Sequence[int]) -> tuple[float, ...]:
    """The embedding of a prompt: a few numbers of its tokens and their order."""
    return (1.0, *(sum(token * (at + way) % 101 for at, token in enumerate(tokens)) - 50.0 for way in range(1, 8)))


def prefill_frames(submit: Submit, worker: WorkerName, cached: int = 0, logits: int = 0) -> Iterator[list[Event]]:
    """What prefill says to `submit`, frame by frame. `logits`: how many a judgement has; 0: 2, and 3 of classes."""
    key = (submit.request_id, submit.attempt)
    tokens = list(submit.tokens)
    frame: list[Event] = []
    if (count := submit.sampling.prompt_logprobs) is not None:
        routed = submit.sampling.routed_experts
        frame.append(PromptScores(*key, tuple(logprob(t, count, routed=routed) for t in tokens[1:])))
        cached = 0
    if submit.sampling.pooling:
        vector = embedding(submit.tokens)
        count = logits or {JUDGED: 2, CLASSES: 3}.get(submit.sampling.pooling, 0)
        frame.append(Embedding(*key, vector[1 : 1 + count] if count else vector))
    if submit.sampling.max_tokens:
        tokens.append(draw(tokens, submit.sampling))
        frame.append(Tokens(*key, len(tokens) - 1, (tokens[-1],), scored(submit, tokens, len(tokens) - 1)))
    marks = {"queue": 0.001, "match": 0.001, "prefill": 0.002}
    frame.append(LegReport(*key, Role.PREFILL, worker, marks, cached, len(submit.tokens) - cached))
    if done := ending(submit, tokens):
        frame.append(done)
    yield frame


def decode_frames(submit: Submit, worker: WorkerName) -> Iterator[list[Event]]:
    """What decode says to `submit`, frame by frame; the first token is prefill's."""
    key = (submit.request_id, submit.attempt)
    tokens = [*submit.tokens, draw(submit.tokens, submit.sampling)]
    if ending(submit, tokens):
        return
    marks = {"grant": 0.001, "arrived": 0.003}
    received = BYTES_A_TOKEN * (len(submit.tokens) - 1)
    reports: list[Event] = [LegReport(*key, Role.DECODE, worker, marks, 1, transfer_bytes=received)]
    while True:
        tokens.append(draw(tokens, submit.sampling))
        at = len(tokens) - 1
        frame: list[Event] = [*reports, Tokens(*key, at, (tokens[at],), scored(submit, tokens, at))]
        reports.clear()
        if done := ending(submit, tokens):
            marks |= {"first_step": 0.004, "done": 0.005}
            yield [*frame, LegReport(*key, Role.DECODE, worker, marks), done]
            return
        yield frame


def local_frames(submit: Submit, worker: WorkerName) -> Iterator[list[Event]]:
    """What a decode worker says to `submit` that computes the prompt itself, frame by frame."""
    yield from prefill_frames(submit, worker)
    yield from decode_frames(submit, worker)


@dataclass
class Leg:
    """One submitted attempt on one worker."""

    session: FakeSession
    submit: Submit
    frames: Iterator[list[Event]]


@dataclass
class Rooms:
    """Hand-overs that have arrived, known to all workers of a cluster."""

    arrived: set[RoomId] = field(default_factory=set)


class FakeSession:
    """`router.links.controller_port.Session` with a fake."""

    def __init__(
        self, worker: FakeWorker, on_events: Callable[[Sequence[Event]], None], on_closed: Callable[[StreamEnd], None]
    ) -> None:
        self.worker = worker
        self.on_events = on_events
        self.on_closed = on_closed
        self.open = True

    def send(self, commands: Sequence[Command]) -> None:
        for command in commands if self.open else ():
            self.worker.handle(self, command)

    def close(self) -> None:
        if self.open:
            self.open = False
            self.worker.drop(self)


class FakeWorker:
    """One worker, across its incarnations. All methods run on the router's loop."""

    def __init__(self, name: str, role: Role, rooms: Rooms | None = None, *, positions: int = 4096) -> None:
        self.name = WorkerName(name)
        self.role = role
        self.rooms = rooms or Rooms()
        self.positions = positions
        self.incarnation = Incarnation(1)
        self.endpoint = self.stream = ""
        self.stream_protocol = STREAM_PROTOCOL
        self.node, self.node_id = "here", ""
        self.state = "ready"
        self.alive = True
        self.hangs = False
        """It answers no call any more."""
        self.paused = False
        self.eager = False
        """Decode doesn't wait for the room: its events come before prefill's."""
        self.cached = self.logits = 0
        self.refusals: list[ErrorKind] = []
        """Errors that the next submits end in, first first."""
        self.violations: tuple[str, ...] = ()
        self.counters: dict[str, float] = {}
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.audits: list[Audit] = []
        self.forgets: list[InvalidatePrefix] = []
        self.asked: list[Attach] = []
        self.detached: list[Detach] = []
        self.attached: Callable[[Attach], Attached | None] | None = None
        """What it says to a router that asks for an answer; None: that it has nothing."""
        self.numerics = ""
        """Its numerics class; empty: it registers without a fingerprint."""
        self.protocol, self.layout, self.weights = PROTOCOL, "layout", "weights"
        self.changed: WeightsVersion | None = None
        """The weights that were put in place of its checkpoint's."""
        self.kv_events = self.kv_replay = ""
        """Where it says that it publishes KV events."""
        self.pages_free: int | None = None
        """Free pages; None: as many as it has no leg for."""
        self.audited: Callable[[Audit], Audited] | None = None
        """What it says to an audit; None: nothing."""
        self.legs: dict[RequestId, Leg] = {}
        self.sessions: list[FakeSession] = []
        self._scheduled = False

    @property
    def record(self) -> WorkerRecord:
        control = f"inproc://{self.name}" if self.role is Role.PREFILL else ""
        fits = WorkerLimits(self.positions, 4096)
        weights = self.weights if self.changed is None else f"{self.weights}/{self.changed.serial}"
        fingerprint = Fingerprint(self.protocol, self.layout, self.numerics, weights) if self.numerics else None
        return WorkerRecord(
            self.name, self.role, self.incarnation, 1, self.node, self.endpoint, control, fits, self.node_id,
            fingerprint, self.stream, stream_protocol=self.stream_protocol, weights=self.changed,
        )  # fmt: skip

    def status(self) -> WorkerStatus:
        state = self.state if self.alive else "dead"
        free = PAGES - len(self.legs) if self.pages_free is None else self.pages_free
        return WorkerStatus(
            self.name, self.role, state, 1, self.node, self.incarnation, len(self.legs), 0, PAGES, free,
            counters=dict(self.counters), kv_events=self.kv_events, kv_replay=self.kv_replay,
        )  # fmt: skip

    def check(self) -> CheckReport:
        return CheckReport(self.name, PAGES, 0, len(self.legs), 0, self.violations)

    def handle(self, session: FakeSession, command: Command) -> None:
        if isinstance(command, Cancel):
            self.cancels.append(command)
            leg = self.legs.get(command.request_id)
            if leg and leg.session is session and leg.submit.attempt <= command.attempt:
                del self.legs[command.request_id]
            return
        if isinstance(command, Detach):  # It keeps nothing: what is left to it ends.
            self.detached.append(command)
            self.legs.pop(command.request_id, None)
            return
        if isinstance(command, Attach):
            self.asked.append(command)
            told = self.attached(command) if self.attached is not None else Attached(command.request_id, 0)
            if told is not None:
                asyncio.get_running_loop().call_soon(session.on_events, [told])
            return
        if isinstance(command, Audit):
            self.audits.append(command)
            if self.audited is not None:
                asyncio.get_running_loop().call_soon(session.on_events, [self.audited(command)])
            return
        if isinstance(command, InvalidatePrefix):
            self.forgets.append(command)
            return
        assert isinstance(command, Submit), "orders of moves go to workers that move"
        self.submits.append(command)
        key = (command.request_id, command.attempt)
        frames: Iterator[list[Event]]
        if self.state == "draining":
            frames = iter([[Done(*key, "error", error=ErrorKind.DRAINING, message="draining")]])
        elif self.refusals:
            kind = self.refusals.pop(0)
            frames = iter([[Done(*key, "error", error=kind, message=f"planted: {kind}")]])
        elif self.role is Role.PREFILL:
            frames = prefill_frames(command, self.name, self.cached, self.logits)
        else:
            frames = decode_frames(command, self.name)
        assert command.request_id not in self.legs, "a request is submitted again only after its cancel or end"
        self.legs[command.request_id] = Leg(session, command, frames)
        self.go()

    def go(self) -> None:
        """Step soon, again and again, unless paused."""
        if not self.paused and not self._scheduled and self.legs:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        if not self.paused and self.alive and self.step():
            self.go()

    def step(self) -> bool:
        """One frame to each session: the next events of every leg that can go on. False when none could."""
        frames: dict[int, tuple[FakeSession, list[Event]]] = {}
        for request_id, leg in list(self.legs.items()):
            blocked = self.role is Role.DECODE and not self.eager and leg.submit.room not in self.rooms.arrived
            events = None if blocked else next(leg.frames, [])
            if events is None:
                continue
            if not events or any(isinstance(e, Done) for e in events) or self.role is Role.PREFILL:
                self.legs.pop(request_id, None)
            if self.role is Role.PREFILL:
                self.rooms.arrived.add(leg.submit.room)
            frames.setdefault(id(leg.session), (leg.session, []))[1].extend(events)
        for session, frame in frames.values():
            if session.open and frame:
                session.on_events(frame)
        return bool(frames) or (self.role is Role.DECODE and bool(self.legs))

    def run(self) -> None:
        """Step until nothing is left."""
        while self.step():
            pass

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.go()

    def drop(self, session: FakeSession) -> None:
        self.sessions.remove(session)
        for request_id in [r for r, leg in self.legs.items() if leg.session is session]:
            del self.legs[request_id]

    def break_links(self, reason: str = "the link broke") -> None:
        """Every router's stream ends; the worker lives on."""
        for session in list(self.sessions):
            if session.open:
                session.open = False
                self.drop(session)
                session.on_closed(StreamEnd(reason))

    def die(self, reason: str = "killed") -> None:
        self.alive = False
        self.break_links(reason)

    def restart(self) -> None:
        """The next incarnation."""
        self.incarnation = Incarnation(self.incarnation + 1)
        self.alive, self.state = True, "ready"


class FakeWorkerClient:
    """`router.links.controller_port.WorkerClient` to one incarnation of a fake."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.incarnation = worker.incarnation

    async def connect(
        self, on_events: Callable[[Sequence[Event]], None], on_closed: Callable[[StreamEnd], None]
    ) -> FakeSession:
        await self._reach()
        session = FakeSession(self.worker, on_events, on_closed)
        self.worker.sessions.append(session)
        return session

    async def _reach(self) -> None:
        if self.worker.hangs:
            await asyncio.Event().wait()
        if not self.worker.alive or self.worker.incarnation != self.incarnation:
            raise ConnectionError(f"{self.worker.name}: nobody answers")

    async def status(self) -> WorkerStatus:
        await self._reach()
        return self.worker.status()

    async def check(self) -> CheckReport:
        await self._reach()
        return self.worker.check()

    async def drain(self) -> WorkerStatus:
        await self._reach()
        self.worker.state = "draining"
        return self.worker.status()

    async def undrain(self) -> WorkerStatus:
        await self._reach()
        self.worker.state = "ready"
        return self.worker.status()

    async def aclose(self) -> None:
        return None


class FakeCluster:
    """`router.links.controller_port.WorkerDirectory` over fakes."""

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        self.rooms = Rooms()
        names = [(f"prefill-{i}", Role.PREFILL) for i in range(prefill)]
        names += [(f"decode-{i}", Role.DECODE) for i in range(decode)]
        self.workers = {name: FakeWorker(name, role, self.rooms) for name, role in names}
        self.hidden: set[str] = set()
        self.away = False
        """The controller can't be reached."""
        self.refuses = ""
        """Why the controller refuses drains."""
        self.fates: tuple[frozenset[WorkerName], ...] = ()
        """Those that start and those that leave, of the answer to changes of pools; empty: the controller is older."""
        self.kept: tuple[Role, ...] = ()
        """The roles that the latest drain mustn't leave without a worker."""
        self.told: list[tuple[str, str]] = []
        self.changes: list[OperatorChange] = []
        self.settings: list[SettingsChange] = []
        self.answer: tuple[WorkerName, ...] | str = ()
        """Whom the controller names when pools are changed, or why it refuses."""
        """What the controller was asked for: drain, undrain or another role, and of whom."""
        self.serving, self.number = ServedWeights(), 0
        """The weights that are served, and the number of the latest change."""
        self.served: dict[str, AdapterRef] = {}
        """The adapters that are served, by name."""
        self._watchers: list[Callable[[tuple[WorkerView, ...]], None]] = []

    def __getitem__(self, name: str) -> FakeWorker:
        return self.workers[name]

    def views(self) -> tuple[WorkerView, ...]:
        return tuple(WorkerView(w.record, w.status()) for n, w in self.workers.items() if n not in self.hidden)

    def watch(self, on_change: Callable[[tuple[WorkerView, ...]], None]) -> Callable[[], None]:
        self._watchers.append(on_change)
        on_change(self.views())
        return lambda: self._watchers.remove(on_change)

    def changed(self) -> None:
        for watcher in list(self._watchers):
            watcher(self.views())

    @property
    def adapters(self) -> tuple[AdapterRef, ...]:
        return tuple(self.served.values())

    def port(self, record: WorkerRecord) -> FakeWorkerClient:
        return FakeWorkerClient(self.workers[record.name])

    def restart(self, name: str) -> None:
        self.workers[name].restart()
        self.changed()

    def named(self, target: str) -> list[FakeWorker]:
        """The worker of that name, or those of the node."""
        if self.away:
            raise ConnectionError("the controller is away")
        found = [w for w in self.workers.values() if target in (w.name, w.node, w.node_id, w.node_id[:8])]
        if not found:
            raise RequestError(f"no worker or node is named {target!r}")
        return found

    async def change_pools(self, change: OperatorChange) -> ChangedWorkers:
        match change:
            case DrainWorkers(target, keep):
                found = self.named(target)
                self.kept = keep
                if self.refuses:
                    raise RequestError(self.refuses)
                self.told.append(("drain", target))
                return ChangedWorkers(tuple(w.name for w in found if w.state == "ready"))
            case UndrainWorkers(target):
                back = [w for w in self.named(target) if w.state == "left" or not w.alive]
                self.told.append(("undrain", target))
                for worker in back:
                    self.restart(worker.name)
                return ChangedWorkers(tuple(w.name for w in back))
            case SetRole(name, role, empty):
                self.named(name)
                if self.refuses:
                    raise RequestError(self.refuses)
                self.told += [(role, name), *([("empty", name)] if empty else [])]
                return ChangedWorkers()
        if self.away:
            raise ConnectionError("the controller is away")
        self.changes.append(change)
        if isinstance(self.answer, str):
            raise RequestError(self.answer)
        match change:
            case LoadAdapter(adapter):
                self.served[adapter.name] = adapter
                self.changed()
            case UnloadAdapter():
                if self.served.pop(change.name, None) is None:
                    raise RequestError(f"no adapter is served as {change.name}")
                self.changed()
        start, leave = self.fates or (frozenset[WorkerName](), frozenset[WorkerName]())
        return ChangedWorkers(self.answer, start, leave, self.number)

    async def change_settings(self, change: SettingsChange) -> SettingsAnswer:
        if self.away:
            raise ConnectionError("the controller is away")
        self.settings.append(change)
        if isinstance(self.answer, str):
            raise RequestError(self.answer)
        changed = (ChangedSetting("a.b", "1", "2", (Role.DECODE,), "routers"),)
        return SettingsAnswer(1, "", changed, {Role.DECODE: "d"}, 2, "it is stuck")

    def heal(self) -> None:
        """Every worker serves again, nothing planted; for the next test."""
        for worker in self.workers.values():
            worker.node, worker.node_id = "here", ""
            worker.hangs = worker.eager = False
            worker.cached = worker.logits = 0
            worker.refusals, worker.violations = [], ()
            worker.submits.clear()
            worker.cancels.clear()
            worker.asked.clear()
            worker.detached.clear()
            worker.attached = None
            if not worker.alive:
                worker.restart()
            worker.state = "ready"
            worker.resume()
        self.hidden.clear()
        self.away, self.refuses, self.fates = False, "", ()
        self.told.clear()
        self.changes.clear()
        self.settings.clear()
        self.answer = ()
        self.changed()

    def leftovers(self) -> list[str]:
        return [f"{w.name}: {r}" for w in self.workers.values() for r in w.legs]
