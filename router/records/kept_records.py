"""The records of one router: of the latest requests that have ended, and of those that run, made when somebody asks.

Of requests that were refused before they were placed, the reason and the numbers that decided are kept, apart from the
records of those that were served. A flood of refusals takes its room from other refusals alone, and a tenant that has
more than its share of them from its own.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from twinpool.contracts.clock import Clock
from twinpool.contracts.messages.request_record import RecordEvent, RecordRing, RecordSpan, RequestRecord, in_order
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.request_headers import TraceContext
from twinpool.router.openai.response_stream import ResponseStream
from twinpool.router.records.make_record import RecordDraft, make_record
from twinpool.router.verification.audits import AuditEnded

MESSAGE_CHARS = 300
SPAN = "admission"
"""What a request did that was refused: it was read and held against limits."""


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """What is known of a request when it is refused."""

    client_id: str
    tenant: str
    trace: TraceContext
    total_s: float
    """Seconds since it came."""


@dataclass(slots=True, eq=False)
class Refusal:
    """One refused request, as its router keeps it."""

    router: str
    model: str
    number: int
    """Of all refusals of this router."""
    request: RefusedRequest
    refused_at: float
    """Seconds since 1970."""
    failure: ApiError
    """What its client was told, its message cut to `MESSAGE_CHARS`."""
    numbers: Mapping[str, float]
    """Those that decided, and the router's at that moment, by name."""

    def __post_init__(self) -> None:
        if len(message := self.failure.message) > MESSAGE_CHARS:
            self.failure = replace(self.failure, message=message[: MESSAGE_CHARS - 1] + "…")

    @property
    def request_id(self) -> str:
        return f"refused-{self.number}"

    def record(self) -> RequestRecord:
        """The record: one span, and what would have been possible instead."""
        request, failure, numbers = self.request, self.failure, dict(self.numbers)
        total_s, code = round(request.total_s, 6), failure.code or failure.type
        if failure.retry_after_s is not None:
            numbers["retry_after_s"] = failure.retry_after_s
        events = [RecordEvent(total_s, "refused", text=f"{failure.status}, {code}: {failure.message}")]
        if instead := possible(numbers):
            events.append(RecordEvent(total_s, "possible", text=instead))
        return RequestRecord(
            self.request_id,
            answer_id="",
            client_id=request.client_id,
            router=self.router,
            model=self.model,
            tenant=request.tenant,
            arrived=round(self.refused_at - request.total_s, 6),
            total_s=total_s,
            first_token_s=None,
            outcome=code,
            message=failure.message,
            attempts=0,
            trace_id=request.trace.trace_id,
            spans=(RecordSpan(SPAN, 0.0, total_s),),
            events=tuple(events),
            refused_status=failure.status,
            numbers=numbers,
        )


def possible(numbers: Mapping[str, float]) -> str:
    """What would have been possible when a request was refused, in words; empty where the numbers don't say."""
    said = []
    asked = numbers.get("answers_asked")
    if asked is not None and "tenant_answers_allowed" in numbers:
        room = max(0, numbers["tenant_answers_allowed"] - numbers["tenant_answers_in_flight"])
        said.append(f"its tenant had room for {room:g} more answers at a time, it needed {asked:g}")
    elif asked is not None:
        room = max(0, numbers["max_queue"] - numbers["answers_in_flight"])
        said.append(f"there was room for {room:g} more answers, it needed {asked:g} or more")
    for what in ("requests", "tokens"):
        if f"{what}_left" in numbers:
            left, a_minute = numbers[f"{what}_left"], numbers[f"{what}_a_minute"]
            wanted = numbers[f"{what}_asked"]
            said.append(f"{left:g} of {a_minute:g} {what} a minute were left, it needed {wanted:g} or more")
    if "expected_ms" in numbers:
        said.append(f"its first token could have come after {numbers['expected_ms']:,.0f} ms")
    if "body_bytes_asked" in numbers:
        room = max(0, numbers["body_buffer_bytes"] - numbers["body_bytes_held"])
        said.append(f"there was room for {room:g} bytes of bodies, it sent {numbers['body_bytes_asked']:g} more")
    if "image_bytes_asked" in numbers:
        room = numbers["image_bytes"] - numbers["image_bytes_held"]
        said.append(f"there was room for {room:g} bytes of images, it needed {numbers['image_bytes_asked']:g}")
    if said and "retry_after_s" in numbers:
        said.append(f"it may be tried again after {numbers['retry_after_s']:g} s")
    return "; ".join(said)


class KeptRefusals:
    """The latest refusals of one router, `most` at most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[int, Refusal] = OrderedDict()
        self._of_tenant: dict[str, deque[int]] = {}
        """The numbers of each tenant's, the oldest first."""
        self.total = 0
        """Refusals since the router's start; the next one's number."""

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, refusal: Refusal) -> None:
        """Keep one. Without room, the oldest of its tenant goes if that has its share of the room, else the oldest of
        all."""
        self.total += 1
        if not self._most:
            return
        if len(self._kept) >= self._most:
            mine = self._of_tenant.get(refusal.request.tenant)
            full = mine is not None and len(mine) * len(self._of_tenant) >= self._most
            self._forget(mine[0] if full and mine is not None else next(iter(self._kept)))
        self._kept[refusal.number] = refusal
        self._of_tenant.setdefault(refusal.request.tenant, deque()).append(refusal.number)

    def _forget(self, number: int) -> None:
        tenant = self._kept.pop(number).request.tenant
        numbers = self._of_tenant[tenant]
        assert numbers.popleft() == number  # What is oldest of all is the oldest of its tenant.
        if not numbers:
            del self._of_tenant[tenant]

    def find(self, asked: str) -> Iterable[RequestRecord]:
        """The records of refused requests with an id: the client's, or that of the record."""
        return [one.record() for one in self._kept.values() if asked in (one.request.client_id, one.request_id)]


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
