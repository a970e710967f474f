import contextlib
import zlib
from dataclasses import replace

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.fingerprint import Fingerprint
from twinpool.contracts.sampling_params import TokenLogprob
from twinpool.transfer.net.zmq_sockets import CurveKeys
from twinpool.transfer.planes.data_plane import SLOT_BYTES
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.room_messages import HandoverMetadata, copy_out, pack

ROOM = RoomId("room-1")
MARK = Fingerprint(7, "a layout", "fast:avx2", "weights")
EXAMPLES: list[m.RoomMessage] = [
    m.Hello("decode-0", 2, 1, MARK, {"model": "x", "page_tokens": 16}, "shm", {"pid": 5}, 5, 99, "boot"),
    m.Welcome("prefill-0", 1, MARK, 5, 99, "boot", ()),
    m.Welcome("prefill-0", 1, MARK, 5, 99, "boot", (m.RankProcess(6, 98, "boot"),)),
    m.PeerRefused("page_tokens: 16 and 64"),
    m.PageGrant(ROOM, (m.GrantedPages("full", 2, (4, 5), (0, 7)), m.GrantedPages("state", 3, (1,), (9,))), 3, 1, 2**62),
    m.AbortRoom(ROOM, "cancelled", True, 2**62),
    m.MessageRejected("no message has the tag 99", ROOM),
    m.HandoverReceived(ROOM),
    m.PagesWritten(ROOM, 7, (m.PageTags("full", 2, (b"k" * 16,), (2**64 - 1,)),)),
    m.SlotWritten(ROOM, 7),
    m.WriterQuiesced(ROOM, 7),
    m.RoomFailed(ROOM, 7, ErrorKind.DAMAGED, "a page"),
    m.NothingToDecode(ROOM, 7),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda x: type(x).__name__)
def test_every_message_survives_the_wire(message: m.RoomMessage) -> None:
    assert m.decode(m.encode(message)) == message


def test_every_type_of_the_table_is_tried() -> None:
    assert {type(x) for x in EXAMPLES} == set(m.TAGS.values())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xc1", "not msgpack"),
        (msgpack.packb([99, 1]), "no message has the tag 99"),
        (msgpack.packb("hello"), "no message has the tag 'hello'"),
        (msgpack.packb([6]), "HandoverReceived has 1 fields, got 0"),
        (msgpack.packb([6, 5]), "HandoverReceived.room must be"),
        (msgpack.packb([4, "r", [["full", 0, [1, "x"], [0, 0]]], 1, 1, 1]), "GrantedPages.indices must be"),
        (msgpack.packb([4, "r", [["full", 0, [1]]], 1, 1, 1]), "GrantedPages has 4 fields, got 3"),
        (msgpack.packb([4, "r", [5], 1, 1, 1]), "PageGrant.places must be"),
        (msgpack.packb([2, "p", 1, 5, 1, 1, "b", []]), "Welcome.fingerprint must be Fingerprint, got 5"),
        (msgpack.packb([2, "p", 1, [1, 2, "n", "w"], 1, 1, "b", []]), "Fingerprint.layout must be"),
        (msgpack.packb([19, "r", 1, 7, "m", False]), "RoomFailed.kind is no error kind: 7"),
    ],
)
def test_d9_only_the_tables_types_come_out_of_bytes(data: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        m.decode(data)


NOTICES = [x for x in EXAMPLES if isinstance(x, m.Notice)]


@pytest.mark.parametrize("notice", NOTICES, ids=lambda x: type(x).__name__)
def test_a9_a_notice_that_a_bit_was_turned_of_on_its_way_is_none(notice: m.Notice) -> None:
    """One turned bit makes `NothingToDecode` of `PagesWritten`: nothing would be decoded, and nobody told (1293)."""
    data = m.encode_notice(notice)
    assert m.decode_notice(data) == m.decode_notice(memoryview(data)) == notice
    for bit in range(8 * len(data)):
        turned = bytearray(data)
        turned[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError, match="checksum"):
            m.decode_notice(bytes(turned))
    for length in range(len(data)):
        with pytest.raises(WireError):
            m.decode_notice(data[:length])


def test_a_failure_of_a_kind_that_only_a_newer_build_knows_is_one_of_the_worker() -> None:
    unknown = m.decode(msgpack.packb([19, "r", 1, "weird", "m", False]))
    assert unknown == m.RoomFailed(RoomId("r"), 1, ErrorKind.WORKER, "m")


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda x: type(x).__name__)
def test_fields_of_a_newer_build_are_skipped(message: m.RoomMessage) -> None:
    assert m.decode(msgpack.packb([*msgpack.unpackb(m.encode(message)), "of tomorrow", {"what": [1]}])) == message


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_d9_random_bytes_are_refused_or_a_message(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert type(m.decode(data)) in m.TAGS.values()


def metadata(top: int) -> HandoverMetadata:
    logprob = TokenLogprob(7, -0.25, tuple((i, -float(i) / 3) for i in range(top)))
    return HandoverMetadata(ROOM, 4, 7, logprob, 32, 10)


def test_d6_a_slot_carries_all_that_prefill_computed() -> None:
    slots = torch.zeros(3, SLOT_BYTES, dtype=torch.uint8)
    for sent in (metadata(20), HandoverMetadata(ROOM, 4, 7, None, 0, 10)):
        data = pack(sent)
        slots[1, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        assert copy_out(slots, 1, ROOM, 4) == sent


def test_a2_a_strangers_or_damaged_slot_is_refused_and_what_was_read_is_a_copy() -> None:
    slots = torch.zeros(2, SLOT_BYTES, dtype=torch.uint8)
    data = pack(metadata(3))
    slots[0, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with pytest.raises(WireError, match="holds room room-1 epoch 4, wanted room-2 epoch 4"):
        copy_out(slots, 0, RoomId("room-2"), 4)
    with pytest.raises(WireError, match="epoch 4, wanted room-1 epoch 5"):
        copy_out(slots, 0, ROOM, 5)
    read = copy_out(slots, 0, ROOM, 4)
    slots[0, 20] ^= 1
    assert read == metadata(3)
    with pytest.raises(WireError, match="damaged"):
        copy_out(slots, 0, ROOM, 4)
    with pytest.raises(WireError):
        copy_out(slots, 1, ROOM, 4)


def test_metadata_that_is_too_large_is_an_error_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="doesn't fit"):
        pack(metadata(SLOT_BYTES // 8))


def test_metadata_may_fill_a_slot_to_its_last_byte_and_no_byte_more() -> None:
    """What is measured is all that is written: of the longest metadata, and of one that is longer by a byte."""
    some = replace(metadata(0), room=RoomId("r" * 1000))
    most = replace(metadata(0), room=RoomId("r" * (1000 + SLOT_BYTES - len(pack(some)))))
    slots = torch.zeros(1, SLOT_BYTES, dtype=torch.uint8)
    slots[0] = torch.frombuffer(bytearray(pack(most)), dtype=torch.uint8)
    assert copy_out(slots, 0, most.room, 4) == most
    with pytest.raises(ValueError, match="doesn't fit"):
        pack(replace(most, room=RoomId(most.room + "r")))


def test_d6_slots_of_builds_with_a_draft_models_state_are_read_and_those_builds_read_ours() -> None:
    """Such builds packed and unpacked exactly seven values."""
    ours = msgpack.unpackb(pack(metadata(2))[8:], use_list=False)
    *before, seventh = ours
    assert (len(ours), seventh) == (7, None)
    of_room, of_slot, token, (of_token, _, top), cached, computed = before
    assert (of_room, of_slot, token, of_token, len(top), cached, computed) == (ROOM, 4, 7, 7, 2, 32, 10), "their order"
    for told in ([*before, ("bfloat16", b"h" * 64, (5, 9), (0.5, 0.25))], before, [*before, None, "of a later build"]):
        body = msgpack.packb(tuple(told))
        data = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body
        slots = torch.zeros(1, SLOT_BYTES, dtype=torch.uint8)
        slots[0, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        assert copy_out(slots, 0, ROOM, 4) == metadata(2)


def test_one_secret_gives_one_key_pair_and_short_secrets_are_refused() -> None:
    assert CurveKeys.from_secret(b"s" * 16) == CurveKeys.from_secret(b"s" * 16)
    assert CurveKeys.from_secret(b"s" * 16) != CurveKeys.from_secret(b"t" * 16)
    with pytest.raises(ValueError, match="16 bytes"):
        CurveKeys.from_secret(b"short")


def test_the_room_of_a_message_that_can_not_be_decoded_is_told_as_far_as_it_is_there() -> None:
    tags = {cls: tag for tag, cls in m.TAGS.items()}
    assert m.room_of(msgpack.packb([tags[m.AbortRoom], "room-1"])) == "room-1", "though its reason lacks"
    assert m.room_of(msgpack.packb([tags[m.AbortRoom]])) == ""
    assert m.room_of(msgpack.packb([tags[m.Hello], "room-1"])) == "", "it is no message of a room"
    assert m.room_of(msgpack.packb([tags[m.AbortRoom], 5])) == ""
    assert m.room_of(msgpack.packb([True, "room-1"])) == ""
    assert m.room_of(b"") == m.room_of(msgpack.packb([])) == m.room_of(msgpack.packb("x")) == ""
