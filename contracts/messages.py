"""Messages between the router and the workers: frozen values, grouped by the edge they cross.

They travel as protobuf (`contracts/proto/worker.proto`, `contracts/wire.py`) between processes and as they are in
one process. A request has one `Submit` a leg; both legs get the same value and differ in who receives it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from contracts.errors import ErrorKind
from contracts.ids import Incarnation, RequestId, Role, RoomId, WorkerName
from contracts.sampling import Difference, SamplingParams, TokenLogprob


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
    moving: bool = False
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
class Handover:
    """Stop this request at its next token and hold its state for `peer`, which will take it as `room`.

    Decode answers `Paused`, or `Resumed` where it can't.
    """

    request_id: RequestId
    attempt: int
    room: RoomId
    peer: PeerRef
    """The decode worker that takes over; its control endpoint isn't needed, as it is the one that calls."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A hand-over is taken back: go on with the request where it stopped. Ends in an error where it isn't held."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Give:
    """Write the finished pages that the tree has of these tokens to `peer`, which will fetch them as `room`.

    Decode answers `Gives`. Nothing that runs is held up.
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
class Fetch:
    """Receive the finished pages of these tokens from `peer` as `room`, for the tree. Decode answers `Fetched`."""

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
class Forget:
    """Never again use state of this prefix from the tree: an audit has shown that something in it is wrong."""

    request_id: RequestId
    """Whose answer was audited."""
    tokens: tuple[int, ...]
    salt: str = ""


Transit = Handover | Resume | Give | Fetch
"""What concerns state that goes between decode workers."""
Command = Submit | Cancel | Transit | Audit | Forget


# ---------------------------------------------------------------- worker -> router


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly committed tokens of one request, in order, the first at absolute position `position`."""

    request_id: RequestId
    attempt: int
    position: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One a token when the client asked for them, else empty."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the prompt's tokens 1.. (token 0 has none), in order, once a request, from prefill."""

    request_id: RequestId
    attempt: int
    scores: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """What one leg did and when; what its reports count adds up.

    Prefill reports once, with its first token. Decode reports what it held and received as soon as that is verified,
    so that it is told of answers too that end before decode does (by a stop string, say), and at the end the rest of
    its marks. `marks` are seconds since the leg's arrival at that worker: ``queue``, ``match``, ``prefill`` on
    prefill; ``grant``, ``arrived``, ``first_step``, ``done`` on decode.
    """

    request_id: RequestId
    attempt: int
    role: Role
    worker: WorkerName
    marks: dict[str, float] = field(default_factory=dict)
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens whose state this worker computed; 0 on decode, always."""
    transfer_bytes: int = 0
    """Bytes of state received and verified; decode alone knows, as it is sent only what it doesn't hold."""
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    """`cached_tokens` by where they were: ``device``, ``host``, ``storage``."""


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of a leg that ends the request: decode, or prefill when it alone answers or either fails."""

    request_id: RequestId
    attempt: int
    reason: str
    """``stop`` (a stop token was drawn), ``length``, or ``error``."""
    stop_token: int | None = None
    error: ErrorKind | None = None
    message: str = ""
    blame: WorkerName | None = None
    """The worker at fault, if the one that reports isn't."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """The worker drains and would rather have this request go on elsewhere."""

    request_id: RequestId
    attempt: int
    started: bool
    """It has state here, which a hand-over would keep; else it has nothing yet and can start anywhere."""
    withdrawn: bool = False
    """Not any more: the worker has been undrained."""


@dataclass(frozen=True, slots=True)
class Paused:
    """A hand-over can begin: all tokens were sent, and the state of the first `position` positions waits for it."""

    request_id: RequestId
    attempt: int
    position: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """The hand-over came to nothing: the request goes on here."""

    request_id: RequestId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Moved:
    """The other worker has everything; nothing of the request is left here."""

    request_id: RequestId
    attempt: int
    bytes: int
    """Of state, that were sent."""


@dataclass(frozen=True, slots=True)
class Gives:
    """Pages of so many positions are kept for whoever fetches them; 0: it isn't worth it, or there are none."""

    request_id: RequestId
    attempt: int
    positions: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetch has ended, with so many bytes; 0: with nothing."""

    request_id: RequestId
    attempt: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Offered:
    """A decode worker that leaves has these tokens' pages, which others may want: the hottest first."""

    request_id: RequestId
    """A name for the offer."""
    attempt: int
    tokens: tuple[int, ...]
    salt: str


class AuditEnd(StrEnum):
    """How an audit ended at its worker."""

    COMPUTED = "computed"
    PREEMPTED = "preempted"
    """A request came, or the worker drains: it may be tried again later."""
    REFUSED = "refused"
    """It can't be computed here."""


@dataclass(frozen=True, slots=True)
class Audited:
    """What came of an `Audit`."""

    request_id: RequestId
    attempt: int
    end: AuditEnd
    checked: int = 0
    """Tokens of the answer that were drawn again."""
    differing: int = 0
    """Those of them that came out otherwise."""
    differences: tuple[Difference, ...] = ()
    """The first of these, in order of position."""
    exact: bool = True
    """Whether every difference is damage; else (numerics: fast) only what is beyond `audit.margin`."""
    message: str = ""


Event = (
    Tokens | PromptScores | Progress | Done | Leaving | Paused | Resumed | Moved | Gives | Fetched | Offered | Audited
)


# ---------------------------------------------------------------- worker state, for the controller and operators


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One line of `twinpool status`."""

    name: WorkerName
    role: Role
    state: str
    """``starting``, ``ready``, ``draining``, ``left``, ``dead``."""
    pid: int
    node: str
    incarnation: Incarnation
    running: int
    waiting: int
    pages_total: int
    pages_free: int
    steps: int = 0
    """Steps made since start: a worker that has work and makes none is stuck."""
    outgoing: int = 0
    """Rooms whose pages have not been released yet."""
    counters: dict[str, float] = field(default_factory=dict)
    stalled_s: float = 0.0
    """How long its loop has made no progress, or had work that could run and ended no step; 0 while all is well."""
    longest_step_s: float = 0.0
    """The longest of its latest steps: what is long for one worker is usual for another."""
    last_end: str = ""
    """Why its last incarnation ended, as the controller knows; empty where none has."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check()` counted and found, recomputed from scratch."""

    name: WorkerName
    pages: int
    slots: int
    leases: int
    rooms: int
    violations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fits:
    """What a worker can ever hold, for the router's early refusals."""

    max_positions: int
    """Longest prompt + answer that fits into the pool when it is empty."""
    context: int
    """The model's context length."""
