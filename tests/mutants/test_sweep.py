"""The tool that breaks product code: what it finds, what it leaves alone, and that a break is a break."""

from __future__ import annotations

import ast
from types import FunctionType

import pytest

from tests.mutants import breaking, probing, sweep
from tests.mutants.breaking import OPERATORS, Place, bodies, broken, places, statements
from twinpool.worker.fair_shares import FairShares

SAMPLE = '''
class Book:
    """A docstring with 1 < 2."""

    def held(self, pages: list[int], most: int = 5) -> bool:
        """Another: not a place."""
        log.info("%d pages, %d", len(pages), 3)
        self.count += 1
        if self.closed and most > 2:
            raise ValueError(f"{most + 1} is too many")
        kept = [p for p in pages if p % 2]
        self.tell(kept, most, loud=True)
        assert self.count >= 0, "counts go up"
        return len(kept[: most]) < min(most, 9) if kept else False

    def __repr__(self) -> str:
        return "Book" + str(1 + 1)
'''


def found() -> list[Place]:
    return places("book.py", SAMPLE)


def unparsed(place: Place) -> str:
    (held, _) = bodies(ast.parse(SAMPLE))
    other = breaking._changed(held.tree, place.node, place.operator)
    assert other is not None
    return ast.unparse(other)


def test_places_are_the_same_whenever_one_looks_and_each_has_a_key_of_its_own() -> None:
    assert found() == found()
    keys = [place.key for place in found()]
    assert len(keys) == len(set(keys))
    moved = places("book.py", "\n\n\n" + SAMPLE)
    assert [place.key for place in moved] == keys, "a function may move in its file"


def test_what_only_people_read_is_no_place() -> None:
    lines = {place.text for place in found()}
    assert not [line for line in lines if line.startswith(("log.", "assert", '"""', "def __repr__", 'return "Book'))]
    assert {place.operator for place in found() if "raise" in place.text} == {"statement removed"}
    assert all(place.function == "Book.held" for place in found())


@pytest.mark.parametrize(
    ("operator", "was", "becomes"),
    [
        ("comparison turned", "most > 2", "most <= 2"),
        ("boundary moved", "most > 2", "most >= 2"),
        ("and/or", "self.closed and most > 2", "self.closed or most > 2"),
        ("last condition dropped", "self.closed and most > 2", "self.closed and self.closed"),
        ("condition negated", "if self.closed and most > 2:", "if not (self.closed and most > 2):"),
        ("arithmetic", "self.count += 1", "self.count -= 1"),
        ("off by one", "min(most, 9)", "min(most, 10)"),
        ("flag turned", "loud=True", "loud=False"),
        ("statement removed", "self.tell(kept, most, loud=True)", "pass"),
        ("arguments swapped", "self.tell(kept, most, loud=True)", "self.tell(most, kept, loud=True)"),
        ("keyword dropped", "self.tell(kept, most, loud=True)", "self.tell(kept, most)"),
        ("opposite call", "min(most, 9)", "max(most, 9)"),
        ("filter dropped", "[p for p in pages if p % 2]", "[p for p in pages]"),
        ("branches swapped", "if kept else False", "False if kept else"),
        ("slice bound dropped", "kept[:most]", "kept[:]"),
    ],
)
def test_an_operator_changes_one_thing(operator: str, was: str, becomes: str) -> None:
    (held, _) = bodies(ast.parse(SAMPLE))
    before = ast.unparse(held.tree)
    assert was in before
    after = [unparsed(place) for place in found() if place.operator == operator]
    assert any(becomes in text and text != before for text in after), after


def test_every_operator_finds_something_in_product_code() -> None:
    files = (
        "cache/pool/page_allocator.py",
        "decode/worker.py",
        "transfer/rooms/receiver/kv_receiver.py",
        "router/core/router_core.py",
    )
    met = {place.operator for path in files for place in places(path, (breaking.ROOT / path).read_text())}
    assert met == set(OPERATORS)


def test_a_break_is_put_into_the_code_that_a_function_had() -> None:
    text = "def more(a):\n    return a + 1\n"
    place = next(p for p in places("x.py", text) if p.operator == "arithmetic")
    name, line, code = broken(place, text)
    assert (name, line) == ("more", 1)
    assert FunctionType(code, {})(5) == 4
    with pytest.raises(LookupError, match="not as it was"):
        broken(place, text.replace("1", "2"))


def test_functions_of_the_package_are_found_by_where_their_files_lie() -> None:
    path = "worker/fair_shares.py"
    place = next(p for p in places(path, (sweep.ROOT / path).read_text()) if p.function == "FairShares.charge")
    name, line, _ = broken(place, (sweep.ROOT / path).read_text())
    assert sweep._functions({path})[str(sweep.ROOT / path), name, line] == [FairShares.charge]


def test_what_is_called_equivalent_can_be_broken_so_and_says_why() -> None:
    """Code that changed has lost its row: whether it is still so is to be thought about again."""
    for (path, *called), why in sweep.equivalents().items():
        found = [sweep.told_by(place)[1:] for place in places(path, (sweep.ROOT / path).read_text())]
        assert tuple(called) in found, (path, called)
        assert why.endswith("."), path


def test_probes_tell_which_statements_ran_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def sign(a):\n    'Doc.'\n    if a < 0:\n        return -1\n    else:\n        b = 1\n    return b\n"
    probes = probing.Probes([])
    monkeypatch.setattr(probing, "ROOT", _Root(text))
    scope: dict[str, object] = {probing._NAME: probes.hits.add}
    exec(probes.code("x.py"), scope)
    sign = scope["sign"]
    assert callable(sign)
    assert sign.__doc__ == "Doc."
    (body,) = bodies(ast.parse(text))
    numbers = {ast.unparse(s): n for n, s in enumerate(statements(body.tree))}
    assert sign(-3) == -1
    ran = {probes.probes[hit][1] for hit in probes.hits}
    assert numbers["return -1"] in ran
    assert numbers["b = 1"] not in ran
    assert sign(3) == 1
    assert {probes.probes[hit][1] for hit in probes.hits} == set(numbers.values())


class _Root:
    """Stands in for the repository's folder: every file in it is this text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __truediv__(self, name: str) -> _Root:
        return self

    def read_bytes(self) -> bytes:
        return self._text.encode()
