"""Messages of an older build, which lacks fields: each field of each message is left out in turn, and what is read is
the same message with that field's default.

The right default of a field that came later is what older builds mean by saying nothing: the one that the message's
type declares. Fields that every build has sent since its message exists have the wire's zero, where that differs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.message import Message as Proto

from tests.wire.instances import fields_of, full, is_record, optional, plain, union
from twinpool.cluster.controller import controller_actions as actions
from twinpool.cluster.controller.supervisor_wire import (
    action_from_proto,
    action_to_proto,
    ended_from_proto,
    ended_to_proto,
    placed_from_proto,
    placed_to_proto,
)
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.messages import (
    autoscaler_messages,
    request_record,
    worker_status,
)
from twinpool.contracts.messages.latency_shape import BUCKETS
from twinpool.contracts.messages.quota import QuotaClaim, QuotaSlice
from twinpool.contracts.messages.router_report import COUNTERS, RouterReport
from twinpool.contracts.messages.settings_change import SettingsAnswer, SettingsChange
from twinpool.contracts.wire import autoscaler_protobuf, quota_protobuf, record_protobuf, router_report_protobuf
from twinpool.contracts.wire import settings_protobuf as settings
from twinpool.contracts.wire.worker_protobuf import (
    record_from_proto,
    record_to_proto,
    report_from_proto,
    report_to_proto,
    status_from_proto,
    status_to_proto,
)

ALWAYS_SENT = {"RequestRecord.attempts"}
"""Fields whose declared default isn't the wire's zero and that no build has ever left out."""
OTHER_NAMES = {"max_positions": "fits", "context": "fits"}
"""Fields of worker.proto that are named otherwise in the code."""


HISTOGRAMS = ("first_tokens", "gaps", "output_tokens")
"""Fields of a router's report that have a count for each bucket."""


def _one(read: Callable[[Any], list[Any]]) -> Callable[[Any], Any]:
    return lambda message: read([message])[0]


Reads = tuple[Any, Callable[[Any], Proto], Callable[[Any], Any]]
MESSAGES: list[Reads] = [
    *((full(cls), action_to_proto, action_from_proto) for cls in union(actions.ControllerAction)
      if cls is not actions.StartFailed),
    (actions.StartFailed(full(actions.StartFailed).name, "why"), action_to_proto, action_from_proto),
    (full(actions.EndedProcess), lambda one: ended_to_proto([one])[0], _one(ended_from_proto)),
    (full(actions.PlacedProcess), lambda one: placed_to_proto([one])[0], _one(placed_from_proto)),
    (full(worker_status.WorkerStatus), status_to_proto, status_from_proto),
    (full(worker_status.WorkerRecord), record_to_proto, record_from_proto),
    (full(worker_status.CheckReport), report_to_proto, report_from_proto),
    (full(QuotaClaim), quota_protobuf.claim_to_proto, quota_protobuf.claim_from_proto),
    (full(QuotaSlice), quota_protobuf.slice_to_proto, quota_protobuf.slice_from_proto),
    (full(request_record.RequestRecord), record_protobuf.record_to_proto, record_protobuf.record_from_proto),
    (full(SettingsChange), settings.change_to_proto, settings.change_from_proto),
    (full(SettingsAnswer), settings.answer_to_proto, settings.answer_from_proto),
    (full(autoscaler_messages.AutoscalerView), autoscaler_protobuf.autoscaler_to_proto,
     autoscaler_protobuf.autoscaler_from_proto),
    (full(autoscaler_messages.LatencyCounts), lambda counts: autoscaler_protobuf.counts_to_proto("r", counts),
     autoscaler_protobuf.counts_from_proto),
    (full(RouterReport, counters=dict.fromkeys(COUNTERS, 3),
          **{name: (number,) * BUCKETS for number, name in enumerate(HISTOGRAMS, 1)}),
     router_report_protobuf.router_report_to_proto, router_report_protobuf.router_report_from_proto),
]  # fmt: skip


@pytest.mark.parametrize(("message", "write", "read"), MESSAGES, ids=[type(made).__name__ for made, _, _ in MESSAGES])
def test_a_field_that_an_older_build_does_not_send_has_its_default_and_no_other_changes(
    message: Any, write: Callable[[Any], Proto], read: Callable[[Any], Any]
) -> None:
    sent = write(message)
    assert read(sent) == message
    for path, without in _each_left_out(sent):
        try:
            got = read(without)
        except (TwinpoolError, ValueError):
            assert path[-1] in ("role", "router"), f"{path}: it can't be read any more"
            continue
        changed = dict(_differing(message, got, type(message).__name__))
        name = OTHER_NAMES.get(path[-1], path[-1])
        for where, (value, default) in changed.items():
            assert name in re.split(r"[.\[]", where), f"{path} is read as {where}"
            assert value == default, f"{where}: an older build means {default!r} and {value!r} was read"


def _each_left_out(message: Proto, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Proto]]:
    """Copies of `message` that lack one field each, fields of messages in it included. A kind of a oneof isn't left
    out: without it the message says nothing."""
    for field, value in message.ListFields():
        inner = field.message_type is not None and not field.message_type.GetOptions().map_entry
        if field.containing_oneof is None or len(field.containing_oneof.fields) == 1:
            copy = type(message)()
            copy.CopyFrom(message)
            copy.ClearField(field.name)
            yield (*path, field.name), copy
        if not inner:
            continue
        several = not isinstance(value, Proto)
        for at, part in enumerate(value if several else [value]):
            for deeper, without in _each_left_out(part, (*path, field.name)):
                copy = type(message)()
                copy.CopyFrom(message)
                held = getattr(copy, field.name)
                (held[at] if several else held).CopyFrom(without)
                yield deeper, copy


def _differing(
    sent: Any, got: Any, where: str, default: Any = dataclasses.MISSING
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The fields that differ, each with what was read and what ought to be."""
    if sent == got:
        return
    if is_record(type(sent)) and type(sent) is type(got):
        for name, (of, declared) in fields_of(type(sent)).items():
            known = None if declared is dataclasses.MISSING and optional(of) else declared
            yield from _differing(getattr(sent, name), getattr(got, name), f"{where}.{name}", known)
        return
    if isinstance(sent, tuple) and isinstance(got, tuple) and len(sent) == len(got):
        for at, (one, other) in enumerate(zip(sent, got, strict=True)):
            yield from _differing(one, other, f"{where}[{at}]")
        return
    zero = plain(type(sent))() if isinstance(sent, int | float | str | tuple | dict) and not _enum(sent) else None
    known = default is not dataclasses.MISSING and where not in ALWAYS_SENT
    yield where, (got, default if known else zero)


def _enum(value: Any) -> bool:
    return type(value).__mro__[1].__name__ == "StrEnum"
