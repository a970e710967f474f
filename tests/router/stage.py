"""A stage for the router core: its actions played out by formulas, one event at a time, in any order a test likes."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.router.fake_worker import FakeCluster, decode_frames, expected, local_frames, prefill_frames
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.router_config import AuditConfig, RouterConfig
from twinpool.contracts.ids import RequestId, Role, RoomId
from twinpool.contracts.messages.kept_answers import Detach
from twinpool.contracts.messages.router_commands import (
    Audit,
    Cancel,
    Command,
    InvalidatePrefix,
    PauseForMigration,
    PullPrefix,
    PushPrefix,
    ResumeHere,
    Submit,
)
from twinpool.contracts.messages.worker_events import Done, Event
from twinpool.contracts.sampling_params import SamplingParams, TokenLogprob
from twinpool.router.core.router_actions import (
    DeliverEmbedding,
    DeliverScores,
    DeliverTokens,
    EndRequest,
    NoteReplay,
    SendCommand,
)
from twinpool.router.core.router_core import RouterCore
from twinpool.router.core.routing_policies import LocalPrefill
from twinpool.router.state.prefix_hashes import prefix_hashes
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.state.worker_table import WorkerKey
from twinpool.router.verification.audits import AuditFinding


@dataclass
class StageLeg:
    """One attempt on one worker: the events it has still to say."""

    submit: Submit
    events: deque[Event]


class Stage:
    """Workers without any I/O, and a router core that believes in them."""

    def __init__(
        self,
        prefill: int = 2,
        decode: int = 2,
        audit: Mapping[str, Any] = {},
        local: LocalPrefill | None = None,
        **config: Any,
    ) -> None:
        self.clock = ManualClock(100.0)
        self.cluster = FakeCluster(prefill, decode)
        rooms = (f"room-{i}" for i in itertools.count())
        self.core = RouterCore(
            RouterConfig(**config), self.clock, lambda: next(rooms), AuditConfig(**audit), local=local
        )
        self.legs: dict[tuple[str, RequestId], StageLeg] = {}
        self.said: list[tuple[WorkerKey, Event]] = []
        self.submits: list[tuple[WorkerKey, Submit]] = []
        self.cancels: list[tuple[WorkerKey, Cancel]] = []
        self.detached: list[tuple[WorkerKey, Detach]] = []
        self.orders: list[tuple[WorkerKey, Command]] = []
        """About moves, which tests answer themselves."""
        self.rooms_in: set[RoomId] = set()
        self.out: dict[RequestId, list[int]] = {}
        self.logprobs: dict[RequestId, list[TokenLogprob]] = {}
        self.scores: dict[RequestId, tuple[TokenLogprob, ...]] = {}
        self.embeddings: dict[RequestId, tuple[float, ...]] = {}
        self.ends: dict[RequestId, Done] = {}
        self.audits: list[tuple[WorkerKey, Audit]] = []
        self.findings: list[AuditFinding] = []
        self.forgets: list[tuple[WorkerKey, InvalidatePrefix]] = []
        self.requests: dict[RequestId, RoutedRequest] = {}
        self.view()
        for name in self.cluster.workers:
            self.link(name)

    # ------------------------------------------------------------ workers

    def key(self, name: str) -> WorkerKey:
        worker = self.cluster[name]
        return (worker.name, worker.incarnation)

    def view(self) -> None:
        self.core.on_view(self.cluster.views())
        self.play()

    def link(self, name: str) -> None:
        self.core.on_linked(self.key(name))
        self.play()

    def unlink(self, name: str, *, left: bool = False) -> None:
        self._forget(name)
        self.core.on_unlinked(self.key(name), "the stream ended", left=left)
        self.play()

    def kill(self, name: str) -> None:
        """The process dies: its stream ends at once, the controller's table says so."""
        self.unlink(name)
        self.cluster[name].alive = False
        self.view()

    def restart(self, name: str) -> None:
        self.cluster[name].restart()
        self.view()
        self.link(name)

    def drain(self, name: str, draining: bool = True) -> None:
        self.cluster[name].state = "draining" if draining else "ready"
        self.view()

    def _forget(self, name: str) -> None:
        for key in [k for k in self.legs if k[0] == name]:
            del self.legs[key]

    # ------------------------------------------------------------ requests

    def request(
        self,
        prompt: tuple[int, ...] = (5, 6, 7),
        max_tokens: int = 6,
        priority: int = 0,
        within_s: float | None = None,
        **sampling: Any,
    ) -> RoutedRequest:
        """A request, not submitted yet; `within_s`: seconds until its first token is due."""
        rid = RequestId(f"r{len(self.requests)}-0")
        params = SamplingParams(max_tokens, **sampling)
        now = self.clock.now()
        return RoutedRequest(
            rid,
            prompt,
            params,
            now=now,
            deadline=now + self.core._config.request_timeout_s,
            hashes=prefix_hashes(prompt),
            priority=priority,
            first_token_by=None if within_s is None else now + within_s,
        )

    def submit(self, prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 6, **options: Any) -> RequestId:
        return self.take(self.request(prompt, max_tokens, **options))

    def take(self, request: RoutedRequest) -> RequestId:
        """Submit a request."""
        rid = request.id
        self.requests[rid] = request
        self.out[rid], self.logprobs[rid] = [], []
        self.core.submit(request)
        self.play()
        return rid

    def answer(self, rid: RequestId) -> list[int]:
        """What the client must get."""
        return expected(self.requests[rid].prompt, self.requests[rid].sampling)

    def tick(self, seconds: float = 0.1) -> None:
        self.clock.advance(seconds)
        self.core.tick()
        self.play()

    def play(self) -> None:
        """Carry out the router core's actions, and let it recount its books."""
        for action in self.core.take_actions():
            match action:
                case SendCommand(worker, Submit() as submit):
                    self.submits.append((worker, submit))
                    frames = prefill_frames if worker[0].startswith("prefill") else decode_frames
                    if submit.peer is None and frames is decode_frames:
                        frames = local_frames
                        self.rooms_in.add(submit.room)
                    events = [e for frame in frames(submit, worker[0]) for e in frame]
                    assert (worker[0], submit.request_id) not in self.legs, "an attempt is cancelled before the next"
                    self.legs[worker[0], submit.request_id] = StageLeg(submit, deque(events))
                case SendCommand(worker, Detach() as detach):
                    self.detached.append((worker, detach))
                case SendCommand(worker, Cancel() as cancel):
                    self.cancels.append((worker, cancel))
                    self.legs.pop((worker[0], cancel.request_id), None)
                case DeliverTokens(rid, tokens, logprobs):
                    assert rid not in self.ends, "nothing follows the end"
                    self.out[rid] += tokens
                    self.logprobs[rid] += logprobs
                case DeliverScores(rid, scores):
                    assert rid not in self.scores, "scores come once"
                    assert not self.out[rid], "scores come first"
                    self.scores[rid] = scores
                case DeliverEmbedding(rid, vector):
                    assert rid not in self.embeddings, "an embedding comes once"
                    self.embeddings[rid] = vector
                case NoteReplay(rid, attempt, reason):
                    assert attempt == self.requests[rid].attempt or rid in self.ends
                    assert reason
                case SendCommand(worker, PushPrefix() | PullPrefix() | PauseForMigration() | ResumeHere() as order):
                    self.orders.append((worker, order))
                case SendCommand(worker, Audit() as audit):
                    self.audits.append((worker, audit))
                case SendCommand(worker, InvalidatePrefix() as forget):
                    self.forgets.append((worker, forget))
                case AuditFinding():
                    self.findings.append(action)
                case EndRequest(rid, done):
                    assert rid not in self.ends, "an end comes once"
                    self.ends[rid] = done
        assert self.core.check() == []

    # ------------------------------------------------------------ events

    def leg(self, rid: RequestId, role: Role) -> str:
        """Which worker has this leg now."""
        found = [name for name, r in self.legs if r == rid and name.startswith(role)]
        assert found, f"{rid} has no {role} worker"
        return found[0]

    def can_say(self, name: str, rid: RequestId) -> bool:
        leg = self.legs[name, rid]
        return bool(leg.events) and (name.startswith("prefill") or leg.submit.room in self.rooms_in)

    def say(self, rid: RequestId, role: Role, count: int = 1) -> None:
        """The leg's next `count` events arrive."""
        name = self.leg(rid, role)
        for _ in range(count):
            self.say_next(name, rid)

    def say_next(self, name: str, rid: RequestId) -> None:
        leg = self.legs[name, rid]
        event = leg.events.popleft()
        if not leg.events:
            del self.legs[name, rid]
            self.rooms_in.add(leg.submit.room)
        self.hear(self.key(name), event)

    def hear(self, worker: WorkerKey, event: Event) -> None:
        self.said.append((worker, event))
        self.core.on_event(worker, event)
        self.play()

    def error(self, rid: RequestId, role: Role, kind: Any, **done: Any) -> None:
        """The leg ends in an error."""
        name = self.leg(rid, role)
        leg = self.legs.pop((name, rid))
        self.hear(self.key(name), Done(rid, leg.submit.attempt, "error", error=kind, message="planted", **done))

    def finish(self, rounds: int = 1000) -> None:
        """Let everything that can be said be said, and time pass, until all requests have ended."""
        for _ in range(rounds):
            for name, rid in list(self.legs):
                if (name, rid) in self.legs and self.can_say(name, rid):
                    self.say_next(name, rid)
            if len(self.ends) == len(self.requests):
                return
            if not self.legs:
                self.tick()
        raise AssertionError(f"not ended: {self.requests.keys() - self.ends.keys()}")

    def assert_answered(self, rid: RequestId) -> None:
        """The full answer, once, in order, and nothing left of it."""
        assert self.out[rid] == self.answer(rid)
        assert rid in self.ends, "it has no end"
        assert self.ends[rid].error is None
        assert not [r for _, r in self.legs if r == rid]
        assert rid not in set(self.core.requests.ids())
