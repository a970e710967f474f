"""The simulator runs the classes that production runs: none is subclassed, replaced or reached into."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCTION = (
    "contracts",
    "cache",
    "transfer",
    "engine",
    "worker",
    "prefill",
    "decode",
    "colocate",
    "router",
    "cluster",
)
PATCHING = ("setattr", "delattr", "__setattr__", "__dict__", "__class__", "mock", "patch", "monkeypatch")


def offences(source: str) -> list[str]:
    """Where a module subclasses production classes, or assigns to anything of theirs."""
    tree = ast.parse(source)
    theirs = set(_imported(tree))
    own = _own_attributes() | _set_by_the_builder()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found += [f"{node.name} is a {ast.unparse(base)}" for base in node.bases if _root(base) in theirs]
        for target in _assigned(node):
            if isinstance(target, ast.Attribute) and _root(target) != "self" and target.attr not in own:
                found.append(f"{ast.unparse(target)} is assigned")
            if isinstance(target, ast.Attribute) and _root(target) in theirs:
                found.append(f"{ast.unparse(target)} is assigned")
        name = getattr(node, "id", getattr(node, "attr", ""))
        if isinstance(node, ast.Name | ast.Attribute) and name in PATCHING:
            found.append(f"it uses {name}")
    return found


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _part(node.module or "") in PRODUCTION:
            yield from (alias.asname or alias.name for alias in node.names)
        if isinstance(node, ast.Import):
            yield from (a.asname or a.name.split(".")[0] for a in node.names if _part(a.name) in PRODUCTION)


def _part(module: str) -> str:
    """The part of Twinpool that a module is of, by its dotted name; empty for all others."""
    package, _, rest = module.partition(".")
    return rest.split(".")[0] if package == "twinpool" else ""


@cache
def _own_attributes() -> frozenset[str]:
    """Attributes that the simulator's own classes give themselves."""
    own: set[str] = set()
    for path in sorted((ROOT / "sim").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            own |= {t.attr for t in _assigned(node) if isinstance(t, ast.Attribute) and _root(t) == "self"}
            if isinstance(node, ast.ClassDef):
                own |= {
                    n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                }
    return frozenset(own)


@cache
def _set_by_the_builder() -> frozenset[str]:
    """What `cluster.assembly` sets of the parts that it puts together, the simulator sets as well."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "cluster" / "assembly").glob("build_*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return frozenset(t.attr for node in nodes for t in _assigned(node) if isinstance(t, ast.Attribute))


def _assigned(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    else:
        return []
    return [part for t in targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])]


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", sorted((ROOT / "sim").rglob("*.py")), ids=lambda path: path.stem)
def test_the_simulator_neither_subclasses_nor_patches_production(path: Path) -> None:
    assert offences(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "from twinpool.decode import DecodeWorker\nclass Mine(DecodeWorker): pass",
        "from twinpool.cache.manager import kv_cache_manager\nclass Mine(kv_cache_manager.Seat): pass",
        "from twinpool.decode import DecodeWorker\nDecodeWorker.step = lambda self: []",
        "import twinpool.decode.worker\ntwinpool.decode.worker.DecodeWorker.step = None",
        "def f(worker):\n    worker.step = lambda: []",
        "from twinpool.decode import DecodeWorker\nsetattr(DecodeWorker, 'step', None)",
        "from unittest import mock\nmock.patch('twinpool.decode.worker')",
    ],
)
def test_a_simulator_that_did_so_would_be_found(source: str) -> None:
    assert offences(source)
