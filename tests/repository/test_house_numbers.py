"""`.ci/house_numbers.py`, which `make check` runs: a number above its bound fails it; no bound is below its goal."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.served_cluster import ROOT

SCRIPT = ROOT / ".ci" / "house_numbers.py"
BOUNDS = tomllib.loads((ROOT / ".ci" / "house_bounds.toml").read_text())
LONG = "x = 1\n" * 501
FUNCTION = "def walk() -> None:\n" + "    step()\n" * 70
LARGE = "class Large:\n" + "".join(f"    def do_{n}(self) -> None: ...\n" for n in range(21))
TAKES = f"class Takes:\n    def __init__(self, {', '.join(f'p{n}' for n in range(9))}):\n        pass\n"
EXCEEDS = {
    "lines of Python in bench/": {"bench/common/long.py": "x = 1\n" * 4},
    "folders of more than 10 files": {f"pond/many/file_{n}.py": "" for n in range(11)},
    "files": {"pond/another.py": "x = 1\n" * 40},
    "files of less than 40 lines": {"pond/thin.py": "x = 1\n" * 39},
    "files of more than 500 lines": {"pond/long.py": LONG},
    "functions of more than 70 lines": {"pond/main.py": FUNCTION},
    "classes of more than 20 methods": {"pond/large.py": LARGE},
    "constructors of more than 8 parameters": {"pond/takes.py": TAKES},
    "class names of several meanings": {"pond/one.py": "class Duck: ...\n", "pond/other.py": "class Duck: ...\n"},
    "file names that occur twice": {"pond/a/duck.py": "", "pond/b/duck.py": ""},
    "private names of production that tests use": {
        "pond/main.py": "_depth = 1\n" * 40,
        "tests/test_pond.py": "print(pond._depth)\n",
    },
}
"""Trees that have one more of a number than the smallest tree; of lines in bench/, one more than its three."""


SMALLEST = {"lines of Python in bench/": 3, "files": 1}
"""What the smallest tree has; of all else it has none."""


def judged(root: Path, tree: dict[str, str], **bounds: dict[str, int]) -> tuple[int, list[str]]:
    """The exit code and what it says of a tree whose bounds are what the smallest one has, unless given."""
    zero = {name: {"goal": 0, "bound": SMALLEST.get(name, 0)} for name in BOUNDS} | bounds
    written = "".join(f'"{name}" = {{ goal = {b["goal"]}, bound = {b["bound"]} }}\n' for name, b in zero.items())
    smallest = {"pond/__init__.py": "", "pond/main.py": "x = 1\n" * 40, "bench/__init__.py": "x = 1\n" * 3}
    for name, text in {**smallest, ".ci/house_bounds.toml": written, **tree}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "twinpool").mkdir()
    (root / "twinpool" / "pond").symlink_to("../pond")
    done = subprocess.run([sys.executable, str(SCRIPT), str(root)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_a_tree_within_its_bounds_passes_and_every_number_is_shown_beside_goal_and_bound(tmp_path: Path) -> None:
    code, said = judged(tmp_path, {})
    assert code == 0
    assert "lines of Python in bench/: 3 (goal 0); bound 3" in said
    assert {line.partition(":")[0] for line in said if "(goal" in line} == set(BOUNDS)


@pytest.mark.parametrize("name", BOUNDS)
def test_one_number_above_its_bound_fails_and_is_named(name: str, tmp_path: Path) -> None:
    others = {other: {"goal": 0, "bound": 99} for other in BOUNDS if other != name}
    code, said = judged(tmp_path, EXCEEDS[name], **others)
    assert code == 1
    (line,) = [line for line in said if "ABOVE ITS BOUND" in line]
    assert line.startswith(f"{name}: ")


def test_a_bound_that_a_number_has_gone_below_can_be_lowered_as_far_as_the_goal(tmp_path: Path) -> None:
    name = "lines of Python in bench/"
    code, said = judged(tmp_path, {}, **{name: {"goal": 5, "bound": 9}})
    assert code == 0
    assert f"{name}: 3 (goal 5); the bound of 9 can be lowered to 5" in said


def test_no_bound_is_below_its_goal() -> None:
    assert [name for name, one in BOUNDS.items() if one["bound"] < one["goal"]] == []


def test_make_check_runs_it() -> None:
    check = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    assert "$(BIN)/python .ci/house_numbers.py" in check


def test_private_names_of_production_that_tests_use_are_counted(tmp_path: Path) -> None:
    """Those that are defined there, by whatever isn't `self`; a name of the test's own is none of them, nor is one that
    all named tuples have."""
    pond = (
        "class Duck:\n    def __init__(self) -> None:\n        self._feet = 2\n        self._own = 3\n"
        "        self._replace = 4\n\n" + "x = 1\n" * 40
    )
    test = (
        "_own = 1\nprint(duck._feet, other.duck._feet, self._feet, duck._wings, duck.feet, duck._own)\n"
        "row._replace(a=1)\n"
    )
    bounds = {"private names of production that tests use": {"goal": 0, "bound": 2}}
    code, said = judged(tmp_path, {"pond/main.py": pond, "tests/test_duck.py": test}, **bounds)
    assert code == 0
    (line,) = [line for line in said if line.startswith("Private names")]
    assert ": 2; most" in line
    assert line.endswith("most in tests/test_duck.py: 2.")
