"""Messages that no process of ours would send are refused whole, each at its bound.

`tests/wire/test_call_format.py` has the types, the names and the numbers of calls.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack
import msgspec
import pytest

from tests.wire.call_messages import raw
from tests.wire.instances import fields_of, full
from twinpool.contracts.cluster_secret import access_metadata, admits
from twinpool.contracts.errors import WireError
from twinpool.contracts.messages.leases import MAX_CLAIMS, QuotaAmounts, QuotaClaim, QuotaClaims, QuotaSlice
from twinpool.contracts.messages.rank_order_codec import decode
from twinpool.contracts.messages.request_record import MAX_RECENT, RecordAnswer, RecordReport, RequestRecord
from twinpool.contracts.messages.router_report import BUCKETS, MAX_BREAKERS, RouterReport, checked
from twinpool.contracts.wire import message_codec

HISTOGRAMS = {name: tuple(range(BUCKETS)) for name in ("first_tokens", "gaps", "output_tokens")}
REPORT: RouterReport = full(RouterReport, counters={"replays": 3}, **HISTOGRAMS)
RECORD: RequestRecord = full(RequestRecord)


def changed(whole: Any, **changes: Any) -> Any:
    """A message with other values in some fields."""
    return msgspec.structs.replace(whole, **changes)


def sent(message: Any) -> Any:
    """A message as its receiver reads it."""
    return message_codec.decode(type(message), message_codec.encode(message))[0]


def floats_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all numbers of a packed message that may be NaN or infinite."""
    if isinstance(value, float):
        return [path]
    inner = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    return [found for at, one in inner for found in floats_of(one, (*path, at))]


@pytest.mark.parametrize("path", floats_of(raw(RECORD)), ids=str)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_record_with_a_time_or_a_cost_that_is_no_number_is_refused(path: tuple[Any, ...], number: float) -> None:
    values: Any = raw(RECORD)
    inner = values
    for at in path[:-1]:
        inner = inner[at]
    inner[path[-1]] = number
    with pytest.raises(WireError, match=r"Expected `float` [<>]="):
        message_codec.decode(RequestRecord, msgpack.packb(values))


@pytest.mark.parametrize("name", HISTOGRAMS)
@pytest.mark.parametrize("buckets", [1, BUCKETS - 1, BUCKETS + 1])
def test_a_histogram_of_a_report_has_all_buckets_or_none(name: str, buckets: int) -> None:
    assert checked(sent(REPORT)) == REPORT
    assert checked(sent(changed(REPORT, **{name: ()})))
    with pytest.raises(WireError, match=r"histogram|length <= "):
        checked(sent(changed(REPORT, **{name: (1,) * buckets})))


@pytest.mark.parametrize("name", ["cpu_s", "ttft_slo_s"])
@pytest.mark.parametrize("seconds", [-0.5, math.nan, math.inf])
def test_seconds_of_a_report_are_none_or_more(name: str, seconds: float) -> None:
    assert sent(changed(REPORT, **{name: 0.0}))
    with pytest.raises(WireError, match=r"Expected `float` [<>]="):
        sent(changed(REPORT, **{name: seconds}))


def test_a_report_has_so_many_breakers_and_counts_what_is_known() -> None:
    assert len(sent(changed(REPORT, open_breakers=("w",) * MAX_BREAKERS)).open_breakers) == MAX_BREAKERS
    with pytest.raises(WireError, match=f"length <= {MAX_BREAKERS}"):
        sent(changed(REPORT, open_breakers=("w",) * (MAX_BREAKERS + 1)))
    newer = changed(REPORT, counters={"replays": 3, "of_a_newer_build": 4})
    assert checked(sent(newer)).counters == {"replays": 3}


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("amount", ["requests", "tokens"])
@pytest.mark.parametrize(
    ("part", "cls"),
    [
        *((part, QuotaClaim) for part in ("limits", "used", "wanted")),
        *((part, QuotaSlice) for part in ("granted", "left")),
    ],
)
def test_every_amount_of_a_quota_is_a_number(part: str, cls: type, amount: str, number: float) -> None:
    whole = full(cls, tenant="t" * 64)
    assert sent(whole) == whole
    bad: QuotaAmounts = changed(getattr(whole, part), **{amount: number})
    place = list(fields_of(cls)).index(part)
    with pytest.raises(WireError, match=rf"Expected `float` .* `\$\[{place}\]"):
        sent(changed(whole, **{part: bad}))


def test_a_call_has_so_many_claims_and_a_tenants_name_so_many_characters() -> None:
    claim: QuotaClaim = full(QuotaClaim, tenant="t" * 64)
    assert sent(QuotaClaims("r", (claim,) * MAX_CLAIMS))
    with pytest.raises(WireError, match=f"length <= {MAX_CLAIMS}"):
        sent(QuotaClaims("r", (claim,) * (MAX_CLAIMS + 1)))
    with pytest.raises(WireError, match="length <= 64"):
        sent(changed(claim, tenant="t" * 65))


@pytest.mark.parametrize("within", ["records", "answers", "records of an answer"])
def test_a_report_has_so_many_records_and_answers(within: str) -> None:
    record = RequestRecord("r", "", "", "", "", "", 0.0, 0.0, None, "stop")
    for count in (MAX_RECENT, MAX_RECENT + 1):
        report = {
            "records": RecordReport("r", (record,) * count),
            "answers": RecordReport("r", (), (RecordAnswer(1, ()),) * count),
            "records of an answer": RecordReport("r", (), (RecordAnswer(1, (record,) * count),)),
        }[within]
        if count == MAX_RECENT:
            assert sent(report) == report
        else:
            with pytest.raises(WireError, match=f"length <= {MAX_RECENT}"):
                sent(report)


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
