"""Messages to bytes and back: `contracts.message_types` says how they look, this is what encodes and decodes them.

A message is decoded at once. Where that fails and it has tuples marked `SKIP_UNKNOWN`, their entries are decoded one by
one, so that those of kinds that only a newer build knows are left out and the rest of the message is taken. Bytes that
no build of this protocol sends raise `WireError`, with the path of what is wrong.

Frames of the streams between routers and workers are decoded so as well, message by message where they fail.
Choices of one long prompt share its tokens: they are encoded once, and copied into each `Submit`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Raw
from msgspec.msgpack import Decoder, Encoder

from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation
from twinpool.contracts.message_types import SKIP_UNKNOWN, Message
from twinpool.contracts.messages.router_commands import Command, Submit
from twinpool.contracts.messages.stream_frames import RouterFrame, StreamEnd, StreamOpening, WorkerFrame
from twinpool.contracts.messages.worker_events import Event

T = TypeVar("T")
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a decoder raises for bytes that aren't of its type."""


class _Kind(msgspec.Struct, array_like=True):
    """What any message of a union begins with."""

    kind: str


def _plain(value: object) -> object:
    """A number or text of a type of its own, such as NumPy's, as Python's."""
    for kind in (float, str):
        if isinstance(value, kind):
            return kind(value)
    return operator.index(value)  # type: ignore[arg-type]


ENCODER = Encoder(enc_hook=_plain)
_KIND = Decoder(_Kind)


def encode(message: Message) -> bytes:
    """Raises `ValueError`, `TypeError` or `OverflowError` for a message that has no bytes."""
    return ENCODER.encode(message)


def decode(of: type[T], data: bytes) -> tuple[T, int]:
    """Decode a message of type `of`, which may be a union of messages; returns it, and the number of entries of its
    tuples that were left out because only a newer build knows their kind. Raises `WireError`."""
    kind: Any = of
    codec: _Codec = _codec(kind)
    try:
        return codec.strict.decode(data), 0
    except UNREADABLE as error:
        if codec.loose is None:
            raise WireError(str(error)) from None
    loose = decoded(codec.loose, data)
    values, left_out = {name: getattr(loose, name) for name in of.__struct_fields__}, 0  # type: ignore[attr-defined]
    for at, name, entry in codec.marked:
        values[name], others = _entries(entry, values[name], f"$[{at}]")
        left_out += others
    return of(**values), left_out


def _entries(entry: Any, raws: Sequence[Raw], where: str) -> tuple[tuple[Any, ...], int]:
    found: list[Any] = []
    left_out = skipped = 0
    for number, raw in enumerate(raws):
        try:
            value, within = decode(entry, bytes(raw))
        except WireError as error:
            if not is_newer(raw, error, _codec(entry).kinds):
                raise WireError(f"{where}[{number}]: {error}") from None
            skipped += 1
        else:
            found.append(value)
            left_out += within
    return tuple(found), left_out + skipped


# ---------------------------------------------------------------- decoders of a type


class _Codec(NamedTuple):
    strict: Decoder[Any]
    loose: Decoder[Any] | None
    """Of the same message with the entries of its marked tuples left as bytes; None where it has none."""
    marked: tuple[tuple[int, str, Any], ...]
    """Place, name and type of entries of each marked tuple."""
    kinds: frozenset[str]
    """The kinds of a union; none of a single type."""


@cache
def _codec(of: Any) -> _Codec:
    members = get_args(of)
    if members:
        return _Codec(Decoder(of), None, (), frozenset(cls.__struct_config__.tag for cls in members))
    hints = get_type_hints(of, include_extras=True)
    shift = of.__struct_config__.tag is not None  # The kind comes first.
    fields: list[Any] = []
    marked = []
    for at, field in enumerate(msgspec.structs.fields(of), shift):
        kind: Any = hints[field.name]
        if get_origin(kind) is Annotated and SKIP_UNKNOWN in kind.__metadata__:
            marked.append((at, field.name, get_args(kind.__origin__)[0]))
            kind = Annotated[(tuple[Raw, ...], *kind.__metadata__)]
        fields.append((field.name, kind, _default(field)))
    if not marked:
        return _Codec(Decoder(of), None, (), frozenset())
    loose = msgspec.defstruct(
        of.__name__, [f if f[2] is not msgspec.NODEFAULT else f[:2] for f in fields], array_like=True
    )
    return _Codec(Decoder(of), Decoder(loose), tuple(marked), frozenset())


def _default(field: Any) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    return field.default


def decoded(decoder: Decoder[T], data: bytes | Raw) -> T:
    """Raises `WireError` for bytes that aren't of the decoder's type."""
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise WireError(str(error)) from None


def is_newer(raw: bytes | Raw, error: Exception, kinds: Collection[str]) -> bool:
    """Whether a message that can't be decoded, as `error` says, is one that a newer build may send. `kinds`: those of
    its union that this build knows; none where it is of no union."""
    if kinds:
        try:
            if _KIND.decode(raw).kind not in kinds:
                return True
        except UNREADABLE:
            return False
    # `msgspec` has no class of its own for the error of a value that an enum hasn't got.
    return str(error).startswith("Invalid enum value")


COMMANDS_BYTES = 64 * 1024 * 1024
"""Bytes of the largest frame of commands that a worker takes: about `FRAME_BYTES`, or one prompt of a whole context."""
EVENTS_BYTES = 256 * 1024 * 1024
"""Bytes of the largest frame of events that a router takes, which log-probabilities of a long prompt can fill."""
FRAME_BYTES = 1024 * 1024
"""A frame is closed once it has this many bytes, or `FRAME_COMMANDS` commands; its last command may go beyond."""
FRAME_COMMANDS = 64
SHARED_TOKENS = 1024
"""The fewest tokens of a `Submit` whose encoding is kept for the commands after it."""


_OPENING = Decoder(StreamOpening)
_COMMANDS, _RAW_COMMANDS = Decoder(RouterFrame[Command]), Decoder(RouterFrame[Raw])
_EVENTS, _RAW_EVENTS = Decoder(WorkerFrame[Event]), Decoder(WorkerFrame[Raw])
_COMMAND: Decoder[Command] = Decoder(Command)
_EVENT: Decoder[Event] = Decoder(Event)
_KINDS = {cls.__struct_config__.tag for cls in (*get_args(Command), *get_args(Event))}


# ---------------------------------------------------------------- openings


def encode_opening(opening: StreamOpening) -> bytes:
    return ENCODER.encode(opening)


def decode_opening(frame: bytes) -> StreamOpening:
    """Raises `WireError` for bytes that are no opening."""
    return decoded(_OPENING, frame)


def opens_version_1(frame: bytes) -> bool:
    """Whether a first frame is of version 1: protobuf, whose field 1 is the incarnation. No msgpack array begins so."""
    return frame[:1] == b"\x08"


def refusal_of_version_1(reason: str) -> bytes:
    """The last frame of a stream of version 1, a protobuf message with `reason` in field 3, of 16,383 bytes at most."""
    text = reason.encode()[: 2**14 - 1]
    return bytes((0x1A, len(text) & 0x7F | 0x80, len(text) >> 7)) + text


# ---------------------------------------------------------------- events


def encode_events(incarnation: Incarnation, events: Sequence[Event] = (), end: StreamEnd | None = None) -> bytes:
    """Return a `WorkerFrame`. Raises `ValueError`, `TypeError` or `OverflowError` for an event that has no bytes."""
    return ENCODER.encode(WorkerFrame(incarnation, tuple(events), end))


def decode_events(frame: bytes) -> tuple[WorkerFrame[Event], int]:
    """Return a `WorkerFrame`, and the number of events that were left out. Raises `WireError`."""
    try:
        return _EVENTS.decode(frame), 0
    except UNREADABLE:
        raw = decoded(_RAW_EVENTS, frame)
        events = _known(_EVENT, raw.events)
        return WorkerFrame(raw.incarnation, events, raw.end), len(raw.events) - len(events)


# ---------------------------------------------------------------- commands


def decode_commands(frame: bytes) -> tuple[tuple[Command, ...], int]:
    """Return a `RouterFrame`'s commands, and the number of those that were left out. Raises `WireError`."""
    try:
        return _COMMANDS.decode(frame).commands, 0
    except UNREADABLE:
        raw = decoded(_RAW_COMMANDS, frame).commands
        commands = _known(_COMMAND, raw)
        return commands, len(raw) - len(commands)


class FrameWriter:
    """Encodes the commands to one worker as frames."""

    def __init__(self) -> None:
        self._tokens: tuple[int, ...] = ()
        self._encoded: Any = Raw()
        self.encoded = 0
        """How often tokens of `SHARED_TOKENS` or more were encoded."""

    def frames(self, commands: Sequence[Command]) -> Iterator[bytes]:
        """`RouterFrame`s with all `commands` in order. Encoded tokens are shared within one call only, by long
        `Submit`s that follow each other and have the very same tuple of tokens."""
        parts: list[Raw] = []
        size = 0
        for number, command in enumerate(commands, 1):
            raw = self._command(command)
            parts.append(Raw(raw))
            size += len(raw)
            if size >= FRAME_BYTES or number % FRAME_COMMANDS == 0 or number == len(commands):
                yield ENCODER.encode(RouterFrame(tuple(parts)))
                parts.clear()
                size = 0
        self._tokens, self._encoded = (), Raw()

    def _command(self, command: Command) -> bytes:
        if not isinstance(command, Submit) or len(command.tokens) < SHARED_TOKENS:
            return ENCODER.encode(command)
        if command.tokens is not self._tokens:
            self._tokens = command.tokens
            self._encoded = Raw(ENCODER.encode(command.tokens))
            self.encoded += 1
        return ENCODER.encode(msgspec.structs.replace(command, tokens=self._encoded))


# ---------------------------------------------------------------- bytes that can't be read as they are


def _known(decoder: Decoder[T], messages: Sequence[Raw]) -> tuple[T, ...]:
    """Those of the messages that this build knows, in order. Raises `WireError` for the first that is none."""
    values: list[T] = []
    for number, raw in enumerate(messages):
        try:
            values.append(decoder.decode(raw))
        except UNREADABLE as error:
            if not is_newer(raw, error, _KINDS):
                raise WireError(f"message {number}: {error}") from None
    return tuple(values)
