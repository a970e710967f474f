"""Everything that is imported of this project is below `twinpool`, in a checkout and beside other packages."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.served_cluster import OWN_NAMES, ROOT
from twinpool.cli.command_line import COMMANDS
from twinpool.contracts.build_id import PACKAGES, import_root


def python_files() -> list[Path]:
    words = ["git", "ls-files", "-co", "--exclude-standard", "--", "*.py"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def imported(tree: ast.AST) -> set[str]:
    """The modules that code imports by their whole name, also code in a string that is run elsewhere."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import " in node.value:
            try:
                names |= imported(ast.parse(node.value))
            except (SyntaxError, ValueError):
                continue
    return names


def test_a_part_is_imported_by_its_whole_name_alone() -> None:
    """By its bare one it would be a second copy, whose classes are others."""
    may = re.compile(rf"\bimport\b[^\n]*\b(?:{'|'.join(PACKAGES)})\b|\bfrom (?:{'|'.join(PACKAGES)})\b")
    bare = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in python_files()
        if path != Path(__file__) and may.search(text := path.read_text())
        for name in imported(ast.parse(text))
        if name.split(".")[0] in PACKAGES
    }
    assert bare == set()


@pytest.mark.parametrize("text", ["import router.main", "from cache import pool", "run('-c', 'import cli, sys')"])
def test_bare_names_are_seen(text: str) -> None:
    assert any(name.split(".")[0] in PACKAGES for name in imported(ast.parse(text)))


def test_a_checkout_links_each_part_and_nothing_else() -> None:
    there = {path.name: path for path in (ROOT / "twinpool").iterdir() if path.name != "__pycache__"}
    assert there.pop("__init__.py").is_file()
    assert {name: os.readlink(path) for name, path in there.items()} == {name: f"../{name}" for name in PACKAGES}
    assert import_root() == ROOT


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["in the working directory", "installed"])
def test_commands_run_beside_packages_that_have_the_names_of_parts(
    beside: str, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """Installed, they are found as well as `twinpool` is; in the working directory they have any name that we import,
    of other packages as of the standard library."""
    site, work = tmp_path / "site", tmp_path / "work"
    wheel.extractall(site)
    work.mkdir()
    installed = beside == "installed"
    for number, name in enumerate(PACKAGES if installed else OWN_NAMES):
        package = (site if installed else work) / name
        module = package / "__init__.py" if number % 2 else package.with_suffix(".py")
        module.parent.mkdir(exist_ok=True)
        module.write_text(f"raise SystemExit('{name} of somebody else was imported')\n")
    code = (
        "import contextlib, io, sys\n"
        "from twinpool.cli.commands import main\n"
        "import twinpool.router.main, twinpool.cluster.controller.controller_process\n"
        "import twinpool.router.kv_index_process\n"
        f"for command in {sorted(COMMANDS)}:\n"
        "    sys.argv = ['twinpool', command, '--help']\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, (command, end.code)\n"
        "print(twinpool.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=work, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == str(site / "twinpool" / "__init__.py")
    assert done.stdout.count("usage: twinpool") >= len(COMMANDS)
