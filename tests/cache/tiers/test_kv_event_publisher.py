"""Publisher and reader over real sockets."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import zmq
import zmq.auth

from twinpool.cache.tiers.kv_event_publisher import KVEventLog, KVEventPublisher, _Answer
from twinpool.contracts.clock import ManualClock, SystemClock
from twinpool.contracts.config.cache_config import EventsConfig
from twinpool.contracts.credentials.certificate_files import CurvePair, read_curve_pair
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.messages.kv_events import END, BlockRemoved, BlockStored, EventMedium, KvEvent, decode_batch
from twinpool.router.kv_indexer.event_replay import KVIndex
from twinpool.router.kv_indexer.kv_event_subscriber import KVEventSubscriber

LOOPBACK = "tcp://127.0.0.1:0"


class Worker:
    """A log, the truth that it tells, and a publisher."""

    def __init__(self, config: EventsConfig, knows_truth: bool = False, curve: CurvePair | None = None) -> None:
        self.log, self.truth, self.rng = KVEventLog(), KVIndex(), random.Random(0)
        truth = self.content if knows_truth else None
        self.publisher = KVEventPublisher(config, self.log, time.time, truth=truth, curve=curve)

    def content(self) -> list[KvEvent]:
        return [
            BlockStored(tier, entry.parent, (page,), entry.tokens, len(entry.tokens))
            for tier, pages in self.truth.pages.items()
            for page, entry in pages.items()
        ]

    def step(self) -> None:
        tier = self.rng.choice(list(EventMedium))
        events: list[KvEvent] = [BlockStored(tier, None, (self.rng.randbytes(16),), (1, 2), 2)]
        if self.rng.random() < 0.5 and self.truth.pages[tier]:
            events.append(BlockRemoved(tier, (self.rng.choice(list(self.truth.pages[tier])),)))
        for event in events:
            self.log.emit(event)
        self.truth.apply(events)
        self.publisher.round()


@contextmanager
def working(config: EventsConfig, knows_truth: bool = False, curve: CurvePair | None = None) -> Iterator[Worker]:
    worker = Worker(config, knows_truth, curve)
    try:
        yield worker
    finally:
        worker.publisher.close()


def both(**more: Any) -> EventsConfig:
    return EventsConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK, **more)


def reader_of(worker: Worker, answer_s: float = 5.0) -> KVEventSubscriber:
    publisher = worker.publisher
    return KVEventSubscriber(publisher.endpoint, SystemClock(), publisher.replay_endpoint, "kv-events", answer_s)


def turn(worker: Worker, reader: KVEventSubscriber, done: Callable[[], bool]) -> None:
    """Turn both loops until `done`."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "it did not come to that"
        worker.publisher.round()
        reader.poll(0.005)


def test_a_subscriber_sees_three_frames_with_a_big_endian_number() -> None:
    with working(both()) as worker, zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.subscribe(b"kv-events")
        sub.connect(worker.publisher.endpoint)
        while not sub.poll(20):
            worker.step()
        topic, seq, payload = sub.recv_multipart()
        assert topic == b"kv-events"
        assert len(seq) == 8
        worker.step()
        assert sub.poll(10_000)
        assert int.from_bytes(sub.recv_multipart()[1], "big") == int.from_bytes(seq, "big") + 1
        assert decode_batch(payload).rank == 0


def test_a_plain_client_replays_from_a_number_to_the_end_mark() -> None:
    with working(both(buffer_batches=3)) as worker, zmq.Context() as context, context.socket(zmq.REQ) as req:
        for _ in range(5):
            worker.step()
        req.connect(worker.publisher.replay_endpoint)
        req.send((3).to_bytes(8, "big"))
        while not req.poll(5):
            worker.publisher.round()
        # A REQ socket takes one message of the answer, as the clients of vLLM's own protocol see it.
        seq, payload = req.recv_multipart()
        assert int.from_bytes(seq, "big") == 3
        assert decode_batch(payload).events


def test_an_answer_ends_with_minus_one() -> None:
    with working(both(buffer_batches=3)) as worker, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        for _ in range(5):
            worker.step()
        dealer.connect(worker.publisher.replay_endpoint)
        dealer.send_multipart([b"", bytes(8)])
        messages: list[list[bytes]] = []
        while not messages or messages[-1][1] != END:
            worker.publisher.round()
            if dealer.poll(5):
                messages.append(dealer.recv_multipart())
        assert [int.from_bytes(m[1], "big", signed=True) for m in messages] == [2, 3, 4, -1]
        assert messages[-1] == [b"", b"\xff" * 8, b""]


def test_who_asks_for_batches_that_are_long_gone_gets_those_that_are_left_at_once() -> None:
    """However many went before: not a bounded part of those each round."""
    with working(both(buffer_batches=3)) as worker, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        for _ in range(1000):
            worker.step()
        dealer.connect(worker.publisher.replay_endpoint)
        dealer.send_multipart([b"", bytes(8)])
        assert worker.publisher._replay is not None
        assert worker.publisher._replay.poll(60_000), "the question"
        worker.publisher.round()
        assert dealer.poll(10_000)
        assert int.from_bytes(dealer.recv_multipart()[1], "big") == 997


def test_a_late_joiner_has_the_whole_index() -> None:
    with working(both()) as worker:
        for _ in range(50):
            worker.step()
        with reader_of(worker) as reader:
            turn(worker, reader, lambda: reader.complete and reader.index == worker.truth)
            for _ in range(50):
                worker.step()
            turn(worker, reader, lambda: reader.complete and reader.index == worker.truth)
            assert reader.lost == 0


def test_a_joiner_beyond_the_buffer_must_resynchronise_and_says_so() -> None:
    with working(both(buffer_batches=5)) as worker:
        for _ in range(50):
            worker.step()
        with reader_of(worker) as reader:
            turn(worker, reader, lambda: reader.lost == 1)
            turn(worker, reader, lambda: any(reader.index.pages.values()))
            assert not reader.complete


def test_a_joiner_beyond_the_buffer_gets_the_truth_where_it_is_known() -> None:
    with working(both(buffer_batches=5), knows_truth=True) as worker:
        for _ in range(50):
            worker.step()
        with reader_of(worker) as reader:
            turn(worker, reader, lambda: reader.complete)
            assert reader.index == worker.truth


@pytest.mark.slow
def test_a_new_publisher_at_the_same_place_is_noticed() -> None:
    with working(both()) as worker:
        for _ in range(10):
            worker.step()
        with reader_of(worker) as reader:
            turn(worker, reader, lambda: reader.complete and reader.index == worker.truth)
            same = EventsConfig(endpoint=worker.publisher.endpoint, replay_endpoint=worker.publisher.replay_endpoint)
            worker.publisher.close()
            with working(same) as successor:
                successor.step()
                turn(successor, reader, lambda: reader.restarts == 1)
                turn(successor, reader, lambda: reader.complete)
                assert reader.index == successor.truth


def test_a_publisher_that_nobody_reads_does_not_wait() -> None:
    with working(both(buffer_batches=4)) as worker, zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.set(zmq.RCVHWM, 1)
        sub.subscribe(b"")
        sub.connect(worker.publisher.endpoint)
        for _ in range(2000):
            worker.step()
        assert worker.publisher.endpoint.startswith("tcp://127.0.0.1:")


def test_a_question_without_an_answer_is_asked_again_by_the_clock() -> None:
    clock = ManualClock()
    config = EventsConfig(endpoint=LOOPBACK)
    with working(config) as worker, zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        port = mute.bind_to_random_port("tcp://127.0.0.1")
        with KVEventSubscriber(worker.publisher.endpoint, clock, f"tcp://127.0.0.1:{port}", answer_s=5.0) as reader:
            askers = set()
            for _ in range(3):
                assert mute.poll(10_000)
                client, _, question = mute.recv_multipart()
                askers.add(client)
                assert question == bytes(8)
                clock.advance(5.0)
                reader.poll()
            assert len(askers) == 3, "each question has its own connection"
            assert not mute.poll(20)
            assert not reader.complete


def test_rubbish_on_the_sockets_is_counted_or_left_alone() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as pub, working(both()) as worker:
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        with KVEventSubscriber(f"tcp://127.0.0.1:{port}", SystemClock()) as reader:
            while not reader.malformed:
                pub.send_multipart([b"", b"short", b"x"])
                reader.poll(0.01)
            while not reader.damaged:
                pub.send_multipart([b"", bytes(8), b"\xc1"])
                reader.poll(0.01)
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(worker.publisher.replay_endpoint)
            for frames in ([b"x"], [b"", b"123"], [b"", b"", b"", b""], [b"", bytes(8)]):
                dealer.send_multipart(frames)
            while not dealer.poll(5):
                worker.publisher.round()
            assert dealer.recv_multipart() == [b"", END, b""]
            assert not dealer.poll(20)


class SlowPeer:
    """The replay socket for a peer whose queue has room for so many messages more."""

    def __init__(self) -> None:
        self.room, self.taken = 0, list[bytes]()

    def poll(self, timeout: int) -> int:
        return 0

    def send_multipart(self, frames: tuple[bytes, ...], flags: int) -> None:
        if not self.room:
            raise zmq.Again
        self.room -= 1
        self.taken.append(frames[2])


def test_who_takes_its_answer_slowly_has_all_of_it_and_only_who_takes_nothing_is_given_up() -> None:
    """The patience counts from the latest message that the subscriber has taken."""
    clock = ManualClock()
    for pace_s, whole in ((4.0, True), (6.0, False)):
        publisher, peer = KVEventPublisher(both(), KVEventLog(), clock.now), SlowPeer()
        assert publisher._replay is not None
        publisher._replay.close()
        publisher._replay = cast(Any, peer)
        for n in range(6):
            publisher._log.emit(BlockStored(EventMedium.HOST, None, (b"%16d" % n,), (1, 2), 2))
            publisher.round()
        publisher._open.append(_Answer(b"a peer", 0, None))
        for _ in range(12):
            publisher.round()
            clock.advance(pace_s)
            peer.room = int(whole)
        wanted = [n.to_bytes(8, "big") for n in range(6)]
        assert peer.taken == ([*wanted, END] if whole else [])
        assert not publisher._open
        publisher.close()


def test_d9_a_stranger_can_neither_fill_the_memory_nor_hold_up_a_round() -> None:
    """What is longer than any question ends its connection unread; of a flood each round takes in a part."""
    with working(both()) as worker, zmq.Context() as context:
        replay = worker.publisher.replay_endpoint
        with context.socket(zmq.DEALER) as large, large.get_monitor_socket(zmq.EVENT_DISCONNECTED) as ended:
            large.connect(replay)
            large.send_multipart([b"", bytes(8192)])
            assert ended.poll(60_000), "8 KB were taken in"
        with context.socket(zmq.DEALER) as flood:
            flood.set(zmq.SNDHWM, 0)
            flood.connect(replay)
            for _ in range(10_000):
                flood.send_multipart([b"", b"what?"])
            flood.send_multipart([b"", (0).to_bytes(8, "big")])
            turns, deadline = 0, time.monotonic() + 60
            while not flood.poll(0):
                assert time.monotonic() < deadline, "the question behind the flood was lost"
                worker.publisher.round()
                turns += 1
            assert turns > 100
            assert flood.recv_multipart()[1] == END


@pytest.fixture
def curve(tmp_path: Path) -> CurvePair:
    zmq.auth.create_certificates(tmp_path, "curve")
    zmq.auth.create_certificates(tmp_path, "other")
    return read_curve_pair(tmp_path / "curve.key_secret")


def test_with_keys_only_who_knows_the_public_one_reads_events(curve: CurvePair, tmp_path: Path) -> None:
    """Over both sockets; and such endpoints may leave the loopback."""
    config = EventsConfig(endpoint="tcp://0.0.0.0:0", replay_endpoint="tcp://0.0.0.0:0")
    with working(config, curve=curve) as worker:
        at = [worker.publisher.endpoint, worker.publisher.replay_endpoint]
        live, replay = (endpoint.replace("0.0.0.0", "127.0.0.1") for endpoint in at)
        keys = [None, tmp_path / "other.key", tmp_path / "curve.key"]
        strangers_and_reader = [KVEventSubscriber(live, SystemClock(), replay, "kv-events", key_file=k) for k in keys]
        reader = strangers_and_reader[-1]
        worker.step()
        turn(worker, reader, lambda: reader.complete and bool(sum(map(len, reader.index.pages.values()))))
        for _ in range(20):
            worker.step()
        turn(worker, reader, lambda: reader.index.pages == worker.truth.pages)
        for stranger in strangers_and_reader[:-1]:
            stranger.poll(0.1)
            assert not any(stranger.index.pages.values())
            assert not stranger.complete
        for one in strangers_and_reader:
            one.close()


def test_a_question_that_finds_no_room_is_asked_again_when_its_answer_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a connection is being refused."""
    send, clock = zmq.Socket.send_multipart, ManualClock()
    refused: list[Any] = []

    def once(socket: Any, *message: Any, **options: Any) -> Any:
        if socket.type == zmq.DEALER and not refused:
            refused.append(socket)
            raise zmq.Again
        return send(socket, *message, **options)

    monkeypatch.setattr(zmq.Socket, "send_multipart", once)
    with working(both()) as worker:
        worker.step()
        publisher = worker.publisher
        reader = KVEventSubscriber(publisher.endpoint, clock, publisher.replay_endpoint, "kv-events", 5.0)
        with reader:
            assert refused
            clock.advance(4.9)
            reader.poll()
            assert not reader.complete
            clock.advance(0.2)
            turn(worker, reader, lambda: reader.complete)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.1.2.3", "example.org", "[::]"])
def test_d9_an_endpoint_off_the_loopback_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"cache\.events\.public: true"):
        KVEventPublisher(EventsConfig(endpoint=f"tcp://{host}:0"), KVEventLog(), time.time)


def test_d9_a_replay_endpoint_off_the_loopback_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="replay_endpoint"):
        KVEventPublisher(EventsConfig(endpoint=LOOPBACK, replay_endpoint="tcp://0.0.0.0:0"), KVEventLog(), time.time)


def test_a_public_endpoint_is_bound_where_the_operator_says_so() -> None:
    publisher = KVEventPublisher(EventsConfig(endpoint="tcp://0.0.0.0:0", public=True), KVEventLog(), time.time)
    assert publisher.endpoint.startswith("tcp://0.0.0.0:")
    publisher.close()
    publisher.close()


@pytest.mark.parametrize(
    "endpoint", ["", "127.0.0.1:5557", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "udp://127.0.0.1:1"]
)
def test_an_endpoint_of_another_form_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        KVEventPublisher(EventsConfig(endpoint=endpoint), KVEventLog(), time.time)


def test_a_port_in_use_is_refused_by_name() -> None:
    refused = pytest.raises(ConfigError, match=r"cache\.events\.endpoint: cannot listen on")
    with working(EventsConfig(endpoint=LOOPBACK)) as worker, refused:
        KVEventPublisher(EventsConfig(endpoint=worker.publisher.endpoint), KVEventLog(), time.time)
