"""Publishes KV events over ZMQ: a PUB socket for the batches and a ROUTER socket to ask for those that were missed.

`round()` is called once a round of the worker's loop. It never waits: a PUB socket drops what a slow subscriber can't
take, which the subscriber sees as a gap in the sequence numbers; it asks for the missing batches on the replay
socket, in vLLM's protocol: frames (empty, start as 8 bytes big-endian); the answer is a message (empty, seq, payload)
for each buffered batch from there on, then (empty, -1, empty). The buffer is bounded; whoever asks for more than it
holds gets what there is, and sees from its first number that something is lost.

Beyond vLLM there is one more question, `truth`: the answer has the same form. It begins with the last batch that was
published, if there is one, so that the asker knows it when it meets it again; the others are the whole content of the
tiers, and each carries the sequence number *from which on* the following batches apply on top.

An answer may be long, and the loop that asks for a round has work of its own: each round sends a bounded part of what
there is to send, and the next goes on from there. So the content is told while it changes. That is as good as told at
once: what is there all the time is in the answer, what comes or goes meanwhile is in batches that the asker applies on
top, and whatever the answer says of it, the last of those batches has the last word. Askers of the truth take turns;
who waits gets an empty part now and then, as a sign of life.

Token ids are the users' prompts, and neither socket knows who listens. So both stay on loopback, unless the operator
says that the network is their own (`cache.events.public`).
"""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import zmq

from contracts.config.cache_config import EventsConfig
from contracts.errors import ConfigError
from contracts.messages.kv_events import END, TRUTH, BlockStored, KvEvent, encode_batch


class KVEventLog:
    """Collects events in order until the round's end."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []

    def emit(self, event: KvEvent) -> None:
        self._events.append(event)

    def drain(self) -> tuple[KvEvent, ...]:
        """What was emitted since the last call, in order."""
        events, self._events = tuple(self._events), []
        return events


TRUTH_PAGES = 512
"""Pages in one message of the answer to `truth`, the last event's beyond that: what is told in a round."""
_QUESTIONS = 16
"""Questions under way at once; the rest wait in the socket."""
_READ = 64
"""Messages that are read in a round, and those that wait for it from one peer."""
_QUESTION_BYTES = 4096
"""The longest message that is taken in: a question has 8 bytes, a subscription its topic."""
_MESSAGES = 256
"""Messages that answers send in a round."""
_QUEUED = 1024
"""Messages that wait for one slow peer, at most: a subscriber asks for what it missed."""
_SIGN_OF_LIFE = 32
"""Rounds after which an asker that waits for its turn gets an empty part."""
_PATIENCE_S = 5.0
"""How long an asker may take nothing that is sent to it."""


@dataclass(eq=False)
class _Answer:
    """What is still to be told to one asker."""

    client: bytes
    seq: int
    """Of the next batch to be sent, or from which on batches apply to the truth."""
    truth: Iterator[KvEvent] | None
    """None: buffered batches."""
    unsent: deque[tuple[bytes, bytes]] = field(default_factory=deque)
    """Messages that are made: sequence number and payload."""
    over: bool = False
    """Nothing will be added to those."""
    rounds: int = 0
    stuck: float | None = None
    """Since when the asker has taken nothing."""


class KVEventPublisher:
    """Sends what `log` collected, one batch a round. One thread.

    `now`: seconds since 1970. `truth`: begins to tell the content of all tiers as `BlockStored` events of few pages
    each, while that changes; what it gives has `close` if it is not to be read to its end. `rank`: the KV cache
    manager's index on this host; as in vLLM it is added to a port that isn't 0. Raises `ConfigError` for an endpoint
    that can't be bound or mustn't be.
    """

    def __init__(
        self,
        config: EventsConfig,
        log: KVEventLog,
        now: Callable[[], float],
        rank: int = 0,
        truth: Callable[[], Iterable[KvEvent]] | None = None,
    ) -> None:
        self._log, self._now, self._rank, self._truth = log, now, rank, truth
        self._topic = config.topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffer_batches, self._buffer_bytes = config.buffer_batches, config.buffer_bytes
        self._buffered = 0
        """Bytes of it."""
        self._next = 0
        self._open: list[_Answer] = []
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub = _bind(self._context, zmq.PUB, "cache.events.endpoint", config.endpoint, config, rank)
            if config.replay_endpoint:
                name, endpoint = "cache.events.replay_endpoint", config.replay_endpoint
                self._replay = _bind(self._context, zmq.ROUTER, name, endpoint, config, rank)
                # Who has gone, and whose queue is full, is to be known.
                self._replay.set(zmq.ROUTER_MANDATORY, 1)
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    @property
    def endpoint(self) -> str:
        """Where to subscribe, with the port that was picked."""
        return self._pub.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str:
        """Where to ask; empty when there is no replay."""
        return self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if self._replay is not None else ""

    def round(self) -> None:
        """Publish what was emitted since the last round, if anything, and answer questions. Never waits."""
        if events := self._log.drain():
            payload = encode_batch(self._now(), events, self._rank)
            self._buffer.append((self._next, payload))
            self._buffered += len(payload)
            while len(self._buffer) > 1 and (
                len(self._buffer) > self._buffer_batches or self._buffered > self._buffer_bytes
            ):
                self._buffered -= len(self._buffer.popleft()[1])
            self._send(self._pub, self._topic, self._next.to_bytes(8, "big"), payload)
            self._next += 1
        self._answer()

    def close(self) -> None:
        """Close the sockets; what a subscriber hasn't taken yet is dropped. Idempotent."""
        for answer in list(self._open):
            self._end(answer)
        self._context.destroy(linger=0)

    def _answer(self) -> None:
        """Take in questions, and go on with the answers."""
        self._read_questions()
        room, told = _MESSAGES, False
        for answer in list(self._open):
            if answer.truth is None:
                self._add_batches(answer, room)
            elif not told:
                told = True
                self._add_truth(answer)
            elif answer.rounds % _SIGN_OF_LIFE == 0:
                answer.unsent.append(self._piece(answer, []))
            answer.rounds += 1
            room -= self._send_some(answer, max(1, room))

    def _read_questions(self) -> None:
        for _ in range(_READ):
            if self._replay is None or len(self._open) >= _QUESTIONS or not self._replay.poll(0):
                return
            match self._replay.recv_multipart():
                case [client, b"", question] if question == TRUTH:
                    events: Iterable[KvEvent] = () if self._truth is None else self._truth()
                    answer = _Answer(client, self._next, iter(events), over=self._truth is None)
                    if self._buffer and self._truth is not None:
                        seq, payload = self._buffer[-1]
                        answer.unsent.append((seq.to_bytes(8, "big"), payload))
                    self._open.append(answer)
                case [client, b"", question] if len(question) == 8:
                    self._open.append(_Answer(client, int.from_bytes(question, "big"), None))
                case _:
                    # Not a question. Without an answer its sender runs into its own deadline.
                    continue

    def _add_batches(self, answer: _Answer, most: int) -> None:
        """Some more of the buffered batches; what has left the buffer meanwhile is a gap that the asker sees."""
        if answer.unsent or answer.over:
            return
        oldest = self._next - len(self._buffer)
        answer.seq = max(answer.seq, oldest)
        stop = min(self._next, answer.seq + most)
        some = islice(self._buffer, max(0, answer.seq - oldest), max(0, stop - oldest))
        answer.unsent.extend((seq.to_bytes(8, "big"), payload) for seq, payload in some)
        answer.seq, answer.over = stop, stop >= self._next

    def _add_truth(self, answer: _Answer) -> None:
        """Some more of what the tiers hold; an empty part where they hold nothing."""
        assert answer.truth is not None
        if len(answer.unsent) > 1 or answer.over:
            return
        events: list[KvEvent] = []
        pages = 0
        while pages < TRUTH_PAGES and not answer.over:
            event = next(answer.truth, None)
            if event is None:
                answer.over = True
                continue
            events.append(event)
            pages += len(event.hashes) if isinstance(event, BlockStored) else 1
        answer.unsent.append(self._piece(answer, events))

    def _piece(self, answer: _Answer, events: Sequence[KvEvent]) -> tuple[bytes, bytes]:
        return answer.seq.to_bytes(8, "big"), encode_batch(self._now(), events, self._rank)

    def _send_some(self, answer: _Answer, most: int) -> int:
        """Send up to `most` messages of an answer, and its end; returns how many."""
        assert self._replay is not None
        sent = 0
        try:
            while answer.unsent and sent < most:
                self._replay.send_multipart((answer.client, b"", *answer.unsent[0]), zmq.NOBLOCK)
                answer.unsent.popleft()
                sent, answer.stuck = sent + 1, None
            if answer.over and not answer.unsent:
                self._replay.send_multipart((answer.client, b"", END, b""), zmq.NOBLOCK)
                self._end(answer)
        except zmq.Again:
            # Its queue is full. What it doesn't take in time is not sent; without the end it asks again.
            answer.stuck = self._now() if answer.stuck is None else answer.stuck
            if self._now() - answer.stuck > _PATIENCE_S:
                self._end(answer)
        except zmq.ZMQError:
            self._end(answer)  # It has gone.
        return sent

    def _end(self, answer: _Answer) -> None:
        self._open.remove(answer)
        close: Callable[[], None] | None = getattr(answer.truth, "close", None)
        if close is not None:
            close()

    @staticmethod
    def _send(socket: zmq.Socket[bytes], *frames: bytes) -> None:
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            # A full queue: the subscriber sees the gap, and asks for what it misses.
            return


def _bind(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, key: str, endpoint: str, config: EventsConfig, rank: int
) -> zmq.Socket[bytes]:
    host, port = _split(key, endpoint)
    if not config.public and not _is_loopback(host):
        raise ConfigError(
            f"config key {key} is {endpoint}: KV events carry the prompts' tokens, and are sent to whoever asks. "
            "Use a loopback address, or set cache.events.public: true on a network of your own"
        )
    socket = context.socket(kind)
    # An answer, with its end and what the truth begins with.
    socket.set(zmq.SNDHWM, min(config.buffer_batches, _QUEUED) + 2)
    socket.set(zmq.RCVHWM, _READ)
    socket.set(zmq.MAXMSGSIZE, _QUESTION_BYTES)
    socket.set(zmq.LINGER, 0)
    try:
        socket.bind(f"tcp://{host}:{port + rank if port else 0}")
    except zmq.ZMQError as error:
        raise ConfigError(
            f"config key {key}: cannot listen on {endpoint} (rank {rank}): {error.strerror}. "
            "Ports grow by the rank: leave room between endpoint and replay_endpoint"
        ) from None
    return socket


def _split(key: str, endpoint: str) -> tuple[str, int]:
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"config key {key} must be tcp://HOST:PORT (port 0: any free one); got {endpoint!r}")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
