"""Request records: where one request's time went and what happened to it, in order; made by its router at its end.

A record is of one choice, since each choice has workers of its own. Spans that aren't hidden follow each other without
gaps and add up to `total_s`; hidden ones ran beside them. All times are seconds of the router's clock since the
request's arrival there. What a worker tells counts from the arrival of the request's leg at that worker, which the
router doesn't see: the leg is placed as late as its reports allow, and it may have come up to `uncertainty_s` earlier.

A `RecordRing` has a bounded number of records, of bounded bytes: the oldest go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Generic, Protocol, TypeVar

from msgspec import Meta, field

from twinpool.contracts.ids import Role
from twinpool.contracts.message_types import SKIP_UNKNOWN, SOME, Finite, Int64, Message, Name, Uint32, Uint64, as_dict

MAX_CANDIDATES = 8
"""Workers of a choice that are named with their cost."""
MAX_NAMED = 4
"""Workers that are named with a reason why they could not be chosen."""
MAX_RECORD_BYTES = 256 * 1024
"""The most bytes of one record on the wire, in the format of `contracts.message_types`."""
MAX_RECENT = 500
"""Records of one report, and of one answer."""
ID_CHARS = 256
"""The most characters of an id by which a request is looked for."""
RUNNING = "running"
"""The outcome of a request that has not ended."""
USUAL = frozenset({"stop", "length", RUNNING})
"""Outcomes of requests that went well."""
ANSWER_PREFIXES = ("cmpl-", "chatcmpl-", "resp_", "msg_")
"""What answers of the endpoints' shapes put before a request's id."""


class RecordSpan(Message, frozen=True):
    """What the request did from `start_s` to `end_s`."""

    name: str
    start_s: Finite
    end_s: Finite
    worker: str = ""
    """Where; empty: at the router."""
    detail: str = ""
    hidden: bool = False
    """Whether it ran beside the other spans and isn't part of the sum."""


class RecordEvent(Message, frozen=True):
    """Something that happened to the request."""

    at_s: Finite
    kind: str
    worker: str = ""
    text: str = ""


class WorkerCandidate(Message, frozen=True):
    """A worker that could have been chosen, as the policy saw it."""

    worker: str
    cost: Finite
    """What the policy compares; see `PlacementChoice.unit`."""
    held: Uint64 = 0
    """Positions of the prompt that it holds, as far as is known."""
    load: Int64 = 0
    """What was in flight there: prompt tokens on prefill, sequences on decode."""


class RefusedWorkers(Message, frozen=True):
    """Workers that could not be chosen, and why."""

    reason: str
    count: Uint32
    workers: Annotated[tuple[str, ...], SOME] = ()
    """The first `MAX_NAMED` of them."""


class PlacementChoice(Message, frozen=True):
    """The choice of one worker of one attempt."""

    at_s: Finite
    attempt: Uint32
    role: Role
    chosen: str
    unit: str
    """What costs count, in words."""
    candidates: Annotated[tuple[WorkerCandidate, ...], Meta(max_length=MAX_CANDIDATES)] = ()
    """The best `MAX_CANDIDATES`, the cheapest first."""
    others: Uint32 = 0
    """How many more could have been chosen."""
    refused: Annotated[tuple[RefusedWorkers, ...], SOME] = ()
    why: str = ""
    """Why it was chosen, where the cost isn't the reason."""


class RequestRecord(Message, frozen=True):
    """The record of one choice of one request; see the module's prose."""

    request_id: str
    """The choice's id among workers; it begins with `answer_id`."""
    answer_id: str
    """The id of the answer that the client gets, without what the endpoint puts before it; empty for a refused one."""
    client_id: str
    """The client's X-Request-Id, or the one that it was given."""
    router: str
    model: str
    tenant: str
    arrived: Finite
    """When the request came, in seconds since 1970 by the router's machine."""
    total_s: Finite
    first_token_s: Finite | None
    """None: no token was delivered."""
    outcome: str
    """``stop`` or ``length``; the kind of an error; ``abandoned``; `RUNNING`; or why it was refused, as its client was
    told."""
    message: str = ""
    """An error's text."""
    prompt_tokens: Uint32 = 0
    cached_tokens: Annotated[dict[str, Uint32], SOME] = field(default_factory=dict)
    """Prompt tokens that the latest attempt's prefill worker did not compute, by the tier that had them."""
    held_tokens: Uint32 = 0
    """Prompt tokens that the latest decode worker held already, which weren't sent."""
    generated: Uint32 = 0
    transfer_bytes: Uint64 = 0
    attempts: Uint32 = 1
    migrations: Uint32 = 0
    retractions: Uint32 = 0
    uncertainty_s: Finite = 0.0
    """How much earlier than shown a worker may have begun with what it was sent; the largest of its legs'."""
    trace_id: str = ""
    """The W3C trace id of its OpenTelemetry trace, 32 hex digits; empty where it isn't traced."""
    spans: Annotated[tuple[RecordSpan, ...], SOME] = ()
    events: Annotated[tuple[RecordEvent, ...], SOME] = ()
    choices: Annotated[tuple[PlacementChoice, ...], SOME] = ()
    left_out: Uint32 = 0
    """Events that there was no room for."""
    refused_status: Uint32 = 0
    """The HTTP status with which the request was refused before it was placed; 0: it was not."""
    numbers: Annotated[dict[str, Finite], SOME] = field(default_factory=dict)
    """Of a refused request: the numbers that decided, by name."""
    weights_version: str = ""
    """The version of the weights that it was answered by; empty where nothing was computed."""

    @property
    def running(self) -> bool:
        return self.outcome == RUNNING

    @property
    def notable(self) -> bool:
        """Whether anything went otherwise than usual."""
        return self.outcome not in USUAL or self.attempts > 1 or bool(self.migrations or self.retractions)

    def is_of(self, asked: str) -> bool:
        """Whether somebody who asks by this id asks for this one."""
        return asks_for(asked, self.request_id, self.answer_id, self.client_id)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        parts = [*self.spans, *self.events, *(one for choice in self.choices for one in choice.candidates)]
        texts = sum(len(span.detail) for span in self.spans) + sum(len(event.text) for event in self.events)
        return 1024 + 160 * len(parts) + 256 * len(self.choices) + texts + len(self.message)

    def as_json(self) -> dict[str, Any]:
        """The record as JSON."""
        return as_dict(self)


Records = Annotated[tuple[RequestRecord, ...], Meta(max_length=MAX_RECENT), SKIP_UNKNOWN]


def asks_for(asked: str, request_id: str, answer_id: str, client_id: str) -> bool:
    """Whether an id asks for a choice: it is the answer's as the client sees it, the choice's, or the client's own."""
    if asked in (request_id, answer_id, client_id):
        return True
    prefix = next((one for one in ANSWER_PREFIXES if asked.startswith(one)), "")
    return bool(prefix) and asked.removeprefix(prefix) in (request_id, answer_id)


class RecordAnswer(Message, frozen=True):
    """What a router has of a request that it was asked for (`ClusterView.record_asks`)."""

    number: Uint64
    """Of the question."""
    records: Records


class RecordReport(Message, frozen=True):
    """What became of a router's requests, and its answers to questions."""

    router: Name
    records: Records = ()
    answers: Annotated[tuple[RecordAnswer, ...], Meta(max_length=MAX_RECENT), SKIP_UNKNOWN] = ()


class RecordQuery(Message, frozen=True):
    """A question for the records of one request, or for the latest ones."""

    request_id: Annotated[str, Meta(max_length=ID_CHARS)] = ""
    """Empty: the latest records."""
    recent: Uint32 = 0
    """How many of these."""


class FoundRecords(Message, frozen=True):
    """What the controller knows of a request, or its latest records."""

    records: Annotated[tuple[RequestRecord, ...], SOME, SKIP_UNKNOWN]
    kept_s: Finite
    """How far back its records go, in seconds."""
    asked: Uint32 = 0
    """Routers that it asked."""
    answered: Uint32 = 0


_Key = tuple[str, str]


class KeptRecord(Protocol):
    """A record, or what one can be made of."""

    @property
    def router(self) -> str: ...
    @property
    def request_id(self) -> str: ...
    @property
    def arrived(self) -> float: ...
    @property
    def nbytes(self) -> int: ...
    def is_of(self, asked: str) -> bool: ...


R = TypeVar("R", bound=KeptRecord)


class RecordRing(Generic[R]):
    """The latest records. A record of a request that is there already takes its place, as the newest."""

    def __init__(self, most: int, max_bytes: int) -> None:
        """`most`: records; 0: none is kept."""
        self._most, self._max_bytes = most, max_bytes
        self._records: OrderedDict[_Key, R] = OrderedDict()
        self.nbytes = 0
        """About how much memory the records take."""

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[R]:
        """The records, the oldest first."""
        return iter(list(self._records.values()))

    def put(self, record: R) -> None:
        """Keep a record, as the newest."""
        key = (record.router, record.request_id)
        before = self._records.pop(key, None)
        if before is not None:
            self.nbytes -= before.nbytes
        self._records[key] = record
        self.nbytes += record.nbytes
        while self._records and (len(self._records) > self._most or self.nbytes > self._max_bytes):
            self.nbytes -= self._records.popitem(last=False)[1].nbytes

    def recent(self, count: int) -> list[R]:
        """The newest records, `count` at most, the newest first."""
        newest = reversed(self._records.values())
        return [record for _, record in zip(range(max(0, count)), newest, strict=False)]

    def get(self, router: str, request_id: str) -> R | None:
        return self._records.get((router, request_id))

    def find(self, asked: str) -> list[R]:
        """The records that an id asks for, the oldest first."""
        return [record for record in self._records.values() if record.is_of(asked)]

    def kept_s(self, now: float) -> float:
        """Seconds since the oldest record's request came; `now`: seconds since 1970. 0 without records."""
        oldest = next(iter(self._records.values()), None)
        return max(0.0, now - oldest.arrived) if oldest is not None else 0.0


def in_order(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Sort the records that one id asks for: by request, then by the choices' numbers, which end their ids."""
    some = list(records)
    came: dict[str, float] = {}
    for record in some:
        answer = record.answer_id or record.request_id
        came[answer] = min(record.arrived, came.get(answer, record.arrived))

    def key(record: RequestRecord) -> tuple[float, str, int]:
        number = record.request_id.rpartition("-")[2]
        answer = record.answer_id or record.request_id
        return came[answer], answer, int(number) if number.isdigit() else 0

    return sorted(some, key=key)
