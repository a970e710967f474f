"""Connections from their acceptance on: each is its owner's, and none stays open that nobody has."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from twinpool.contracts.wire import socket_acceptor
from twinpool.contracts.wire.socket_acceptor import SocketAcceptor

WAIT_S = 60.0


class Scene:
    """An acceptor whose connections open as `opening` says, and what became of them."""

    def __init__(self, opening: Callable[[socket.socket], Any]) -> None:
        self.bound = socket.create_server(("127.0.0.1", 0))
        self.accepted: list[socket.socket] = []
        self.ended: list[asyncio.Task[None]] = []
        self._opening = opening
        self.acceptor = SocketAcceptor(self.bound, self._take)

    def _take(self, connection: socket.socket, peer: Any) -> None:
        assert not connection.getblocking()
        self.accepted.append(connection)
        self.acceptor.begin(connection, self._opening(connection), self.ended.append)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.bound.getsockname())

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not true():
                await asyncio.sleep(0)

    async def close(self) -> None:
        self.acceptor.close()
        await self.acceptor.wait_closed()
        self.bound.close()
        for connection in self.accepted:
            connection.close()


async def waits(connection: socket.socket) -> None:
    await asyncio.Event().wait()


async def fails(connection: socket.socket) -> None:
    raise ConnectionResetError("no TLS")


async def breaks(connection: socket.socket) -> None:
    raise ZeroDivisionError


async def hung_up(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(WAIT_S):
        return await reader.read() == b""


@pytest.mark.parametrize("opening", [fails, waits])
def test_a_connection_that_cannot_be_opened_or_is_cancelled_is_hung_up(opening: Callable[[socket.socket], Any]) -> None:
    async def life() -> None:
        scene = Scene(opening)
        reader, writer = await scene.connect()
        if opening is waits:
            await scene.until(lambda: scene.accepted)
            await asyncio.sleep(0)
            scene.acceptor.close()
        assert await hung_up(reader)
        await scene.until(lambda: scene.ended)
        writer.close()
        await scene.close()

    asyncio.run(life())


def test_one_that_is_cancelled_before_its_first_turn_is_closed() -> None:
    async def life() -> None:
        scene = Scene(waits)
        ours, theirs = socket.socketpair()
        task = scene.acceptor.begin(theirs, waits(theirs), scene.ended.append)
        task.cancel()
        await scene.until(lambda: scene.ended)
        assert theirs.fileno() == -1
        assert ours.recv(1) == b""
        ours.close()
        await scene.close()

    asyncio.run(life())


def test_after_close_nobody_is_accepted_and_nothing_opens() -> None:
    async def life() -> None:
        scene = Scene(waits)
        _, first = await scene.connect()
        await scene.until(lambda: scene.accepted)
        scene.acceptor.close()
        scene.acceptor.close()
        await scene.acceptor.wait_closed()
        assert [task.cancelled() for task in scene.ended] == [True]
        _, late = await scene.connect()  # The kernel still takes it; nobody here does.
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(scene.accepted) == 1
        first.close()
        late.close()
        await scene.close()

    asyncio.run(life())


def test_an_error_of_our_own_is_logged_and_the_next_connection_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    async def life() -> None:
        scene = Scene(breaks)
        writers = [(await scene.connect())[1] for _ in range(2)]
        await scene.until(lambda: len(scene.ended) == 2)
        for writer in writers:
            writer.close()
        await scene.close()

    asyncio.run(life())
    assert [record.message for record in caplog.records] == ["a connection failed inside"] * 2


class Exhausted:
    """A listening socket for which the process has no descriptor left, `times` times."""

    def __init__(self, bound: socket.socket, times: int, number: int = errno.EMFILE) -> None:
        self._bound, self.left, self._number = bound, times, number

    def accept(self) -> tuple[socket.socket, Any]:
        if self.left:
            self.left -= 1
            raise OSError(self._number, os.strerror(self._number))
        return self._bound.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bound, name)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_where_no_descriptor_or_memory_is_left_it_pauses_and_goes_on(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket_acceptor, "PAUSE_S", 0.01)

    async def life() -> None:
        scene = Scene(waits)
        tired: Any = Exhausted(scene.bound, 1, number)
        scene.acceptor._bound = tired
        _, writer = await scene.connect()
        await scene.until(lambda: scene.accepted)
        assert tired.left == 0
        writer.close()
        await scene.close()

    asyncio.run(life())
    assert [record.message for record in caplog.records] == ["no connection can be accepted"]


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EINTR, errno.EAGAIN])
def test_a_connection_that_is_gone_before_it_is_accepted_is_nothing_to_speak_of(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def life() -> None:
        scene = Scene(waits)
        gone: Any = Exhausted(scene.bound, 1, number)
        scene.acceptor._bound = gone
        _, writer = await scene.connect()
        await scene.until(lambda: scene.accepted)
        assert gone.left == 0
        writer.close()
        await scene.close()

    asyncio.run(life())
    assert caplog.records == []


def test_one_that_is_closed_while_it_pauses_accepts_nothing_after_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_acceptor, "PAUSE_S", 1000.0)

    async def life() -> None:
        scene = Scene(waits)
        tired: Any = Exhausted(scene.bound, 1)
        scene.acceptor._bound = tired
        _, writer = await scene.connect()
        await scene.until(lambda: tired.left == 0)
        pause = scene.acceptor._pause
        assert pause is not None
        assert not pause.cancelled()
        scene.acceptor.stop_accepting()
        assert pause.cancelled()
        scene.acceptor.stop_accepting()
        writer.close()
        await scene.close()

    asyncio.run(life())


def test_nothing_is_kept_of_a_connection_that_has_opened() -> None:
    async def opens(connection: socket.socket) -> None:
        await asyncio.sleep(0)

    async def life() -> None:
        scene = Scene(opens)
        _, writer = await scene.connect()
        await scene.until(lambda: scene.ended)
        gone = weakref.ref(scene.ended.pop())
        writer.close()
        await asyncio.sleep(0)
        gc.collect()
        assert gone() is None, "its task is kept for as long as the listener lives"
        await scene.close()

    asyncio.run(life())
