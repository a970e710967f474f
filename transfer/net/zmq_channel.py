"""The transport between the two ends of rooms: control messages, and proof of a peer's death.

Rooms (`KVSender`, `KVReceiver`) do no I/O of their own: their control messages go through a `ControlTransport`. They
rely on three promises of it:

    order    messages of one connection arrive in the order in which they were sent, each once
    loss     a live connection loses nothing; a cut one may lose the end of what was sent, and its channel reports it
    death    a watch reports a worker dead only if it will never write again

`ZmqControlTransport` keeps these with one DEALER socket for each connection, one ROUTER socket for all peers that
connect, and pidfds. A worker sleeps in one place, its `Waiter`, until a socket, a process's death or another thread
wakes it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Sequence

import zmq

from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.transfer.net import process_watch as process
from twinpool.transfer.net.control_channel import ProcessIdentity
from twinpool.transfer.net.zmq_sockets import CurveKeys, DisconnectWatch, bind, keep_alive

LINK_TIMEOUT_S = TransferConfig().link_timeout_s
FRAME_BYTES = TransferConfig().control_frame_bytes
_AT_ONCE = 1024
"""Messages that one call of `receive` takes in at most."""
_WAITING = 64
"""Messages of one connection that may wait here to be taken in; more wait at the sender."""
_UNREAD = 4096
"""Messages to one connection that may wait until the peer reads them; later ones are lost, as with a cut."""
log = logging.getLogger("twinpool.transfer")


class ZmqControlTransport:
    """The transport of real workers; arriving messages and deaths of peers wake `waiter`."""

    def __init__(
        self,
        host: str,
        waiter: Waiter,
        curve: CurveKeys | None,
        link_timeout_s: float = LINK_TIMEOUT_S,
        frame_bytes: int = FRAME_BYTES,
    ) -> None:
        """`frame_bytes`: the longest message that is taken in; a peer that sends a longer one is disconnected."""
        self._host, self._waiter, self._curve, self._link_timeout_s = host, waiter, curve, link_timeout_s
        self._frame_bytes = frame_bytes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()

    def mine(self) -> ProcessIdentity:
        return process.mine()

    def listen(self) -> ZmqControlInbox:
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.SNDHWM, _UNREAD)
        socket.set(zmq.RCVHWM, _WAITING)
        socket.set(zmq.MAXMSGSIZE, self._frame_bytes)
        socket.set(zmq.ROUTER_HANDOVER, 1)
        keep_alive(socket, self._link_timeout_s)
        return ZmqControlInbox(socket, bind(socket, self._host, self._curve), self._waiter)

    def connect(self, endpoint: str, identity: bytes) -> ZmqControlChannel:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, _WAITING)
        socket.set(zmq.MAXMSGSIZE, self._frame_bytes)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.ROUTING_ID, identity)
        keep_alive(socket, self._link_timeout_s)
        if self._curve is not None and endpoint.startswith("tcp"):
            self._curve.call(socket)
        watch = DisconnectWatch(socket)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            log.warning("no connection to %.80r: %s", endpoint, error)  # As if nobody answered there.
        return ZmqControlChannel(socket, watch, self._waiter)

    def watch(self, processes: Sequence[ProcessIdentity]) -> PidWatch | None:
        watch = process.PidfdGroupWatch.open(processes)
        return PidWatch(watch, self._waiter) if watch is not None else None


class ZmqControlInbox:
    """Implements `ControlInbox`."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, waiter: Waiter) -> None:
        self._socket, self.endpoint, self._waiter = socket, endpoint, waiter
        waiter.add(socket)

    def receive(self) -> list[tuple[bytes, bytes]]:
        out: list[tuple[bytes, bytes]] = []
        for _ in range(_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 2:
                out.append((frames[0], frames[1]))
        return out

    def send(self, identity: bytes, data: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([identity, data], zmq.NOBLOCK)

    def close(self) -> None:
        self._waiter.remove(self._socket)
        self._socket.close(linger=0)


class ZmqControlChannel:
    """Implements `ControlChannel`."""

    def __init__(self, socket: zmq.Socket[bytes], watch: DisconnectWatch, waiter: Waiter) -> None:
        self._socket, self._watch, self._waiter = socket, watch, waiter
        waiter.add(socket)

    def cut(self) -> bool:
        return self._watch.cut()

    @property
    def up(self) -> bool:
        return self._watch.up

    def send(self, data: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # There is no connection, as the endpoint is none; it never waits.
            self._socket.send(data, zmq.NOBLOCK)

    def receive(self) -> bytes | None:
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        self._watch.close()
        self._waiter.remove(self._socket)
        self._socket.close(linger=0)


class PidWatch:
    """Implements `PeerWatch`: deaths wake the waiter."""

    def __init__(self, watch: process.PidfdGroupWatch, waiter: Waiter) -> None:
        self._watch, self._waiter = watch, waiter
        self.pid = watch.pid
        for fd in watch.fds:
            waiter.add(fd)

    @property
    def dead(self) -> bool:
        self._watch.forget_dead(self._waiter.remove)
        return not self._watch.fds

    def close(self) -> None:
        for fd in self._watch.fds:
            self._waiter.remove(fd)
        self._watch.close()


Waitable = zmq.Socket[bytes] | int


class Waiter:
    """Sleeps until a registered socket or file descriptor is readable, or `wake` was called."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Lock()
        """Held to write to `_event` and to close it: a closed descriptor's number may soon be another file's."""
        self._poller = zmq.Poller()
        self._poller.register(self._event, zmq.POLLIN)

    def add(self, waitable: Waitable) -> None:
        self._poller.register(waitable, zmq.POLLIN)

    def remove(self, waitable: Waitable) -> None:
        if waitable in self._poller:
            self._poller.unregister(waitable)

    def wake(self) -> None:
        """May be called from any thread, also during and after `close`."""
        with self._closing:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def wait(self, timeout_s: float) -> None:
        self._poller.poll(math.ceil(max(0.0, timeout_s) * 1000))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def close(self) -> None:
        with self._closing:
            event, self._event = self._event, -1
            if event >= 0:
                self._poller.unregister(event)
                os.close(event)
