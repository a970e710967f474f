"""Records, status, reports and limits of workers, for the controller and operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

from msgspec import field

from twinpool.contracts.damage import where_of
from twinpool.contracts.ids import NO_INCARNATION, Incarnation, Role, WorkerName
from twinpool.contracts.message_types import SOME, UNSIGNED, Finite, Message, Uint32, Uint64
from twinpool.contracts.messages.fingerprint import Fingerprint
from twinpool.contracts.sampling_params import WeightsVersion

CPU_SECONDS = "cpu_seconds"
"""Counter of `WorkerStatus` that says how much processor time the worker's process has used."""
GPU_UTILIZATION = "gpu_utilization"
"""Gauge among the counters: the share of the driver's last sampling period in which its GPU computed, 0 to 1."""


class RankNode(Message, frozen=True):
    """The node of a rank of a worker whose ranks may be on several."""

    node: str
    """Its host name."""
    node_id: str
    """Its Ray node id."""


class WorkerRecord(Message, frozen=True):
    """A worker as it registered with the controller."""

    name: WorkerName
    role: Role
    incarnation: Annotated[Incarnation, UNSIGNED]
    pid: Uint32
    node: str
    endpoint: str
    """Its gRPC service for calls, ``host:port``; empty in one process."""
    control: str
    """Endpoint of its control socket for rooms; empty where peers don't connect to it."""
    fits: WorkerLimits
    node_id: str = ""
    """Id of the Ray node that it runs on; empty without Ray."""
    fingerprint: Fingerprint | None = None
    """What peers must have in common with the worker; None while no process of it has registered."""
    stream: str = ""
    """Where routers open their streams, ``host:port``; empty in one process."""
    settings: str = ""
    """Digest of the settings that it was started with; empty in one process."""
    build: str = ""
    """The build that it runs (`contracts.build_id`); empty in one process, and of builds that don't say."""
    stream_protocol: Uint32 = 0
    """Version of its messages with routers (`contracts.messages.stream_frames`); 0: of builds that don't say."""
    weights: WeightsVersion | None = None
    """The weights that it has in place of the checkpoint's; None: the checkpoint's."""
    rank_nodes: Annotated[tuple[RankNode, ...], SOME] = ()
    """The nodes of its ranks from 1 on, where they may be on others than `node`."""

    @property
    def nodes(self) -> tuple[tuple[str, str], ...]:
        """Host name and Ray node id of each node that it has a process on; its own is the first."""
        return tuple(dict.fromkeys([(self.node, self.node_id), *((one.node, one.node_id) for one in self.rank_nodes)]))

    @property
    def weights_number(self) -> int:
        return 0 if self.weights is None else self.weights.number

    @property
    def weights_version(self) -> str:
        """The name by which clients are told of its weights: the one that was given, or their digest; empty while no
        process of it has registered."""
        if self.weights is not None and self.weights.version:
            return self.weights.version
        digest = "" if self.fingerprint is None else self.fingerprint.weights
        return digest if self.weights is None else digest.removesuffix(f"-{self.weights.serial}")


class WorkerView(Message, frozen=True):
    """A worker as the controller last saw it."""

    record: WorkerRecord
    status: WorkerStatus
    cordoned: bool = False
    """Its node gets no workers until the node is undrained."""


class EndedWorker(Message, frozen=True):
    """An incarnation of a worker that has ended for the controller: it and all before it get no lease any more, and no
    request. Its processes may still be there."""

    name: WorkerName
    incarnation: Annotated[Incarnation, UNSIGNED]
    closed_from: Annotated[Incarnation, UNSIGNED] = NO_INCARNATION
    """The first of the incarnations, up to `incarnation`, that its process has been and has closed by its own word: it
    holds nothing of theirs any more, and may live on as another. 0: none."""


# ---------------------------------------------------------------- worker state, for the controller and operators


class WorkerStatus(Message, frozen=True):
    """The state and counts of a worker: one line of `twinpool status`."""

    name: WorkerName
    role: Role
    state: str
    """``starting``, ``ready``, ``draining``, ``left``, ``dead``."""
    pid: Uint32
    node: str
    incarnation: Annotated[Incarnation, UNSIGNED]
    running: Uint32
    waiting: Uint32
    pages_total: Uint64
    pages_free: Uint64
    steps: Uint64 = 0
    """Steps made since start, slices of pictures among them: a worker that has work and makes none is stuck."""
    outgoing: Uint32 = 0
    """Hand-overs to peers (rooms) whose pages have not been released yet."""
    counters: Annotated[dict[str, float], SOME] = field(default_factory=dict)
    stalled_s: Finite = 0.0
    """Seconds in which its loop made no progress, or had work that could run and ended no step; 0 while all is well."""
    longest_step_s: Finite = 0.0
    """Seconds of the longest of its latest steps: a long step for one worker is usual for another."""
    last_end: str = ""
    """Why its last incarnation ended, as far as the controller knows; empty where none has."""
    plane: str = ""
    """The data plane that its pages travel by, as in `transfer.plane`; empty while it hasn't said."""
    kv_events: str = ""
    """Where it publishes its KV events, as it bound the socket; empty where it publishes none."""
    kv_replay: str = ""
    """Where it is asked for KV events that were missed; empty where it isn't."""
    routers: Uint32 = 0
    """Routers that have a stream to it."""
    prompt_tokens: Uint64 = 0
    """Tokens of the prompts that it has which are still to be computed."""
    counters_left_out: bool = False
    """Whether `counters` are empty because they are said more seldom than the rest."""
    waits: str = ""
    """What the start of its next incarnation waits for, as far as the controller knows; empty where it doesn't wait."""
    ungranted: Uint32 = 0
    """Its requests that wait for pages."""
    adapters: Annotated[tuple[str, ...], SOME] = ()
    """Digests of the adapters that it has in memory."""
    prepared: Uint32 = 0
    """The number of the weights that it has read and checked, to change to them; 0: of none."""
    prepared_digest: str = ""
    """The digest of their files, as it has read them."""
    unprepared: str = ""
    """Why it can't change to the weights that it was told to prepare, in words; empty where it can."""
    paused: bool = False
    """Whether it makes no step until it is told to go on."""
    background: Uint32 = 0
    """Its background requests (`router_commands.BACKGROUND`), of those that run and wait."""


class CheckReport(Message, frozen=True):
    """The result of a worker's `check()`: counts, and invariants that are broken, recomputed from scratch."""

    name: WorkerName
    pages: Uint64
    slots: Uint64
    leases: Uint64
    rooms: Uint64
    violations: Annotated[tuple[str, ...], SOME] = ()
    kept_answers: Uint64 = 0
    """Answers that a decode worker keeps for clients that may come back, those that run for nobody among them."""


class WorkerLimits(Message, frozen=True):
    """The longest request that a worker can ever hold, for the router's early refusals. In positions."""

    max_positions: Uint64
    """Longest prompt + answer that fits into the worker's empty pools."""
    context: Uint64
    """The model's context length."""


K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class DamageSample:
    """One worker's count of one kind of damage (`where`, from `contracts.damage`)."""

    worker: str
    role: str
    where: str
    count: float


class DamageTotals:
    """Damage counts by worker, role and `where`; bounded by the names that workers ever had.

    A worker counts from its start and reports its counts in every heartbeat. Here those of all incarnations are added
    up, so that a worker that is started again, or leaves, takes nothing off the metric. Damage that a worker found
    after its last heartbeat is in the worker's log alone.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[WorkerName, Role, str], float] = {}
        """The counts of earlier incarnations."""
        self._now: dict[WorkerName, tuple[Incarnation, Role, dict[str, float]]] = {}
        self._seen: dict[WorkerName, WorkerStatus] = {}
        """The latest status of each worker that was taken in: most tables bring it again."""

    def on_statuses(self, statuses: Iterable[WorkerStatus]) -> None:
        """Take in workers' statuses; that of an older incarnation than the one known is ignored."""
        for status in statuses:
            if status is self._seen.get(status.name):
                continue
            self._seen[status.name] = status
            incarnation, role, known = self._now.get(status.name, (status.incarnation, status.role, {}))
            if incarnation > status.incarnation:
                continue
            if incarnation < status.incarnation:
                for where, value in known.items():
                    _add(self._before, (status.name, role, where), value)
                known = {}
            # A status without counters (of a worker that has ended) takes nothing back.
            counts = {w: max(value, known.get(w, 0.0)) for w, value in _counts(status.counters).items()}
            self._now[status.name] = (status.incarnation, status.role, {**known, **counts})

    def samples(self) -> Iterator[DamageSample]:
        """A sample for each `where` that a worker has ever reported, also where the count is 0."""
        totals = dict(self._before)
        for name, (_, role, counts) in self._now.items():
            for where, value in counts.items():
                _add(totals, (name, role, where), value)
        for (name, role, where), value in sorted(totals.items()):
            yield DamageSample(name, role, where, value)


def _counts(counters: Mapping[str, float]) -> dict[str, float]:
    """The damage counters summed by `where`: several counters may count the same."""
    out: dict[str, float] = {}
    for name, value in counters.items():
        where = where_of(name)
        if where is not None:
            _add(out, where, value)
    return out


def _add(totals: dict[K, float], key: K, value: float) -> None:
    totals[key] = totals.get(key, 0.0) + value
