"""Encoding of router frames in which the tokens that several choices of one long prompt share are encoded only once.

A message's bytes are its fields' bytes one after the other, in any order (Protocol Buffers, "Encoding", on
concatenation). So tokens that were encoded alone can be appended to the rest of each `Submit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from twinpool.contracts.messages.router_commands import Command, Submit
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.wire.command_protobuf import command_to_proto

COMMANDS_BYTES = 64 * 1024 * 1024
"""Bytes of the largest frame of commands that a worker takes: about `FRAME_BYTES`, or one prompt of a whole context."""
EVENTS_BYTES = 256 * 1024 * 1024
"""Bytes of the largest frame of events that a router takes, which log-probabilities of a long prompt can fill."""
FRAME_BYTES = 1024 * 1024
"""A frame is closed once it has this many bytes, or `FRAME_COMMANDS` commands; its last command may go beyond."""
FRAME_COMMANDS = 64
SHARED_TOKENS = 1024
"""The fewest tokens of a `Submit` whose encoding is kept for the commands after it."""
_DELIMITED = 2
_COMMANDS = pb.RouterFrame.DESCRIPTOR.fields_by_name["commands"].number
_SUBMIT = pb.Command.DESCRIPTOR.fields_by_name["submit"].number


class FrameWriter:
    """Encodes the commands to one worker as frames."""

    def __init__(self) -> None:
        self._tokens: tuple[int, ...] = ()
        self._encoded = b""
        self.encoded = 0
        """How often tokens of `SHARED_TOKENS` or more were encoded."""

    def frames(self, commands: Sequence[Command]) -> Iterator[bytes]:
        """Serialised `RouterFrame`s with all `commands` in order. Encoded tokens are shared within one call only, by
        long `Submit`s that follow each other and have the very same tuple of tokens."""
        parts: list[bytes] = []
        size = 0
        for number, command in enumerate(commands, 1):
            raw = self._command(command)
            parts += (_head(_COMMANDS, len(raw)), raw)
            size += len(raw)
            if size >= FRAME_BYTES or number % FRAME_COMMANDS == 0 or number == len(commands):
                yield b"".join(parts)
                parts.clear()
                size = 0
        self._tokens, self._encoded = (), b""

    def _command(self, command: Command) -> bytes:
        if not isinstance(command, Submit) or len(command.tokens) < SHARED_TOKENS:
            return bytes(command_to_proto(command).SerializeToString())
        if command.tokens is not self._tokens:
            self._tokens = command.tokens
            self._encoded = pb.Submit(tokens=command.tokens).SerializeToString()
            self.encoded += 1
        rest = command_to_proto(replace(command, tokens=())).submit.SerializeToString()
        return _head(_SUBMIT, len(rest) + len(self._encoded)) + rest + self._encoded


def _head(field: int, length: int) -> bytes:
    """The bytes of tag and length before a length-delimited field."""
    return _varint(field << 3 | _DELIMITED) + _varint(length)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
