"""What a record is made of, kept until somebody wants the record: most are never asked for, and making one costs more
than the rest of a request's end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.messages.request_record import RUNNING, USUAL, PlacementChoice, RecordEvent, asks_for
from twinpool.contracts.messages.worker_events import LegReport
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.response_stream import ResponseStream
from twinpool.router.state.request_journal import JournalEntry, JournalKind
from twinpool.router.state.routed_request import RoutingPhase

ABANDONED = "abandoned"
"""The outcome of a choice whose client left, or that was of no use any more."""
RETRACTED = f": {ErrorKind.RETRACTED}: "
"""In the reason of a replay: decode had no memory for the attempt any more."""


@dataclass(slots=True, eq=False)
class RecordDraft:
    """One choice as its router knows it, at its end or while it runs. Times without another word are of the router's
    clock."""

    router: str
    model: str
    request_id: str
    answer_id: str
    client_id: str
    tenant: str
    trace_id: str
    parent_id: str
    """The client's span, of its trace."""
    sampled: bool
    """Whether its trace is recorded."""
    began: float
    """When the request came."""
    tokenised: float
    now: float
    """When it ended, or when somebody asked."""
    first_at: float
    """When the first token was delivered; 0: none was."""
    arrived: float
    """`began` in seconds since 1970."""
    outcome: str
    message: str
    prompt_tokens: int
    generated: int
    attempts: int
    migrations: int
    entries: Sequence[JournalEntry]
    choices: Sequence[tuple[float, PlacementChoice]]
    reports: Sequence[LegReport]
    left_out: int
    audits: list[RecordEvent] = field(default_factory=list)
    """What came of audits of its answer, after its end."""

    @classmethod
    def of(
        cls,
        router: str,
        model: str,
        stream: ResponseStream,
        choice: ChoiceOutput,
        now: float,
        wall: float,
        *,
        ended: bool,
    ) -> RecordDraft:
        """What is known of a choice at `now`; `wall`: the same moment in seconds since 1970. `ended`: whether it is
        over; a choice that is over without an end of its own was abandoned."""
        r, trace = choice.request, stream.trace
        began = r.arrived - choice.tokenise_s
        outcome, message = _outcome(choice, ended)
        return cls(
            router,
            model,
            r.id,
            stream.id,
            stream.client_id,
            r.share.tenant,
            trace.trace_id,
            trace.parent_id,
            trace.sampled,
            began,
            r.arrived,
            now,
            choice.first_at,
            wall - (now - began),
            outcome,
            message,
            len(r.prompt),
            len(choice.tokens),
            r.attempts,
            r.migrations,
            r.journal.entries,
            r.journal.choices,
            r.progress,
            r.journal.left_out,
        )

    @property
    def total_s(self) -> float:
        return self.now - self.began

    @property
    def first_s(self) -> float:
        """Seconds to the first token; to the end without one."""
        return (self.first_at or self.now) - self.began

    @property
    def retractions(self) -> int:
        notes = sum(note.kind == "retracted" for report in self.reports for note in report.notes)
        return notes + sum(e.kind is JournalKind.REPLAYED and RETRACTED in e.text for e in self.entries)

    @property
    def notable(self) -> bool:
        """As `RequestRecord.notable`."""
        return self.outcome not in USUAL or self.attempts > 1 or bool(self.migrations or self.retractions)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes, and its record."""
        named = sum(len(choice.candidates) for _, choice in self.choices)
        texts = sum(len(entry.text) for entry in self.entries) + len(self.message)
        return 2048 + 512 * len(self.entries) + 256 * len(self.choices) + 160 * named + texts

    def is_of(self, asked: str) -> bool:
        return asks_for(asked, self.request_id, self.answer_id, self.client_id)


def _outcome(choice: ChoiceOutput, ended: bool) -> tuple[str, str]:
    if choice.error is not None:
        return str(choice.error.error or ErrorKind.WORKER), choice.error.message
    if choice.finish is not None:
        return choice.finish, ""
    if ended:
        return ABANDONED, "the client left, or took the answer too slowly"
    if choice.request.phase is RoutingPhase.WAITING:
        return RUNNING, "it waits for workers"
    return RUNNING, ""
