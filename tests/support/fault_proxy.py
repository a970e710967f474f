"""A TCP proxy that does to real connections what networks do: delay, throttle, silence and cut.

It runs on a thread of its own. Workers ask it for detours (`faults.proxy`, `transfer.net.fault_injection`), so every
connection to them goes through it: ``serve`` is a worker's gRPC service, ``control`` a prefill worker's socket for
rooms, ``data`` what a decode worker receives notices on and ``pages`` where plane zmq's pages come in (both by pid).
Tests may also ask for a way with `Proxy.relay`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
CHUNK = 64 * 1024
IN_FLIGHT = 64
"""Chunks that a direction holds."""


@dataclass(eq=False)
class Relay:
    """The way to one endpoint. Attributes may be set from any thread and act on what comes from then on."""

    kind: str
    name: str
    target: str
    port: int = 0
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    """0: as fast as it goes."""
    refuses: bool = False
    """New connections are closed at once."""
    cuts: int = 0
    """Connections that were cut."""
    taken: int = 0
    """Bytes that have come here."""
    passed: int = 0
    """Those of them that went on."""
    open: set[asyncio.StreamWriter] = field(default_factory=set)
    flows: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"


class Proxy:
    """All relays, and the door where they are asked for."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._servers: list[asyncio.Server] = []
        self.relays: list[Relay] = []
        self._thread.start()
        self.door = f"127.0.0.1:{self._run(self._open_door())}"

    def relay(self, kind: str, name: str, target: str) -> Relay:
        """A way to `target` (``host:port``)."""
        return self._run(self._relay(kind, name, target))

    def find(self, kind: str, name: str = "") -> list[Relay]:
        """Those of a kind, the newest last; of every name without one."""
        return [r for r in list(self.relays) if r.kind == kind and name in ("", r.name)]

    def cut(self, relay: Relay, *, refuse: bool = False) -> None:
        """Abort its connections; with `refuse` no new ones are taken until `mend`."""

        def work() -> None:
            relay.refuses = refuse
            for writer in list(relay.open):
                relay.cuts += 1
                writer.transport.abort()

        self._call(work)

    def silence(self, relay: Relay) -> None:
        """Nothing passes any more, in either direction, until `mend`; connections stay."""
        self._call(relay.flows.clear)

    def slow(self, relay: Relay, *, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        relay.delay_s, relay.bytes_per_s = delay_s, bytes_per_s

    def mend(self, relay: Relay) -> None:
        """All faults of it end."""

        def work() -> None:
            relay.refuses, relay.delay_s, relay.bytes_per_s = False, 0.0, 0.0
            relay.flows.set()

        self._call(work)

    def close(self) -> None:
        for relay in self.relays:
            self.mend(relay)
            self.cut(relay, refuse=True)
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    # ------------------------------------------------------------ on the loop

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def _call(self, work: Callable[[], object]) -> None:
        async def on_loop() -> None:
            work()

        self._run(on_loop())

    async def _open_door(self) -> int:
        server = await asyncio.start_server(self._asked, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind, name, target = (await reader.readline()).decode().split()
        relay = await self._relay(kind, name, target)
        writer.write(f"{relay.endpoint}\n".encode())
        await writer.drain()
        writer.close()

    async def _relay(self, kind: str, name: str, target: str) -> Relay:
        relay = Relay(kind, name, target)
        relay.flows.set()
        server = await asyncio.start_server(lambda r, w: self._carry(relay, r, w), "127.0.0.1", 0)
        self._servers.append(server)
        relay.port = int(server.sockets[0].getsockname()[1])
        self.relays.append(relay)
        return relay

    async def _carry(self, relay: Relay, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if relay.refuses:
            writer.transport.abort()
            return
        host, _, port = relay.target.rpartition(":")
        try:
            upstream = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, upstream[1]}
        relay.open |= ends
        try:
            ways = [
                asyncio.ensure_future(_pump(relay, reader, upstream[1])),
                asyncio.ensure_future(_pump(relay, upstream[0], writer)),
            ]
            with contextlib.suppress(asyncio.CancelledError):  # At the end of the proxy: this task is asked by nobody.
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            relay.open -= ends
            for way in ways:
                way.cancel()
            for end in ends:
                end.transport.abort()

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(relay: Relay, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """One direction. What is delayed doesn't hold up the reading of what comes behind it."""
    line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT)
    loop = asyncio.get_running_loop()

    async def read() -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK):
                relay.taken += len(data)
                await line.put((loop.time() + relay.delay_s, data))
        await line.put((0.0, b""))

    reading = loop.create_task(read())
    try:
        while True:
            due, data = await line.get()
            if not data:
                return
            await asyncio.sleep(due - loop.time())
            if relay.bytes_per_s:
                await asyncio.sleep(len(data) / relay.bytes_per_s)
            await relay.flows.wait()
            relay.passed += len(data)
            sink.write(data)
            await sink.drain()
    except OSError:
        return
    finally:
        reading.cancel()


@contextmanager
def proxying() -> Iterator[Proxy]:
    proxy = Proxy()
    try:
        yield proxy
    finally:
        proxy.close()
