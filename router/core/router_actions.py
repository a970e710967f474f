"""The router core's actions, as values that the service carries out, and the core's counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from twinpool.contracts.ids import RequestId
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.worker_events import Done
from twinpool.contracts.sampling_params import TokenLogprob
from twinpool.router.core.answer_lookups import LookupEnded
from twinpool.router.state.routed_request import AttemptCost
from twinpool.router.state.worker_table import WorkerKey
from twinpool.router.verification.audits import AuditEnded, AuditFinding


@dataclass(frozen=True, slots=True)
class SendCommand:
    """Send `command` on the link to `worker`."""

    worker: WorkerKey
    command: Command


class DeliverTokens(msgspec.Struct, frozen=True):
    """The next tokens of a request, in order. `logprobs`: one a token when the client asked for them, else empty."""

    request_id: RequestId
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob]


@dataclass(frozen=True, slots=True)
class DeliverScores:
    """The prompt's log-probabilities, once a request and before any token."""

    request_id: RequestId
    scores: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class DeliverEmbedding:
    """The prompt's embedding, as `contracts.messages.worker_events.Embedding` has it; once a request."""

    request_id: RequestId
    vector: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EndRequest:
    """The request has ended; nothing follows."""

    request_id: RequestId
    done: Done


@dataclass(frozen=True, slots=True)
class NoteReplay:
    """A request starts over from its tokens, as attempt `attempt`; for the log."""

    request_id: RequestId
    attempt: int
    reason: str


PromptAction = DeliverScores | DeliverEmbedding
"""What prefill tells of a prompt besides tokens."""
RouterAction = (
    SendCommand | DeliverTokens | PromptAction | EndRequest | NoteReplay | AuditFinding | AuditEnded | LookupEnded
)


@dataclass(slots=True)
class RouterCounts:
    """Counters of requests and attempts since the router's start; read by the metrics."""

    submitted: int = 0
    ended: int = 0
    failed: int = 0
    cancelled: int = 0
    replays: int = 0
    refusals: int = 0
    damaged: int = 0
    recomputed: int = 0
    """Attempts that decode retracted after they had brought a token; their state is computed again from the tokens."""
    late_events: int = 0
    refused_early: int = 0
    """Requests that were refused as their first token was predicted to be late."""
    refused_falsely: int = 0
    """Those of `refused_early` whose worker would have had the time for them, by what it did afterwards."""
    shed: int = 0
    """Requests that ended as nothing had begun them when their first token was due."""
    adopted: int = 0
    """Requests that a decode worker had kept, and that went on here."""
    detached: int = 0
    """Requests that were left to their workers, as their clients may come back."""
    fallbacks: int = 0
    """Legs in which decode had to compute a part of the prompt itself, instead of receiving all of it."""
    local_prompts: Counter[str] = field(default_factory=Counter)
    """Attempts whose prompt a decode worker was given to compute, by why."""

    placements: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Attempts that a worker was chosen for, by its name and the role that it has in them."""

    def charge(self, cost: AttemptCost) -> None:
        """Count a failed attempt by its cost."""
        self.replays += cost is AttemptCost.REPLAY
        self.refusals += cost is AttemptCost.REFUSAL
        self.recomputed += cost is AttemptCost.FREE
