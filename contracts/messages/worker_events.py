"""What workers tell a router."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from contracts.errors import ErrorKind
from contracts.ids import RequestId, Role, WorkerName
from contracts.sampling_params import TokenDifference, TokenLogprob

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
class LegReport:
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
class MigrationWanted:
    """The worker drains and would rather have this request go on elsewhere."""

    request_id: RequestId
    attempt: int
    started: bool
    """It has state here, which a hand-over would keep; else it has nothing yet and can start anywhere."""
    withdrawn: bool = False
    """Not any more: the worker has been undrained."""


@dataclass(frozen=True, slots=True)
class MigrationPaused:
    """A hand-over can begin: all tokens were sent, and the state of the first `position` positions waits for it."""

    request_id: RequestId
    attempt: int
    position: int


@dataclass(frozen=True, slots=True)
class MigrationUndone:
    """The hand-over came to nothing: the request goes on here."""

    request_id: RequestId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class MigrationDone:
    """The other worker has everything; nothing of the request is left here."""

    request_id: RequestId
    attempt: int
    bytes: int
    """Of state, that were sent."""


@dataclass(frozen=True, slots=True)
class PushReady:
    """Pages of so many positions are kept for whoever fetches them; 0: it isn't worth it, or there are none."""

    request_id: RequestId
    attempt: int
    positions: int


@dataclass(frozen=True, slots=True)
class PullDone:
    """A fetch has ended, with so many bytes; 0: with nothing."""

    request_id: RequestId
    attempt: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PrefixOffered:
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
    differences: tuple[TokenDifference, ...] = ()
    """The first of these, in order of position."""
    exact: bool = True
    """Whether every difference is damage; else (numerics: fast) only what is beyond `audit.margin`."""
    message: str = ""


Event = (
    Tokens
    | PromptScores
    | LegReport
    | Done
    | MigrationWanted
    | MigrationPaused
    | MigrationUndone
    | MigrationDone
    | PushReady
    | PullDone
    | PrefixOffered
    | Audited
)
