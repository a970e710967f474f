"""Grammars that never end are told from those that do."""

from __future__ import annotations

import pytest

from tests.support.structured_cases import GRAMMARS
from twinpool.contracts.errors import RequestError
from twinpool.router.openai import client_grammar
from twinpool.router.openai.client_grammar import is_endless
from twinpool.router.openai.structured_output import read_grammar

ENDLESS = [
    'start: "a" start',
    'start: ("a" | "b") start',
    'start: "a" b\nb: "c" d\nd: "e" b | "f" start',
    'start: a\na: a "x"',
    'start: a+\na: "(" a ")"',
    'start: "x" (a | "y" a)\na: a "z"',
    'start: a~2..3\na: "b" a',
    'start: "x" A\nA: "b" A',
    'start: %json {"type": "string"} start',
]
ENDED = [
    'start: "a" start | "b"',
    'start: "a" start?',
    'start: "a" start*',
    'start: "a" [start]',
    'start: a~0..3\na: "b" a',
    'start: a "x" | "y"\na: "b" a',
    'start: "a" |',
    'start: /a:b|c/ "start"i <[3]> b\nb.2: "c"',
    "%ignore / /\nstart: B // b: start\nB: /b/",
    'start: a\na[lazy, suffix="x"]: /.*/',
]
UNKNOWN = ["start: a::1\na::_: %if is_ones(_)", 'start: "a', "start: (", "start: )", "start: *", "x: start", "a", ""]


@pytest.mark.parametrize("lark", ENDLESS)
def test_a_grammar_that_never_ends_is_refused(lark: str) -> None:
    assert is_endless(lark)
    with pytest.raises(RequestError, match="no text can follow it to an end") as refused:
        read_grammar({"guided_grammar": lark})
    assert refused.value.param == "guided_grammar"


@pytest.mark.parametrize("lark", [*ENDED, *GRAMMARS, *UNKNOWN])
def test_a_grammar_that_ends_or_isnt_known_is_not(lark: str) -> None:
    assert not is_endless(lark)


def test_each_rule_is_looked_at_as_often_as_what_it_waits_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    missing = client_grammar._missing

    def counted(*args: object) -> list[str] | None:
        nonlocal looks
        looks += 1
        return missing(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(client_grammar, "_missing", counted)
    rules = 3000
    chain = "\n".join(f'r{number}: "a" r{number + 1}' for number in range(rules))
    assert not is_endless(f'start: r0\n{chain}\nr{rules}: "b"')
    assert looks <= 6 * rules
    looks = 0
    wide = " | ".join(f"r{number}" for number in range(rules))
    assert is_endless(f"start: {wide}\n" + "\n".join(f'r{number}: "a" r{number}' for number in range(rules)))
    assert looks <= 6 * rules
