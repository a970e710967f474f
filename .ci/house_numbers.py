"""house_numbers.py [ROOT]: how large the production code's folders, files, functions and classes are.

A look at the tree, and no test: it fails on nothing. Lines are those of the file, of a function from its first
decorator or `def` to its end. Generated code is left out, and so is an `__init__.py` from the counts of files.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

GENERATED = "contracts/proto"
FOLDER, FILE, METHODS, PARAMETERS = 10, 250, 20, 8
"""What CONTRIBUTING has as about the most."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(root: Path) -> Iterator[Path]:
    for package in sorted(path.name for path in (root / "twinpool").iterdir() if path.is_symlink()):
        for path in sorted((root / package).rglob("*.py")):
            if not path.relative_to(root).is_relative_to(GENERATED):
                yield path.relative_to(root)


def lines(node: ast.AST) -> int:
    assert isinstance(node, Function | ast.ClassDef)
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


def spread(title: str, sizes: Sequence[tuple[int, str]], most: int | None = None) -> str:
    """Median, largest, and how many are above `most`."""
    counts = [size for size, _ in sizes]
    size, name = max(sizes)
    above = f"{sum(count > most for count in counts)} over {most}" if most is not None else ""
    return f"| {title} | {len(sizes)} | {statistics.median(counts):g} | {size} (`{name}`) | {above} |"


def twice(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def report(root: Path) -> Iterator[str]:
    paths = list(sources(root))
    trees = {path: ast.parse((root / path).read_text()) for path in paths}
    files = [path for path in paths if path.name != "__init__.py"]
    nodes = [(path, node) for path in paths for node in ast.walk(trees[path])]
    functions = [(lines(node), f"{path}::{node.name}") for path, node in nodes if isinstance(node, Function)]
    classes = [(f"{path}::{node.name}", node) for path, node in nodes if isinstance(node, ast.ClassDef)]
    folders: dict[Path, int] = defaultdict(int)
    for path in files:
        folders[path.parent] += 1
    sizes = [(len((root / path).read_text().splitlines()), path.as_posix()) for path in files]
    methods = [(sum(isinstance(part, Function) for part in node.body), name) for name, node in classes]
    taken = [(count, name) for name, node in classes if (count := taken_by(node))]
    yield "| | how many | median | largest | |"
    yield "|---|---|---|---|---|"
    yield spread("files a folder", [(count, folder.as_posix()) for folder, count in folders.items()], FOLDER)
    yield spread("lines a file", sizes, FILE)
    yield spread("lines a function", functions)
    yield spread("methods a class", methods, METHODS)
    yield spread("parameters of `__init__`", taken, PARAMETERS)
    yield ""
    yield f"Class names of several meanings: {', '.join(twice(node.name for _, node in classes)) or 'none'}."
    yield f"Names of files that occur twice: {', '.join(twice(path.name for path in files)) or 'none'}."


if __name__ == "__main__":
    sys.stdout.write("\n".join(report(Path(sys.argv[1] if len(sys.argv) > 1 else "."))) + "\n")
