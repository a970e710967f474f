"""KV events: what came to a tier or went from it, recorded from the tree and published over ZMQ.

`KVEventPublisher` has a PUB socket for the batches, and a ROUTER socket to ask for missed ones. `round()` is called
once a round of the worker's loop. It never waits: a PUB socket drops batches that a slow subscriber can't take, and the
subscriber sees a gap in the sequence numbers. It asks for the missing batches on the replay socket, in vLLM's protocol:
frames (empty, start as 8 bytes big-endian); the answer is a message (empty, seq, payload) for each buffered batch from
there on, then (empty, -1, empty). The buffer is bounded: a subscriber that asks for older batches gets those that are
left, and sees from the first sequence number that others are lost.

Beyond vLLM there is one more question, `truth`, whose answer has the same form. It begins with the last batch that was
published, if there is one, so that the subscriber recognises this batch when it arrives on the PUB socket too. The
other messages are the whole content of the tiers, and each carries the sequence number *from which on* the following
batches apply on top.

An answer may be long, and the worker's loop has work of its own: each round sends a bounded part, and the next round
goes on from there. So the content is told while it changes. That is as good as telling it at once: blocks that are
there throughout are in the answer, and blocks that come or go meanwhile are in batches that the subscriber applies on
top; where the answer says something else of such a block, the last of those batches counts. Answers to `truth` take
turns; a subscriber that waits for its turn gets an empty part now and then, as a sign of life.

Token ids are the users' prompts, and neither socket knows who listens. So both stay on loopback, unless the operator
says that the network is their own (`cache.events.public`).

`KVEventRecorder` makes the events. They are about the full component: a block is in a tier, or for the device is being
loaded there from the host. Pages that are written to storage are told once, when the write is known to have succeeded.
They aren't part of the truth that a late subscriber gets, and pages that storage evicts by itself aren't told: storage
outlives this worker, and another process that shares it may evict them.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import zmq

from twinpool.cache.prefix_cache.radix_tree import RadixTree
from twinpool.cache.prefix_cache.tree_node import IN_TREE, Tier, TreeNode, token_ids
from twinpool.contracts.block_hash import KEY_BYTES
from twinpool.contracts.config.cache_config import EventsConfig
from twinpool.contracts.credentials.certificate_files import CurvePair
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.messages.kv_events import END, TRUTH, BlockRemoved, BlockStored, KvEvent, encode_batch
from twinpool.contracts.messages.kv_events import EventMedium as Medium


class KVEventLog:
    """The events of a round, in order, until the round's end."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []

    def emit(self, event: KvEvent) -> None:
        self._events.append(event)

    def drain(self) -> tuple[KvEvent, ...]:
        """Remove and return the events that were emitted since the last call, in order."""
        events, self._events = tuple(self._events), []
        return events


TRUTH_PAGES = 512
"""Pages in one message of an answer to `truth`, which is all that a round tells; its last event may go beyond."""
_QUESTIONS = 16
"""Questions that are answered at once; the rest wait in the socket."""
_READ = 64
"""Messages that are read in a round, and messages of one peer that may wait in the socket."""
_QUESTION_BYTES = 4096
"""The longest message that is taken in: a question has 8 bytes, a subscription its topic."""
_MESSAGES = 256
"""Messages that answers send in a round."""
_QUEUED = 1024
"""Messages that wait for one slow peer, at most: a subscriber asks again for those that were dropped."""
_SIGN_OF_LIFE = 32
"""Rounds after which a subscriber that waits for its turn gets an empty part."""
_PATIENCE_S = 5.0
"""How long a subscriber may fail to take any message of its answer before the answer is given up."""


@dataclass(eq=False)
class _Answer:
    """The unsent rest of an answer to one subscriber."""

    client: bytes
    """The subscriber's identity at the ROUTER socket."""
    seq: int
    """The sequence number of the next batch to be sent; of the truth, the one from which on batches apply on top."""
    truth: Iterator[KvEvent] | None
    """Events still to be told; None: the answer is buffered batches."""
    unsent: deque[tuple[bytes, bytes]] = field(default_factory=deque)
    """Messages ready to be sent: sequence number and payload."""
    over: bool = False
    """Whether `unsent` is the rest of the answer, but for its end mark."""
    rounds: int = 0
    stuck: float | None = None
    """The time since which the subscriber has taken no message; None while it takes them."""


class KVEventPublisher:
    """Sends the events of `log`, one batch a round, and answers questions. For one thread.

    `now`: seconds since 1970. `truth`: returns the content of the tiers as `BlockStored` events of few pages each,
    which are made while the content changes; the iterator's `close`, if it has one, is called when the answer ends.
    `rank`: the KV cache manager's index on this host; as in vLLM it is added to a port that isn't 0. `curve`: with it
    only who knows the public key may connect. Raises `ConfigError` for an endpoint that can't be bound, or that isn't
    on loopback although there are no keys and `cache.events.public` is false.
    """

    def __init__(
        self,
        config: EventsConfig,
        log: KVEventLog,
        now: Callable[[], float],
        rank: int = 0,
        truth: Callable[[], Iterable[KvEvent]] | None = None,
        curve: CurvePair | None = None,
    ) -> None:
        self._log, self._now, self._rank, self._truth = log, now, rank, truth
        self._topic = config.topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffer_batches, self._buffer_bytes = config.buffer_batches, config.buffer_bytes
        self._buffered = 0
        """Bytes of all payloads in the buffer."""
        self._next = 0
        self._open: list[_Answer] = []
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub = _bind(self._context, zmq.PUB, "cache.events.endpoint", config.endpoint, config, rank, curve)
            if config.replay_endpoint:
                name, endpoint = "cache.events.replay_endpoint", config.replay_endpoint
                self._replay = _bind(self._context, zmq.ROUTER, name, endpoint, config, rank, curve)
                # Makes sending raise for a peer that has gone, and for one whose queue is full.
                self._replay.set(zmq.ROUTER_MANDATORY, 1)
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    @property
    def endpoint(self) -> str:
        """The address to subscribe at, with the port that was picked."""
        return self._pub.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str:
        """The address to ask for missed batches at, with the port that was picked; empty when there is no replay."""
        return self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if self._replay is not None else ""

    def round(self) -> None:
        """Publish the events since the last round, if there are any, as one batch, and answer questions. Never
        waits."""
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
        """Close the sockets; messages that subscribers haven't taken yet are dropped. Idempotent."""
        for answer in list(self._open):
            self._end(answer)
        self._context.destroy(linger=0)

    def _answer(self) -> None:
        """Read questions, and go on with the answers."""
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
        """Add some of the buffered batches to an answer; batches that have left the buffer meanwhile are a gap that
        the subscriber sees."""
        if answer.unsent or answer.over:
            return
        oldest = self._next - len(self._buffer)
        answer.seq = max(answer.seq, oldest)
        stop = min(self._next, answer.seq + most)
        some = islice(self._buffer, max(0, answer.seq - oldest), max(0, stop - oldest))
        answer.unsent.extend((seq.to_bytes(8, "big"), payload) for seq, payload in some)
        answer.seq, answer.over = stop, stop >= self._next

    def _add_truth(self, answer: _Answer) -> None:
        """Add some of the content of the tiers to an answer; an empty part where they hold nothing."""
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
        """Send up to `most` messages of an answer, and its end mark once all are sent; returns how many it sent."""
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
            # The peer's queue is full. If it stays so, the answer is given up; without an end mark the peer asks again.
            answer.stuck = self._now() if answer.stuck is None else answer.stuck
            if self._now() - answer.stuck > _PATIENCE_S:
                self._end(answer)
        except zmq.ZMQError:
            self._end(answer)  # The peer has gone.
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
            # A full queue: the subscriber sees the gap, and asks for the missing batches.
            return


def _bind(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    key: str,
    endpoint: str,
    config: EventsConfig,
    rank: int,
    curve: CurvePair | None,
) -> zmq.Socket[bytes]:
    host, port = _split(key, endpoint)
    if curve is None and not config.public and not _is_loopback(host):
        raise ConfigError(
            f"config key {key} is {endpoint}: KV events carry the prompts' tokens, and are sent to whoever asks. "
            "Use a loopback address, or make keys (twinpool certs new) and set security.curve_key, or set "
            "cache.events.public: true on a network of your own"
        )
    socket = context.socket(kind)
    # Room for an answer with its end mark and, of the truth, the batch that it begins with.
    socket.set(zmq.SNDHWM, min(config.buffer_batches, _QUEUED) + 2)
    socket.set(zmq.RCVHWM, _READ)
    socket.set(zmq.MAXMSGSIZE, _QUESTION_BYTES)
    socket.set(zmq.LINGER, 0)
    if curve is not None:
        curve.serve(socket)
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


_RUN_PAGES = 64
"""Pages in one event of the truth, at most."""
_MEDIA = {Tier.DEVICE: Medium.DEVICE, Tier.HOST: Medium.HOST, Tier.STORAGE: Medium.STORAGE}


class KVEventRecorder:
    """Publishes one tree's changes as KV events. It is the tree's observer of nodes.

    `now`: seconds since 1970. Raises `ConfigError` as `KVEventPublisher` does.
    """

    def __init__(
        self,
        tree: RadixTree,
        config: EventsConfig,
        now: Callable[[], float],
        rank: int,
        curve: CurvePair | None = None,
    ) -> None:
        self._tree = tree
        self._log = KVEventLog()
        self.publisher = KVEventPublisher(config, self._log, now, rank, self._truth, curve)
        tree.accounts.observe_nodes(self._node_changed)

    def _node_changed(self, node: TreeNode, tier: Tier, there: bool) -> None:
        """The full state of `node` has come to `tier`, or gone from it."""
        self._log.emit(self._stored(node, tier) if there else BlockRemoved(_MEDIA[tier], tuple(node.keys)))

    @property
    def endpoint(self) -> str:
        """Where the events are published."""
        return self.publisher.endpoint

    @property
    def replay_endpoint(self) -> str:
        """Where missed ones are asked for; empty: nowhere."""
        return self.publisher.replay_endpoint

    def round(self) -> None:
        self.publisher.round()

    def close(self) -> None:
        self.publisher.close()

    def _stored(self, node: TreeNode, tier: Tier, first: int = 0, count: int | None = None) -> BlockStored:
        """Returns the event for pages `first ..` of `node`: `count` of them, or all."""
        stop = node.pages if count is None else first + count
        size = 4 * self._tree.spec.page_tokens
        raw, chain = node.raw[first * size : stop * size], node.chain
        keys = tuple(chain[KEY_BYTES * page : KEY_BYTES * (page + 1)] for page in range(first, stop))
        parent = chain[KEY_BYTES * (first - 1) : KEY_BYTES * first] if first else node.parent_key
        return BlockStored(_MEDIA[tier], parent, keys, tuple(token_ids(raw)), self._tree.spec.page_tokens, node.salt)

    def _truth(self) -> Iterator[KvEvent]:
        """Yields events for the whole content of device and host, a few pages at a time, while it changes.

        Pages that are in a tier throughout are told. When the node at hand is split, its lower half is the same object
        and is told on; the upper half is a new node, and comes later.
        """
        cursor = self._tree.accounts.list.cursor()
        try:
            while (node := cursor.next()) is not None:
                number = node.start
                while node.linked and (number := max(number, node.start)) < node.start + node.pages:
                    first = number - node.start
                    count = min(_RUN_PAGES, node.pages - first)
                    held = [tier for tier in IN_TREE if self._tree.full in node.parts[tier]]
                    yield from [self._stored(node, tier, first, count) for tier in held]
                    number += count
        finally:
            cursor.close()
