"""`.ci/unused.py`, which `make check` runs: what nothing in production reaches fails it, and tests don't count."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.run import copy_tree
from tests.support.served_cluster import ROOT

PROJECT = """
[project.scripts]
pond = "pond.main:main"
[tool.hatch.build.targets.wheel]
packages = ["pond"]
"""
MAIN = """
from pond.table import ENTRIES
from pond import tools

def main() -> None:
    print(ENTRIES, tools.needed(), Duck().quack())

class Duck:
    def quack(self) -> "Sound":
        return Sound()

class Sound:
    pass
"""
TABLE = 'ENTRIES = {"goose": "birds.Goose"}\n'
BIRDS = "class Goose:\n    pass\n"
TOOLS = "def needed() -> int:\n    return _inner()\n\ndef _inner() -> int:\n    return 1\n"


def judged(root: Path, allowed: str = "", **files: str) -> tuple[int, list[str]]:
    """Exit code and lines for a project that is whole but for `files`."""
    texts = {"main": MAIN, "table": TABLE, "birds": BIRDS, "tools": TOOLS, "__init__": ""} | files
    for folder in ("pond", "tests", ".ci", "docs"):
        (root / folder).mkdir(exist_ok=True)
    for name, text in texts.items():
        path = root / (f"tests/{name}.py" if name.startswith("test_") else f"pond/{name}.py")
        path.write_text(text)
    (root / "pyproject.toml").write_text(PROJECT)
    (root / ".ci" / "unused_allowed.txt").write_text(allowed)
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "unused.py"), str(root)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr.splitlines()


def test_what_is_reached_by_name_by_attribute_by_quotes_and_by_a_table_is_fine(tmp_path: Path) -> None:
    assert judged(tmp_path) == (0, [])


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"tools": TOOLS + "\ndef spare() -> None:\n    pass\n"}, ["pond/tools.py:7: spare"]),
        ({"tools": TOOLS + "\nSPARE = 1\n"}, ["pond/tools.py:7: SPARE"]),
        ({"main": MAIN + "\n    def paddle(self) -> None:\n        pass\n"}, ["pond/main.py:15: paddle"]),
        ({"tools": TOOLS + "\ndef ping() -> None:\n    pong()\n\ndef pong() -> None:\n    ping()\n"}, ["ping", "pong"]),
        ({"spare": "def main() -> None:\n    needed()\n\ndef needed() -> None:\n    pass\n"}, ["main", "needed"]),
        ({"table": "ENTRIES = {}\n"}, ["pond/birds.py:1: Goose"]),
    ],
)
def test_what_nothing_reaches_is_named(tmp_path: Path, files: dict[str, str], found: list[str]) -> None:
    """Also what only uses itself in a circle, and what has the name of something that is used elsewhere."""
    code, lines = judged(tmp_path, **files)
    assert code == 1
    assert len(lines) == len(found)
    assert all(any(one in line for line in lines) for one in found), lines


def test_a_test_is_no_user(tmp_path: Path) -> None:
    files = {
        "tools": TOOLS + "\ndef spare() -> None:\n    pass\n",
        "test_pond": "from pond.tools import spare\nspare()\n",
    }
    assert judged(tmp_path, **files) == (1, ["pond/tools.py:7: spare is reached by nothing in production"])


def test_what_is_allowed_has_a_reason_and_is_allowed_with_all_that_it_uses(tmp_path: Path) -> None:
    files = {"tools": TOOLS + "\ndef spare() -> None:\n    deeper()\n\ndef deeper() -> None:\n    pass\n"}
    assert judged(tmp_path, "pond/tools.py::spare  a face\n", **files) == (0, [])
    code, lines = judged(tmp_path, "pond/tools.py::spare\n", **files)
    assert code == 1
    assert "has no reason" in lines[0]


def test_what_allows_nothing_any_more_is_an_error(tmp_path: Path) -> None:
    code, lines = judged(tmp_path, "pond/tools.py::needed  once a face\n")
    assert (code, lines) == (1, [".ci/unused_allowed.txt: pond/tools.py::needed allows nothing that has to be allowed"])


@pytest.mark.slow
def test_a_dead_function_in_production_fails_the_check(tmp_path: Path) -> None:
    """On a copy of the project itself."""
    copy_tree(tmp_path)
    for folder in ("tests", "bench"):
        shutil.rmtree(tmp_path / folder)
    clock = tmp_path / "contracts" / "clock.py"
    clock.write_text(clock.read_text() + "\n\ndef release() -> None:\n    release()\n")
    command = [sys.executable, ".ci/unused.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    line = len(clock.read_text().splitlines()) - 1
    assert done.stderr == f"contracts/clock.py:{line}: release is reached by nothing in production\n"
