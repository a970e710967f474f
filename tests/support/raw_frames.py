"""A router's end of a stream, from the bytes up: the length, big-endian, then the message."""

from __future__ import annotations

import asyncio
import ssl
import struct
from typing import Any

import msgspec

from twinpool.contracts.credentials.certificate_files import NODE_NAME
from twinpool.contracts.ids import Incarnation
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL, RouterFrame, StreamOpening, WorkerFrame
from twinpool.contracts.messages.worker_events import Event

WAIT_S = 60.0


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame that isn't a sign of life. Raises `asyncio.IncompleteReadError` at the end."""
    while True:
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        if size:
            return await reader.readexactly(size)


def framed(raw: bytes) -> bytes:
    return struct.pack(">I", len(raw)) + raw


def opening(incarnation: int, access: str = "", protocol: int = STREAM_PROTOCOL) -> bytes:
    return msgspec.msgpack.encode(StreamOpening(protocol, Incarnation(incarnation), access))


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
        stream.write(opening(incarnation, access))
        first = await stream.read()
        assert first == WorkerFrame(Incarnation(incarnation)), first
        return stream

    def write(self, raw: bytes) -> None:
        self.writer.write(framed(raw))

    def send(self, *commands: Command) -> None:
        self.write_frame(*commands)

    def write_frame(self, *commands: Any) -> None:
        """Commands, or whatever a peer says in their place."""
        self.write(msgspec.msgpack.encode(RouterFrame(commands)))

    async def read(self) -> WorkerFrame[Event]:
        async with asyncio.timeout(WAIT_S):
            return msgspec.msgpack.decode(await read_frame(self.reader), type=WorkerFrame[Event])

    async def end(self) -> str:
        """Read on until the worker says why the stream ends, and the connection is closed."""
        while (end := (await self.read()).end) is None:
            pass
        async with asyncio.timeout(WAIT_S):
            while await self.reader.read(65536):
                pass
        return end.reason

    def abort(self) -> None:
        self.writer.transport.abort()
