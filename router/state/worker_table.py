"""The workers as the router knows them: each one's latest status, what it has in flight, and whether it serves.

Placement chooses among them (`router/core/placement.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.ids import PAIR, Incarnation, RequestId, Role, WorkerName
from twinpool.contracts.messages.cluster_view import ServedWeights
from twinpool.contracts.messages.fingerprint import binding_class, handover_class, mismatch
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerStatus, WorkerView
from twinpool.router.state.able_workers import AbleWorkers, WorkerColumns
from twinpool.router.state.circuit_breaker import CircuitBreaker
from twinpool.router.state.ttft_prediction import PrefillQueue, PromptCost

WorkerKey = tuple[WorkerName, Incarnation]
"""One incarnation of one worker."""

REFUSAL_PAUSE_S = 0.5
"""Seconds for which a worker that refused a request as draining gets no other."""

DRAIN_ANSWER_S = 10.0
"""Seconds after which a worker that was asked to drain and still serves counts as not having heard of it."""

COUNTED_S = 0.1
"""Seconds for which a count of the workers that serve is good enough to be told."""

GONE = frozenset({"left", "dead"})

SEQUENCE_TOKENS = 16
"""The load of a sequence on a colocated worker, in prompt tokens: it takes a token of each step to come."""


@dataclass(slots=True)
class WorkerEntry:
    """One incarnation of one worker."""

    record: WorkerRecord
    status: WorkerStatus
    breaker: CircuitBreaker
    prompts: PrefillQueue = field(default_factory=PrefillQueue)
    linked: bool = False
    refuses_until: float = 0.0
    """Until then the worker gets no requests: it refused one as draining, before the controller's table said so."""
    leaves_until: float = 0.0
    """Until then the worker doesn't count as staying: an operator has asked it to drain, answered or not."""
    drains: bool = False
    """Whether the worker has answered that it drains, and no operator has cancelled that. A view may be older."""
    load: int = 0
    """Prefill: prompt tokens in flight. Decode: sequences in flight. Colocated: prompt tokens, and `SEQUENCE_TOKENS`
    for each sequence."""
    local_tokens: int = 0
    """Decode: tokens in flight of prompts that it computes itself."""
    other_local: int = 0
    """Those that other routers have in flight there, as `others`."""
    transfers: PromptCost = field(default_factory=PromptCost)
    """Decode: the seconds that a hand-over takes beyond the computation of its prompt, by the positions that it
    brings."""
    turn: int = 0
    """The number of the choice that last picked the worker; ties go to the lowest."""
    requests: set[RequestId] = field(default_factory=set)
    """The requests booked on the worker, which `load` counts."""
    key: WorkerKey = field(init=False)
    numerics: str = field(init=False)
    """The worker's numerics class and weights (`binding_class`)."""
    handover: str = field(init=False)
    """The worker's hand-over class: only workers of one class are paired."""
    page_tokens: int = 0
    promised: int = 0
    """Positions of sequences that were sent to it since its latest status, once they have grown."""
    others: int = 0
    """What other routers have in flight there, in the unit of `load`: what its latest status has beyond what this
    router had booked when that came. 0 where this is its only router."""
    marks: tuple[set[int], int] | None = field(default=None, repr=False, compare=False)
    """Where to note that the entry has changed, and its number there."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if (marks := getattr(self, "marks", None)) is not None:
            marks[0].add(marks[1])

    def touch(self) -> None:
        """Note that the breaker or the prompts have changed."""
        if self.marks is not None:
            self.marks[0].add(self.marks[1])

    def __post_init__(self) -> None:
        self._identify(self.record)
        self.see(self.record, self.status)

    def see(self, record: WorkerRecord, status: WorkerStatus) -> None:
        """Take in what the controller tells of the worker."""
        if status is not self.status:
            self.promised = 0
            shared = status.routers > 1
            self.others = max(0, self._told_load(record.role, status) - self.load) if shared else 0
            computes = shared and record.role is Role.DECODE
            self.other_local = max(0, status.prompt_tokens - self.local_tokens) if computes else 0
        self.status = status
        if record is not self.record:
            self._identify(record)

    def _identify(self, record: WorkerRecord) -> None:
        self.record, self.key = record, (record.name, record.incarnation)
        self.numerics, self.handover = binding_class(record.fingerprint), handover_class(record.fingerprint)

    @staticmethod
    def _told_load(role: Role, status: WorkerStatus) -> int:
        """What a worker has by its status, in the unit of `load`."""
        sequences = status.running + status.waiting
        match role:
            case Role.PREFILL:
                return status.prompt_tokens
            case Role.DECODE:
                return sequences
            case Role.COLOCATED:
                return status.prompt_tokens + SEQUENCE_TOKENS * sequences

    @property
    def weights(self) -> tuple[str, str, int]:
        """Its numerics class and weights, their version, and their number."""
        return self.numerics, self.record.weights_version, self.record.weights_number

    @property
    def whole_load(self) -> int:
        """What is in flight there as far as is known, of all routers."""
        return self.load + self.others

    @property
    def sequence_load(self) -> int:
        """The load of a sequence in flight."""
        return SEQUENCE_TOKENS if self.record.role is Role.COLOCATED else 1

    @property
    def peer(self) -> PeerRef:
        return PeerRef(self.record.name, self.record.incarnation, self.record.control)

    def speaks(self, version: int) -> bool:
        """Whether the worker's build knows what came with this version of the streams; one in this process does."""
        return not self.record.stream or self.record.stream_protocol >= version

    @property
    def headroom(self) -> int | None:
        """Positions for which the worker has room, less what it was promised since it said so; None while it has said
        nothing."""
        if not self.status.pages_total or not self.page_tokens:
            return None
        return self.status.pages_free * self.page_tokens - self.promised

    def serves(self, now: float) -> bool:
        """Whether the worker can get requests: it is linked and ready and hasn't just refused one as draining."""
        return self.linked and self.status.state == "ready" and now >= self.refuses_until

    def stays(self, now: float) -> bool:
        """Whether the worker serves and, as far as is known, goes on serving."""
        return self.serves(now) and now >= self.leaves_until

    def request_drain(self, now: float) -> None:
        """Note that an operator asks the worker to drain, as its answer may take a while."""
        self.leaves_until = now + DRAIN_ANSWER_S

    def cancel_drain(self) -> None:
        """Note that an operator has cancelled the drain, or that it was refused."""
        self.leaves_until, self.drains = 0.0, False

    def book(self, request: RequestId, load: int, positions: int = 0, prompt: int = 0) -> None:
        """Book a request that goes to the worker; `load` in the entry's unit, `positions` that it may grow by there,
        `prompt`: tokens that it computes of the prompt."""
        self.load += load
        self.promised += positions
        self._add_prompt(prompt)
        self.requests.add(request)
        self.breaker.sent(request)

    def unbook(self, request: RequestId, load: int, prompt: int = 0) -> None:
        """Unbook a request that is gone from the worker; `load` and `prompt`: what is still booked of them."""
        self.load -= load
        self.prompt_done(prompt)
        self.requests.discard(request)
        self.breaker.left(request)

    def prompt_done(self, tokens: int) -> None:
        """Unbook tokens of a prompt that the worker has computed, or won't."""
        self._add_prompt(-tokens)

    def _add_prompt(self, tokens: int) -> None:
        if self.record.role is Role.DECODE:
            self.local_tokens += tokens
        else:
            self.load += tokens


class WorkerTable:
    """The worker table: one entry a worker, of its current incarnation only."""

    def __init__(
        self, config: RouterConfig, short_share: float = 0.0, page_tokens: int = 0, *, conditional: bool = False
    ) -> None:
        """`short_share`: `prefill.short_share`. `page_tokens`: `cache.page_tokens`. `conditional`: whether decode
        workers can compute prompts."""
        self._config, self._short_share, self._page_tokens = config, short_share, page_tokens
        self._conditional = conditional
        self._entries: dict[WorkerName, WorkerEntry] = {}
        self._columns = WorkerColumns(())
        self._counts: Mapping[Role, int] = {}
        self._counted_until = -inf
        self.served = ServedWeights()
        """The weights that the cluster serves, as the controller told last."""
        self.colocated = False
        """Whether the cluster's workers are colocated: then a request needs one of them, and else one of each role of
        `PAIR`."""

    def __iter__(self) -> Iterator[WorkerEntry]:
        return iter(self._entries.values())

    def get(self, key: WorkerKey) -> WorkerEntry | None:
        entry = self._entries.get(key[0])
        return entry if entry is not None and entry.record.incarnation == key[1] else None

    @property
    def keys(self) -> list[WorkerKey]:
        """The keys of all entries, in order: the same list until others come or go."""
        return self._columns.keys

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of which a request has a worker each."""
        return (Role.COLOCATED,) if self.colocated else PAIR

    @property
    def needed(self) -> tuple[Role, ...]:
        """The roles without which no request can be answered: where decode workers compute prompts, decode alone."""
        return (Role.DECODE,) if self._conditional and not self.colocated else self.roles

    @property
    def computing(self) -> tuple[Role, ...]:
        """The roles whose workers compute prompts, those that have nothing else to do first."""
        return PAIR if self._conditional and not self.colocated else self.roles[:1]

    def named(self, name: str) -> WorkerEntry | None:
        return self._entries.get(WorkerName(name))

    def update(self, views: Iterable[WorkerView]) -> list[WorkerEntry]:
        """Take in the controller's table; returns the entries whose incarnation has ended."""
        lost: list[WorkerEntry] = []
        seen = set()
        for view in views:
            name, incarnation = view.record.name, view.record.incarnation
            seen.add(name)
            old = self._entries.get(name)
            if old is not None and old.record.incarnation > incarnation:
                continue  # an older table than what we know
            if old is not None and old.record.incarnation == incarnation:
                was_gone = old.status.state in GONE
                old.see(view.record, view.status)
                if view.status.state in GONE and not was_gone:
                    lost.append(old)
                continue
            if old is not None:
                lost.append(old)
            self._entries[name] = WorkerEntry(
                view.record,
                view.status,
                CircuitBreaker(self._config),
                PrefillQueue(self._short_share),
                page_tokens=self._page_tokens,
            )
        for name in [n for n in self._entries if n not in seen]:
            lost.append(self._entries.pop(name))
        if [entry.key for entry in self] != self._columns.keys:
            self._columns = WorkerColumns(self)
        self.colocated = any(e.record.role is Role.COLOCATED for e in self)
        return lost

    def failed(self, key: WorkerKey, request: RequestId, now: float, reporter: WorkerKey) -> None:
        """Count a failed attempt against the worker `key`, and the complaint against `reporter`, if that's another."""
        guilty, witness = self.get(key), self.get(reporter)
        if guilty is not None:
            guilty.breaker.failed(request, now)
            guilty.touch()
        if witness is not None and reporter != key:
            witness.breaker.complained(key[0], now)
            witness.touch()

    def refused(self, key: WorkerKey, now: float) -> None:
        """Send nothing for a while to a worker that refused a request as draining; its view will say so."""
        entry = self.get(key)
        if entry is not None:
            entry.refuses_until = now + REFUSAL_PAUSE_S

    def succeeded(self, keys: Iterable[WorkerKey | None], request: RequestId, now: float) -> None:
        """Count an attempt in which these workers did their part; None is skipped."""
        for entry in [self.get(key) for key in keys if key]:
            if entry is not None:
                entry.breaker.succeeded(request, now)
                entry.touch()

    def gone(self, entry: WorkerEntry) -> None:
        """End the breaker of an incarnation that has ended, and drop the complaints about it: they were right."""
        entry.breaker.over()
        for other in self:
            other.breaker.justified(entry.record.name)

    def left_alone(self, now: float) -> list[WorkerName]:
        """The names of the serving workers whose breakers admit no request."""
        admitted = {e.key for role in self.roles for e in self.able(role, 0, {}, now)}
        return [e.record.name for e in self if e.serves(now) and e.key not in admitted]

    def others_like(self, key: WorkerKey) -> bool:
        """Whether the role of the worker `key` has another worker, up or coming back."""
        entry = self.get(key)
        role = entry.record.role if entry is not None else None
        return any(e.record.role is role and e.record.name != key[0] and e.status.state != "left" for e in self)

    def staying(self, role: Role, now: float) -> list[WorkerEntry]:
        return [e for e in self if e.record.role is role and e.stays(now)]

    def serving(self, role: Role, now: float) -> list[WorkerEntry]:
        return [e for e in self if e.record.role is role and e.serves(now)]

    def serving_counts(self, now: float) -> Mapping[Role, int]:
        """How many workers of each needed role serve: counted `COUNTED_S` ago at most, since refused requests, which
        keep it, come in floods."""
        if now >= self._counted_until:
            self._counts = {role: len(self.serving(role, now)) for role in self.needed}
            self._counted_until = now + COUNTED_S
        return self._counts

    def max_positions(self, role: Role) -> int | None:
        """The most positions of a sequence that any worker of `role` can hold; None while no such worker is known.

        A worker that is starting hasn't reported yet what fits (0): requests wait for it.
        """
        known = (e.record.fits.max_positions for e in self if e.record.role is role and e.status.state not in GONE)
        return max(filter(None, known), default=None)

    def unlike(self, now: float) -> str:
        """Why no serving prefill worker can hand over to a serving decode worker; empty where one can, or a role has no
        worker."""
        prefill, decode = (self.serving(role, now) for role in PAIR)
        if not prefill or not decode or {e.handover for e in prefill} & {e.handover for e in decode}:
            return ""
        one, other = prefill[0].record, decode[0].record
        if one.fingerprint is None or other.fingerprint is None:
            return ""
        why = mismatch(one.fingerprint, other.fingerprint, one.name, other.name)
        return f"no prefill worker can hand over to a decode worker: {why}"

    def able(self, role: Role, need: int, avoid: Mapping[WorkerKey, float], now: float) -> AbleWorkers:
        """The workers of `role` that could take a request of `need` positions now.

        `avoid`: workers to leave out, each with the time until when.
        """
        able = self._columns.able(role, need, now)
        return able.where(lambda e: avoid.get(e.key, 0.0) <= now) if avoid else able


def weights_version(workers: WorkerTable) -> str:
    """The version of the weights that the cluster is to serve: as it was given, or a digest; empty while no worker has
    told it."""
    served = workers.served.weights
    told = (entry.record.weights_version for entry in workers if entry.record.weights_number == served.number)
    return served.version or next(filter(None, told), "")
