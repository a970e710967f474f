"""What strangers send in a publisher's place is bounded: a frame that is too long is never taken in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from twinpool.contracts.clock import ManualClock, SystemClock
from twinpool.contracts.messages.kv_events import END, TRUTH, BlockStored, EventMedium, encode_batch
from twinpool.router.kv_indexer.kv_event_subscriber import KVEventSubscriber

PAGE = bytes(range(16))
STORED = encode_batch(1.0, [BlockStored(EventMedium.DEVICE, None, (PAGE,), (1, 2), 2)], 0)
LONG = bytes(5_000)
FRAME_BYTES = 1_000


@contextmanager
def publisher() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """The two sockets of a publisher: batches (its subscriptions can be read), and answers."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as pub, context.socket(zmq.ROUTER) as replay:
        pub.set(zmq.XPUB_VERBOSE, 1)
        for socket in (pub, replay):
            socket.set(zmq.LINGER, 0)
            socket.bind("tcp://127.0.0.1:0")
        yield pub, replay


def endpoint(socket: zmq.Socket[bytes]) -> str:
    bound = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.decode()


def heard(socket: zmq.Socket[bytes], reader: KVEventSubscriber) -> list[bytes]:
    """The next message at the publisher's socket, while the reader goes on."""
    deadline = time.monotonic() + 60
    while not socket.poll(2):
        assert time.monotonic() < deadline
        reader.poll()
    return socket.recv_multipart()


def test_a_batch_that_is_too_long_is_not_taken_in_and_the_next_one_is() -> None:
    with publisher() as (pub, _), KVEventSubscriber(endpoint(pub), SystemClock(), frame_bytes=FRAME_BYTES) as reader:
        assert heard(pub, reader) == [b"\x01"], "it has subscribed"
        pub.send_multipart([b"", bytes(8), LONG])
        while heard(pub, reader) != [b"\x01"]:
            pass  # It left, and comes back.
        pub.send_multipart([b"", (1).to_bytes(8, "big"), STORED])
        deadline = time.monotonic() + 60
        while PAGE not in reader.index.pages[EventMedium.DEVICE]:
            assert time.monotonic() < deadline
            reader.poll(0.002)
        assert (reader.damaged, reader.malformed) == (0, 0), "nothing of the long one was read"


def test_an_answer_that_is_too_long_is_not_taken_in_and_asked_for_again() -> None:
    with publisher() as (pub, replay):
        clock = ManualClock()
        reader = KVEventSubscriber(endpoint(pub), clock, endpoint(replay), answer_s=5.0, frame_bytes=FRAME_BYTES)
        with reader, replay.get_monitor_socket(zmq.EVENT_DISCONNECTED) as left:
            client, _, question = heard(replay, reader)
            assert question in (TRUTH, bytes(8))
            replay.send_multipart([client, b"", bytes(8), LONG])
            assert left.poll(60_000), "it leaves where it is sent so much"
            replay.disable_monitor()
            clock.advance(5.0)
            client, _, question = heard(replay, reader)
            assert question in (TRUTH, bytes(8)), "it asks again"
            replay.send_multipart([client, b"", bytes(8), STORED])
            replay.send_multipart([client, b"", END, b""])
            deadline = time.monotonic() + 60
            while not reader.complete:
                assert time.monotonic() < deadline
                reader.poll(0.002)
            assert PAGE in reader.index.pages[EventMedium.DEVICE]
            assert (reader.damaged, reader.malformed) == (0, 0)


def test_a_long_answer_has_its_time_from_its_latest_part() -> None:
    clock = ManualClock()
    with publisher() as (pub, replay), KVEventSubscriber(endpoint(pub), clock, endpoint(replay)) as reader:
        client, _, _ = heard(replay, reader)
        for number in range(3):
            clock.advance(4.0)
            page = bytes([number]) * 16
            stored = encode_batch(1.0, [BlockStored(EventMedium.DEVICE, None, (page,), (1, 2), 2)], 0)
            replay.send_multipart([client, b"", number.to_bytes(8, "big"), stored])
            while page not in reader.index.pages[EventMedium.DEVICE]:
                assert not replay.poll(2), "it asks again"
                reader.poll()
        replay.send_multipart([client, b"", END, b""])
        while not reader.complete:
            assert not replay.poll(2), "it asks again"
            reader.poll()
