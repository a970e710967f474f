"""The messages of Envoy's external processing (`envoy.service.ext_proc.v3`) and of gRPC's health checks, as bytes.

They are protobuf. Those fields that an endpoint picker reads or writes are here, by their numbers in Envoy's
`external_processor.proto`, `base.proto` and `processing_mode.proto`, and protobuf's `struct.proto`; others are passed
over, as by every reader of protobuf. Bytes that can't be read raise `ValueError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types."""
MAX_DEPTH = 16
"""Values within values of metadata."""
OVERWRITE = 2
"""`HeaderValueOption.HeaderAppendAction`: in place of what the client has sent under that name."""


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
                metadata |= dict(_map(value, 1))
            case 11, bytes():
                given = dict(_fields(value))
                modes = _mode(given.get(1, 0)), _mode(given.get(2, 0))
    if part is None:
        raise ValueError("a message about no part of an exchange")
    if part in (Part.REQUEST_BODY, Part.RESPONSE_BODY):
        body = dict(_fields(content))
        return ProcessingRequest(part, {}, _bytes(body.get(1, b"")), bool(body.get(2, 0)), metadata, modes)
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
    return _bytes(dict(_fields(data)).get(1, b"")).decode()


def _headers(data: bytes) -> dict[str, str]:
    """A `HeaderMap`. Values are in `raw_value` as Envoy sends them, in `value` as some others do."""
    found = {}
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            given = dict(_fields(value))
            raw = _bytes(given.get(3, b"")) or _bytes(given.get(2, b""))
            found[_bytes(given.get(1, b"")).decode().lower()] = raw.decode("latin-1")
    return found


def _map(data: bytes, number: int, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Entries of a map from names to `Struct`, or with `depth` above 0 to `Value`."""
    for found, value in _fields(data):
        if found == number and isinstance(value, bytes):
            entry = dict(_fields(value))
            inner = _bytes(entry.get(2, b""))
            yield _bytes(entry.get(1, b"")).decode(), _value(inner, depth) if depth else dict(_map(inner, 1, 1))


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
                found = dict(_map(value, 1, depth + 1))
            case 6, bytes():
                found = [_value(_bytes(one), depth + 1) for inner, one in _fields(value) if inner == 1]
    return found


def _mode(value: int | float | bytes) -> BodyMode:
    try:
        return BodyMode(int(value))
    except ValueError:  # Of a newer gateway: its bodies aren't looked at.
        return BodyMode.NONE


def _bytes(value: int | float | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes were expected")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Each field's number and value, in order."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                value, at = _varint(data, at)
                yield key >> 3, value
                continue
            case 1:
                end = at + 8
            case 2:
                length, at = _varint(data, at)
                end = at + length
            case 5:
                end = at + 4
            case other:
                raise ValueError(f"wire type {other}")
        if end > len(data):
            raise ValueError("a field ends beyond its message")
        taken, at = data[at:end], end
        if key & 7 == _BYTES:
            yield key >> 3, taken
        else:
            (number,) = struct.unpack("<d" if key & 7 == _FIXED64 else "<f", taken)
            yield key >> 3, float(number)


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
        return _number(number << 3 | _VARINT) + _number(value)
    return _number(number << 3 | _BYTES) + _number(len(value)) + value


def _number(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
