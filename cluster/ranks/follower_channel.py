"""The follower's end of the channel between the ranks of a worker, and a watch for dead ranks."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import zmq

from twinpool.cluster.ranks.leader_channel import ANSWER, JOIN, NOTICE_KINDS, meeting_point
from twinpool.contracts.errors import WireError
from twinpool.contracts.messages.rank_order_codec import decode
from twinpool.contracts.messages.rank_orders import FollowerNotice, Order
from twinpool.transfer.net import process_watch as process
from twinpool.transfer.net.process_watch import PidfdWatch


class FollowerChannel:
    """The follower's end of the channel: takes orders, sends answers and notices. Used from one thread."""

    def __init__(self, secret: str, rank: int) -> None:
        endpoint, curve = meeting_point(secret)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.RCVHWM, 0)
        # At the end, the leader may still be waiting for the last answers.
        self.socket.set(zmq.LINGER, 500)
        self.socket.set(zmq.ROUTING_ID, b"%d" % rank)
        curve.call(self.socket)
        self.socket.connect(endpoint)
        self.socket.send_multipart([JOIN, msgpack.packb(process.mine())])

    def next(self, timeout_s: float) -> tuple[int, Order] | None:
        """The number of the next order and the order (number 0: no answer is wanted); None when none has come after
        `timeout_s`.

        Raises `WireError` for a message that is no order.
        """
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        try:
            sequence, data = self.socket.recv_multipart()
        except ValueError as error:
            raise WireError(f"not an order: {error}") from None
        return int.from_bytes(sequence, "little"), decode(data)

    def answer(self, sequence: int, value: Any) -> None:
        self.socket.send_multipart([ANSWER, sequence.to_bytes(8, "little"), msgpack.packb(value)])

    def send(self, notice: FollowerNotice) -> None:
        self.socket.send_multipart([NOTICE_KINDS[type(notice)], msgpack.packb(notice)])

    def close(self) -> None:
        self.socket.close()


class DeathWatch:
    """A thread that calls back, once, when the first of several processes has died."""

    def __init__(self, watches: Sequence[tuple[str, PidfdWatch]], on_death: Callable[[str], None]) -> None:
        """`watches`: for each process its description for the text, and its watch. `on_death` is called on the thread
        with a sentence that names the process."""
        self._watches = {watch.fd: (who, watch.pid) for who, watch in watches}
        self._on_death = on_death
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        poller = select.poll()
        for fd in (self._stop, *self._watches):
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll():
            if fd in self._watches:
                who, pid = self._watches[fd]
                self._on_death(f"{who} (pid {pid}) died")
                return

    def stop(self) -> None:
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        stop, self._stop = self._stop, -1
        os.close(stop)
