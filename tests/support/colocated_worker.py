"""Colocated workers in this process, stepped by hand: requests in, answers out, no router, no threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.worker_pair import SESSION, Answer, UnhurriedClock, counts_for, together
from twinpool.cache.device.device_port import Device
from twinpool.cluster.assembly.build_worker import build_worker
from twinpool.colocate.worker import ColocatedWorker
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import Incarnation, RequestId, Role, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import Cancel, Submit
from twinpool.contracts.messages.worker_events import Done, Embedding, Event, LegReport, PromptScores, Tokens
from twinpool.contracts.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tests.support.rank_followers import RankProcesses
    from twinpool.cluster.ranks import RankGroup

ROLE = Role.COLOCATED


def build(
    folder: Path,
    config: Config,
    tokens: int,
    clock: Clock,
    name: str = "colocated-0",
    device: Device | None = None,
    group: RankGroup | None = None,
) -> ColocatedWorker:
    worker = build_worker(
        ROLE,
        WorkerName(name),
        Incarnation(1),
        read_model_spec(folder, draft_model=config.engine.draft_model),
        config,
        host="127.0.0.1",
        counts=counts_for(folder, config, ROLE, tokens),
        clock=clock,
        device=device,
        group=group,
    )
    assert isinstance(worker, ColocatedWorker)
    return worker


class Colocated:
    """Steps one colocated worker until asked-for requests are done."""

    def __init__(self, worker: ColocatedWorker, clock: Clock) -> None:
        self.worker, self.clock = worker, clock
        self.answers: dict[RequestId, Answer] = {}
        self._numbers = itertools.count(1)

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, *, emitted: Sequence[int] = (), **options: Any
    ) -> RequestId:
        number = next(self._numbers)
        request, tokens = RequestId(f"r{number}"), (*prompt, *emitted)
        self.answers[request] = Answer()
        room = RoomId(f"room-{number}")
        self.worker.handle(SESSION, Submit(request, 0, room, tokens, len(prompt), sampling, None, **options))
        return request

    def cancel(self, request: RequestId) -> None:
        self.worker.handle(SESSION, Cancel(request, 0))

    def step(self) -> list[Event]:
        """One round; returns its events, which are taken in."""
        events = [event for _, event in self.worker.step()]
        for event in events:
            self._take(event)
        return events

    def run(self, *requests: RequestId, rounds: int = 20000) -> list[Answer]:
        """Step until all of `requests` are done."""
        wanted = [self.answers[r] for r in (requests or self.answers)]
        for _ in range(rounds):
            if all(a.done is not None for a in wanted):
                return wanted
            self.step()
        raise AssertionError(f"no end after {rounds} rounds: {[a for a in wanted if a.done is None]}")

    def settle(self, rounds: int = 2000) -> None:
        """Step until the worker holds no request, then check it and that every page is back."""
        for _ in range(rounds):
            self.step()
            status, report = self.worker.status(), self.worker.check()
            if not (status.running or status.waiting or report.rooms) and status.pages_free == status.pages_total:
                break
        assert report.violations == ()
        assert not (status.running)
        assert not (status.waiting)
        assert not (report.rooms)
        assert status.pages_free == status.pages_total, status

    def _take(self, event: Event) -> None:
        answer = self.answers.get(getattr(event, "request_id", RequestId("")))
        if answer is None:
            return
        if isinstance(event, Tokens):
            for i, token in enumerate(event.tokens):
                assert answer.tokens.setdefault(event.position + i, token) == token
            for i, logprob in enumerate(event.logprobs):
                answer.logprobs[event.position + i] = logprob
        elif isinstance(event, PromptScores):
            answer.scores = event.scores
        elif isinstance(event, Embedding):
            assert not answer.embedding, "an embedding comes once"
            answer.embedding = event.vector
        elif isinstance(event, LegReport):
            answer.progress[event.role] = together(answer.progress.get(event.role), event)
        elif isinstance(event, Done):
            answer.done = event


@contextmanager
def colocated(
    folder: Path,
    *,
    tokens: int = 8192,
    clock: Clock | None = None,
    settle: bool = True,
    device: Device | None = None,
    ranks: RankProcesses | None = None,
    **sections: dict[str, Any],
) -> Iterator[Colocated]:
    """A colocated worker that is checked for leaks at the end. `ranks`: warm processes for one of several ranks."""
    sections.setdefault("transfer", {}).setdefault("plane", "local")
    sections.setdefault("engine", {}).setdefault("threads", 1)
    # Here is nobody who could take what the worker offers of its tree when it leaves.
    sections["decode"] = {"prefix_offer_bytes": 0, **sections.get("decode", {})}
    config, clock = config_from_dict(sections), clock or UnhurriedClock()
    with ExitStack() as stack:
        group = _crew(stack, ranks, folder, config, tokens)
        worker = Colocated(build(folder, config, tokens, clock, device=device, group=group), clock)
        try:
            yield worker
            if settle:
                worker.settle()
        finally:
            worker.worker.close()


def _crew(
    stack: ExitStack, processes: RankProcesses | None, folder: Path, config: Config, tokens: int
) -> RankGroup | None:
    """The other ranks of the worker, where it has several."""
    if config.colocate.tp == 1:
        return None
    from tests.support.rank_followers import group_of, rank_processes

    processes = processes or stack.enter_context(rank_processes())
    counts = counts_for(folder, config, ROLE, tokens)
    return stack.enter_context(group_of(processes, folder, ROLE, config, counts))
