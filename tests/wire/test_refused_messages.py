"""Messages that no process of ours would send are refused whole: each number and each list by itself, at its bound."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.wire.instances import full
from twinpool.contracts.cluster_secret import access_metadata, admits
from twinpool.contracts.errors import WireError
from twinpool.contracts.messages.latency_shape import BUCKETS
from twinpool.contracts.messages.quota import QuotaAmounts, QuotaClaim, QuotaSlice
from twinpool.contracts.messages.rank_order_codec import decode
from twinpool.contracts.messages.request_record import MAX_CANDIDATES, PlacementChoice, RequestRecord, WorkerCandidate
from twinpool.contracts.messages.router_report import MAX_BREAKERS, NAME_CHARS, RouterReport
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.wire.quota_protobuf import claim_from_proto, claim_to_proto, slice_from_proto, slice_to_proto
from twinpool.contracts.wire.record_protobuf import MAX_RECORD_BYTES, record_from_proto, record_to_proto
from twinpool.contracts.wire.router_report_protobuf import router_report_from_proto, router_report_to_proto

HISTOGRAMS = {name: tuple(range(BUCKETS)) for name in ("first_tokens", "gaps", "output_tokens")}
REPORT: RouterReport = full(RouterReport, counters={"replays": 3}, **HISTOGRAMS)
RECORD: RequestRecord = full(RequestRecord)


def changed(whole: Any, **changes: Any) -> Any:
    """A message with other values in some fields."""
    return dataclasses.replace(whole, **changes)


def floats_of(message: Any, path: str = "") -> list[str]:
    """The paths of all numbers of a protobuf message that may be NaN or infinite, those within lists included."""
    found = []
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].type == field.TYPE_DOUBLE:
                found.append(name)
        elif field.message_type is not None:
            inner = value[-1] if field.is_repeated else value
            found += floats_of(inner, f"{name}.")
        elif field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
            found.append(name)
    return found


def put(message: Any, path: str, number: float) -> None:
    """Set a number of a message, in the last entry of each list on the way."""
    *way, last = path.split(".")
    for name in way:
        inner = getattr(message, name)
        message = inner[-1] if not hasattr(inner, "ListFields") else inner
    value = getattr(message, last)
    if hasattr(value, "keys"):
        value[next(iter(value))] = number
    else:
        setattr(message, last, number)


@pytest.mark.parametrize("path", floats_of(record_to_proto(RECORD)))
def test_a_record_with_a_time_or_a_cost_that_is_no_number_is_refused(path: str) -> None:
    assert record_from_proto(record_to_proto(RECORD)) == RECORD
    for number in (math.nan, math.inf, -math.inf):
        message = record_to_proto(RECORD)
        put(message, path, number)
        with pytest.raises(WireError, match="finite"):
            record_from_proto(message)


def test_a_record_has_so_many_bytes_and_so_many_candidates_of_a_choice() -> None:
    fits = changed(RECORD, message="")
    room = MAX_RECORD_BYTES - record_to_proto(fits).ByteSize() - 4  # Four of its tag and its length.
    for chars in (room, room + 1):
        message = record_to_proto(changed(RECORD, message="x" * chars))
        assert message.ByteSize() == MAX_RECORD_BYTES + chars - room
        if chars == room:
            assert len(record_from_proto(message).message) == room
        else:
            with pytest.raises(WireError, match="bytes"):
                record_from_proto(message)
    many = tuple(WorkerCandidate(f"w-{n}", float(n)) for n in range(MAX_CANDIDATES + 3))
    choice: PlacementChoice = changed(RECORD.choices[0], candidates=many)
    got = record_from_proto(record_to_proto(changed(RECORD, choices=(choice,))))
    assert got.choices[0].candidates == many[:MAX_CANDIDATES]


@pytest.mark.parametrize("name", HISTOGRAMS)
@pytest.mark.parametrize("buckets", [1, BUCKETS - 1, BUCKETS + 1])
def test_a_histogram_of_a_report_has_all_buckets_or_none(name: str, buckets: int) -> None:
    assert router_report_from_proto(router_report_to_proto(REPORT)) == REPORT
    assert router_report_from_proto(router_report_to_proto(changed(REPORT, **{name: ()})))
    with pytest.raises(WireError, match="histogram"):
        router_report_from_proto(router_report_to_proto(changed(REPORT, **{name: (1,) * buckets})))


@pytest.mark.parametrize("name", ["cpu_s", "ttft_slo_s"])
@pytest.mark.parametrize("seconds", [-0.5, math.nan, math.inf])
def test_seconds_of_a_report_are_none_or_more(name: str, seconds: float) -> None:
    assert router_report_from_proto(router_report_to_proto(changed(REPORT, **{name: 0.0})))
    with pytest.raises(WireError, match="seconds"):
        router_report_from_proto(router_report_to_proto(changed(REPORT, **{name: seconds})))


@pytest.mark.parametrize("name", ["router", "node", "build", "model", "name", "address", "settings", "open_breakers"])
def test_no_name_in_a_report_is_longer_than_a_name(name: str) -> None:
    for chars in (NAME_CHARS, NAME_CHARS + 1):
        message = router_report_to_proto(REPORT)
        if name == "open_breakers":
            message.open_breakers[-1] = "x" * chars
        else:
            setattr(message, name, "x" * chars)
        if chars == NAME_CHARS:
            router_report_from_proto(message)
        else:
            with pytest.raises(WireError, match="no name has more"):
                router_report_from_proto(message)


def test_a_report_names_its_router_and_so_many_breakers_and_counts_what_is_known() -> None:
    nameless = router_report_to_proto(changed(REPORT, router=""))
    with pytest.raises(WireError, match="names its router"):
        router_report_from_proto(nameless)
    many = router_report_to_proto(changed(REPORT, open_breakers=("w",) * (MAX_BREAKERS + 1)))
    assert len(router_report_from_proto(many).open_breakers) == MAX_BREAKERS, "what is sent is cut"
    many.open_breakers.append("w")
    with pytest.raises(WireError, match="names its router"):
        router_report_from_proto(many)
    newer = router_report_to_proto(changed(REPORT, counters={"replays": 3, "of_a_newer_build": 4}))
    assert router_report_from_proto(newer).counters == {"replays": 3}


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("amount", ["requests", "tokens"])
@pytest.mark.parametrize(
    ("part", "cls", "to_proto", "from_proto"),
    [
        *((part, QuotaClaim, claim_to_proto, claim_from_proto) for part in ("limits", "used", "wanted")),
        *((part, QuotaSlice, slice_to_proto, slice_from_proto) for part in ("granted", "left")),
    ],
)
def test_every_amount_of_a_quota_is_a_number(
    part: str, cls: type, to_proto: Callable[..., Any], from_proto: Callable[..., Any], amount: str, number: float
) -> None:
    whole = full(cls, tenant="t" * 64)
    assert from_proto(to_proto(whole)) == whole
    bad: QuotaAmounts = changed(getattr(whole, part), **{amount: number})
    with pytest.raises(WireError, match="finite"):
        from_proto(to_proto(changed(whole, **{part: bad})))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\x90", b"\x91\x63", b"\x91\xa1x", b"\x91\x04", b"\x93\x04\xa1a\xa1b", b"\x92\x09\xc0", b"\x01",
        b"\x93\x09\x01\x01", b"\x91\x91\x04",
    ],
)  # fmt: skip
def test_bytes_that_are_no_order_are_refused(data: bytes) -> None:
    """Too few values, too many, an unknown tag, a list that is none, what isn't msgpack at all."""
    with pytest.raises(WireError, match="no order"):
        decode(data)


def test_an_access_token_is_of_its_secret_and_cannot_be_left_out() -> None:
    (pair,) = access_metadata("ab" * 32)
    assert admits("ab" * 32, [("other", "x"), pair])
    assert not admits("ab" * 32, [])
    assert not admits("ab" * 32, access_metadata("cd" * 32))
    assert not admits("ab" * 32, [(pair[0], pair[1][:-1])])
    assert not admits("ab" * 32, [(pair[0], "")])
    assert not admits("ab" * 32, [(pair[0], "\xff")])
    assert admits("", [])
    assert admits("", [pair])
    assert "ab" * 32 not in pair[1], "the secret itself never travels"


def test_the_messages_above_are_those_of_the_protocol() -> None:
    assert floats_of(record_to_proto(RECORD)), "there are times"
    assert isinstance(record_to_proto(RECORD), pb.RequestRecord)
