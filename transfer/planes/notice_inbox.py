"""The inbox of a reader's notices: a ZMQ socket that writers send to."""

from __future__ import annotations

import os
from collections.abc import Sequence

import zmq

from twinpool.transfer.net.curve_keys import CurveKeys, bind
from twinpool.transfer.net.disconnects import keep_alive
from twinpool.transfer.net.fault_injection import via_proxy

AT_ONCE = 4096
"""Notices that one poll takes in at most."""
_WAITING = 64
"""Messages of one connection that may wait here; more wait at their sender."""


class NoticeInbox:
    """Takes notices in, of one frame each, and bounded in number and length."""

    def __init__(
        self, host: str, curve: CurveKeys | None, link_timeout_s: float, message_bytes: int, proxy: str
    ) -> None:
        """Binds to a free port of `host`. `message_bytes`: the longest notice that is taken in. `proxy`: as
        `faults.proxy`."""
        self._socket = pull_socket(zmq.Context.instance(), link_timeout_s, message_bytes)
        self.endpoint = via_proxy(bind(self._socket, host, curve), "data", str(os.getpid()), proxy)

    def poll(self) -> list[bytes]:
        """Return the notices that have arrived, `AT_ONCE` at most. Messages of several frames are dropped."""
        out: list[bytes] = []
        for _ in range(AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 1:
                out.append(frames[0])
        return out

    @property
    def waitable(self) -> Sequence[zmq.Socket[bytes]]:
        return (self._socket,)

    def close(self) -> None:
        self._socket.close(linger=0)


def pull_socket(
    context: zmq.Context[zmq.Socket[bytes]], link_timeout_s: float, message_bytes: int
) -> zmq.Socket[bytes]:
    """A socket to receive from many peers, which isn't bound yet: bounded, and with heartbeats."""
    socket = context.socket(zmq.PULL)
    socket.set(zmq.RCVHWM, _WAITING)
    socket.set(zmq.MAXMSGSIZE, message_bytes)
    keep_alive(socket, link_timeout_s)
    return socket
