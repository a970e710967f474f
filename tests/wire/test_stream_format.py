"""The bytes of the streams between routers and workers: what a build writes today is read by later ones, fields come
and go at the end alone, and what no build writes is refused with its path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest

from tests.wire.instances import fields_of, full, is_struct, union
from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation, RequestId, RoomId
from twinpool.contracts.key_file import TENANT_CHARS
from twinpool.contracts.message_types import Message
from twinpool.contracts.messages.router_commands import Cancel, Command, PeerRef, Submit
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL, StreamEnd, StreamOpening
from twinpool.contracts.messages.worker_events import Done, Event, Tokens
from twinpool.contracts.sampling_params import SamplingParams, TokenLogprob
from twinpool.contracts.wire.message_codec import (
    FrameWriter,
    decode_commands,
    decode_events,
    decode_opening,
    encode_events,
    encode_opening,
    opens_version_1,
    refusal_of_version_1,
)

KINDS: list[type[Message]] = [*union(Command), *union(Event)]
RECORDED = Path(__file__).with_name("stream_messages.json")
"""Each message as the first build that had it wrote it: names and values in the order of the wire. A line is never
changed; `python -m tests.wire.test_stream_format` adds what is new."""
HEX = "hex:"
"""What stands before bytes in JSON."""
INT, TEXT, FLOAT = 2**32, "text", 0.5


def decode(values: list[Any]) -> Any:
    """A message of either union, given as what it is packed from."""
    events = values[0] in {cls.__struct_config__.tag for cls in union(Event)}
    if events:
        frame, left_out = decode_events(msgpack.packb([1, [values]]))
        messages: tuple[Any, ...] = frame.events
    else:
        messages, left_out = decode_commands(msgpack.packb([[values]]))
    assert not left_out
    return messages[0]


def raw(message: Message) -> list[Any]:
    values: list[Any] = msgpack.unpackb(msgspec.msgpack.encode(message))
    return values


def named(value: Any) -> Any:
    """A message as JSON has it, with the names of its fields in the order of the wire."""
    if is_struct(type(value)):
        return {name: named(getattr(value, name)) for name in fields_of(type(value))}
    if isinstance(value, tuple):
        return [named(one) for one in value]
    return f"{HEX}{value.hex()}" if isinstance(value, bytes) else value


def unnamed(value: Any) -> Any:
    """What such JSON is packed from. Dicts that aren't messages are those of marks and tiers."""
    if isinstance(value, dict):
        return [unnamed(one) for one in value.values()]
    if isinstance(value, str) and value.startswith(HEX):
        return bytes.fromhex(value.removeprefix(HEX))
    return [unnamed(one) for one in value] if isinstance(value, list) else value


def recorded() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


def packed(cls: type[Message], values: dict[str, Any]) -> list[Any]:
    maps = {name for name, (kind, _) in fields_of(cls).items() if str(kind).startswith("dict")}
    fields = [value if name in maps else unnamed(value) for name, value in values.items()]
    return [cls.__struct_config__.tag, *fields]


def assert_holds(value: Any, recorded: Any) -> None:
    """Whatever was recorded is there under its name; fields that came later have their defaults."""
    if is_struct(type(value)):
        for name, (_, default) in fields_of(type(value)).items():
            if name in recorded:
                assert_holds(getattr(value, name), recorded[name])
            else:
                assert getattr(value, name) == default, name
        assert recorded.keys() <= fields_of(type(value)).keys()
    elif isinstance(value, tuple):
        for one, before in zip(value, recorded, strict=True):
            assert_holds(one, before)
    else:
        assert named(value) == recorded


# ---------------------------------------------------------------- builds of one protocol


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_what_earlier_builds_of_the_protocol_wrote_is_read_as_they_meant_it(cls: type[Message]) -> None:
    before = recorded()[str(cls.__struct_config__.tag)]
    assert_holds(decode(packed(cls, before)), before)


def test_every_field_of_every_message_is_recorded_in_its_place() -> None:
    """What is recorded is only ever added to; a new protocol begins a new record."""
    now = {str(cls.__struct_config__.tag): named(full(cls)) for cls in KINDS}
    before = recorded()
    assert before.keys() == now.keys()
    for kind, fields in now.items():
        assert list(names(before[kind])) == list(names(fields)), kind


def names(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, one in value.items():
            yield f"{path}.{name}"
            yield from names(one, f"{path}.{name}")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from names(value[0], path)


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_fields_that_an_older_build_lacks_have_their_defaults_and_needed_ones_are_missed(cls: type[Message]) -> None:
    whole = full(cls)
    values, fields = raw(whole), list(fields_of(cls).items())
    for count in range(len(fields)):
        rest = dict(fields[count:])
        shorter = values[: 1 + count]
        if any(default is not_given for (_, default) in rest.values()):
            with pytest.raises(WireError, match="message 0: Expected `array` of at least length"):
                decode(shorter)
        else:
            want = {name: default for name, (_, default) in rest.items()}
            assert decode(shorter) == msgspec.structs.replace(whole, **want)


not_given = next(default for _, default in fields_of(Cancel).values())


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_fields_of_a_newer_build_are_passed_over(cls: type[Message]) -> None:
    whole = full(cls)
    for more in ([None], [1, "x", [[{}]], {"a": b"b"}], [b"\xff" * 70_000]):
        assert decode([*raw(whole), *more]) == whole


def test_kinds_of_a_newer_build_are_left_out_one_by_one_and_counted() -> None:
    first, last = Cancel(RequestId("a"), 0), Cancel(RequestId("b"), 0, True)
    kinds = [["newer"], raw(first), ["newest", 1, {"deep": [[[]]]}], raw(last)]
    assert decode_commands(msgpack.packb([kinds])) == ((first, last), 2)
    done = Done(RequestId("a"), 0, "stop")
    frame, left_out = decode_events(msgpack.packb([7, [["newer"], raw(done)], None]))
    assert (frame.incarnation, frame.events, left_out) == (7, (done,), 1)
    frame, left_out = decode_events(msgpack.packb([7, [["newer"]], ["why", True, "more"], "more"]))
    assert (frame.end, frame.events, left_out) == (StreamEnd("why", True), (), 1)


# ---------------------------------------------------------------- what no build writes


def places(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    for at, inner in enumerate(value if isinstance(value, list) else ()):
        yield (*path, at)
        yield from places(inner, (*path, at))


def changed(values: list[Any], path: tuple[int, ...], junk: Any) -> list[Any]:
    copy: list[Any] = msgpack.unpackb(msgpack.packb(values))
    inner = copy
    for at in path[:-1]:
        inner = inner[at]
    inner[path[-1]] = junk
    return copy


def reached(values: Any, path: tuple[int, ...]) -> Any:
    for at in path:
        values = values[at]
    return values


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_a_value_of_another_type_is_refused_with_its_path(cls: type[Message]) -> None:
    values = raw(full(cls))
    for path in places(values):
        if path == (0,):
            continue
        of_bytes = isinstance(reached(values, path), bytes)
        junks: tuple[Any, ...] = ("text" if of_bytes else b"bytes", msgpack.ExtType(5, b"x"), [[[]]], {1: 2})
        for junk in junks:
            where = "".join(f"[{at}]" for at in path)
            with pytest.raises(WireError) as found:
                decode(changed(values, path, junk))
            # Tuples and lists that are wrong within are refused by a path that goes further in.
            assert "message 0: Expected" in str(found.value)
            assert f"`${where}" in str(found.value), (path, str(found.value))


SUBMIT = Submit(
    RequestId("r"), 0, RoomId("m"), (5, 6), 2, SamplingParams(4, logit_bias=((1, 0.5),)),
    PeerRef("w", Incarnation(1), "c"),  # type: ignore[arg-type]
)  # fmt: skip
NUMBERS: list[tuple[str, tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]] = [
    ("attempt", (2,), (0, 2**32 - 1), (-1, 2**32, 1.0, True)),
    ("tokens", (4, 1), (0, 2**32 - 1), (-1, 2**32, 2**64 - 1, 0.5, None)),
    ("prompt_len", (5,), (0,), (-1, 2**32)),
    ("max_tokens", (6, 0), (0, 2**32 - 1), (-1, 2**32)),
    ("temperature", (6, 1), (0.0, -1.5, 3), (math.nan, math.inf, -math.inf, "1", True)),
    ("top_k", (6, 3), (-(2**31), 2**31 - 1), (-(2**31) - 1, 2**31)),
    ("logit_bias", (6, 8, 0, 0), (0,), (-1, 2**32)),
    ("logit_bias", (6, 8, 0, 1), (-100.0,), (math.nan, math.inf)),
    ("seed", (6, 11), (0, 2**63, 2**64 - 1), (-1, 1e30)),
    ("logprobs", (6, 15), (None, 0), (-1, "0")),
    ("peer.incarnation", (7, 1), (0, 2**64 - 1), (-1,)),
    ("deadline_s", (9,), (0.0, -1.0), (math.nan, math.inf)),
    ("priority", (10,), (-(2**63), 2**63 - 1), (2**63, 0.5)),
    ("first_token_s", (11,), (0.0,), (math.nan, -math.inf)),
    ("tenant", (13,), ("", "t" * TENANT_CHARS), ("t" * (TENANT_CHARS + 1), None)),
    ("weight", (14,), (0, 1), (-1, 2**32)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "path", "good", "bad"), NUMBERS, ids=[f"{n}-{p}" for n, p, _, _ in NUMBERS])
def test_numbers_and_names_have_bounds(
    name: str, path: tuple[int, ...], good: tuple[Any, ...], bad: tuple[Any, ...]
) -> None:
    values = raw(SUBMIT)
    for value in good:
        got = raw(decode(changed(values, path, value)))
        assert got == changed(values, path, value), name
    for value in bad:
        with pytest.raises(WireError, match="message 0: Expected"):
            decode(changed(values, path, value))


def test_numbers_of_other_libraries_travel_as_pythons_and_what_is_none_is_refused_by_its_sender() -> None:
    odd: Any = Tokens(RequestId("r"), np.int64(1), np.uint32(2), (np.int32(3),), (TokenLogprob(4, np.float64(-0.5)),))  # type: ignore[arg-type]
    (got,) = decode_events(encode_events(Incarnation(1), [odd]))[0].events
    assert got == Tokens(RequestId("r"), 1, 2, (3,), (TokenLogprob(4, -0.5),))
    for wrong in (1j, object(), np.float32(1.5)):
        with pytest.raises(TypeError):
            encode_events(Incarnation(1), [msgspec.structs.replace(odd, position=wrong)])


def test_an_integer_that_no_message_can_carry_is_refused_by_its_sender() -> None:
    for tokens in ((2**64,), (-(2**63) - 1,)):
        with pytest.raises(OverflowError):
            encode_events(Incarnation(1), [Tokens(RequestId("r"), 0, 0, tokens)])


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\xc0", b"\x91", b"\x90", b"\x91\x01", b"\x91\x91\x01", b"\x91\x91\x90", b"\x91\x91\x91\x01",
        b"\x91\x90\x00", b"\x91\xdd\xff\xff\xff\xff", b"\x91\x91\xdd\xff\xff\xff\xff", b"\x91\x81\xa1a\x01",
        b"\x91\x91\x93\xa6cancel\xa1\xff\x00", b"\x91\x91\x93\xa6cancel\xdb\xff\xff\xff\xff",
        b"\x91\x91\x92\xa5newer" + b"\x91" * 5000, b"\x91" * 100_000, b"\x91\x91\x94\xa6cancel\xa1a\x00\xd4\x05\x00",
    ],
)  # fmt: skip
def test_d9_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_commands(data)
    with pytest.raises(WireError):
        decode_events(b"\x93\x01" + data[1:] + b"\xc0" if data[:1] == b"\x91" else data)
    with pytest.raises(WireError):
        decode_opening(data)


def test_a_frame_has_so_many_messages() -> None:
    """One byte each is enough to claim them; read one by one they would take a hundred."""
    for count, words in ((2**16, "message 0: Expected `array`"), (2**16 + 1, "length <= 65536")):
        junk = b"\xdd" + count.to_bytes(4, "big") + b"\xc0" * count
        with pytest.raises(WireError, match=words):
            decode_commands(b"\x91" + junk)
        with pytest.raises(WireError, match=words):
            decode_events(b"\x92\x01" + junk)


def test_a_sequence_has_so_many_tokens() -> None:
    values = raw(SUBMIT)
    begin = msgpack.packb([[values]]).index(b"\x92\x05\x06")
    frame = msgpack.packb([[values]])
    long = b"\xdd" + (2**24 + 1).to_bytes(4, "big") + bytes(2**24 + 1)
    with pytest.raises(WireError, match="length <= 16777216"):
        decode_commands(frame[:begin] + long + frame[begin + 3 :])


# ---------------------------------------------------------------- protocols before this one


def test_an_opening_of_version_1_is_known_and_its_refusal_is_read_by_that_build() -> None:
    """By the protobuf messages of that version: field 1 of an opening is the incarnation, 2 the token, 3 the version;
    field 3 of a worker's frame is why the stream ends."""
    for incarnation in (b"\x01", b"\xff\xff\x03"):
        assert opens_version_1(b"\x08" + incarnation + b"\x12\x01x\x18\x01")
    assert not opens_version_1(encode_opening(StreamOpening(STREAM_PROTOCOL, Incarnation(8), "x")))
    assert not opens_version_1(b"")
    for reason in ("too old", "ü" * 100, "x" * 127, "x" * 128, "x" * 20_000):
        frame = refusal_of_version_1(reason)
        assert frame[0] == 3 << 3 | 2
        size = frame[1] & 0x7F | frame[2] << 7
        assert frame[1] & 0x80
        assert frame[3:] == reason.encode()[:16383]
        assert len(frame) == 3 + size
    assert decode_opening(encode_opening(StreamOpening(9, Incarnation(8), "x"))) == StreamOpening(
        9, Incarnation(8), "x"
    )


def test_a_command_that_is_encoded_alone_and_one_that_shares_its_tokens_have_the_same_bytes() -> None:
    long = msgspec.structs.replace(SUBMIT, tokens=tuple(range(5000)))
    (together,) = FrameWriter().frames([long, long])
    assert together == msgpack.packb([[raw(long), raw(long)]])


def main() -> None:
    """Record what is new."""
    now = {str(cls.__struct_config__.tag): named(full(cls)) for cls in KINDS}
    RECORDED.write_text(json.dumps(added(recorded(), now), indent=1) + "\n", encoding="utf-8")


def added(before: Any, now: Any) -> Any:
    """What was recorded before, with the names and values that are new behind it."""
    if isinstance(before, dict):
        return {name: added(value, now[name]) for name, value in before.items()} | {
            name: value for name, value in now.items() if name not in before
        }
    if isinstance(before, list) and before and isinstance(before[0], dict):
        return [added(value, now[0]) for value in before]
    return before


if __name__ == "__main__":
    main()
