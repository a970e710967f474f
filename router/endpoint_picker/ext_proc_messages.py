"""Envoy's external processing (`envoy.service.ext_proc.v3`): its messages and those of gRPC's health checks, as bytes,
and what is replied to them in one exchange.

They are protobuf. Those fields that an endpoint picker reads or writes are here, by their numbers in Envoy's
`external_processor.proto`, `base.proto` and `processing_mode.proto`, and protobuf's `struct.proto`; others are passed
over, as by every reader of protobuf. Bytes that can't be read raise `ValueError`.

The names of headers and of metadata are those of the endpoint picker protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from twinpool.contracts.json_logs import log
from twinpool.router.api.app import TEXT_KINDS
from twinpool.router.openai.api_errors import BufferFull
from twinpool.router.service.admission import BodyBuffer
from twinpool.router.tokenizer_pool.prepare_request import BODY_BYTES_MOST

if TYPE_CHECKING:
    from twinpool.router.endpoint_picker.endpoint_picker import EndpointPicker

PROCESSOR, HEALTH = "envoy.service.ext_proc.v3.ExternalProcessor", "grpc.health.v1.Health"
"""The services."""
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
METADATA, SUBSET_METADATA = "envoy.lb", "envoy.lb.subset_hint"
"""Name spaces of metadata."""
MAX_DEPTH = 16
"""Values within values of metadata."""
OVERWRITE = 2
"""`HeaderValueOption.HeaderAppendAction`: in place of what the client has sent under that name."""


class _Wire(IntEnum):
    """How a field is written."""

    VARINT = 0
    FIXED64 = 1
    BYTES = 2
    FIXED32 = 5


class BodyMode(IntEnum):
    """`ProcessingMode.BodySendMode`: how bodies are sent."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


class Part(IntEnum):
    """What of an exchange a message is about: the number of its field in `ProcessingRequest`."""

    REQUEST_HEADERS = 2
    RESPONSE_HEADERS = 3
    REQUEST_BODY = 4
    RESPONSE_BODY = 5
    REQUEST_TRAILERS = 6
    RESPONSE_TRAILERS = 7


@dataclass(frozen=True, slots=True)
class ProcessingRequest:
    """A part of an exchange, as the gateway sends it."""

    part: Part
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of headers: by name, in small letters; the last one of a name."""
    body: bytes = b""
    end_of_stream: bool = False
    """Whether no body, or no more of it, and no trailers follow."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Filter metadata, by name space."""
    modes: tuple[BodyMode, BodyMode] | None = None
    """How bodies of the request and of the response are sent; None: this message doesn't say, or its sender never
    does."""

    @property
    def subset(self) -> list[str] | None:
        """The endpoints that the gateway allows; None: all."""
        given = self.metadata.get(SUBSET_METADATA, {}).get(SUBSET)
        if isinstance(given, str):
            given = given.split(",")
        if isinstance(given, list):
            return [one.strip() for one in given if isinstance(one, str)]
        return None if given is None else []

    @property
    def served(self) -> str:
        """The endpoint whose answer this is of; empty where the gateway doesn't say."""
        given = self.metadata.get(METADATA, {}).get(SERVED)
        return given if isinstance(given, str) else ""


# ---------------------------------------------------------------- reading


def read_request(data: bytes) -> ProcessingRequest:
    """Read a `ProcessingRequest`. Raises `ValueError`, also for one that is about no part."""
    part: Part | None = None
    content, metadata, modes = b"", dict[str, Any](), None
    for number, value in _fields(data):
        match number, value:
            case 2 | 3 | 4 | 5 | 6 | 7, bytes():
                part, content = Part(number), value
            case 8, bytes():
                metadata |= _map(value)
            case 11, bytes():
                given = dict(_fields(value))
                modes = _mode(given.get(1, 0)), _mode(given.get(2, 0))
    if part is None:
        raise ValueError("a message about no part of an exchange")
    if part in (Part.REQUEST_BODY, Part.RESPONSE_BODY):
        body = dict(_fields(content))
        return ProcessingRequest(part, {}, _bytes(body, 1), bool(body.get(2, 0)), metadata, modes)
    headers, end = dict[str, str](), False
    for number, value in _fields(content):
        match number, value:
            case 1, bytes():
                headers |= _headers(value)
            case 3, int():
                end = bool(value)
    return ProcessingRequest(part, headers, b"", end, metadata, modes)


def read_health_check(data: bytes) -> str:
    """The service that a `HealthCheckRequest` asks about; empty: the server as a whole."""
    return _bytes(dict(_fields(data)), 1).decode()


def _headers(data: bytes) -> dict[str, str]:
    """A `HeaderMap`. Values are in `raw_value` as Envoy sends them, in `value` as some others do."""
    entries = [dict(_fields(entry)) for entry in _repeated(data, 1)]
    return {
        _bytes(entry, 1).decode().lower(): (_bytes(entry, 3) or _bytes(entry, 2)).decode("latin-1") for entry in entries
    }


def _map(data: bytes, depth: int = 0) -> dict[str, Any]:
    """A map from names to `Struct`, or with `depth` above 0 to `Value`."""
    entries = [dict(_fields(entry)) for entry in _repeated(data, 1)]
    return {
        _bytes(entry, 1).decode(): _value(_bytes(entry, 2), depth) if depth else _map(_bytes(entry, 2), 1)
        for entry in entries
    }


def _value(data: bytes, depth: int) -> Any:
    """A `Value` of protobuf's `struct.proto`."""
    if depth > MAX_DEPTH:
        raise ValueError("metadata is nested too deeply")
    found: Any = None
    for number, value in _fields(data):
        match number, value:
            case 2, float():
                found = value
            case 3, bytes():
                found = value.decode()
            case 4, int():
                found = bool(value)
            case 5, bytes():
                found = _map(value, depth + 1)
            case 6, bytes():
                found = [_value(one, depth + 1) for one in _repeated(value, 1)]
    return found


def _mode(value: int | float | bytes) -> BodyMode:
    """A mode; one of a newer gateway is none of these, and its bodies aren't looked at."""
    return next((mode for mode in BodyMode if mode == value), BodyMode.NONE)


def _repeated(data: bytes, number: int) -> Iterator[bytes]:
    """The messages of a repeated field."""
    return (value for found, value in _fields(data) if found == number and isinstance(value, bytes))


def _bytes(fields: Mapping[int, int | float | bytes], number: int) -> bytes:
    """A field of bytes; empty where it isn't there."""
    value = fields.get(number, b"")
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes were expected")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Each field's number and value, in order."""
    at = 0
    value: int | float | bytes
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case _Wire.VARINT:
                value, at = _varint(data, at)
            case _Wire.BYTES:
                length, at = _varint(data, at)
                value, at = _taken(data, at, length)
            case _Wire.FIXED64:
                taken, at = _taken(data, at, 8)
                (value,) = struct.unpack("<d", taken)
            case _Wire.FIXED32:
                taken, at = _taken(data, at, 4)
                (value,) = struct.unpack("<f", taken)
            case other:
                raise ValueError(f"wire type {other}")
        yield key >> 3, value


def _taken(data: bytes, at: int, length: int) -> tuple[bytes, int]:
    """So many bytes, and where what follows them begins."""
    end = at + length
    if end > len(data):
        raise ValueError("a field ends beyond its message")
    return data[at:end], end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number without an end")


# ---------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class ProcessingResponse:
    """What the gateway is to do about a part of an exchange."""

    part: Part
    headers: Mapping[str, str] = field(default_factory=dict)
    """To be set, in place of those of the same names."""
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """To be set as dynamic metadata, by name space."""
    chunk: tuple[bytes, bool] | None = None
    """A piece of the body that is passed on, and whether it is the last; for bodies that are sent in full duplex."""

    def to_bytes(self) -> bytes:
        """A `ProcessingResponse`."""
        mutation = b"".join(_written(1, _header_option(name, value)) for name, value in self.headers.items())
        if self.part in (Part.REQUEST_TRAILERS, Part.RESPONSE_TRAILERS):
            inner = _written(1, mutation) if mutation else b""
        else:
            common = _written(2, mutation) + _written(5, 1) if mutation else b""
            if self.chunk is not None:
                body, last = self.chunk
                common += _written(3, _written(3, _written(1, body) + _written(2, int(last))))
            inner = _written(1, common)
        spaces = b"".join(
            _entry(
                space, _written(5, b"".join(_entry(name, _written(3, value.encode())) for name, value in some.items()))
            )
            for space, some in self.metadata.items()
        )
        return _written(self.part - 1, inner) + (_written(8, spaces) if spaces else b"")


@dataclass(frozen=True, slots=True)
class ImmediateResponse:
    """An answer to the client in place of the exchange, which ends with it."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    details: str
    """For the gateway's access log."""

    def to_bytes(self) -> bytes:
        """A `ProcessingResponse`."""
        mutation = b"".join(_written(1, _header_option(name, value)) for name, value in self.headers.items())
        inner = _written(1, _written(1, self.status)) + _written(2, mutation) + _written(3, self.body)
        return _written(7, inner + _written(5, self.details.encode()))


def health_answer(serving: bool) -> bytes:
    """A `HealthCheckResponse`."""
    return _written(1, 1 if serving else 2)


def _header_option(name: str, value: str) -> bytes:
    header = _written(1, name.encode()) + _written(3, value.encode("latin-1"))
    return _written(1, header) + _written(3, OVERWRITE)


def _entry(name: str, value: bytes) -> bytes:
    """An entry of a `Struct`: a name, and a `Value`."""
    return _written(1, _written(1, name.encode()) + _written(2, value))


def _written(number: int, value: int | bytes) -> bytes:
    """A field: a number of at least 0, or bytes."""
    if isinstance(value, int):
        return _number(number << 3 | _Wire.VARINT) + _number(value)
    return _number(number << 3 | _Wire.BYTES) + _number(len(value)) + value


def _number(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


# ---------------------------------------------------------------- an exchange

_ECHOED = (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.GRPC)
"""How bodies are sent that go on only as they are sent back."""
_AT_ONCE = (BodyMode.NONE, BodyMode.STREAMED)
"""How bodies are sent of which nothing is known when the headers have to be answered."""
Reply = ProcessingResponse | ImmediateResponse


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request as far as the gateway has shown it; `body`: None where it isn't known whole."""

    headers: Mapping[str, str]
    body: bytes | None

    @property
    def path(self) -> str:
        return self.headers.get(":path", "").partition("?")[0]

    @property
    def is_previewed(self) -> bool:
        """Whether routers can say what would become of it."""
        return self.body is not None and self.headers.get(":method") == "POST" and self.path in TEXT_KINDS


class GatewayExchange:
    """One exchange of a client through the gateway: what was seen of it, and where it was sent."""

    def __init__(self, picker: EndpointPicker, held: BodyBuffer) -> None:
        """`held`: the count of bytes of all exchanges' bodies that wait for a choice."""
        self._picker, self._held = picker, held
        self._headers: dict[str, str] = {}
        self._subset: list[str] | None = None
        self._modes = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED
        """The protocol asks for these, of a gateway that doesn't say."""
        self._body: list[bytes] = []
        """The pieces that wait for the choice."""
        self._booked = 0
        self._destination: str | None = None
        """The value of `DESTINATION`; None: nothing was chosen yet."""
        self._sent_to = ""

    @property
    def chosen(self) -> bool:
        """Whether the gateway has been told where the request goes: nothing of it is held then."""
        return self._destination is not None

    async def take(self, message: ProcessingRequest) -> list[Reply]:
        """What is to be replied to a message; nothing where more of the body must come first."""
        self._modes = message.modes or self._modes
        match message.part:
            case Part.REQUEST_HEADERS:
                return await self._begin(message)
            case Part.REQUEST_BODY if self._modes[0] in _ECHOED:
                return await self._piece(message)
            case Part.REQUEST_BODY if self._destination is None:
                return [await self._choose(Part.REQUEST_BODY, known=self._hold(message.body))]
            case Part.REQUEST_TRAILERS if self._destination is None:
                replies = await self._whole(end=False)
                return replies if self._destination is None else [*replies, ProcessingResponse(message.part)]
            case Part.RESPONSE_BODY if self._modes[1] in _ECHOED:
                return [ProcessingResponse(Part.RESPONSE_BODY, chunk=(message.body, message.end_of_stream))]
            case Part.RESPONSE_HEADERS if message.served and self._sent_to:
                self._count_at(message.served)  # The gateway may have tried another one.
        return [ProcessingResponse(message.part)]

    def close(self) -> None:
        """End the exchange. Idempotent."""
        self._drop_body()
        self._count_at("")

    async def _begin(self, message: ProcessingRequest) -> list[Reply]:
        self._headers, self._subset = dict(message.headers), message.subset
        if message.end_of_stream or self._modes[0] in _AT_ONCE:
            return [await self._choose(Part.REQUEST_HEADERS, known=message.end_of_stream)]
        return [] if self._modes[0] in _ECHOED else [ProcessingResponse(Part.REQUEST_HEADERS)]

    async def _piece(self, message: ProcessingRequest) -> list[Reply]:
        """Take a piece of a body that is sent back in pieces: at once, where a choice was made."""
        if self._destination is not None:
            return [ProcessingResponse(Part.REQUEST_BODY, chunk=(message.body, message.end_of_stream))]
        known = self._hold(message.body)
        if known and not message.end_of_stream:
            return []
        return await self._whole(end=message.end_of_stream, known=known)

    def _hold(self, piece: bytes) -> bool:
        """Hold a piece of the body until the choice; returns whether the body may be looked at: it isn't too large, and
        there is room for it."""
        self._body.append(piece)
        try:
            self._held.take(len(piece))
        except BufferFull:
            return False
        self._booked += len(piece)
        return self._booked <= BODY_BYTES_MOST

    async def _whole(self, *, end: bool, known: bool = True) -> list[Reply]:
        """Choose by the body that has come, and let it pass. `end`: whether its last piece is the end of the request.
        `known`: whether it is all of the body."""
        pieces = self._body
        chosen = await self._choose(Part.REQUEST_HEADERS, known=known)
        if isinstance(chosen, ImmediateResponse):
            return [chosen]
        last = len(pieces) - 1
        chunks = [(piece, end and number == last) for number, piece in enumerate(pieces)]
        return [chosen, *(ProcessingResponse(Part.REQUEST_BODY, chunk=chunk) for chunk in chunks)]

    async def _choose(self, part: Part, *, known: bool) -> Reply:
        """Choose, and reply to `part` with the choice. `known`: whether what is held is the whole body."""
        request = HttpRequest(self._headers, b"".join(self._body) if known else None)
        picked = await self._picker.pick(request, self._subset)
        self._drop_body()
        if isinstance(picked, ImmediateResponse):
            log("refused", status=picked.status, details=picked.details, path=self._headers.get(":path", "")[:200])
            return picked
        self._count_at(picked[0])
        self._destination = ",".join(picked)
        told = {DESTINATION: self._destination}
        return ProcessingResponse(part, told, {METADATA: told})

    def _count_at(self, endpoint: str) -> None:
        """Count the exchange as under way at `endpoint`, and no more where it was; empty: nowhere."""
        if self._sent_to:
            self._picker.open[self._sent_to] -= 1
        if endpoint:
            self._picker.open[endpoint] += 1
        self._sent_to = endpoint

    def _drop_body(self) -> None:
        self._held.give_back(self._booked)
        self._body, self._booked = [], 0
