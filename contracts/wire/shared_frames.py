"""Router frames as bytes: what 128 choices of one long prompt share is encoded once.

A message's bytes are its fields' bytes one after the other, in any order (Protocol Buffers, "Encoding", on
concatenation), so that tokens which were encoded alone can be put behind the rest of their `Submit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from contracts.messages.router_commands import Command, Submit
from contracts.proto import worker_pb2 as pb
from contracts.wire.command_protobuf import command_to_proto

FRAME_BYTES = 1024 * 1024
"""A frame is sent when it has as much, or `FRAME_COMMANDS`; a single command may have more."""
FRAME_COMMANDS = 64
SHARED_TOKENS = 1024
"""From so many tokens on it is looked whether the last command had the same."""
_DELIMITED = 2
_COMMANDS = pb.RouterFrame.DESCRIPTOR.fields_by_name["commands"].number
_SUBMIT = pb.Command.DESCRIPTOR.fields_by_name["submit"].number


class FrameWriter:
    """Encodes the commands to one worker."""

    def __init__(self) -> None:
        self._tokens: tuple[int, ...] = ()
        self._encoded = b""
        self.encoded = 0
        """How often long tokens were encoded."""

    def frames(self, commands: Sequence[Command]) -> Iterator[bytes]:
        """`RouterFrame`s with all of `commands` in order. What is shared is forgotten at the end."""
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
    """Tag and length of a delimited field."""
    return _varint(field << 3 | _DELIMITED) + _varint(length)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
