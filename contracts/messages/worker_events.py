"""Events: the messages from workers to a router."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import field

from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role, WorkerName
from twinpool.contracts.message_types import SOME, Finite, Message, TokenIds, Uint32, Uint64
from twinpool.contracts.messages.kept_answers import Attached
from twinpool.contracts.sampling_params import TokenDifference, TokenLogprobs

# ---------------------------------------------------------------- worker -> router


class Tokens(Message, frozen=True, tag="tokens"):
    """Newly committed tokens of one request, in order, the first at absolute position `position`."""

    request_id: RequestId
    attempt: Uint32
    position: Uint32
    tokens: TokenIds
    logprobs: TokenLogprobs = ()
    """One for each token when the client asked for them, else empty."""


class PromptScores(Message, frozen=True, tag="prompt_scores"):
    """Log-probabilities of the prompt's tokens 1.. (token 0 has none), in order; prefill sends them once for a
    request."""

    request_id: RequestId
    attempt: Uint32
    scores: TokenLogprobs


class Embedding(Message, frozen=True, tag="embedding"):
    """The embedding of a prompt, where it was asked for, as `SamplingParams.pooling` says. Prefill sends it once for a
    request."""

    request_id: RequestId
    attempt: Uint32
    vector: Annotated[tuple[Finite, ...], SOME]
    """[hidden], or of what the last `Dense` module makes of it: float32s, not normalised; the logits of a judgement."""


class LegNote(Message, frozen=True):
    """Something that happened to a leg, besides its marks.

    ``retracted`` and ``resumed``: decode took the request off the device, with `bytes` of state, and it runs again.
    ``loaded``: from `at_s` on, `bytes` of its prefix are loaded from the tiers that `text` names. ``waited``: until
    `at_s` the leg waited for what `text` says. ``preempted``: its prompt starts over. ``drafted``: its answer is
    complete, and so many drafts of it were right as `text` says.
    """

    kind: str
    at_s: Finite
    """Seconds since the leg's arrival at its worker."""
    bytes: Uint64 = 0
    text: str = ""


class LegReport(Message, frozen=True, tag="leg_report"):
    """What one leg of a request did, and when. The counts of several reports of one leg add up.

    Prefill reports once, with its first token, or where it gives the prompt up before that. Decode reports what it held
    and received as soon as the received state is verified, so that answers which end before decode does (by a stop
    string, say) are reported too; then at each retraction and return of the request; and at its end with the rest of
    its marks. `marks` are seconds since the leg's arrival at that worker: ``queue``, ``grant``, ``prefill`` on prefill;
    ``grant``, ``arrived``, ``first_step``, ``done`` on decode.
    """

    request_id: RequestId
    attempt: Uint32
    role: Role
    worker: WorkerName
    marks: dict[str, Finite] = field(default_factory=dict)
    cached_tokens: Uint32 = 0
    computed_tokens: Uint32 = 0
    """Prompt tokens whose state this worker computed; 0 on decode, always."""
    transfer_bytes: Uint64 = 0
    """Bytes of state received and verified. Only decode reports them, as it is sent only the state that it lacks."""
    cached_by_tier: dict[str, Uint32] = field(default_factory=dict)
    """`cached_tokens` by the tier that held them: ``device``, ``host``, ``storage``."""
    notes: Annotated[tuple[LegNote, ...], SOME] = ()
    """What has happened to the leg since its last report, in order."""


class Done(Message, frozen=True, tag="done"):
    """The last event of the leg that ends a request: decode, or prefill when it answers alone, or either when it
    fails."""

    request_id: RequestId
    attempt: Uint32
    reason: str
    """``stop`` (a stop token was drawn), ``length``, or ``error``."""
    stop_token: Uint32 | None = None
    error: ErrorKind | None = None
    message: str = ""
    blame: WorkerName | None = None
    """The worker at fault; None: the one that reports."""


class MigrationWanted(Message, frozen=True, tag="migration_wanted"):
    """The worker drains, and asks that this request be continued on another worker."""

    request_id: RequestId
    attempt: Uint32
    started: bool
    """The request has state here, which a migration would keep; else it has none yet and can start on any worker."""
    withdrawn: bool = False
    """The worker takes the wish back: it has been undrained."""


class MigrationPaused(Message, frozen=True, tag="migration_paused"):
    """A migration can begin: all tokens were sent, and the state of the first `position` positions is held for the
    peer."""

    request_id: RequestId
    attempt: Uint32
    position: Uint32


class MigrationUndone(Message, frozen=True, tag="migration_undone"):
    """A migration failed or was refused: the request goes on at this worker."""

    request_id: RequestId
    attempt: Uint32
    reason: str


class MigrationDone(Message, frozen=True, tag="migration_done"):
    """A migration is complete: the other worker has all state, and this worker has freed the request."""

    request_id: RequestId
    attempt: Uint32
    bytes: Uint64
    """Bytes of state that were sent."""


class PushReady(Message, frozen=True, tag="push_ready"):
    """Answer to `PushPrefix`: the pages of `positions` positions are held for the peer; 0: none, or not worth a
    push."""

    request_id: RequestId
    attempt: Uint32
    positions: Uint32


class PullDone(Message, frozen=True, tag="pull_done"):
    """Answer to `PullPrefix`: the pull has ended, with `bytes` bytes; 0: nothing was received."""

    request_id: RequestId
    attempt: Uint32
    bytes: Uint64


class PrefixOffered(Message, frozen=True, tag="prefix_offered"):
    """A decode worker that leaves offers the pages of these tokens to other workers. The hottest prefix is offered
    first."""

    request_id: RequestId
    """Names the offer."""
    attempt: Uint32
    tokens: TokenIds
    salt: str


class AuditEnd(StrEnum):
    """How an audit ended at its worker."""

    COMPUTED = "computed"
    PREEMPTED = "preempted"
    """A request came, or the worker drains: the audit may be tried again later."""
    REFUSED = "refused"
    """The worker can't compute this audit."""

    @classmethod
    def _missing_(cls, value: object) -> AuditEnd | None:
        """An end that only a newer build knows: nothing was computed."""
        return cls.REFUSED if isinstance(value, str) else None


class Audited(Message, frozen=True, tag="audited"):
    """The result of an `Audit`."""

    request_id: RequestId
    attempt: Uint32
    end: AuditEnd
    checked: Uint32 = 0
    """Tokens of the answer that were drawn again."""
    differing: Uint32 = 0
    """Tokens among the checked ones that were drawn differently."""
    differences: Annotated[tuple[TokenDifference, ...], SOME] = ()
    """The first of the differing tokens, in order of position."""
    exact: bool = True
    """Whether every difference is damage; else (numerics: fast) only a difference with a gap above `audit.margin`."""
    message: str = ""


Event = (
    Tokens
    | PromptScores
    | Embedding
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
