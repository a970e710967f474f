"""A listener's strangers: few, the oldest cut for a newer one, and none left when it is closed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.certificates import TestAuthority
from twinpool.contracts.credentials.node_tls import NodeTls
from twinpool.contracts.wire import frame_connection
from twinpool.contracts.wire.frame_connection import FrameConnection, FrameListener

WAIT_S = 60.0


class Scene:
    """A listener, the connections that it gave out, in order, and why each has ended."""

    def __init__(self, tls: NodeTls | None = None) -> None:
        self.bound = socket.create_server(("127.0.0.1", 0))
        self.address = self.bound.getsockname()
        self.taken: list[FrameConnection] = []
        self.ended: dict[int, str] = {}
        self.listener = FrameListener(self.bound, self._take, 60.0, tls)
        self.callers: list[socket.socket] = []

    def _take(self, connection: FrameConnection) -> None:
        number = len(self.taken)
        self.taken.append(connection)

        def end(reason: str) -> None:
            self.ended[number] = reason

        connection.on_end = end

    async def call(self) -> socket.socket:
        """A caller that says nothing, once it is taken."""
        caller = socket.socket()
        caller.setblocking(False)
        self.callers.append(caller)
        await asyncio.get_running_loop().sock_connect(caller, self.address)
        await self.until(lambda: len(self.taken) == len(self.callers))
        return caller

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not true():
                await asyncio.sleep(0)

    async def close(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.listener.close()
        for connection in self.taken:
            connection.abort()
            await connection.lost
        for caller in self.callers:
            caller.close()


async def cut(caller: socket.socket) -> bool:
    """Whether a caller sees the end of its connection."""
    async with asyncio.timeout(WAIT_S):
        try:
            return await asyncio.get_running_loop().sock_recv(caller, 1) == b""
        except ConnectionError:
            return True


def test_the_oldest_stranger_is_cut_for_one_too_many_and_who_was_admitted_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frame_connection, "STRANGERS", 3)

    async def life() -> None:
        scene = Scene()
        for _ in range(3):
            await scene.call()
        assert scene.ended == {}, "so many may be there"
        scene.listener.release(scene.taken[0])
        scene.listener.release(scene.taken[0])
        await scene.call()
        assert scene.ended == {}, "one of them is a stranger no more"
        await scene.call()
        assert list(scene.ended) == [1], "the oldest that is left"
        assert "others came" in scene.ended[1]
        await scene.close()
        assert sorted(scene.ended) == [1, 2, 3, 4]

    asyncio.run(life())


def test_closing_cuts_strangers_leaves_who_was_admitted_and_gives_the_port_back() -> None:
    async def life() -> None:
        scene = Scene()
        admitted, stranger = await scene.call(), await scene.call()
        scene.listener.release(scene.taken[0])
        async with asyncio.timeout(WAIT_S):
            await scene.listener.close()
            await scene.listener.close()
        assert scene.ended == {1: "the listener is closed"}
        assert scene.bound.fileno() == -1
        with pytest.raises(OSError):
            socket.create_connection(scene.address, 1.0).close()
        loop = asyncio.get_running_loop()
        assert await cut(stranger)
        heard: list[bytes] = []
        scene.taken[0].on_frame = heard.append
        await loop.sock_sendall(admitted, b"\0\0\0\2hi")
        await scene.until(lambda: heard == [b"hi"])
        await scene.close()

    asyncio.run(life())


def test_a_caller_that_never_ends_its_handshake_delays_no_closing_and_nobodys_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_connection, "STRANGERS", 1)
    monkeypatch.setattr(frame_connection, "HANDSHAKE_S", 10 * WAIT_S)  # It isn't its own deadline that ends it.

    async def life() -> None:
        scene = Scene(NodeTls(TestAuthority(tmp_path).node()))
        first, _ = await scene.call(), await scene.call()
        assert list(scene.ended) == [0]
        assert await cut(first)
        await scene.close()
        assert sorted(scene.ended) == [0, 1]

    asyncio.run(life())
