"""No process of ours imports from the folder that it is started in: its commands are made in one place."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.served_cluster import ROOT, own_packages
from twinpool.cluster.arena import arena_agent
from twinpool.cluster.processes import keeper, process_ids, reaper
from twinpool.contracts import python_command
from twinpool.contracts.build_id import PACKAGES
from twinpool.contracts.python_command import module_command, script_command

MAKERS = {"contracts/python_command.py", "cluster/processes/process_ids.py"}
"""The first makes commands; the second is a script that can't import it, and is one itself."""
OPTIONS = {"-m", "-c"}
SCRIPTS = [str(module.__file__) for module in (keeper, reaper, process_ids, arena_agent)]


def product() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def commands(tree: ast.AST) -> Iterator[ast.expr]:
    """Each sequence that names the interpreter, or an option by which Python takes a module or code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            found = [
                one
                for one in node.elts
                if (isinstance(one, ast.Attribute) and one.attr == "executable")
                or (isinstance(one, ast.Constant) and one.value in OPTIONS)
            ]
            if found:
                yield node


def test_commands_of_python_processes_are_made_in_one_place() -> None:
    seen = {
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in product()
        if str(path.relative_to(ROOT)) not in MAKERS
        for node in commands(ast.parse(path.read_text()))
    }
    compilers = {one for one in seen if "engine/native/compile_kernels.py" in one and "compiler.command" in one}
    assert len(compilers) == 1, "a C++ compiler's -c"
    assert seen - compilers == set(), "use contracts.python_command: a bare -m imports from the working directory"


def test_the_walk_sees_each_way_to_write_such_a_command() -> None:
    for text in ("[sys.executable, x]", "(python, '-m', name)", "run([*TIED, *(sys.executable, '-c', code)])"):
        assert list(commands(ast.parse(text))), text
    assert not list(commands(ast.parse("f'{sys.executable} -m'; module_command('twinpool.router.main')")))


@pytest.mark.parametrize(
    "command", [module_command("twinpool.contracts.json_logs"), script_command("-c", "import json, twinpool.cache")]
)
def test_a_command_runs_nothing_of_the_folder_that_it_is_started_in(command: list[str], tmp_path: Path) -> None:
    own_packages(tmp_path)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "of the folder" not in done.stderr + done.stdout
    assert done.returncode == (0 if command[1] == "-P" else 1), (
        "a script sees no installed package: there is no twinpool"
    )


def test_a_bare_command_would_run_what_lies_in_the_folder(tmp_path: Path) -> None:
    own_packages(tmp_path)
    bare = [sys.executable, "-m", "twinpool.contracts.json_logs"]
    done = subprocess.run(bare, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "of the folder" in done.stderr


def test_a_tree_that_is_not_installed_is_found_by_its_own_place(tmp_path: Path) -> None:
    """`-I -S`: neither the environment nor any installed package is there."""
    command = [sys.executable, "-I", "-S", python_command.__file__, "twinpool.contracts.ids"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_interpreter_finds_modules_among_its_own_packages(tmp_path: Path) -> None:
    assert module_command("twinpool.router.main", "x", python="/opt/y/bin/python") == [
        *("/opt/y/bin/python", "-P", "-m", "twinpool.router.main", "x")
    ]
    assert module_command("twinpool.router.main", python=sys.executable)[0] == sys.executable


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: Path(file).stem)
def test_a_script_needs_nothing_but_the_standard_library(file: str, tmp_path: Path) -> None:
    """Whatever they import of ours must not need more: they have no installed package."""
    command = script_command(
        "-c", f"import runpy, sys; sys.argv = ['x']; runpy.run_path({file!r}, run_name='__main__')"
    )
    done = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    assert "ImportError" not in done.stderr
    assert "ModuleNotFoundError" not in done.stderr


def test_those_are_all_scripts_that_are_started() -> None:
    called = re.compile(r"script_command\(\s*str\((\w+)\.__file__\)")
    found = {name for path in product() for name in called.findall(path.read_text())}
    assert found | {"process_ids"} == {Path(file).stem for file in SCRIPTS}
