"""What `make test` leaves to `make test-all`: of a slow test all parameters but the first, beside what is listed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.native import BUILDS
from tests.support import thorough_marks
from twinpool.engine.native.compile_kernels import MACHINE


class Collected:
    """A collected test, as far as marks go."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, list(marks)

    def iter_markers(self) -> Iterator[pytest.Mark]:
        return (getattr(pytest.mark, name).mark for name in self.marks)

    def add_marker(self, mark: str) -> None:
        self.marks.append(mark)


def left_out(*items: Collected) -> list[str]:
    made: Any = items
    thorough_marks.mark_later_parameters(made)
    return [item.nodeid for item in items if "thorough" in item.marks]


def test_of_a_slow_test_the_first_parameter_stays() -> None:
    items = [Collected(f"f::{test}[{number}]", "slow") for test in ("one", "two") for number in range(3)]
    assert left_out(*items) == ["f::one[1]", "f::one[2]", "f::two[1]", "f::two[2]"]


def test_the_first_that_is_neither_listed_nor_a_soak_stays() -> None:
    items = [Collected("f::one[0]", "slow", "thorough"), Collected("f::one[1]", "slow", "soak")]
    assert left_out(*items, Collected("f::one[2]", "slow"), Collected("f::one[3]", "slow")) == [
        "f::one[0]",
        "f::one[3]",
    ]


def test_what_is_quick_or_has_no_parameters_or_means_each_of_them_stays() -> None:
    quick = [Collected("f::quick[0]"), Collected("f::quick[1]")]
    alone = [Collected("f::alone", "slow"), Collected("f::alone", "slow")]
    each = [
        Collected(f"f::{mark}[{number}]", "slow", mark) for mark in ("every_parameter", "runs") for number in (0, 1)
    ]
    assert left_out(*quick, *alone, *each) == []


def test_where_one_parameter_is_slow_the_quick_ones_stay() -> None:
    items = [Collected("f::one[0]"), Collected("f::one[1]", "slow"), Collected("f::one[2]")]
    assert left_out(*items) == ["f::one[1]"]


@pytest.mark.parametrize("build", BUILDS)
def test_builds_of_the_kernels_are_left_out_wherever_a_test_names_them_but_this_machines(build: str) -> None:
    """Each takes ten seconds to be compiled, and in a fresh clone all that are asked for are."""
    for parameters in (build, f"{build}-1", f"1-{build}", f"1-{build}-1"):
        item: Any = Collected(f"tests/engine/test_of_any_kind.py::test_products[{parameters}]")
        thorough_marks.mark_by_lists(item)
        assert item.marks == ([] if build == MACHINE else ["thorough"]), parameters


def test_a_pattern_that_names_no_test_is_stale_and_one_that_does_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thorough_marks, "NAMING", {"thorough": set()})
    patterns = thorough_marks._listed("thorough")
    (pattern,) = (one for one in patterns if one.startswith("tests/bench/test_bench_measures.py::"))
    item: Any = Collected("tests/bench/test_bench_measures.py::test_anything")
    thorough_marks.mark_by_lists(item)
    assert item.marks == ["thorough"]
    assert pattern not in thorough_marks.stale_patterns("thorough")
    assert len(thorough_marks.stale_patterns("thorough")) == len(patterns) - 1
