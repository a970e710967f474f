"""unused.py [ROOT]: fail on code of the packages that nothing in them reaches; tests and benches don't count.

Two looks, because each is blind where the other sees:

- Definitions of modules (functions, classes, constants) are followed from where a process begins: from
  `[project.scripts]`, from what modules run when they are imported or started, and from what unused_allowed.txt names.
  A group of definitions that only use each other is found.
- Methods, attributes and variables are vulture's: a name that no code of the packages or of docs/ ever reads.

unused_allowed.txt beside this file has one pattern a line, ``PATH::NAME  reason``; lines that start with ``#`` say
something. A line without a reason, and one that allows nothing any more, is an error.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vulture import Vulture

ALLOWED = "unused_allowed.txt"
USERS = ("docs",)
"""Folders besides the packages whose code counts as a user."""
_QUOTED = re.compile(r"[A-Za-z_][\w.\[\], |]*")
"""What can be an annotation or the name of a definition."""
Definition = tuple[str, str]
"""A module and a name that is defined at its top level."""


def sources(root: Path, packages: Iterable[str]) -> list[Path]:
    """The modules of packages by the paths that they are imported by, also below folders that are links."""
    walks = (walk for package in packages for walk in os.walk(root / package, followlinks=True))
    paths = (Path(folder, name) for folder, _, names in walks for name in names if name.endswith(".py"))
    return sorted(path for path in paths)


def place(root: Path, path: Path) -> str:
    """Where a file lies, below `root`."""
    return path.resolve().relative_to(root.resolve()).as_posix()


@dataclass
class Module:
    path: str
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    others: list[ast.stmt] = field(default_factory=list)
    """What runs when the module is imported or started, besides imports."""
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """Name in this module -> the module that it is from, and what of it; None: the module itself."""


class Code:
    """The modules of the packages, and which definition uses which."""

    def __init__(self, root: Path, packages: Iterable[str]) -> None:
        self.modules: dict[str, Module] = {}
        self._known: dict[ast.AST, set[Definition]] = {}
        for path in sources(root, packages):
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules[module] = read(place(root, path), ast.parse(path.read_text()))

    def __iter__(self) -> Iterator[Definition]:
        return ((name, defined) for name, module in self.modules.items() for defined in module.definitions)

    def line(self, definition: Definition) -> int:
        return self.modules[definition[0]].definitions[definition[1]][0].lineno

    def pattern(self, definition: Definition) -> str:
        return f"{self.modules[definition[0]].path}::{definition[1]}"

    def started(self) -> set[Definition]:
        """What modules use outside their definitions."""
        return {
            used for name, module in self.modules.items() for other in module.others for used in self.uses(name, other)
        }

    def reached(self, roots: Iterable[Definition]) -> set[Definition]:
        seen: set[Definition] = set()
        waiting = list(roots)
        while waiting:
            name, defined = waiting.pop()
            if (name, defined) not in seen:
                seen.add((name, defined))
                for statement in self.modules[name].definitions[defined]:
                    waiting += self.uses(name, statement)
        return seen

    def uses(self, module: str, tree: ast.AST) -> set[Definition]:
        if tree in self._known:
            return self._known[tree]
        used = self._known[tree] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                used |= self._named(module, dotted(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used |= self._quoted(module, node.value)
        return used

    def _named(self, module: str, names: list[str]) -> set[Definition]:
        found: Definition | str | None = module
        for name in names:
            if not isinstance(found, str):
                break
            found = self._resolve(found, name)
        return {found} if isinstance(found, tuple) else set()

    def _quoted(self, module: str, text: str) -> set[Definition]:
        """A quoted annotation, or an entry of a table such as "llama.Llama" of the module beside."""
        if not _QUOTED.fullmatch(text):
            return set()
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError:
            return set()
        package = module.rpartition(".")[0]
        beside = self._named(package, dotted(tree)) if package and isinstance(tree, ast.Attribute) else set()
        return beside | self.uses(module, tree)

    def _resolve(self, module: str, name: str) -> Definition | str | None:
        """The definition or the module that `name` stands for in `module`."""
        known = self.modules.get(module, Module(""))
        if name in known.definitions:
            return module, name
        if name in known.imports:
            source, imported = known.imports[name]
            return source if imported is None else self._resolve(source, imported)
        return f"{module}.{name}" if f"{module}.{name}" in self.modules else None


def dotted(node: ast.expr) -> list[str]:
    """``a.b.c`` as its names; none when it begins with something else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def read(path: str, tree: ast.Module) -> Module:
    module = Module(path)
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [statement.name]
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        else:
            names = []
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                module.others.append(statement)
        for name in names:
            if name != "__all__":
                module.definitions.setdefault(name, []).append(statement)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module.imports |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                module.imports[alias.asname or first] = (alias.name if alias.asname else first, None)
    return module


def scripts(project: dict[str, dict[str, object]]) -> Iterator[Definition]:
    declared = project["project"].get("scripts", {})
    for entry in declared.values() if isinstance(declared, dict) else ():
        module, _, name = entry.partition(":")
        yield module, name


def unread(root: Path, packages: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Names that vulture finds read nowhere: ``PATH::NAME`` and the line."""
    vulture = Vulture()
    vulture.scavenge(sources(root, (*packages, *USERS)))
    for item in vulture.get_unused_code():
        path = place(root, Path(item.filename))
        if not path.startswith(tuple(f"{name}/" for name in USERS)):
            yield f"{path}::{item.name}", item.first_lineno


def read_allowed(path: Path) -> list[str]:
    patterns = []
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.strip() and not line.startswith("#"):
            pattern, _, reason = line.strip().partition(" ")
            if not reason.strip():
                sys.exit(f"{path}: {pattern} has no reason")
            patterns.append(pattern)
    return patterns


def allows(patterns: Iterable[str], one: str) -> bool:
    return any(fnmatch.fnmatchcase(one, pattern) for pattern in patterns)


def judge(
    root: Path, packages: list[str], begins: set[Definition], allowed: list[str]
) -> tuple[dict[str, int], list[str]]:
    """What nothing reaches and nothing allows, with its line, and the patterns that allow nothing."""
    code = Code(root, packages)
    begins = begins | code.started()
    alone = code.reached(begins)
    permitted = {one for one in code if one not in alone and allows(allowed, code.pattern(one))}
    reached = code.reached(begins | permitted)
    settled = {code.pattern(one) for one in reached}
    found = {code.pattern(one): code.line(one) for one in code if one not in reached}
    found |= {pattern: line for pattern, line in unread(root, packages) if pattern not in settled}
    needed = {*found, *map(code.pattern, permitted)}
    surprises = {one: line for one, line in sorted(found.items()) if not allows(allowed, one)}
    return surprises, [pattern for pattern in allowed if not fnmatch.filter(needed, pattern)]


def main(root: Path) -> int:
    project = tomllib.loads((root / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    surprises, stale = judge(root, packages, set(scripts(project)), read_allowed(root / ".ci" / ALLOWED))
    for one, line in surprises.items():
        path, _, name = one.partition("::")
        sys.stderr.write(f"{path}:{line}: {name} is reached by nothing in production\n")
    for pattern in stale:
        sys.stderr.write(f".ci/{ALLOWED}: {pattern} allows nothing that has to be allowed\n")
    return 1 if surprises or stale else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
