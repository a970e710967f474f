"""JSON of answers: the same value as Python's own writer's, in one line for every client."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.contracts.compact_json import SseReader, compact_json, sse_event

TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(TREES)
def test_any_value_is_written_as_it_is_in_ascii_and_in_one_line(tree: Any) -> None:
    written = compact_json(tree)
    assert json.loads(written) == tree
    assert written.isascii()
    assert len(written.splitlines()) == 1


@pytest.mark.parametrize("tree", ["a\u2028b", "a\u0085b", {"k\u2029": ["\x1c\x0b\x0c"]}, "\ud800", 2**70, {5: "x"}])
def test_what_clients_take_for_line_ends_and_what_orjson_has_no_form_for(tree: Any) -> None:
    written = compact_json(tree)
    assert json.loads(written) == ({"5": "x"} if tree == {5: "x"} else tree)
    assert written.isascii()
    assert len(written.splitlines()) == 1


def test_what_json_has_no_form_for_is_told_or_made_something_of() -> None:
    assert compact_json({"at": Path("x")}, str) == '{"at":"x"}'
    assert compact_json({"at": Path("\u2028")}, str) == '{"at":"\\u2028"}'
    with pytest.raises(TypeError):
        compact_json({"at": Path("x")})


def test_an_event_is_lines_with_its_kind_before_what_it_says() -> None:
    assert sse_event(b"{}") == b"data: {}\n\n"
    assert sse_event('{"a":1}', "frame") == b'event: frame\ndata: {"a":1}\n\n'


@given(st.lists(st.integers(0, 100)))
def test_events_are_read_whole_however_their_bytes_come(cuts: list[int]) -> None:
    stream = b': beat\n\nid: 1-1\nevent: a\ndata: {"a": "data: b"}\n\ndata:c\r\n\r\ndata: [DONE]\n\ndata: not whole'
    bounds = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    reader = SseReader()
    read = [said for begin, end in pairwise(bounds) for said in reader.feed(stream[begin:end])]
    assert read == [b'{"a": "data: b"}', b"c", b"[DONE]"]
