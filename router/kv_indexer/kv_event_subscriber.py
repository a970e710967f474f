"""The subscriber of a worker's KV events: reads the publisher's sockets and keeps a KV index."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import TracebackType

import zmq
from zmq.utils.monitor import recv_monitor_message

from twinpool.contracts.clock import Clock
from twinpool.contracts.credentials.certificate_files import call, read_curve_public
from twinpool.contracts.messages.kv_events import END
from twinpool.router.kv_indexer.event_replay import BlockEntry, EventIndex, KVEventReplay, KVIndex

__all__ = ["BlockEntry", "KVEventReplay", "KVEventSubscriber", "KVIndex"]

FRAME_BYTES = 128 * 1024**2
"""The longest frame that is taken in: more than a publisher keeps of all its batches (`cache.events.buffer_bytes`)."""
_READ = 4096
"""Most messages of a socket that one `poll` reads, so that a fast publisher can't keep the reader there."""


class KVEventSubscriber:
    """Subscribes to one publisher, and asks it for lost batches. One thread; call `poll` often enough.

    `endpoint` and `replay_endpoint` are the publisher's (the second may be empty: then every loss is for good).
    `answer_s`: seconds without a part of the answer after which the question is asked anew. `frame_bytes`: a publisher
    that sends a longer frame is disconnected, and what was lost by that is asked for like any other loss. `key_file`:
    the publisher's public CURVE key, where it has one (`security.curve_key`). Raises `ConfigError` where it can't be
    read. `index`: what the events are applied to; None: an index of its own. `context`: for the sockets; None: one of
    its own.
    """

    def __init__(
        self,
        endpoint: str,
        clock: Clock,
        replay_endpoint: str = "",
        topic: str = "",
        answer_s: float = 5.0,
        frame_bytes: int = FRAME_BYTES,
        key_file: Path | None = None,
        *,
        into: EventIndex | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._server_key = read_curve_public(key_file) if key_file is not None else b""
        self._clock, self._answer_s = clock, answer_s
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self._frame_bytes = frame_bytes
        self._follower = KVEventReplay(bool(replay_endpoint), into)
        self.malformed = 0
        """Messages that don't have the format's frames."""
        self._own_context = context is None
        self._context = context if context is not None else zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.set(zmq.MAXMSGSIZE, frame_bytes)
        self._sub.subscribe(topic)
        self._monitor = self._sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._protect(self._sub)
        self._sub.connect(endpoint)
        self._dealer: zmq.Socket[bytes] | None = None
        self._asked: bytes | None = None
        self._deadline = 0.0
        self._ask()

    @property
    def index(self) -> KVIndex:
        """The index of the publisher's pages, as far as they are known here."""
        return self._follower.index

    @property
    def complete(self) -> bool:
        """Whether `index` is all that the publisher held when it sent the last batch that arrived here.

        False for long means that lost batches could not be recovered: the index holds less than the publisher.
        """
        return self._follower.complete

    @property
    def lost(self) -> int:
        """How often batches were lost for good."""
        return self._follower.lost

    @property
    def damaged(self) -> int:
        """How many payloads could not be read."""
        return self._follower.damaged

    @property
    def restarts(self) -> int:
        """How often a new publisher was found in the place of the last one."""
        return self._follower.restarts

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets to wait at before `poll`; they change with time."""
        return [socket for socket in (self._sub, self._monitor, self._dealer) if socket is not None]

    @property
    def behind(self) -> bool:
        """Whether batches have arrived that aren't read yet."""
        return bool(self._sub.poll(0))

    def poll(self, timeout_s: float = 0.0) -> None:
        """Read the messages that have arrived, waiting up to `timeout_s` seconds for the first; never longer."""
        poller = zmq.Poller()
        for socket in self.sockets:
            poller.register(socket, zmq.POLLIN)
        poller.poll(int(timeout_s * 1000))
        # Batches that arrived before a question is sent must be with the follower by then: answers are read last.
        self._notice_breaks()
        self._read_batches()
        self._ask()
        self._read_answers()
        if self._asked is not None and self._clock.now() >= self._deadline:
            self._hang_up()
            self._follower.unanswered()
        self._ask()

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        if self._own_context:
            self._context.destroy(linger=0)
        elif not self._sub.closed:
            self._sub.disable_monitor()
            for socket in self.sockets:
                socket.close(linger=0)

    def __enter__(self) -> KVEventSubscriber:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _notice_breaks(self) -> None:
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._follower.disconnected()
            # ZeroMQ connects again by itself, but not after a frame that was too long.
            with suppress(zmq.ZMQError):
                self._sub.disconnect(self._endpoint)
            self._sub.connect(self._endpoint)

    def _read_batches(self) -> None:
        for _ in range(_READ):
            if not self._sub.poll(0):
                return
            message = self._sub.recv_multipart()
            # Breaks first: what a new connection brings arrives after the break was reported.
            self._notice_breaks()
            match message:
                case [_, seq, payload] if len(seq) == 8:
                    self._follower.live(int.from_bytes(seq, "big"), payload)
                case _:
                    self.malformed += 1

    def _read_answers(self) -> None:
        for _ in range(_READ):
            if self._asked is None or self._dealer is None or not self._dealer.poll(0):
                return
            match self._dealer.recv_multipart():
                case [b"", seq, _] if seq == END:
                    self._asked = None
                    self._follower.answered()
                    self._ask()
                case [b"", seq, payload] if len(seq) == 8:
                    # Each part is a sign of life: the deadline of a long answer counts from the latest one.
                    self._deadline = self._clock.now() + self._answer_s
                    self._follower.answer(int.from_bytes(seq, "big"), payload)
                case _:
                    self.malformed += 1

    def _ask(self) -> None:
        question = self._follower.question
        if question is None or self._asked is not None:
            return
        if self._dealer is None:
            self._dealer = self._context.socket(zmq.DEALER)
            self._dealer.set(zmq.LINGER, 0)
            self._dealer.set(zmq.MAXMSGSIZE, self._frame_bytes)
            self._protect(self._dealer)
            self._dealer.connect(self._replay_endpoint)
        self._asked, self._deadline = question, self._clock.now() + self._answer_s
        self._follower.asked()
        with suppress(zmq.Again):  # While a connection is refused there may be no room; then no answer comes, either.
            self._dealer.send_multipart([b"", question], zmq.NOBLOCK)

    def _protect(self, socket: zmq.Socket[bytes]) -> None:
        if self._server_key:
            call(socket, self._server_key)

    def _hang_up(self) -> None:
        """Close the replay socket: the next question gets a new one, where a late answer to the last can't arrive."""
        assert self._dealer is not None
        self._dealer.close(linger=0)
        self._dealer, self._asked = None, None
