"""house_numbers.py [ROOT]: how large the code's folders, files, functions and classes are, and whether that may be.

Prints a table of the production code's sizes, then each number that has a bound beside its goal. Exit code 1 where a
number is above its bound. Bounds are in `.ci/house_bounds.toml`: the goal where it is reached, else what the number was
when its bound was last written, so that it can only go down. Lines are those of the file, of a function from its first
decorator or `def` to its end. Generated code is left out, and so is an `__init__.py` from the counts of files.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

FOLDER, THIN, FILE, FUNCTION, METHODS, PARAMETERS = 10, 40, 500, 70, 20, 8
"""A file is worth opening: a small face over much. One below `THIN` lines is part of another's idea, one beyond `FILE`
has several."""
PRIVATE = re.compile(r"_[a-z]")
"""Names with one underscore."""
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
"""Names with one that are public: the standard library's documentation has them."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Size = tuple[int, str]
"""How large, and what."""


def sources(root: Path) -> Iterator[Path]:
    for package in sorted(path.name for path in (root / "twinpool").iterdir() if path.is_symlink()):
        for path in sorted((root / package).rglob("*.py")):
            yield path.relative_to(root)


def definitions(node: ast.AST) -> Iterator[Function | ast.ClassDef]:
    """Functions and classes, nested ones as well. Only statements are gone through: an expression has none."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for below in getattr(node, part, ()):
            if isinstance(below, Function | ast.ClassDef):
                yield below
            yield from definitions(below)


def lines(node: Function) -> int:
    first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
    return (node.end_lineno or first) - first + 1


def parameters(node: Function) -> int:
    given = node.args
    return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1


def taken_by(node: ast.ClassDef) -> int:
    """Parameters of a constructor that is written out."""
    for part in node.body:
        if isinstance(part, Function) and part.name == "__init__":
            return parameters(part)
    return 0


def spread(title: str, sizes: Sequence[Size], most: int | None = None) -> str:
    """Median, largest, and how many are above `most`."""
    size, name = max(sizes, default=(0, "none"))
    median = statistics.median([count for count, _ in sizes]) if sizes else 0
    above = f"{over(sizes, most)} over {most}" if most is not None else ""
    return f"| {title} | {len(sizes)} | {median:g} | {size} (`{name}`) | {above} |"


def over(sizes: Sequence[Size], most: int) -> int:
    return sum(count > most for count, _ in sizes)


def twice(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def private_names(tree: ast.AST) -> set[str]:
    """What a file defines for itself alone: attributes that it sets, functions, classes and names of the module."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if PRIVATE.match(name)}


def reaches(tree: ast.AST, theirs: set[str]) -> int:
    """How often a test's file uses a private name of production, from outside of what defines it."""
    own = private_names(tree)
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr in theirs - own - OF_NAMED_TUPLES
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for node in ast.walk(tree)
    )


class House:
    """The sizes of the code below a folder."""

    def __init__(self, root: Path) -> None:
        self.files: list[Size] = []
        self.functions: list[Size] = []
        self.methods: list[Size] = []
        self.taken: list[Size] = []
        folders: dict[Path, int] = defaultdict(int)
        classes, names = list[str](), list[str]()
        for path in sources(root):
            text = (root / path).read_text(encoding="utf-8")
            if path.name != "__init__.py":
                folders[path.parent] += 1
                names.append(path.name)
                self.files.append((len(text.splitlines()), path.as_posix()))
            for node in definitions(ast.parse(text)):
                name = f"{path}::{node.name}"
                if isinstance(node, ast.ClassDef):
                    classes.append(node.name)
                    self.methods.append((sum(isinstance(part, Function) for part in node.body), name))
                    self.taken += [(count, name)] if (count := taken_by(node)) else []
                else:
                    self.functions.append((lines(node), name))
        self.folders = [(count, folder.as_posix()) for folder, count in folders.items()]
        self.classes_twice, self.names_twice = twice(classes), twice(names)
        theirs = set[str]()
        for path in sources(root):
            theirs |= private_names(ast.parse((root / path).read_text(encoding="utf-8")))
        self.reached = [
            (count, path.relative_to(root).as_posix())
            for path in sorted((root / "tests").rglob("*.py"))
            if (count := reaches(ast.parse(path.read_text(encoding="utf-8")), theirs))
        ]
        self.bench = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (root / "bench").rglob("*.py"))

    def numbers(self) -> dict[str, int]:
        """Those that have a bound."""
        return {
            "lines of Python in bench/": self.bench,
            f"folders of more than {FOLDER} files": over(self.folders, FOLDER),
            "files": len(self.files),
            f"files of less than {THIN} lines": sum(count < THIN for count, _ in self.files),
            f"files of more than {FILE} lines": over(self.files, FILE),
            f"functions of more than {FUNCTION} lines": over(self.functions, FUNCTION),
            f"classes of more than {METHODS} methods": over(self.methods, METHODS),
            f"constructors of more than {PARAMETERS} parameters": over(self.taken, PARAMETERS),
            "class names of several meanings": len(self.classes_twice),
            "file names that occur twice": len(self.names_twice),
            "private names of production that tests use": sum(count for count, _ in self.reached),
        }

    def report(self) -> Iterator[str]:
        yield "| | how many | median | largest | |"
        yield "|---|---|---|---|---|"
        yield spread("files a folder", self.folders, FOLDER)
        yield spread("lines a file", self.files, FILE)
        yield spread("lines a function", self.functions, FUNCTION)
        yield spread("methods a class", self.methods, METHODS)
        yield spread("parameters of `__init__`", self.taken, PARAMETERS)
        yield ""
        yield f"Class names of several meanings: {', '.join(self.classes_twice) or 'none'}."
        yield f"Names of files that occur twice: {', '.join(self.names_twice) or 'none'}."
        total, (most, where) = sum(count for count, _ in self.reached), max(self.reached, default=(0, "none"))
        yield f"Private names of production that tests use: {total}; most in {where}: {most}."


def judge(numbers: dict[str, int], bounds: dict[str, dict[str, int]]) -> tuple[list[str], bool]:
    """A line for each number, and whether all are within their bounds. Raises `KeyError` for a number without one."""
    said, well = list[str](), True
    for name, number in numbers.items():
        goal, bound = bounds[name]["goal"], bounds[name]["bound"]
        if number > bound:
            verdict, well = f"ABOVE ITS BOUND of {bound}", False
        elif number < bound and bound > goal:
            verdict = f"the bound of {bound} can be lowered to {max(number, goal)}"
        else:
            verdict = f"bound {bound}"
        said.append(f"{name}: {number} (goal {goal}); {verdict}")
    return said, well


def main(root: Path) -> int:
    house = House(root)
    said, well = judge(house.numbers(), tomllib.loads((root / ".ci" / "house_bounds.toml").read_text("utf-8")))
    sys.stdout.write("\n".join([*house.report(), "", *said]) + "\n")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
