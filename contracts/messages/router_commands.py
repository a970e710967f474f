"""Messages between the router and the workers: frozen values, grouped by the edge they cross.

They travel as protobuf (`contracts/proto/worker.proto`, `contracts/wire/command_protobuf.py`) between processes and as
they are in one process. A request has one `Submit` a leg; both legs get the same value and differ in who receives it.
"""

from __future__ import annotations

from dataclasses import dataclass

from contracts.ids import Incarnation, RequestId, RoomId, WorkerName
from contracts.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class PeerRef:
    """The other leg's worker, as the router knows it."""

    name: WorkerName
    incarnation: Incarnation
    control: str
    """Endpoint of its control socket (``tcp://host:port`` or ``inproc://name``)."""


# ---------------------------------------------------------------- router -> worker


@dataclass(frozen=True, slots=True)
class Submit:
    """One leg of one attempt at one request."""

    request_id: RequestId
    attempt: int
    """0 at first; a replay after a failure carries the next number, and older events are dropped."""
    room: RoomId
    tokens: tuple[int, ...]
    """The prompt, then whatever earlier attempts have already emitted."""
    prompt_len: int
    """How many of `tokens` are the client's prompt; the rest are emitted tokens."""
    sampling: SamplingParams
    peer: PeerRef | None
    """The other leg; None when prefill alone can answer (``max_tokens`` leaves at most one token to draw)."""
    salt: str = ""
    """Part of the prefix key: requests with different salts share nothing."""
    deadline_s: float = 600.0
    """Seconds from arrival at the worker until the request is failed there."""
    priority: int = 0
    """Under ``cache.eviction=priority`` state of higher priority stays longer."""
    migrating: bool = False
    """It stands still elsewhere until it is granted here: without room for it now it is refused."""

    @property
    def emitted(self) -> tuple[int, ...]:
        return self.tokens[self.prompt_len :]

    @property
    def max_len(self) -> int:
        """Positions that prompt and answer may take at most."""
        return self.prompt_len + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Cancel:
    """The router takes an attempt back: the client left, a stop string matched, or the other leg failed."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class PauseForMigration:
    """Stop this request at its next token and hold its state for `peer`, which will take it as `room`.

    Decode answers `MigrationPaused`, or `MigrationUndone` where it can't.
    """

    request_id: RequestId
    attempt: int
    room: RoomId
    peer: PeerRef
    """The decode worker that takes over; its control endpoint isn't needed, as it is the one that calls."""


@dataclass(frozen=True, slots=True)
class ResumeHere:
    """A hand-over is taken back: go on with the request where it stopped. Ends in an error where it isn't held."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class PushPrefix:
    """Write the finished pages that the tree has of these tokens to `peer`, which will fetch them as `room`.

    Decode answers `PushReady`. Nothing that runs is held up.
    """

    request_id: RequestId
    """The running request whose pages they are, or a name for what was offered."""
    attempt: int
    room: RoomId
    peer: PeerRef
    tokens: tuple[int, ...] = ()
    """Empty: those of the request."""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class PullPrefix:
    """Receive the finished pages of these tokens from `peer` as `room`, for the tree. Decode answers `PullDone`."""

    request_id: RequestId
    attempt: int
    room: RoomId
    peer: PeerRef
    tokens: tuple[int, ...]
    salt: str = ""
    spare: bool = False
    """Only into pages that hold nothing."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Compute a finished answer again from its tokens alone, when there is nothing else to do.

    Nothing of it is taken from a tree or a tier, nor kept. Any request that comes ends it (`AuditEnd.PREEMPTED`).
    """

    request_id: RequestId
    """The audit's own."""
    attempt: int
    tokens: tuple[int, ...]
    """The prompt, then the whole answer."""
    prompt_len: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class InvalidatePrefix:
    """Never again use state of this prefix from the tree: an audit has shown that something in it is wrong."""

    request_id: RequestId
    """Whose answer was audited."""
    tokens: tuple[int, ...]
    salt: str = ""


MigrationCommand = PauseForMigration | ResumeHere | PushPrefix | PullPrefix
"""What concerns state that goes between decode workers."""
Command = Submit | Cancel | MigrationCommand | Audit | InvalidatePrefix
