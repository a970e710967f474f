"""The records of one router: of the latest requests that have ended, and of those that run, made when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from twinpool.contracts.clock import Clock
from twinpool.contracts.messages.record_ring import RecordRing, in_order
from twinpool.contracts.messages.request_record import RecordEvent, RequestRecord
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.response_stream import ResponseStream
from twinpool.router.records.make_record import make_record
from twinpool.router.records.record_draft import RecordDraft
from twinpool.router.records.refusals import KeptRefusals, Refusal, RefusedRequest
from twinpool.router.verification.audit_cases import AuditEnded


class KeptRecords:
    """Keeps what the records of one router are made of, and makes them; on its event loop."""

    def __init__(
        self,
        router: str,
        model: str,
        ring: RecordRing[RecordDraft],
        clock: Clock,
        wall: Callable[[], float],
        in_flight: Callable[[], Iterable[tuple[ResponseStream, ChoiceOutput]]],
        refusals: int = 0,
    ) -> None:
        """`router`: this router's name, of this start of it. `wall`: seconds since 1970. `in_flight`: the choices that
        have not ended. `refusals`: requests that were refused of which it is kept why, at most."""
        self.router, self.ring = router, ring
        self._model, self._clock, self._wall, self._in_flight = model, clock, wall, in_flight
        self.refusals = KeptRefusals(refusals)
        self.refusal_listeners: list[Callable[[Refusal], None]] = []
        """Called for each refusal; they must be quick."""
        self.listeners: list[Callable[[RecordDraft], None]] = []
        """Called at each request's end, and again when its audit is over; they must be quick."""

    def ended(self, stream: ResponseStream, choice: ChoiceOutput) -> None:
        """Keep what the record of a choice that is over is made of."""
        draft = self._draft(stream, choice, ended=True)
        self.ring.put(draft)
        for listener in self.listeners:
            listener(draft)

    def _draft(self, stream: ResponseStream, choice: ChoiceOutput, *, ended: bool) -> RecordDraft:
        now, wall = self._clock.now(), self._wall()
        return RecordDraft.of(self.router, self._model, stream, choice, now, wall, ended=ended)

    def refused(self, request: RefusedRequest, failure: ApiError, numbers: Mapping[str, float]) -> None:
        """Keep why a request was refused before it was placed, with the numbers that decided."""
        number, now = self.refusals.total, self._wall()
        refusal = Refusal(self.router, self._model, number, request, now, failure, numbers)
        self.refusals.put(refusal)
        for listener in self.refusal_listeners:
            listener(refusal)

    def audited(self, audit: AuditEnded) -> None:
        """Add to a record what became of the audit of its answer, which comes after its end."""
        draft = self.ring.get(self.router, audit.request_id)
        if draft is not None:
            at_s = round(self._clock.now() - draft.began, 6)
            draft.audits.append(RecordEvent(at_s, "audited", " and ".join(audit.auditors), audit.text))
            for listener in self.listeners:
                listener(draft)

    def recent(self, count: int) -> list[RequestRecord]:
        """The newest records of requests that have ended, `count` at most, the newest first."""
        return [make_record(draft) for draft in self.ring.recent(count)]

    def find(self, asked: str) -> list[RequestRecord]:
        """The records that an id asks for, those of choices that still run included, in order."""
        running = [
            self._draft(stream, choice, ended=False)
            for stream, choice in self._in_flight()
            if asked == stream.client_id or stream.id in asked or choice.request.id in asked
        ]
        found = [*self.ring.find(asked), *(draft for draft in running if draft.is_of(asked))]
        return in_order([*map(make_record, found), *self.refusals.find(asked)])

    @property
    def kept_s(self) -> float:
        """How far back the records go."""
        return self.ring.kept_s(self._wall())
