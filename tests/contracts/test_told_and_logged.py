"""What is told of damage, processors and processes: by names that others go by."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from twinpool.contracts import cpu_levels
from twinpool.contracts.damage import COUNTERS, DamageSite, log_damage, where_of
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, RoomId, request_in, room_of
from twinpool.contracts.json_logs import JsonFormatter
from twinpool.contracts.messages.router_commands import Cancel, Command
from twinpool.contracts.wire.message_codec import FRAME_COMMANDS, FrameWriter, decode_commands

V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def test_a_counter_of_damage_says_where_and_any_other_nothing() -> None:
    assert {name: where_of(name) for name in COUNTERS} == {name: str(site) for name, site in COUNTERS.items()}
    assert where_of("damage_restore") == "restore"
    for name in ("steps", "pages_free", "undamage_x", "", "damage"):
        assert where_of(name) is None, name


def test_damage_is_one_line_with_its_site_and_facts(caplog: pytest.LogCaptureFixture) -> None:
    log_damage(logging.getLogger("test"), DamageSite.STEP, request_id="r1", pages=3)
    (record,) = caplog.records
    line = json.loads(JsonFormatter("decode-0").format(record))
    assert (line["event"], line["where"], line["request_id"], line["pages"]) == ("state damage", "step", "r1", 3)
    assert (line["level"], line["process"], line["logger"]) == ("error", "decode-0", "test")


def test_a_line_has_the_calls_fields_the_time_and_the_traceback_and_no_notes_of_libraries() -> None:
    try:
        raise ValueError("planted\nin two lines")
    except ValueError:
        record = logging.LogRecord("a", logging.WARNING, __file__, 1, "said %s", ("so",), sys.exc_info())
    record.created, record.msecs = 86_400.5, 7.9
    record.fields = {"room": "r/1"}
    record.worker, record._note, record.odd = "w", "x", {1, 2}.__class__
    text = JsonFormatter("p").format(record)
    line = json.loads(text)
    assert "\n" not in text
    assert line["time"] == "1970-01-02T00:00:00.007Z"
    assert (line["event"], line["room"], line["worker"]) == ("said so", "r/1", "w")
    assert line["odd"] == str(set)
    assert "planted" in line["traceback"]
    assert not {"_note", "args", "msg", "fields", "exc_info"} & line.keys()


def test_a_machine_runs_a_level_only_with_all_that_the_levels_below_have() -> None:
    assert cpu_levels.levels(V3) == ("x86-64-v3",)
    assert cpu_levels.levels(V4) == ("x86-64-v3", "x86-64-v4")
    for flag in V3:
        assert cpu_levels.levels(V4 - {flag}) == (), flag
    for flag in V4 - V3:
        assert cpu_levels.levels(V4 - {flag}) == ("x86-64-v3",), flag
    assert cpu_levels.described("", V4 | {"avx512_bf16", "amx_bf16"}) == "x86-64-v4+avx512_bf16+amx_bf16"
    assert cpu_levels.described("x86-64-v3", V4 | {"amx_bf16"}) == "x86-64-v3"


@pytest.mark.parametrize(
    ("limit", "has", "isa"),
    [
        ("", V4 | {"avx512_vnni"}, "avx512_core_vnni"),
        ("AVX512_CORE", V4 | {"avx512_vnni"}, "avx512_core"),
        ("avx2", V4 | {"avx_vnni"}, "avx2"),
        ("AVX2_VNNI", V4 | {"avx_vnni"}, "avx2_vnni"),
        ("AVX512_CORE", V3, "avx2"),
        ("nonsense", V3, "avx2"),
        ("", frozenset({"sse4_1"}), "sse41"),
        ("", frozenset(), "reference"),
    ],
)
def test_onednn_uses_the_best_that_the_processor_has_up_to_its_limit(limit: str, has: frozenset[str], isa: str) -> None:
    assert cpu_levels.onednn_isa({"ONEDNN_MAX_CPU_ISA": limit} if limit else {}, has) == isa


@pytest.mark.parametrize("request_id", ["r1-0", "tenant/r1-0", "a/b/c"])
def test_a_room_names_its_request_whatever_its_id_has_in_it(request_id: str) -> None:
    assert request_in(room_of(RequestId(request_id), "7f")) == request_id
    assert request_in(RoomId("bare")) == ""


def test_an_error_of_a_newer_build_counts_as_the_workers_and_kinds_say_who_tries_again() -> None:
    assert [ErrorKind(kind) for kind in ErrorKind] == list(ErrorKind)
    assert ErrorKind("of a newer build") is ErrorKind.WORKER
    assert {kind for kind in ErrorKind if kind.retryable} == {
        ErrorKind.ROOM, ErrorKind.DAMAGED, ErrorKind.DRAINING, ErrorKind.WORKER, ErrorKind.RETRACTED,
        ErrorKind.NONFINITE, ErrorKind.CANCELLED,
    }  # fmt: skip


@pytest.mark.parametrize("count", [1, FRAME_COMMANDS, FRAME_COMMANDS + 1, 2 * FRAME_COMMANDS + 3])
def test_a_frame_has_so_many_commands_and_all_come_in_order(count: int) -> None:
    commands: list[Command] = [Cancel(RequestId(f"r{number}"), 1) for number in range(count)]
    frames = [decode_commands(raw)[0] for raw in FrameWriter().frames(commands)]
    assert [one.request_id for frame in frames for one in frame] == [f"r{n}" for n in range(count)]
    assert [len(frame) for frame in frames[:-1]] == [FRAME_COMMANDS] * ((count - 1) // FRAME_COMMANDS)
