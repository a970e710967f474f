"""Publishes KV events over ZMQ: a PUB socket for the batches and a ROUTER socket to ask for those that were missed.

`round()` is called once a round of the worker's loop. It never waits: a PUB socket drops what a slow subscriber can't
take, which the subscriber sees as a gap in the sequence numbers; it asks for the missing batches on the replay
socket, in vLLM's protocol: frames (empty, start as 8 bytes big-endian); the answer is a message (empty, seq, payload)
for each buffered batch from there on, then (empty, -1, empty). The buffer is bounded; whoever asks for more than it
holds gets what there is, and sees from its first number that something is lost.

Beyond vLLM there is one more question, `truth`: the answer has the same form. It begins with the last batch that was
published, if there is one, so that the asker knows it when it meets it again; the others are the whole content of the
tiers, and each carries the sequence number *from which on* the following batches apply on top. It costs time in
proportion to the tree, so at most one such question is answered a round.

Token ids are the users' prompts, and neither socket knows who listens. So both stay on loopback, unless the operator
says that the network is their own (`cache.events.public`).
"""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import zmq

from cache.events import EventLog, KvEvent, encode_batch
from contracts.config import EventsConfig
from contracts.errors import ConfigError

END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends an answer."""
TRUTH = b"truth"
"""The question for the whole content."""
_TRUTH_EVENTS = 1024
"""Events in one message of the answer to `truth`, or more where the buffer is small."""
_QUESTIONS = 16
"""Questions answered in a round; the rest wait for the next."""


class Publisher:
    """Sends what `log` collected, one batch a round. One thread.

    `now`: seconds since 1970. `truth`: the content of all tiers as `Stored` events, parents first. `rank`: the seat's
    index on this host; as in vLLM it is added to a port that isn't 0. Raises `ConfigError` for an endpoint that can't
    be bound or mustn't be.
    """

    def __init__(
        self,
        config: EventsConfig,
        log: EventLog,
        now: Callable[[], float],
        rank: int = 0,
        truth: Callable[[], Iterable[KvEvent]] | None = None,
    ) -> None:
        self._log, self._now, self._rank, self._truth = log, now, rank, truth
        self._topic = config.topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_batches)
        self._buffer_batches = config.buffer_batches
        self._next = 0
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub = _bind(self._context, zmq.PUB, "cache.events.endpoint", config.endpoint, config, rank)
            if config.replay_endpoint:
                name, endpoint = "cache.events.replay_endpoint", config.replay_endpoint
                self._replay = _bind(self._context, zmq.ROUTER, name, endpoint, config, rank)
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
            self._send(self._pub, self._topic, self._next.to_bytes(8, "big"), payload)
            self._next += 1
        self._answer()

    def close(self) -> None:
        """Close the sockets; what a subscriber hasn't taken yet is dropped. Idempotent."""
        self._context.destroy(linger=0)

    def _answer(self) -> None:
        truths = 1
        for _ in range(_QUESTIONS):
            if self._replay is None or not truths or not self._replay.poll(0):
                return
            match self._replay.recv_multipart():
                case [client, b"", question] if question == TRUTH:
                    answer = self._whole()
                    truths -= 1
                case [client, b"", question] if len(question) == 8:
                    answer = self._since(int.from_bytes(question, "big"))
                case _:
                    # Not a question. Without an answer its sender runs into its own deadline.
                    continue
            for seq, payload in answer:
                self._send(self._replay, client, b"", seq.to_bytes(8, "big"), payload)
            self._send(self._replay, client, b"", END, b"")

    def _since(self, start: int) -> Iterator[tuple[int, bytes]]:
        return ((seq, payload) for seq, payload in self._buffer if seq >= start)

    def _whole(self) -> Iterator[tuple[int, bytes]]:
        if self._truth is None:
            return
        events = list(self._truth())
        # No more messages than the queue to the client takes.
        step = max(_TRUTH_EVENTS, -(-len(events) // self._buffer_batches))
        if self._buffer:
            yield self._buffer[-1]
        for start in range(0, max(len(events), 1), step):
            yield self._next, encode_batch(self._now(), events[start : start + step], self._rank)

    @staticmethod
    def _send(socket: zmq.Socket[bytes], *frames: bytes) -> None:
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            # A full queue: the peer sees the gap, or misses the end of its answer, and asks again.
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
    socket.set(zmq.SNDHWM, config.buffer_batches + 2)
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
