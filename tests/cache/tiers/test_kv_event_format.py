"""The bytes on the wire, read by a decoder written here by hand from the format's description."""

import struct
from typing import Any

import msgpack
import pytest

from twinpool.cache.tiers.kv_event_publisher import KVEventLog
from twinpool.contracts.errors import WireError
from twinpool.contracts.messages.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventMedium,
    decode_batch,
    encode_batch,
)
from twinpool.router.kv_indexer.event_replay import KVIndex

A, B, C = bytes(16), bytes(range(16)), b"\xff" * 16


class Decoder:
    """A decoder for the part of msgpack that the format uses; refuses any other byte."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def value(self) -> Any:
        lead = self.take(1)[0]
        if lead < 0x80:
            return lead
        if lead & 0xF0 == 0x90:
            return [self.value() for _ in range(lead & 0x0F)]
        if lead & 0xE0 == 0xA0:
            return self.take(lead & 0x1F).decode()
        match lead:
            case 0xC0:
                return None
            case 0xC4:
                return self.take(self.take(1)[0])
            case 0xCB:
                return struct.unpack(">d", self.take(8))[0]
            case 0xCD:
                return struct.unpack(">H", self.take(2))[0]
            case 0xCE:
                return struct.unpack(">I", self.take(4))[0]
            case 0xDC:
                return [self.value() for _ in range(struct.unpack(">H", self.take(2))[0])]
        raise AssertionError(f"unexpected byte {lead:#x} at {self.at - 1}")


def test_a_batch_is_tagged_arrays_in_the_order_that_indexers_read() -> None:
    events = (
        BlockStored(EventMedium.DEVICE, None, (A, B), (1, 2, 300, 70000), 2),
        BlockStored(EventMedium.HOST, B, (C,), tuple(range(16)), 16, salt="tenant"),
        BlockRemoved(EventMedium.STORAGE, (A,)),
        AllBlocksCleared(),
        AllBlocksCleared(EventMedium.HOST),
    )
    payload = encode_batch(1234.5, events, 3)
    decoder = Decoder(payload)
    assert decoder.value() == [
        1234.5,
        [
            ["BlockStored", [A, B], None, [1, 2, 300, 70000], 2, None, "GPU", None],
            ["BlockStored", [C], B, list(range(16)), 16, None, "CPU_PINNED", None, [["tenant"]]],
            ["BlockRemoved", [A], "DISK"],
            ["AllBlocksCleared"],
            ["AllBlocksCleared", "CPU_PINNED"],
        ],
        3,
    ]
    assert decoder.at == len(payload)


def test_each_block_of_a_run_has_the_salt() -> None:
    """Indexers read the extra keys block by block."""
    payload = encode_batch(1.0, (BlockStored(EventMedium.DEVICE, None, (A, B, C), (1, 2, 3), 1, salt="tenant"),), None)
    ((_, (event,), _),) = [Decoder(payload).value()]
    assert event[-1] == [["tenant"]] * 3


def test_the_first_bytes_of_a_batch_are_these() -> None:
    payload = encode_batch(0.0, (BlockRemoved(EventMedium.DEVICE, (A,)),), 0)
    assert payload == (
        b"\x93" + b"\xcb" + bytes(8) + b"\x91" + b"\x93\xacBlockRemoved" + b"\x91\xc4\x10" + A + b"\xa3GPU" + b"\x00"
    )


def test_what_was_encoded_is_decoded() -> None:
    events = (
        BlockStored(EventMedium.STORAGE, C, (A, B), (5, 6), 1, salt="s"),
        BlockRemoved(EventMedium.HOST, (A, B)),
        AllBlocksCleared(EventMedium.DEVICE),
    )
    assert decode_batch(encode_batch(2.0, events, None)).events == events


def test_batches_of_other_engines_are_read() -> None:
    short = msgpack.packb([1.0, [["BlockStored", [A], None, [7], 1, None], ["BlockRemoved", [A]]]])
    assert decode_batch(short).events == (
        BlockStored(EventMedium.DEVICE, None, (A,), (7,), 1),
        BlockRemoved(EventMedium.DEVICE, (A,)),
    )
    named = msgpack.packb([1, [["BlockStored", [A], None, [7], 1, None, "CPU", None, None, 0]], 0])
    assert decode_batch(named).events == (BlockStored(EventMedium.HOST, None, (A,), (7,), 1),)
    cleared = msgpack.packb([1.0, [["AllBlocksCleared"], ["AllBlocksCleared", None], ["AllBlocksCleared", "CPU"]]])
    assert decode_batch(cleared).events == (AllBlocksCleared(), AllBlocksCleared(), AllBlocksCleared(EventMedium.HOST))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"\x91" * 5000,
        msgpack.packb({"ts": 1.0}),
        msgpack.packb([1.0, [["Unheard"]], None]),
        msgpack.packb([1.0, [[]], None]),
        msgpack.packb([1.0, ["BlockStored"], None]),
        msgpack.packb([1.0, [["BlockRemoved", ["text"], "GPU"]], None]),
        msgpack.packb([1.0, [["BlockRemoved", [A], "TAPE"]], None]),
        msgpack.packb([1.0, [["BlockRemoved", [A], ["GPU"]]], None]),
        msgpack.packb([1.0, [["BlockStored", [A], None, [1, 2, 3], 2, None, "GPU", None]], None]),
        msgpack.packb([1.0, [["BlockStored", [], None, [], 2, None, "GPU", None]], None]),
        msgpack.packb([1.0, [["BlockStored", [A], 7, [1], 1, None, "GPU", None]], None]),
        msgpack.packb([1.0, [["BlockStored", [A], None, ["x"], 1, None, "GPU", None]], None]),
        msgpack.packb([1.0, [["BlockStored", [A], None, [1], 1, None, "GPU", None, 5]], None]),
        msgpack.packb([1.0, [["BlockStored", [A], None, [1], True, None, "GPU", None]], None]),
        msgpack.packb([1.0, [], "rank"]),
    ],
)
def test_a_malformed_payload_is_a_wire_error(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode_batch(payload)


def test_the_index_keeps_parents_and_tokens_for_each_tier() -> None:
    index = KVIndex()
    index.apply(
        [
            BlockStored(EventMedium.DEVICE, None, (A, B), (1, 2, 3, 4), 2),
            BlockStored(EventMedium.HOST, A, (B,), (3, 4), 2),
        ]
    )
    assert index.pages[EventMedium.DEVICE][B].parent == A
    assert index.pages[EventMedium.DEVICE][B].tokens == (3, 4)
    index.apply([BlockRemoved(EventMedium.DEVICE, (B, C))])
    assert list(index.pages[EventMedium.DEVICE]) == [A]
    assert list(index.pages[EventMedium.HOST]) == [B]
    index.apply([AllBlocksCleared(EventMedium.HOST)])
    assert not index.pages[EventMedium.HOST]
    assert index.pages[EventMedium.DEVICE]


def test_a_log_gives_each_event_once_in_order() -> None:
    log = KVEventLog()
    log.emit(AllBlocksCleared())
    log.emit(BlockRemoved(EventMedium.HOST, (A,)))
    assert log.drain() == (AllBlocksCleared(), BlockRemoved(EventMedium.HOST, (A,)))
    assert log.drain() == ()
