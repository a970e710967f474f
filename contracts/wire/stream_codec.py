"""Frames of the streams between routers and workers to bytes and back.

The messages are their own definition of these bytes (`contracts.message_types`). A frame is decoded at once; where that
fails, message by message, so that those of kinds that only a newer build knows are left out and the others are taken.
Bytes that no build of this protocol sends raise `WireError`, with the path of what is wrong.

Choices of one long prompt share its tokens: they are encoded once, and copied into each `Submit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Raw
from msgspec.msgpack import Decoder

from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation
from twinpool.contracts.messages.router_commands import Command, Submit
from twinpool.contracts.messages.stream_frames import RouterFrame, StreamEnd, StreamOpening, WorkerFrame
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.wire.message_codec import ENCODER, UNREADABLE, decoded, is_newer

COMMANDS_BYTES = 64 * 1024 * 1024
"""Bytes of the largest frame of commands that a worker takes: about `FRAME_BYTES`, or one prompt of a whole context."""
EVENTS_BYTES = 256 * 1024 * 1024
"""Bytes of the largest frame of events that a router takes, which log-probabilities of a long prompt can fill."""
FRAME_BYTES = 1024 * 1024
"""A frame is closed once it has this many bytes, or `FRAME_COMMANDS` commands; its last command may go beyond."""
FRAME_COMMANDS = 64
SHARED_TOKENS = 1024
"""The fewest tokens of a `Submit` whose encoding is kept for the commands after it."""

T = TypeVar("T")


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
