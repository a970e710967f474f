"""The bytes of calls and of lease frames: what a build writes today is read by later ones, fields come and go at the
end alone, and what no build writes is refused with its path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import msgpack
import msgspec
import pytest

from tests.wire.call_messages import MESSAGES, raw
from tests.wire.instances import fields_of, full, is_struct, messages_of_union, optional, plain, union
from twinpool.cluster.controller.controller_actions import ControllerAction
from twinpool.contracts.errors import WireError
from twinpool.contracts.message_types import NAME_CHARS, Message
from twinpool.contracts.messages.pool_changes import OperatorChange
from twinpool.contracts.wire.message_codec import decode

RECORDED = Path(__file__).with_name("call_messages.json")
"""Each message as the first build that had it wrote it: names and values in the order of the wire, with the kind where
it has one. A line is never changed; `python -m tests.wire.test_call_format` adds what is new."""
MAY_BE_ANYTHING = {"WorkerStatus.counters"}
"""Numbers that may be NaN or infinite: nobody computes with them."""


def read(cls: type[Message], values: list[Any]) -> Any:
    """A message, given as what it is packed from."""
    message, left_out = decode(cls, msgpack.packb(values))
    assert not left_out
    return message


# ---------------------------------------------------------------- what was recorded


def named(value: Any) -> Any:
    """A message as JSON has it, with the names of its fields in the order of the wire."""
    if is_struct(type(value)):
        kind = {"kind": tag} if (tag := type(value).__struct_config__.tag) is not None else {}
        return kind | {name: named(getattr(value, name)) for name in fields_of(type(value))}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {name: named(one) for name, one in value.items()}
    return [named(one) for one in value] if isinstance(value, tuple) else value


def packed(kind: Any, value: Any) -> Any:
    """What a recorded value of this type is packed from."""
    kind = plain(kind)
    if value is None:
        return None
    if is_struct(kind):
        fields = fields_of(kind)
        return [value[name] if name == "kind" else packed(fields[name][0], value[name]) for name in value]
    if optional(kind):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
        return packed(kind, value)
    if kinds := messages_of_union(kind):
        return packed(next(one for one in kinds if one.__struct_config__.tag == value["kind"]), value)
    if kind is bytes:
        return value.encode()
    args = get_args(kind)
    if isinstance(value, list):
        fixed = get_origin(kind) is tuple and args[-1] is not Ellipsis
        of = args if fixed else args[:1] * len(value)
        return [packed(one, inner) for one, inner in zip(of, value, strict=True)]
    if isinstance(value, dict):
        return {name: packed(args[1], inner) for name, inner in value.items()}
    return value


def assert_holds(value: Any, recorded: Any) -> None:
    """Whatever was recorded is there under its name; fields that came later have their defaults."""
    if is_struct(type(value)):
        for name, (_, default) in fields_of(type(value)).items():
            if name in recorded:
                assert_holds(getattr(value, name), recorded[name])
            else:
                assert getattr(value, name) == default, name
        assert recorded.keys() - {"kind"} <= fields_of(type(value)).keys()
    elif isinstance(value, tuple):
        for one, before in zip(value, recorded, strict=True):
            assert_holds(one, before)
    elif isinstance(value, dict):
        assert value.keys() == recorded.keys()
        for name, one in value.items():
            assert_holds(one, recorded[name])
    else:
        assert named(value) == recorded


def recorded() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_what_earlier_builds_wrote_is_read_as_they_meant_it(cls: type[Message]) -> None:
    before = recorded()[cls.__name__]
    assert_holds(read(cls, packed(cls, before)), before)


def test_every_field_of_every_message_is_recorded_in_its_place() -> None:
    """What is recorded is only ever added to; a new version of the calls begins a new record."""
    before = recorded()
    assert list(before) == [cls.__name__ for cls in MESSAGES]
    for cls in MESSAGES:
        kind = ["kind"] if cls.__struct_config__.tag is not None else []
        assert list(before[cls.__name__]) == [*kind, *fields_of(cls)], cls
    for kinds in (union(OperatorChange), union(ControllerAction)):
        assert len({before[cls.__name__]["kind"] for cls in kinds}) == len(kinds)


# ---------------------------------------------------------------- builds of one version


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_fields_that_an_older_build_lacks_have_their_defaults_and_needed_ones_are_missed(cls: type[Message]) -> None:
    whole = full(cls)
    values, fields = raw(whole), list(fields_of(cls).items())
    kind = len(values) - len(fields)
    needed = [field.name for field in msgspec.structs.fields(cls) if field.required]
    for count in range(len(fields)):
        rest = dict(fields[count:])
        if rest.keys() & set(needed):
            with pytest.raises(WireError, match="Expected `array` of at least length"):
                read(cls, values[: kind + count])
        else:
            want = {name: default for name, (_, default) in rest.items()}
            assert read(cls, values[: kind + count]) == msgspec.structs.replace(whole, **want)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_fields_of_a_newer_build_are_passed_over(cls: type[Message]) -> None:
    whole = full(cls)
    for more in ([None], [1, "x", [[{}]], {"a": b"b"}], [b"\xff" * 70_000]):
        assert read(cls, [*raw(whole), *more]) == whole


# ---------------------------------------------------------------- what no build writes


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value in a packed message, with its path."""
    inner = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for at, one in inner:
        yield (*path, at), one
        yield from places(one, (*path, at))


def changed(values: list[Any], path: tuple[Any, ...], junk: Any) -> list[Any]:
    copy: list[Any] = msgpack.unpackb(msgpack.packb(values))
    inner = copy
    for at in path[:-1]:
        inner = inner[at]
    inner[path[-1]] = junk
    return copy


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_a_value_of_another_type_is_refused_with_its_path(cls: type[Message]) -> None:
    values = raw(full(cls))
    for path, _ in places(values):
        if path == (0,) and cls.__struct_config__.tag is not None:
            continue
        junks: tuple[Any, ...] = (msgpack.ExtType(5, b"x"), [[[]]])
        for junk in junks:
            with pytest.raises(WireError, match=r"\$\["):
                read(cls, changed(values, path, junk))


def test_every_number_that_is_computed_with_is_finite() -> None:
    """Those within other messages are tried with the messages that they are fields of."""
    tried = set[str]()
    for cls in MESSAGES:
        whole = full(cls)
        for at, name in enumerate(fields_of(cls), cls.__struct_config__.tag is not None):
            where = f"{cls.__name__}.{name}"
            value = raw(whole)[at]
            numbers = {(at, key): one for key, one in value.items()} if isinstance(value, dict) else {(at,): value}
            for path in [path for path, one in numbers.items() if isinstance(one, float)]:
                if where in MAY_BE_ANYTHING:
                    continue
                tried.add(where)
                for number in (math.nan, math.inf, -math.inf):
                    with pytest.raises(WireError, match=r"Expected `float` [<>]= .* `\$\["):
                        read(cls, changed(raw(whole), path, number))
    assert {"QuotaAmounts.tokens", "WorkerCandidate.cost", "RequestRecord.numbers", "WorkerStatus.stalled_s"} <= tried
    assert len(tried) >= 25


NAMES = {
    ("AddWorkers", "node"), ("RestartWorker", "name"), ("CordonNode", "node"), ("UncordonNode", "node"),
    ("DrainWorkers", "target"), ("UndrainWorkers", "target"), ("SetRole", "name"), ("LatencyReport", "router"),
    ("QuotaClaims", "router"), ("RecordReport", "router"), ("RouterReport", "router"), ("RouterReport", "node"),
    ("RouterReport", "build"), ("RouterReport", "model"), ("RouterReport", "open_breakers"),
    ("RouterIdentity", "name"), ("RouterIdentity", "address"), ("RouterIdentity", "settings"),
}  # fmt: skip
"""Names in requests, which the controller keeps: they have at most `NAME_CHARS` characters."""


@pytest.mark.parametrize(("of", "name"), sorted(NAMES), ids=".".join)
def test_no_name_that_the_controller_keeps_is_longer_than_a_name(of: str, name: str) -> None:
    cls = next(cls for cls in MESSAGES if cls.__name__ == of)
    kind = fields_of(cls)[name][0]
    for chars in (NAME_CHARS, NAME_CHARS + 1):
        text = "x" * chars
        value = (text,) if get_origin(plain(kind)) is tuple else text
        values = raw(msgspec.structs.replace(full(cls), **{name: value}))
        if chars == NAME_CHARS:
            assert getattr(read(cls, values), name) == value
        else:
            with pytest.raises(WireError, match=f"length <= {NAME_CHARS}"):
                read(cls, values)


@pytest.mark.parametrize("of", ["LatencyReport", "QuotaClaims", "RouterReport"])
def test_a_report_names_its_router(of: str) -> None:
    cls = next(cls for cls in MESSAGES if cls.__name__ == of)
    with pytest.raises(WireError, match="length >= 1"):
        read(cls, raw(msgspec.structs.replace(full(cls), router="")))


def main() -> None:
    """Record what is new."""
    before = recorded() if RECORDED.exists() else {}
    now = {cls.__name__: before.get(cls.__name__, {}) for cls in MESSAGES}
    for cls in MESSAGES:
        now[cls.__name__] = before.get(cls.__name__, {}) | {
            name: value for name, value in named(full(cls)).items() if name not in before.get(cls.__name__, {})
        }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(fields)}" for name, fields in now.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
