"""Requests that were refused before they were placed: why, and the numbers that decided, kept apart from the records
of those that were served.

A flood of refusals takes its room from other refusals alone, and a tenant that has more than its share of them from
its own.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from contracts.messages.request_record import RecordEvent, RecordSpan, RequestRecord
from router.openai.api_errors import ApiError
from router.state.trace_context import TraceContext

MESSAGE_CHARS = 300
SPAN = "admission"
"""What a request did that was refused: it was read and held against limits."""


@dataclass(slots=True, eq=False)
class Refusal:
    """One refused request, as its router knows it."""

    router: str
    model: str
    number: int
    """Of all refusals of this router."""
    client_id: str
    tenant: str
    trace: TraceContext
    arrived: float
    """Seconds since 1970."""
    total_s: float
    status: int
    """Of HTTP."""
    code: str
    """As its client was told."""
    message: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Those that decided, and the router's at that moment, by name."""

    @classmethod
    def of(
        cls,
        router: str,
        model: str,
        number: int,
        request: RefusedRequest,
        failure: ApiError,
        numbers: Mapping[str, float],
        wall: float,
    ) -> Refusal:
        """`wall`: now, in seconds since 1970."""
        message = failure.message
        if len(message) > MESSAGE_CHARS:
            message = message[: MESSAGE_CHARS - 1] + "…"
        arrived, code = wall - request.total_s, failure.code or failure.type
        if failure.retry_after_s is not None:
            numbers = {**numbers, "retry_after_s": failure.retry_after_s}
        return cls(
            router, model, number, request.client_id, request.tenant, request.trace, arrived, request.total_s,
            failure.status, code, message, numbers,
        )  # fmt: skip

    @property
    def request_id(self) -> str:
        return f"refused-{self.number}"

    def record(self) -> RequestRecord:
        """The record: one span, and what would have been possible instead."""
        total_s = round(self.total_s, 6)
        events = [RecordEvent(total_s, "refused", text=f"{self.status}, {self.code}: {self.message}")]
        if instead := possible(self.numbers):
            events.append(RecordEvent(total_s, "possible", text=instead))
        return RequestRecord(
            self.request_id,
            "",
            self.client_id,
            self.router,
            self.model,
            self.tenant,
            round(self.arrived, 6),
            total_s,
            None,
            self.code,
            self.message,
            attempts=0,
            trace_id=self.trace.trace_id,
            spans=(RecordSpan(SPAN, 0.0, total_s),),
            events=tuple(events),
            refused_status=self.status,
            numbers=dict(self.numbers),
        )


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """What is known of a request when it is refused."""

    client_id: str
    tenant: str
    trace: TraceContext
    total_s: float
    """Seconds since it came."""


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
            mine = self._of_tenant.get(refusal.tenant)
            full = mine is not None and len(mine) * len(self._of_tenant) >= self._most
            self._forget(mine[0] if full and mine is not None else next(iter(self._kept)))
        self._kept[refusal.number] = refusal
        self._of_tenant.setdefault(refusal.tenant, deque()).append(refusal.number)

    def _forget(self, number: int) -> None:
        tenant = self._kept.pop(number).tenant
        numbers = self._of_tenant[tenant]
        assert numbers.popleft() == number  # What is oldest of all is the oldest of its tenant.
        if not numbers:
            del self._of_tenant[tenant]

    def find(self, asked: str) -> Iterable[RequestRecord]:
        """The records of refused requests with an id: the client's, or that of the record."""
        return [one.record() for one in self._kept.values() if asked in (one.client_id, one.request_id)]
