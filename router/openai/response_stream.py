"""The answer of one HTTP request in flight: its choices, and for a stream the events that wait to be written.

**Numbered events** are for a client that may come back and have only the rest. Each event's id says what the client has
once it has the event: the number of events of each choice. An answer with a key is fed to its writer token by token,
however workers group them, so that its events are a function of its tokens alone, and the same number is the same bytes
at every router. Events of several choices may come in another order.

**The timeline** is the field `twinpool` of an answer, which says where its time went. Times are in seconds.
``tokenise``, ``queue``, ``transfer``, ``hidden`` and ``exposed`` are durations: what of the transfer ran beside the
computation of the prompt, and what came after it. ``first_token`` and ``total`` count from the request's arrival at the
router, and the marks of the prefill and decode legs from the leg's arrival at its worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from twinpool.contracts.compact_json import END, Pieces
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import PAIR, RequestId, Role
from twinpool.contracts.messages.worker_events import Done, LegReport
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.openai.choice_output import ChoiceOutput, OutputDelta
from twinpool.router.openai.parse_request import GenerateRequest
from twinpool.router.openai.request_headers import NO_TRACE, SeenEvents, TraceContext, event_id

_END = END.encode()


class NumberedEvents:
    """The numbering of one stream. `seen`: what the client has already, which is left out."""

    def __init__(self, created: int, choices: int, seen: SeenEvents | None) -> None:
        self._created = created
        self._counts = [0] * choices
        self._seen = seen.counts if seen is not None else (0,) * choices

    def number(self, index: int, events: bytes | tuple[bytes, ...]) -> bytes:
        """Return the next events of a choice with their ids, those that the client hasn't seen."""
        whole = events if isinstance(events, bytes) else b"".join(events)
        return b"".join(self._new(index, whole))

    def _new(self, index: int, events: bytes) -> Iterator[bytes]:
        for event in events.split(_END)[:-1]:
            self._counts[index] += 1
            if self._counts[index] > self._seen[index]:
                yield f"id: {event_id(SeenEvents(self._created, self._told))}\n".encode() + event + _END

    @property
    def _told(self) -> tuple[int, ...]:
        """What the client has: of choices that come again, all that it had before."""
        return tuple(max(pair) for pair in zip(self._counts, self._seen, strict=True))


def timeline_of(choice: ChoiceOutput) -> dict[str, Any]:
    """Return the timeline, workers and counts of one choice, as JSON."""
    request = choice.request
    prefill = _last(request.progress, Role.PREFILL)
    decode = _last(request.progress, Role.DECODE)
    received = sum(p.transfer_bytes for p in request.progress)
    arrived = request.arrived - choice.tokenise_s
    placed = request.first_placed if request.first_placed is not None else request.arrived
    computed = {str(role): sum(p.computed_tokens for p in request.progress if p.role is role) for role in PAIR}
    return {
        "timeline": {
            "tokenise": round(choice.tokenise_s, 6),
            "queue": round(placed - request.arrived, 6),
            "prefill": dict(prefill.marks) if prefill else {},
            "transfer": _transfer_s(decode) if len(set(request.workers.values())) > 1 else None,
            "hidden": _mark(decode, "hidden"),
            "exposed": _mark(decode, "exposed"),
            "decode": dict(decode.marks) if decode else {},
            "first_token": round(choice.first_at - arrived, 6) if choice.first_at else None,
            "total": round(choice.ended_at - arrived, 6),
        },
        "prefill_worker": request.workers.get(Role.PREFILL),
        "decode_worker": request.workers.get(Role.DECODE),
        "local_prompt": request.local or None,
        "transfer_bytes": received,
        "cached_tokens": choice.cached_tokens,
        "cached_by_tier": dict(prefill.cached_by_tier) if prefill else {},
        "held_by_decode": decode.cached_tokens if decode else 0,
        "computed": computed,
        "attempts": request.attempts,
        "migrations": request.migrations,
    }


def _last(reports: list[LegReport], role: Role) -> LegReport | None:
    """Return the leg's reports of the last attempt that has one, merged into one; None without any."""
    mine = [p for p in reports if p.role is role]
    if not mine:
        return None
    mine = [p for p in mine if p.attempt == mine[-1].attempt]
    cached = sum(p.cached_tokens for p in mine)
    return replace(mine[-1], marks={k: v for p in mine for k, v in p.marks.items()}, cached_tokens=cached)


def _mark(leg: LegReport | None, name: str) -> float | None:
    return round(leg.marks[name], 6) if leg is not None and name in leg.marks else None


def _transfer_s(decode: LegReport | None) -> float | None:
    """From the grant of decode's pages to the arrival of the last one."""
    if decode and {"grant", "arrived"} <= decode.marks.keys():
        return round(decode.marks["arrived"] - decode.marks["grant"], 6)
    return None


class AnswerWriter(Protocol):
    """What writes an answer in the shape of an API."""

    def bind(self, choices: list[ChoiceOutput]) -> None:
        """Set the choices; called once, before anything is written."""

    def chunk(self, piece: OutputDelta) -> bytes | tuple[bytes, ...]:
        """Return the events of a delta, empty where it adds nothing."""

    def closing(self, twinpool: object | None) -> bytes:
        """Return the end of a stream; `twinpool`: the timeline, where asked for."""

    def failed(self, failure: ApiError) -> bytes:
        """Return the end of a stream that failed."""

    def whole(self, twinpool: object | None) -> Sequence[bytes | Pieces]:
        """Return the body of an answer that isn't streamed, in parts."""


KEEP_ALIVE = b": keep-alive\n\n"
WRITE_BYTES = 256 * 1024
"""Parts of events are joined for one write until they have this size; the last of them may go beyond it."""


def _queue(event: bytes) -> bool:
    """Take nothing, so that all events are queued."""
    return False


class ResponseStream:
    """The answer of one HTTP request: `RouterService` fills it, the HTTP handler empties it, on one event loop."""

    __slots__ = (
        "_buffer_events",
        "_direct_write",
        "_now",
        "_shares",
        "_waits",
        "_wake",
        "answer",
        "answer_key",
        "choices",
        "client_id",
        "failed",
        "id",
        "numbered",
        "open",
        "outbox",
        "overflowed",
        "request",
        "tenant",
        "timeout_s",
        "trace",
        "written_at",
    )

    def __init__(
        self,
        stream_id: str,
        request: GenerateRequest,
        answer: AnswerWriter,
        buffer_events: int,
        client_id: str,
        timeout_s: float,
        tenant: str = "",
        numbered: NumberedEvents | None = None,
        answer_key: str = "",
        trace: TraceContext = NO_TRACE,
    ) -> None:
        """`numbered`: numbers the events of a stream whose client may come back for the rest. `answer_key`: under which
        it is claimed (`router.service.idempotency_keys`); empty where its client can't come back."""
        self.answer_key = answer_key
        self.trace = trace
        self.id = stream_id
        self.numbered = numbered
        self.tenant = tenant
        """Who asks; empty where nobody needs a key."""
        self.timeout_s = timeout_s
        """Seconds from the request's arrival to its deadline."""
        self.client_id = client_id
        self.request = request
        self.answer = answer
        self.choices: list[ChoiceOutput] = []
        self.open = 0
        """Choices that have not ended."""
        self.failed: Done | None = None
        """The first error, which ends the whole answer."""
        self.outbox: list[bytes | tuple[bytes, ...]] = []
        """Events that wait to be written. An event that shares large parts with others is a tuple of its parts."""
        self._shares = False
        self.overflowed = False
        """Whether an event was dropped because the outbox was full: the stream must be ended."""
        self._buffer_events = buffer_events
        self._wake = asyncio.Event()
        self._direct_write: Callable[[bytes], bool] = _queue
        self._now = time.monotonic
        self.written_at = 0.0
        """When an event was last written at once, in seconds of the clock of `write_directly`."""
        self._waits = False
        """Whether `more` waits: all that it has returned is written."""

    def bind(self, choices: list[ChoiceOutput]) -> None:
        """Set the choices; called once, before anything else."""
        self.choices = choices
        self.open = len(choices)
        self.answer.bind(choices)

    def push(self, piece: OutputDelta) -> None:
        """Queue the event of a delta. Does nothing for an answer that isn't streamed, which its choices hold."""
        if self.request.stream:
            self._put(self.answer.chunk(piece))

    def push_each(self, pieces: Iterable[OutputDelta]) -> None:
        """Queue the events of deltas as one entry, numbered, without those that the client has seen. The writer has
        each delta before the next is made."""
        if not self.request.stream or self.numbered is None:
            for _ in pieces:
                pass
            return
        self._put(b"".join([self.numbered.number(p.index, self.answer.chunk(p)) for p in pieces]))

    def closing(self, twinpool: object | None) -> bytes:
        """Return the end of a stream that has not failed."""
        events = self.answer.closing(twinpool)
        return events if self.numbered is None else self.numbered.number(0, events)

    def _put(self, chunk: bytes | tuple[bytes, ...]) -> None:
        if not chunk:
            return
        if self._waits and not self.outbox and type(chunk) is bytes and self._direct_write(chunk):
            self.written_at = self._now()
            return
        if len(self.outbox) >= self._buffer_events:
            self.overflowed = True
            return
        self.outbox.append(chunk)
        if isinstance(chunk, tuple):
            self._shares = True
        self._wake.set()

    def beat(self) -> None:
        """Queue a comment, which SSE clients skip and which keeps the connection alive."""
        self.outbox.append(KEEP_ALIVE)
        self._wake.set()

    def close_one(self, choice: ChoiceOutput) -> None:
        """Note that a choice has ended, well or with an error; call it once for each choice that ends."""
        self.open -= 1
        if choice.error is not None and self.failed is None:
            self.failed = choice.error
        if self.open == 0 or self.failed is not None:
            self._wake.set()

    @property
    def over(self) -> bool:
        """Whether every choice has ended, or one has failed."""
        return self.open == 0 or self.failed is not None

    def write_directly(self, write: Callable[[bytes], bool], now: Callable[[], float]) -> None:
        """Have events written at once from now on while `more` waits, and queued where `write` returns False. `now`:
        the clock for `written_at`."""
        self._direct_write, self._now = write, now

    async def more(self) -> bytes:
        """Wait for events and return those since the last call, joined for one write; empty when the answer is over."""
        self._waits = True
        try:
            while not self.outbox and not self.over:
                self._wake.clear()
                await self._wake.wait()
        finally:
            self._waits = False
        if self._shares:
            return self._more_of_shared()
        chunks, self.outbox = self.outbox, []
        return b"".join(chunks)  # type: ignore[arg-type]

    def _more_of_shared(self) -> bytes:
        """Return about `WRITE_BYTES` of what waits: joining all would copy a large part once for each event with it."""
        parts = [p for chunk in self.outbox for p in ((chunk,) if isinstance(chunk, bytes) else chunk)]
        size = count = 0
        while count < len(parts) and size < WRITE_BYTES:
            size += len(parts[count])
            count += 1
        rest = parts[count:]
        self.outbox = [tuple(rest)] if rest else []
        self._shares = bool(rest)
        return b"".join(parts[:count])

    async def ended(self) -> None:
        """Wait until every choice has ended, or one has failed."""
        while not self.over:
            self._wake.clear()
            await self._wake.wait()

    def fail(self, message: str, kind: ErrorKind = ErrorKind.CANCELLED) -> None:
        """End the whole answer with an error of the router's own, unless it has failed already."""
        if self.failed is None:
            self.failed = Done(RequestId(self.id), 0, "error", error=kind, message=message)
        self._wake.set()

    def facts(self) -> dict[str, Any]:
        """Return the fields of a log line about this request."""
        first = self.choices[0].request
        return {
            "request_id": self.id,
            "client_id": self.client_id,
            **({"trace_id": self.trace.trace_id} if self.trace.trace_id else {}),
            **({"tenant": self.tenant} if self.tenant else {}),
            "choices": len(self.choices),
            "prompt_tokens": len(first.prompt),
            "tokens": sum(len(c.tokens) for c in self.choices),
            "workers": sorted({name for c in self.choices for name in c.request.workers.values()}),
            "room": first.room,
            "attempts": first.attempts,
            "migrations": first.migrations,
        }

    def timeline(self) -> object:
        """Return the field `twinpool`: the timeline of the only choice, or a list with one for each choice."""
        each = [timeline_of(c) for c in self.choices]
        return each[0] if len(each) == 1 else each


class StreamHeartbeat:
    """The timer that queues a keep-alive comment when a stream has written nothing for `every_s` seconds.

    Call `written` after each write and `stop` at the end.
    """

    def __init__(self, stream: ResponseStream, every_s: float) -> None:
        self._stream = stream
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_later(every_s, self._due)

    def written(self) -> None:
        """Note a write, other than of those that the stream makes at once."""
        self._last = self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()

    def _due(self) -> None:
        left_s = max(self._last, self._stream.written_at) + self._every_s - self._loop.time()
        if left_s <= 0:
            # A client that doesn't read needs no more to read.
            if not self._stream.outbox and not self._stream.over:
                self._stream.beat()
            left_s = self._every_s
        self._timer = self._loop.call_later(left_s, self._due)
