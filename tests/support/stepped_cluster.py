"""Several workers in this process and the real router core between them, all stepped by hand.

Everything is what a cluster runs but for threads, wires and text: requests go to the router core, its commands to the
workers, their events back. At the end every worker's books and every page are recounted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.default_device import default_device
from tests.support.rank_followers import RankProcesses, group_of
from tests.support.thread_ranks import idle_sharers
from tests.support.worker_pair import SESSION, UnhurriedClock, counts_for, turns
from twinpool.cluster.assembly.build_worker import build_worker
from twinpool.cluster.ranks import DataParallelRank, RankGroup
from twinpool.contracts.checkpoint.model_spec import read_model_spec, with_weights
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import Incarnation, RequestId, Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import Worker
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL
from twinpool.contracts.messages.worker_events import Done, Event, Tokens
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerView
from twinpool.contracts.sampling_params import SamplingParams, TokenLogprob, WeightsVersion
from twinpool.decode.worker import DecodeWorker
from twinpool.router.core.router_actions import DeliverEmbedding, DeliverTokens, EndRequest, NoteReplay, SendCommand
from twinpool.router.core.router_core import RouterCore
from twinpool.router.core.routing_policies import local_prefill
from twinpool.router.state.prefix_hashes import prefix_hashes
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.state.worker_table import WorkerKey


@dataclass
class Told:
    """What the client of one request was told."""

    request: RoutedRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    done: Done | None = None
    replays: list[str] = field(default_factory=list)
    embedding: tuple[float, ...] = ()


class Company:
    """See the module's prose."""

    def __init__(
        self, folder: Path, config: Config, roles: Sequence[Role], tokens: int, clock: Clock,
        group: Callable[[Role], RankGroup | None] = lambda role: None,
        sharers: Callable[[Role, WorkerName], DataParallelRank | None] = lambda role, name: None,
    ) -> None:  # fmt: skip
        """`group`: the other ranks of a worker that is about to be built. `sharers`: its place among those that it
        shares its experts with."""
        self.clock, self.config = clock, config
        self._folder, self._tokens, self._crew, self._sharers = folder, tokens, group, sharers
        self.workers: dict[WorkerName, Worker] = {}
        self._numbers = itertools.count(1)
        self._incarnations: dict[WorkerName, int] = {}
        self.weights: WeightsVersion | None = None
        """Those that workers which start from now on have in place of the checkpoint's."""
        self._weights_of: dict[WorkerName, WeightsVersion | None] = {}
        self.core = RouterCore(config.router, clock, lambda: f"room-{next(self._numbers)}", local=local_prefill(config))
        self.told: dict[RequestId, Told] = {}
        self.between: list[Callable[[WorkerKey, Event], bool]] = []
        """Each sees every event on its way to the router; True: it is lost."""
        self.sent: list[tuple[WorkerName, Command]] = []
        counts: dict[Role, int] = dict.fromkeys(Role, 0)
        for role in roles:
            self.start(role, WorkerName(f"{role}-{counts[role]}"))
            counts[role] += 1

    # ------------------------------------------------------------ workers

    def start(self, role: Role, name: WorkerName) -> Worker:
        number = self._incarnations[name] = self._incarnations.get(name, 0) + 1
        spec = read_model_spec(self._folder, draft_model=self.config.engine.draft_model)
        spec = with_weights(spec, self.weights, self.config.engine.weight_roots)
        self._weights_of[name] = self.weights
        worker = build_worker(
            role, name, Incarnation(number), spec, self.config, host="127.0.0.1",
            counts=counts_for(self._folder, self.config, role, self._tokens), clock=self.clock,
            group=self._crew(role), device=default_device(), dp=self._sharers(role, name),
        )  # fmt: skip
        self.workers[name] = worker
        self.view()
        self.core.on_linked(self.key(name))
        return worker

    def key(self, name: str) -> WorkerKey:
        return WorkerName(name), Incarnation(self._incarnations[WorkerName(name)])

    def decode(self, name: str) -> DecodeWorker:
        worker = self.workers[WorkerName(name)]
        assert isinstance(worker, DecodeWorker)
        return worker

    def view(self) -> None:
        """The controller's table reaches the router."""
        self.core.on_view(
            WorkerView(
                WorkerRecord(
                    name, worker.status().role, Incarnation(self._incarnations[name]), 1, "here", "", worker.control,
                    worker.fits, stream_protocol=STREAM_PROTOCOL,
                    fingerprint=worker.fingerprint if any(self._weights_of.values()) else None,
                    weights=self._weights_of[name],
                ),
                worker.status(),
            )
            for name, worker in self.workers.items()
        )  # fmt: skip
        self.act()

    def drain(self, name: str, draining: bool = True) -> None:
        worker = self.workers[WorkerName(name)]
        worker.drain() if draining else worker.undrain()
        self.view()

    def gone(self, name: str) -> None:
        """The worker is no more: its stream ends, and so does its row."""
        key, worker = self.key(name), self.workers.pop(WorkerName(name))
        worker.close()
        self.core.on_unlinked(key, "the stream ended")
        self.view()

    # ------------------------------------------------------------ requests

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, **options: Any) -> RequestId:
        rid = RequestId(f"r{len(self.told)}")
        now = self.clock.now()
        request = RoutedRequest(
            rid, tuple(prompt), sampling, now=now, deadline=now + self.config.router.request_timeout_s,
            hashes=prefix_hashes(prompt), **options,
        )  # fmt: skip
        self.told[rid] = Told(request)
        self.core.submit(request)
        self.act()
        return rid

    def act(self) -> None:
        """Carry out what the router core has decided."""
        while actions := self.core.take_actions():
            for action in actions:
                match action:
                    case SendCommand(worker, command):
                        self.sent.append((worker[0], command))
                        if worker[0] in self.workers and worker == self.key(worker[0]):
                            self.workers[worker[0]].handle(SESSION, command)
                    case DeliverTokens(rid, tokens, logprobs):
                        assert self.told[rid].done is None
                        self.told[rid].tokens += tokens
                        self.told[rid].logprobs += logprobs
                    case DeliverEmbedding(rid, vector):
                        assert not self.told[rid].embedding
                        self.told[rid].embedding = vector
                    case EndRequest(rid, done):
                        assert self.told[rid].done is None
                        self.told[rid].done = done
                    case NoteReplay(rid, _, reason):
                        self.told[rid].replays.append(reason)
        assert self.core.check() == []

    def step(self, *names: str) -> None:
        """One round of every worker, or of those named; the router hears all that they say."""
        for name, worker in list(self.workers.items()):
            if names and name not in names:
                continue
            for _, event in worker.step():
                key = self.key(name)
                if not any(loses(key, event) for loses in self.between):
                    self.core.on_event(key, event)
                self.act()
        self.core.tick()
        self.act()

    def until(self, true: Callable[[], bool], what: str, rounds: int = 20000) -> None:
        for _ in turns(rounds):
            if true():
                return
            self.step()
        raise AssertionError(f"waited {rounds} rounds for {what}")

    def run(self, *rids: RequestId) -> list[list[int]]:
        """Step until these, or all, have ended; returns their answers."""
        wanted = [self.told[rid] for rid in rids or self.told]
        self.until(lambda: all(t.done is not None for t in wanted), f"ends of {len(wanted)} requests")
        for told in wanted:
            assert told.done is not None
            assert told.done.error is None, told.done
        return [t.tokens for t in wanted]

    def cancel(self, rid: RequestId) -> None:
        self.core.cancel(rid)
        self.act()

    def worker_of(self, rid: RequestId) -> str:
        """Which decode worker has it now, as the router knows."""
        decode = self.told[rid].request.decode
        return decode[0] if decode is not None else ""

    def settle(self) -> None:
        """Step until nothing is under way, then recount everything."""

        def idle() -> bool:
            reports = [w.check() for w in self.workers.values()]
            statuses = [w.status() for w in self.workers.values()]
            assert [r.violations for r in reports if r.violations] == []
            quiet = not any(r.rooms for r in reports) and not any(s.running + s.waiting + s.outgoing for s in statuses)
            return quiet and all(s.pages_free == s.pages_total for s in statuses)

        # A peer that was gone before it said hello is given up by the clock, not by rounds.
        self.until(idle, "every page to come back", 200_000)
        assert self.core.check() == []
        assert self.core.requests.in_flight == 0


@contextmanager
def company(
    folder: Path, *, prefills: int = 1, decodes: int = 2, tokens: int = 8192, clock: Clock | None = None,
    settle: bool = True, ranks: RankProcesses | None = None, colocated: int = 0, **sections: dict[str, Any],
) -> Iterator[Company]:  # fmt: skip
    """`ranks`: warm processes for workers of several ranks. `colocated`: so many such workers, instead of two pools."""
    sections.setdefault("transfer", {}).setdefault("plane", "local")
    sections.setdefault("engine", {}).setdefault("threads", 1)
    roles = [Role.COLOCATED] * colocated or [Role.PREFILL] * prefills + [Role.DECODE] * decodes
    config = config_from_dict(sections)
    with ExitStack() as stack:

        def group(role: Role) -> RankGroup | None:
            counts = counts_for(folder, config, role, tokens)
            return stack.enter_context(group_of(ranks, folder, role, config, counts)) if ranks is not None else None

        def sharers(role: Role, name: WorkerName) -> DataParallelRank | None:
            return stack.enter_context(idle_sharers(folder, role, name, config))

        both = Company(folder, config, roles, tokens, clock or UnhurriedClock(), group, sharers)
        try:
            yield both
            if settle:
                both.settle()
        finally:
            for worker in both.workers.values():
                worker.close()


def hears(company: Company, kind: type[Event]) -> list[Event]:
    """A list that fills with the events of a kind from now on."""
    heard: list[Event] = []

    def listen(worker: WorkerKey, event: Event) -> bool:
        if isinstance(event, kind):
            heard.append(event)
        return False

    company.between.append(listen)
    return heard


def generated(company: Company, rid: RequestId, count: int) -> Callable[[], bool]:
    """Whether so many tokens of it were told."""
    return lambda: len(company.told[rid].tokens) >= count


def told_tokens(events: Sequence[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.tokens]
