"""A prefill and a decode worker in this process, stepped by hand: requests in, answers out, no router, no threads."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from tests.support.default_device import default_device
from twinpool.cache.device.device_port import Device
from twinpool.cluster.assembly.build_worker import build_worker
from twinpool.cluster.assembly.memory_plan import plan_memory, state_options
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cache_config import CacheOverride
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import PAIR, Incarnation, RequestId, Role, RoomId, WorkerName
from twinpool.contracts.interfaces.worker_interface import SessionId, Worker
from twinpool.contracts.messages.router_commands import Cancel, PeerRef, Submit
from twinpool.contracts.messages.worker_events import Done, Embedding, Event, LegReport, PromptScores, Tokens
from twinpool.contracts.sampling_params import SamplingParams, TokenLogprob
from twinpool.decode.worker import DecodeWorker
from twinpool.engine.models.registry import read_model
from twinpool.prefill.worker import PrefillWorker

if TYPE_CHECKING:
    from tests.support.rank_followers import RankProcesses
    from twinpool.cluster.arena.arena_client import ArenaProvider
    from twinpool.cluster.ranks import DataParallelRank, RankGroup
    from twinpool.engine.runner.load_model import KeptModel

SESSION = SessionId(1)
_AT_REST, _IDLE_S = 20, 50e-6
"""Rounds without an event after which each leaves the interpreter to others for so long: else the threads of devices
have it every 5 ms alone, once for each of a thousand small copies."""
_AT_ONCE, _LOOK_S = 200, 0.001
"""Rounds after which a pair that comes to rest waits for what its devices do, and how long each time."""
_PATIENCE_S = 20.0
"""What workers are stepped for at least before they count as stuck: what they say to each other goes through threads of
ZeroMQ's, which run late on a busy machine."""


def turns(rounds: int) -> Iterator[int]:
    """The number of each of so many rounds, and of more as long as one may still be patient."""
    end = time.monotonic() + _PATIENCE_S
    yield from itertools.takewhile(lambda number: number < rounds or time.monotonic() < end, itertools.count())


class UnhurriedClock:
    """The machine's clock, but for what it runs on between two looks: of that it counts a little at most. So no
    deadline passes because a busy machine ran nothing of this process for seconds."""

    MOST_S = 0.02

    def __init__(self) -> None:
        self._seen = self._now = time.monotonic()
        self._lock = threading.Lock()

    def now(self) -> float:
        with self._lock:
            seen = time.monotonic()
            self._now += min(seen - self._seen, self.MOST_S)
            self._seen = seen
            return self._now


@dataclass
class Answer:
    """What one request came to."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    scores: tuple[TokenLogprob, ...] = ()
    embedding: tuple[float, ...] = ()
    progress: dict[Role, LegReport] = field(default_factory=dict)
    done: Done | None = None

    @property
    def list(self) -> list[int]:
        """The tokens in order of position; fails on a gap."""
        positions = sorted(self.tokens)
        assert positions == list(range(positions[0], positions[0] + len(positions))), positions
        return [self.tokens[p] for p in positions]


class Pair:
    """Steps both workers in turn until asked-for requests are done; what fails on one is cancelled on both."""

    _idle = 0
    """Rounds since the last event."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        tokens: int | Mapping[Role, int],
        clock: Clock,
        devices: Mapping[Role, Device] | None = None,
        groups: Mapping[Role, RankGroup | None] | None = None,
        arenas: Mapping[Role, ArenaProvider] | None = None,
        kept: Mapping[Role, KeptModel] | None = None,
        sharers: Mapping[Role, DataParallelRank | None] | None = None,
    ) -> None:
        """`sharers`: by role, a worker's place among those that it shares its experts with."""
        devices, groups, arenas, kept = devices or {}, groups or {}, arenas or {}, kept or {}
        sizes = tokens if isinstance(tokens, Mapping) else dict.fromkeys(PAIR, tokens)
        spec = read_model_spec(folder, draft_model=config.engine.draft_model)
        # There is no other decode worker that could take what this one has.
        config = replace(config, decode=replace(config.decode, prefix_offer_bytes=0))
        self.clock = clock
        options: dict[str, Any] = {"host": "127.0.0.1", "clock": clock}
        prefill, decode = (
            build_worker(
                role,
                WorkerName(f"{role}-0"),
                Incarnation(1),
                spec,
                config,
                counts=counts_for(folder, config, role, sizes[role]),
                device=devices.get(role) or default_device(),
                group=groups.get(role),
                arenas=arenas.get(role),
                kept=kept.get(role),
                dp=(sharers or {}).get(role),
                **options,
            )
            for role in (Role.PREFILL, Role.DECODE)
        )
        assert isinstance(prefill, PrefillWorker)
        assert isinstance(decode, DecodeWorker)
        self.prefill, self.decode = prefill, decode
        self.answers: dict[RequestId, Answer] = {}
        self._numbers = itertools.count(1)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        emitted: Sequence[int] = (),
        legs: tuple[Role, ...] = (Role.PREFILL, Role.DECODE),
        **options: Any,
    ) -> RequestId:
        number = next(self._numbers)
        request, room = RequestId(f"r{number}"), RoomId(f"room-{number}")
        alone = sampling.max_tokens - len(emitted) <= 1
        tokens = (*prompt, *emitted)
        peers = {
            Role.PREFILL: PeerRef(WorkerName("decode-0"), Incarnation(1), ""),
            Role.DECODE: PeerRef(WorkerName("prefill-0"), Incarnation(1), self.prefill.control),
        }
        self.answers[request] = Answer()
        for role in legs:
            if alone and role is Role.DECODE:
                continue
            peer = None if alone else peers[role]
            command = Submit(request, 0, room, tokens, len(prompt), sampling, peer, **options)
            worker = self.prefill if role is Role.PREFILL else self.decode
            worker.handle(SESSION, command)
        return request

    def cancel(self, request: RequestId, legs: tuple[Role, ...] = (Role.PREFILL, Role.DECODE)) -> None:
        for role in legs:
            (self.prefill if role is Role.PREFILL else self.decode).handle(SESSION, Cancel(request, 0))

    def step(self, *roles: Role) -> None:
        """One round of each worker, or of those named."""
        workers: dict[Role, Worker] = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        self._idle += 1
        for role, worker in workers.items():
            if not roles or role in roles:
                for _, event in worker.step():
                    self._idle = 0
                    self._take(event)
        if self._idle > _AT_REST:
            time.sleep(_IDLE_S)

    def run(self, *requests: RequestId, rounds: int = 20000) -> list[Answer]:
        """Step until all of `requests` are done."""
        wanted = [self.answers[r] for r in (requests or self.answers)]
        for _ in turns(rounds):
            if all(a.done is not None for a in wanted):
                return wanted
            self.step()
        raise AssertionError(f"no end after {rounds} rounds: {[a for a in wanted if a.done is None]}")

    def settle(self, rounds: int = 2000) -> None:
        """Step until neither worker holds a request or a room, then check both and that every page is back."""
        for number in turns(rounds):
            self.step()
            statuses = [w.status() for w in (self.prefill, self.decode)]
            reports = [w.check() for w in (self.prefill, self.decode)]
            idle = not any(s.running + s.waiting for s in statuses) and not any(r.rooms for r in reports)
            # Pages that an operation under way still names come back when it is complete.
            if idle and all(s.pages_free == s.pages_total for s in statuses):
                break
            if number > _AT_ONCE:
                self.decode.wait(_LOOK_S)
        for status, report in zip(statuses, reports, strict=True):
            assert report.violations == ()
            assert report.rooms == 0
            assert status.pages_free == status.pages_total, status

    def _take(self, event: Event) -> None:
        answer = self.answers[event.request_id]
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
            if event.error is not None:
                self.cancel(event.request_id)


def together(before: LegReport | None, report: LegReport) -> LegReport:
    """What a leg has said in all."""
    if before is None:
        return report
    return structs.replace(
        report,
        marks=before.marks | report.marks,
        cached_tokens=before.cached_tokens + report.cached_tokens,
        computed_tokens=before.computed_tokens + report.computed_tokens,
        transfer_bytes=before.transfer_bytes + report.transfer_bytes,
        cached_by_tier=before.cached_by_tier | report.cached_by_tier,
    )


def counts_for(folder: Path, config: Config, role: Role, tokens: int) -> dict[str, int]:
    """The pools of a worker of so many positions, as planned where memory is no question."""
    model = read_model(folder, draft_model=config.engine.draft_model, config=config.engine)
    cache = replace(config.cache_for(role), device_tokens=tokens)
    plain = replace(config, cache=cache, prefill=replace(config.prefill, cache=CacheOverride()))
    plain = replace(plain, decode=replace(config.decode, cache=CacheOverride()))
    plain = replace(plain, colocate=replace(config.colocate, cache=CacheOverride()))
    pool_set = model.pool_set(state_options(model.spec, plain, role))
    plan = plan_memory(pool_set, plain, role, model.spec.context, 1 << 40)
    assert plan is not None
    return plan.counts


@contextmanager
def pair(
    folder: Path,
    *,
    tokens: int | Mapping[Role, int] = 8192,
    clock: Clock | None = None,
    settle: bool = True,
    devices: Mapping[Role, Device] | None = None,
    ranks: RankProcesses | None = None,
    arenas: Mapping[Role, ArenaProvider] | None = None,
    sharers: Mapping[Role, DataParallelRank | None] | None = None,
    rank_hosts: Sequence[str] = (),
    **sections: dict[str, Any],
) -> Iterator[Pair]:
    """A pair that is checked for leaks at the end. `ranks`: warm processes for workers of several ranks. `sharers`: by
    role, a worker's place among those that it shares its experts with; None: these are idle. `rank_hosts`: an address
    for each rank of a worker, by which they meet as over a network."""
    sections.setdefault("transfer", {}).setdefault("plane", "local")
    sections.setdefault("engine", {}).setdefault("threads", 1)
    # Here is nobody who could take what decode offers of its tree when it leaves.
    sections["decode"] = {"prefix_offer_bytes": 0, **sections.get("decode", {})}
    config = config_from_dict(sections)
    with ExitStack() as stack:
        groups = _crews(stack, ranks, folder, config, tokens, rank_hosts)
        sharers = sharers or {role: stack.enter_context(_idle_sharers(folder, role, config)) for role in PAIR}
        both = Pair(folder, config, tokens, clock or UnhurriedClock(), devices, groups, arenas, sharers=sharers)
        try:
            yield both
            if settle:
                both.settle()
        finally:
            both.prefill.close()
            both.decode.close()


def _idle_sharers(folder: Path, role: Role, config: Config) -> AbstractContextManager[DataParallelRank | None]:
    if config.dp_for(role) == 1:
        return nullcontext()
    from tests.support.thread_ranks import idle_sharers

    return idle_sharers(folder, role, WorkerName(f"{role}-0"), config)


def _crews(
    stack: ExitStack,
    processes: RankProcesses | None,
    folder: Path,
    config: Config,
    tokens: int | Mapping[Role, int],
    hosts: Sequence[str] = (),
) -> dict[Role, RankGroup | None]:
    """The other ranks of each worker, where it has several."""
    if not any(config.ranks_for(role) > 1 for role in PAIR):
        return {}
    from tests.support.rank_followers import group_of, rank_processes

    processes = processes or stack.enter_context(rank_processes())
    groups: dict[Role, RankGroup | None] = {}
    for role in PAIR:
        size = tokens[role] if isinstance(tokens, Mapping) else tokens
        counts = counts_for(folder, config, role, size)
        groups[role] = stack.enter_context(group_of(processes, folder, role, config, counts, hosts))
    return groups
