"""The real router core over two real workers, stepped by hand: no HTTP, no gRPC, no threads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.worker_pair import SESSION, Pair, UnhurriedClock, turns
from twinpool.contracts.config.router_config import AuditConfig, RouterConfig
from twinpool.contracts.damage import where_of
from twinpool.contracts.ids import Incarnation, RequestId, Role
from twinpool.contracts.messages.router_commands import Audit
from twinpool.contracts.messages.worker_events import Done
from twinpool.contracts.messages.worker_status import CheckReport, WorkerRecord, WorkerView
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.core.router_actions import DeliverTokens, EndRequest, NoteReplay, SendCommand
from twinpool.router.core.router_core import RouterCore
from twinpool.router.state.prefix_hashes import prefix_hashes
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.state.worker_table import WorkerKey
from twinpool.router.verification.audits import AuditFinding, AuditResult


class Hurried:
    """A clock that runs fast: the router core's pauses after a failure are long beside a step of these workers."""

    def __init__(self) -> None:
        self._clock = UnhurriedClock()

    def now(self) -> float:
        return 100 * self._clock.now()


class Cell:
    """A pair's workers, and a router core that sends them requests; what fails is replayed as in a cluster."""

    def __init__(self, both: Pair, *, audit: Mapping[str, Any] = {}, **router: Any) -> None:
        self.both, self.clock = both, Hurried()
        rooms = (f"cell-room-{i}" for i in itertools.count())
        self.core = RouterCore(
            RouterConfig(**{"worker_wait_s": 6000.0, **router}), self.clock, lambda: next(rooms), AuditConfig(**audit)
        )
        self.workers = {(w.status().name, Incarnation(1)): w for w in (both.prefill, both.decode)}
        self.answers: dict[RequestId, list[int]] = {}
        self.ends: dict[RequestId, Done] = {}
        self.replays: list[NoteReplay] = []
        self.findings: list[AuditFinding] = []
        self.audits = 0
        self._numbers = itertools.count()
        self.see()
        for key in self.workers:
            self.core.on_linked(key)

    def see(self) -> None:
        """The controller's table, as of now."""
        self.core.on_view(self._view(key) for key in self.workers)

    def _view(self, key: WorkerKey) -> WorkerView:
        worker = self.workers[key]
        status = worker.status()
        record = WorkerRecord(key[0], status.role, key[1], 1, "here", "", worker.control, worker.fits)
        return WorkerView(record, status)

    def submit(self, prompt: Sequence[int], sampling: SamplingParams) -> RequestId:
        rid, now = RequestId(f"cell-{next(self._numbers)}"), self.clock.now()
        self.answers[rid] = []
        request = RoutedRequest(
            rid, tuple(prompt), sampling, now=now, deadline=now + 6000, hashes=prefix_hashes(prompt)
        )
        self.core.submit(request)
        self.act()
        return rid

    def act(self) -> None:
        """Carry out the router core's actions, and let it recount its books."""
        while actions := self.core.take_actions():
            for action in actions:
                match action:
                    case SendCommand(key, command):
                        self.audits += isinstance(command, Audit)
                        self.workers[key].handle(SESSION, command)
                    case DeliverTokens(rid, tokens, _):
                        self.answers[rid] += tokens
                    case EndRequest(rid, done):
                        self.ends[rid] = done
                    case NoteReplay():
                        self.replays.append(action)
                    case AuditFinding():
                        self.findings.append(action)
        assert self.core.check() == []

    def round(self) -> None:
        """One step of each worker, what it says, and the passing of time."""
        for key, worker in self.workers.items():
            for _, event in worker.step():
                self.core.on_event(key, event)
                self.act()
        self.see()
        self.core.tick()
        self.act()

    def run(self, *requests: RequestId, rounds: int = 20_000) -> list[list[int]]:
        """Step until `requests` have ended well; their answers."""
        wanted = requests or tuple(self.answers)
        for _ in turns(rounds):
            if all(rid in self.ends for rid in wanted):
                break
            self.round()
        assert all(self.ends[rid].error is None for rid in wanted), self.ends
        return [self.answers[rid] for rid in wanted]

    def ask(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        return self.run(self.submit(prompt, sampling))[0]

    def audit_all(self, rounds: int = 20_000) -> dict[AuditResult, int]:
        """Step until no audit waits or runs; what became of all of them."""
        for _ in turns(rounds):
            if not (self.core.audits.queued or self.core.audits.under_way):
                return dict(self.core.audits.counts.results)
            self.round()
        raise AssertionError("audits don't end")

    def rest(self, rounds: int = 2000) -> list[CheckReport]:
        """Step until nothing of any request is left on the workers."""
        for _ in turns(rounds):
            self.round()
            statuses = [worker.status() for worker in self.workers.values()]
            if not any(s.running + s.waiting + s.outgoing for s in statuses):
                break
        return [worker.check() for worker in self.workers.values()]

    def damage(self) -> dict[tuple[str, str], int]:
        """The metric's counts that aren't 0, by role and `where`."""
        samples = [s for s in self.core.damage.samples() if s.count]
        return {(s.role, s.where): int(s.count) for s in samples}


def counted(both: Pair, role: Role, where: str) -> float:
    """What a worker itself has counted under `where`."""
    counters = (both.prefill if role is Role.PREFILL else both.decode).status().counters
    return sum(value for name, value in counters.items() if where_of(name) == where)
