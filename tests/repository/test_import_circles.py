"""No module of the package waits for itself: a circle of imports works or fails by which of its modules comes first."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "twinpool"


def modules(package: Path) -> dict[str, Path]:
    """The modules below a folder of links, by their full names."""
    found = {}
    for part in sorted(package.iterdir()):
        for path in sorted(part.resolve().rglob("*.py")) if part.is_dir() else ():
            name = f"{package.name}.{part.name}.{path.relative_to(part.resolve()).with_suffix('')}".replace("/", ".")
            found[name.removesuffix(".__init__")] = path
    return found


def run_at_import(body: Sequence[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of a module that run when it is imported: not those in functions, or for types alone."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If):
            yield from run_at_import(node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else node.body)
        elif isinstance(node, ast.Try):
            yield from run_at_import(node.body)


def imports(source: str, known: Mapping[str, Path]) -> set[str]:
    names: set[str] = set()
    for node in run_at_import(ast.parse(source).body):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif node.module:
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return names & known.keys()


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of one circle, in order; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = modules(PACKAGE)
    assert len(known) > 400
    assert circle({name: imports(path.read_text(), known) - {name} for name, path in known.items()}) == []


@pytest.mark.parametrize(("two", "found"), [("from p.a import x", True), ("def f():\n    from p.a import x", False)])
def test_a_circle_is_found(two: str, found: bool) -> None:
    known = {"p.a": Path(), "p.b": Path()}
    graph = {"p.a": imports("import p.b", known), "p.b": imports(two, known)}
    assert bool(circle(graph)) is found
