"""Events: the messages from workers to a router."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role, WorkerName
from twinpool.contracts.messages.kept_answers import Attached
from twinpool.contracts.sampling_params import TokenDifference, TokenLogprob

# ---------------------------------------------------------------- worker -> router


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly committed tokens of one request, in order, the first at absolute position `position`."""

    request_id: RequestId
    attempt: int
    position: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token when the client asked for them, else empty."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the prompt's tokens 1.. (token 0 has none), in order; prefill sends them once for a
    request."""

    request_id: RequestId
    attempt: int
    scores: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class LegNote:
    """Something that happened to a leg, besides its marks.

    ``retracted`` and ``resumed``: decode took the request off the device, with `bytes` of state, and it runs again.
    ``loaded``: from `at_s` on, `bytes` of its prefix are loaded from the tiers that `text` names. ``waited``: until
    `at_s` the leg waited for what `text` says. ``preempted``: its prompt starts over.
    """

    kind: str
    at_s: float
    """Seconds since the leg's arrival at its worker."""
    bytes: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class LegReport:
    """What one leg of a request did, and when. The counts of several reports of one leg add up.

    Prefill reports once, with its first token, or where it gives the prompt up before that. Decode reports what it held
    and received as soon as the received state is verified, so that answers which end before decode does (by a stop
    string, say) are reported too; then at each retraction and return of the request; and at its end with the rest of
    its marks. `marks` are seconds since the leg's arrival at that worker: ``queue``, ``grant``, ``prefill`` on prefill;
    ``grant``, ``arrived``, ``first_step``, ``done`` on decode.
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
    """Bytes of state received and verified. Only decode reports them, as it is sent only the state that it lacks."""
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    """`cached_tokens` by the tier that held them: ``device``, ``host``, ``storage``."""
    notes: tuple[LegNote, ...] = ()
    """What has happened to the leg since its last report, in order."""


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of the leg that ends a request: decode, or prefill when it answers alone, or either when it
    fails."""

    request_id: RequestId
    attempt: int
    reason: str
    """``stop`` (a stop token was drawn), ``length``, or ``error``."""
    stop_token: int | None = None
    error: ErrorKind | None = None
    message: str = ""
    blame: WorkerName | None = None
    """The worker at fault; None: the one that reports."""


@dataclass(frozen=True, slots=True)
class MigrationWanted:
    """The worker drains, and asks that this request be continued on another worker."""

    request_id: RequestId
    attempt: int
    started: bool
    """The request has state here, which a migration would keep; else it has none yet and can start on any worker."""
    withdrawn: bool = False
    """The worker takes the wish back: it has been undrained."""


@dataclass(frozen=True, slots=True)
class MigrationPaused:
    """A migration can begin: all tokens were sent, and the state of the first `position` positions is held for the
    peer."""

    request_id: RequestId
    attempt: int
    position: int


@dataclass(frozen=True, slots=True)
class MigrationUndone:
    """A migration failed or was refused: the request goes on at this worker."""

    request_id: RequestId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class MigrationDone:
    """A migration is complete: the other worker has all state, and this worker has freed the request."""

    request_id: RequestId
    attempt: int
    bytes: int
    """Bytes of state that were sent."""


@dataclass(frozen=True, slots=True)
class PushReady:
    """Answer to `PushPrefix`: the pages of `positions` positions are held for the peer; 0: none, or not worth a
    push."""

    request_id: RequestId
    attempt: int
    positions: int


@dataclass(frozen=True, slots=True)
class PullDone:
    """Answer to `PullPrefix`: the pull has ended, with `bytes` bytes; 0: nothing was received."""

    request_id: RequestId
    attempt: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PrefixOffered:
    """A decode worker that leaves offers the pages of these tokens to other workers. The hottest prefix is offered
    first."""

    request_id: RequestId
    """Names the offer."""
    attempt: int
    tokens: tuple[int, ...]
    salt: str


class AuditEnd(StrEnum):
    """How an audit ended at its worker."""

    COMPUTED = "computed"
    PREEMPTED = "preempted"
    """A request came, or the worker drains: the audit may be tried again later."""
    REFUSED = "refused"
    """The worker can't compute this audit."""


@dataclass(frozen=True, slots=True)
class Audited:
    """The result of an `Audit`."""

    request_id: RequestId
    attempt: int
    end: AuditEnd
    checked: int = 0
    """Tokens of the answer that were drawn again."""
    differing: int = 0
    """Tokens among the checked ones that were drawn differently."""
    differences: tuple[TokenDifference, ...] = ()
    """The first of the differing tokens, in order of position."""
    exact: bool = True
    """Whether every difference is damage; else (numerics: fast) only a difference with a gap above `audit.margin`."""
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
    | Attached
)
