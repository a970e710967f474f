"""JSON of answers: the same value as Python's own writer's, in one line for every client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.contracts.compact_json import compact_json

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
