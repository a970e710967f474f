"""Which statements of product code a test executes: a probe before each of them, put in as modules are imported.

A probe is one call of a set's `add`, so tests run little slower, in every thread of the process. What other processes
execute isn't seen. A statement is named by its file, its outermost function, that function's digest and its number
within it, so that what was found out holds as long as the function stays as it is, wherever it moves in its file.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from tests.mutants.breaking import ROOT, bodies, statements

_NAME = "__twinpool_probe__"


class Probes(importlib.abc.MetaPathFinder):
    """Imports the modules of `paths` with probes in them; install it before they are imported."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.hits: set[int] = set()
        """Numbers of the statements that were executed."""
        self.functions: list[tuple[str, str, str]] = []
        """Path, name and digest of each function."""
        self.probes: list[tuple[int, int]] = []
        """For each probe the number of its function, and that of its statement."""
        self._files = {"twinpool." + path.removesuffix(".py").replace("/", "."): path for path in paths}

    def install(self) -> None:
        setattr(builtins, _NAME, self.hits.add)
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        if file is None:
            return None
        return importlib.util.spec_from_file_location(fullname, ROOT / file, loader=_Loader(self, fullname, file))

    def code(self, path: str) -> CodeType:
        tree = ast.parse((ROOT / path).read_bytes())
        for body in bodies(tree):
            self.functions.append((path, body.name, body.digest))
            numbers = {id(s): number for number, s in enumerate(statements(body.tree))}
            for node in ast.walk(body.tree):
                for name in ("body", "orelse", "finalbody"):
                    block = getattr(node, name, None)
                    if isinstance(block, list):
                        setattr(node, name, self._with_probes(block, numbers))
        ast.fix_missing_locations(tree)
        return compile(tree, str(ROOT / path), "exec", dont_inherit=True)

    def _with_probes(self, block: list[ast.stmt], numbers: dict[int, int]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in block:
            if id(statement) not in numbers:
                out.append(statement)
                continue
            self.probes.append((len(self.functions) - 1, numbers[id(statement)]))
            call = ast.Call(ast.Name(_NAME, ast.Load()), [ast.Constant(len(self.probes) - 1)], [])
            probe = ast.copy_location(ast.Expr(call), statement)
            docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            out += [statement, probe] if docstring else [probe, statement]
        return out


class _Loader(importlib.abc.InspectLoader):
    def __init__(self, probes: Probes, fullname: str, path: str) -> None:
        self._probes, self._path = probes, path

    def get_source(self, fullname: str) -> str:
        return (ROOT / self._path).read_text()

    def get_filename(self, fullname: str) -> str:
        return str(ROOT / self._path)

    def is_package(self, fullname: str) -> bool:
        return False

    def get_code(self, fullname: str) -> CodeType:
        return self._probes.code(self._path)
