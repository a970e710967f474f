"""Reads a publisher's KV events from its sockets: the hands of the `KVEventReplay`, which knows what they mean."""

from __future__ import annotations

from types import TracebackType

import zmq
from zmq.utils.monitor import recv_monitor_message

from contracts.clock import Clock
from contracts.messages.kv_events import END
from router.kv_indexer.event_replay import KVEventReplay
from router.kv_indexer.kv_index import KVIndex

_READ = 4096
"""Messages of a socket read in one `poll`, so that a fast publisher can't keep the reader there."""


class KVEventSubscriber:
    """Subscribes to one publisher, and asks it. One thread; call `poll` often enough.

    `endpoint` and `replay_endpoint` are the publisher's (the second may be empty: then every loss is for good).
    `answer_s`: how long an answer may take before the question is asked anew.
    """

    def __init__(
        self, endpoint: str, clock: Clock, replay_endpoint: str = "", topic: str = "", answer_s: float = 5.0
    ) -> None:
        self._clock, self._answer_s, self._replay_endpoint = clock, answer_s, replay_endpoint
        self._follower = KVEventReplay(can_ask=bool(replay_endpoint))
        self.malformed = 0
        """Messages that don't have the format's frames."""
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(topic)
        self._monitor = self._sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._sub.connect(endpoint)
        self._dealer: zmq.Socket[bytes] | None = None
        self._asked: bytes | None = None
        self._deadline = 0.0
        self._ask()

    @property
    def index(self) -> KVIndex:
        """What the publisher holds, as far as it is known here."""
        return self._follower.index

    @property
    def complete(self) -> bool:
        """Whether `index` is all that the publisher held when it sent the last batch that arrived here.

        False for long means that what is lost could not be had again: the index holds less than the publisher.
        """
        return self._follower.complete

    @property
    def lost(self) -> int:
        """How often batches were lost for good."""
        return self._follower.lost

    @property
    def damaged(self) -> int:
        """Payloads that could not be read."""
        return self._follower.damaged

    @property
    def restarts(self) -> int:
        """How often another publisher was found in the place of the last one."""
        return self._follower.restarts

    def poll(self, timeout_s: float = 0.0) -> None:
        """Read what has come, waiting up to `timeout_s` for the first of it; never longer."""
        poller = zmq.Poller()
        for socket in (self._sub, self._monitor, self._dealer):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        poller.poll(int(timeout_s * 1000))
        # What had come before a question is sent must be with the follower by then: the answers go last.
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
        self._context.destroy(linger=0)

    def __enter__(self) -> KVEventSubscriber:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _notice_breaks(self) -> None:
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._follower.disconnected()

    def _read_batches(self) -> None:
        for _ in range(_READ):
            if not self._sub.poll(0):
                return
            message = self._sub.recv_multipart()
            # The break first: whatever a new connection brings comes after it was told.
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
                    # Each part is a sign of life: a long answer has its deadline from the last of them.
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
            self._dealer.connect(self._replay_endpoint)
        self._asked, self._deadline = question, self._clock.now() + self._answer_s
        self._follower.asked()
        self._dealer.send_multipart([b"", question], zmq.NOBLOCK)

    def _hang_up(self) -> None:
        """A new socket for the next question, so that a late answer to the last one can't be taken for its own."""
        assert self._dealer is not None
        self._dealer.close(linger=0)
        self._dealer, self._asked = None, None
