"""Commands: the messages from a router to workers, as frozen values.

Commands travel as protobuf (`contracts/proto/worker.proto`, `contracts/wire/command_protobuf.py`) between processes and
as they are in one process. Each leg of a request gets one `Submit`; both are alike but for `peer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from twinpool.contracts.ids import Incarnation, RequestId, RoomId, WorkerName
from twinpool.contracts.messages.kept_answers import AnswerName, Attach, Detach
from twinpool.contracts.sampling_params import SamplingParams


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
    """0 at first; a replay after a failure carries the next number, and the router drops events of older attempts."""
    room: RoomId
    tokens: tuple[int, ...]
    """The prompt, then the tokens that earlier attempts have already emitted."""
    prompt_len: int
    """How many of `tokens` are the client's prompt; the rest are emitted tokens."""
    sampling: SamplingParams
    peer: PeerRef | None
    """The worker of the other leg; None when prefill alone can answer (``max_tokens`` leaves at most one token to
    draw)."""
    salt: str = ""
    """Part of the prefix key: requests with different salts share nothing."""
    deadline_s: float = 600.0
    """Seconds from the arrival at the worker after which the worker fails the request."""
    priority: int = 0
    """Requests with a higher number are admitted first and retracted last; under ``cache.eviction=priority`` their
    state stays longer."""
    first_token_s: float = 0.0
    """Seconds from the arrival at the worker after which the prompt isn't begun any more; 0: it may always be."""
    migrating: bool = False
    """The request is paused on another decode worker until this one grants it: without room for it now it is
    refused."""
    tenant: str = ""
    """Whose request it is; tenants have fair shares of a worker that not all can have at once. Empty: nobody's, where
    nobody needs a key."""
    weight: int = 1
    """The share that the tenant's requests have beside those of others."""
    name: AnswerName | None = None
    """The name under which its decode worker keeps it when its router is gone; None: it is cancelled then."""

    def begin_by(self, now: float) -> float:
        """When the prompt of a request that arrives `now` isn't begun any more; infinite: it may always be."""
        return now + self.first_token_s if self.first_token_s else math.inf

    @property
    def late(self) -> str:
        """Why the request ends where its prompt wasn't begun in time."""
        return f"its prompt could not be begun within {self.first_token_s:g} s, in which its first token was due"

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
    keep: bool = False
    """Whether decode keeps the tokens of an answer with a name: it is whole."""


@dataclass(frozen=True, slots=True)
class PauseForMigration:
    """Stop this request at its next token and hold its state for `peer`, which will fetch it as `room`.

    Decode answers `MigrationPaused`, or `MigrationUndone` where it can't migrate the request.
    """

    request_id: RequestId
    attempt: int
    room: RoomId
    peer: PeerRef
    """The decode worker that takes over. Its control endpoint isn't needed, as that worker connects to this one."""


@dataclass(frozen=True, slots=True)
class ResumeHere:
    """A migration is taken back: go on with the request where it was paused. A request that isn't held ends in an
    error."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class PushPrefix:
    """Write the finished pages that the prefix cache has of these tokens to `peer`, which will ask for them as `room`.

    Decode answers `PushReady`. Running requests go on meanwhile.
    """

    request_id: RequestId
    """The running request whose pages they are, or the name of a `PrefixOffered`."""
    attempt: int
    room: RoomId
    peer: PeerRef
    tokens: tuple[int, ...] = ()
    """Empty: the tokens of the running request."""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class PullPrefix:
    """Receive the finished pages of these tokens from `peer` as `room`, for the prefix cache. Decode answers
    `PullDone`."""

    request_id: RequestId
    attempt: int
    room: RoomId
    peer: PeerRef
    tokens: tuple[int, ...]
    salt: str = ""
    spare: bool = False
    """Take only free pages for them: evict nothing."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Compute a finished answer again from its tokens alone, while the worker is idle. The worker answers `Audited`.

    No page of it is taken from the prefix cache or a tier, and none is kept. Any request that comes ends the audit
    (`AuditEnd.PREEMPTED`).
    """

    request_id: RequestId
    """Names the audit itself, not the request that is audited."""
    attempt: int
    tokens: tuple[int, ...]
    """The prompt, then the whole answer."""
    prompt_len: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class InvalidatePrefix:
    """Invalidate this prefix in the prefix cache: an audit has shown that some of its state is wrong."""

    request_id: RequestId
    """The request whose answer was audited."""
    tokens: tuple[int, ...]
    salt: str = ""


MigrationCommand = PauseForMigration | ResumeHere | PushPrefix | PullPrefix
"""Commands about state that goes between decode workers."""
Command = Submit | Cancel | Detach | Attach | MigrationCommand | Audit | InvalidatePrefix
