"""A router's end of a stream, from the bytes up: the length, big-endian, then the message."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Sequence

from twinpool.contracts.credentials.certificate_files import NODE_NAME
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.wire.command_protobuf import command_to_proto

WAIT_S = 20.0


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame that isn't a sign of life. Raises `asyncio.IncompleteReadError` at the end."""
    while True:
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        if size:
            return await reader.readexactly(size)


def framed(raw: bytes) -> bytes:
    return struct.pack(">I", len(raw)) + raw


class RawStream:
    """A stream to the worker at `address`, ``host:port``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, address: str, context: ssl.SSLContext | None = None) -> RawStream:
        host, _, port = address.rpartition(":")
        name = NODE_NAME if context is not None else None
        return cls(*await asyncio.open_connection(host, int(port), ssl=context, server_hostname=name))

    @classmethod
    async def open(cls, address: str, incarnation: int, access: str = "") -> RawStream:
        """Connect and be admitted."""
        stream = await cls.connect(address)
        stream.write(pb.StreamOpening(incarnation=incarnation, access=access).SerializeToString())
        first = await stream.read()
        assert (first.incarnation, first.ended, len(first.events)) == (incarnation, "", 0), first
        return stream

    def write(self, raw: bytes) -> None:
        self.writer.write(framed(raw))

    def send(self, *commands: Command) -> None:
        self.write_frame([command_to_proto(command) for command in commands])

    def write_frame(self, commands: Sequence[pb.Command]) -> None:
        self.write(pb.RouterFrame(commands=commands).SerializeToString())

    async def read(self) -> pb.WorkerFrame:
        async with asyncio.timeout(WAIT_S):
            return pb.WorkerFrame.FromString(await read_frame(self.reader))

    async def end(self) -> str:
        """Read on until the worker says why the stream ends, and the connection is closed."""
        while not (frame := await self.read()).ended:
            pass
        async with asyncio.timeout(WAIT_S):
            while await self.reader.read(65536):
                pass
        return frame.ended

    def abort(self) -> None:
        self.writer.transport.abort()
